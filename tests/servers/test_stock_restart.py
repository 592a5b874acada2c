"""A stock server that dies and is back between two POSTs and within one step: nothing it answers is believed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from channel_b.test_rollout_client import ask, make_client, positions, texts
from fake_rollout_server import FakeRolloutServer
from rollout_batch import prove, withdraw
from test_stalled_server import KILLED_BY_S, kept, peer
from torch.distributed import TCPStore
from waiting import wait_for

from swift_stage2.collectives import StoreNotes

VERSION = 3


@pytest.fixture
def boards() -> tuple[StoreNotes, StoreNotes]:
    """Of two ranks: rank 0's, which probes, and another's, which asks for rollouts."""
    limit = timedelta(seconds=60)
    master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    client = TCPStore("127.0.0.1", master.port, is_master=False, timeout=limit)
    return StoreNotes(master), StoreNotes(client)


def lost_by(board: StoreNotes) -> Callable[[str, int], bool]:
    return lambda url, version: board.read(f"{url} {version}") is not None


def restarted(old: FakeRolloutServer) -> FakeRolloutServer:
    """Another process at the same address; a stock one says nothing that tells it from the old one."""
    return FakeRolloutServer(port=int(old.url.rpartition(":")[2]))


def test_a_loss_that_rank_zero_finds_between_two_posts_of_another_rank_is_known_there_at_its_next_answer(
    boards: tuple[StoreNotes, StoreNotes],
) -> None:
    rank_0, rank_1 = boards
    with peer("stock") as (process, port), FakeRolloutServer() as old:
        transport, _ = kept(port)
        with make_client(old, is_lost=lost_by(rank_1)) as client:
            assert texts(ask(client, 1)) == ["echo 0"]
            assert not transport.is_lost()
            process.kill()
            process.wait(KILLED_BY_S)
            old.__exit__(None, None, None)
            wait_for(transport.is_lost)
            rank_0.write(f"{old.url} {VERSION}", "lost")
            with restarted(old) as new:
                outcome = ask(client, 2, first=1)
                assert (texts(outcome), positions(outcome.returned)) == ([], [1, 2])
                assert outcome.quarantined == ()
                assert "was lost; who answers is another" in client.suspects[new.url]


def test_a_later_version_of_the_same_server_is_believed_again(boards: tuple[StoreNotes, StoreNotes]) -> None:
    rank_0, rank_1 = boards
    with FakeRolloutServer() as server, make_client(server, is_lost=lost_by(rank_1)) as client:
        rank_0.write(f"{server.url} {VERSION}", "lost")
        assert texts(ask(client, 1)) == []
        assert client.take_suspicions() == {server.url}
        withdraw(client, server.url)
        prove(client, version=VERSION + 1)
        assert texts(ask(client, 1)) == ["echo 0"]
