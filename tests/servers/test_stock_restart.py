"""A stock server that dies and is back between two POSTs and within one step: nothing it answers is believed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
from channel_b.test_rollout_client import ask, make_client, positions, texts
from fake_rollout_server import LONGEST_WAIT_S, FakeRolloutServer
from swift_stage2.servers.probe import SuspectProbe
from test_stalled_server import KILLED_BY_S, kept, peer
from torch.distributed import TCPStore

from swift_stage2.channel_b.rollouts import ServedWeights
from swift_stage2.collectives import NoteBoard
from swift_stage2.fence import InferFence

VERSION = 3


@pytest.fixture
def boards() -> tuple[NoteBoard, NoteBoard]:
    """Of two ranks: rank 0's, which probes, and another's, which asks for rollouts."""
    limit = timedelta(seconds=60)
    master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    client = TCPStore("127.0.0.1", master.port, is_master=False, timeout=limit)
    return NoteBoard(master), NoteBoard(client)


def lost_by(board: NoteBoard) -> Callable[[str, int], bool]:
    return lambda url, version: board.read(f"{url} {version}") is not None


def restarted(old: FakeRolloutServer) -> FakeRolloutServer:
    """Another process at the same address; a stock one says nothing that tells it from the old one."""
    return FakeRolloutServer(port=int(old.url.rpartition(":")[2]))


def test_a_loss_that_rank_zero_finds_between_two_posts_of_another_rank_is_known_there_at_its_next_answer(
    boards: tuple[NoteBoard, NoteBoard],
) -> None:
    rank_0, rank_1 = boards
    is_noted = threading.Event()
    with peer("stock") as (process, port), FakeRolloutServer() as old:
        transport, _ = kept(port)

        def note(server: int) -> None:
            rank_0.write(f"{old.url} {VERSION}", "lost")
            is_noted.set()

        probe = SuspectProbe(
            rank=0,
            api_key=None,
            interval_s=0.01,
            find_lost=lambda: (0,) if transport.is_lost() else (),
            on_lost=note,
        )
        probe.start()
        try:
            with make_client(old, fence=InferFence(version=VERSION), is_lost=lost_by(rank_1)) as client:
                assert texts(ask(client, 1)) == ["echo 0"]
                assert not is_noted.is_set()
                process.kill()
                process.wait(KILLED_BY_S)
                old.__exit__(None, None, None)
                assert is_noted.wait(LONGEST_WAIT_S)
                with restarted(old) as new:
                    outcome = ask(client, 2, first=1)
                    assert (texts(outcome), positions(outcome.returned)) == ([], [1, 2])
                    assert outcome.quarantined == ()
                    assert "was lost; who answers is another" in client.suspects[new.url]
        finally:
            probe.stop()


def test_a_later_version_of_the_same_server_is_believed_again(boards: tuple[NoteBoard, NoteBoard]) -> None:
    rank_0, rank_1 = boards
    fence = InferFence(version=VERSION)
    with FakeRolloutServer() as server, make_client(server, fence=fence, is_lost=lost_by(rank_1)) as client:
        rank_0.write(f"{server.url} {VERSION}", "lost")
        assert texts(ask(client, 1)) == []
        fence.close()
        client.set_proven({server.url: ServedWeights(VERSION + 1, stamps=False)})
        fence.reopen(VERSION + 1)
        assert texts(ask(client, 1)) == ["echo 0"]
