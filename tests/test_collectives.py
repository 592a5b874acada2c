"""Two real processes over gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch

from swift_stage2.collectives import SingleRank, WeightGroup, join_control_group

DEADLINE_S = 60.0
PRELUDE = """
import datetime, json, os, sys
import torch, torch.distributed as dist
from swift_stage2.collectives import GlooControlGroup, WeightGroup, join_control_group
rank, port = int(sys.argv[1]), int(sys.argv[2])
"""
CONTROL_PRELUDE = (
    PRELUDE
    + """
timeout = datetime.timedelta(seconds=30)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=timeout)
"""
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_pair(prelude: str, body: str) -> list[tuple[int, Any]]:
    """Runs ``body`` as rank 0 and rank 1; returns exit status and the JSON of the last line of each."""
    port = str(free_port())
    program = prelude + textwrap.dedent(body)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), port],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        (process.returncode, json.loads(output.splitlines()[-1]) if output else None)
        for process, output in zip(processes, outputs, strict=True)
    ]


def test_the_control_group_reduces_and_broadcasts_alike_on_both_ranks() -> None:
    results = run_pair(
        CONTROL_PRELUDE,
        """
        group = join_control_group(20.0)
        assert isinstance(group, GlooControlGroup) and group.world_size == 2 and group.rank == rank
        print(json.dumps([
            group.reduce_max([rank, -rank, 2**40 + rank]),
            group.reduce_sum([0.5 + rank, 1e15]),
            group.broadcast({"from": rank, "text": "é", "numbers": [1, None]}),
            group.broadcast("" if rank == 0 else "ignored"),
        ]))
        group.close()
        dist.destroy_process_group()
        """,
    )
    expected = [[1, 0, 2**40 + 1], [2.0, 2e15], {"from": 0, "text": "é", "numbers": [1, None]}, ""]
    assert results == [(0, expected), (0, expected)]


def test_a_rank_that_never_comes_ends_the_others_call_by_the_deadline() -> None:
    results = run_pair(
        CONTROL_PRELUDE,
        """
        group = GlooControlGroup(1.0)
        if rank == 1:
            sys.stdin = None
            import threading
            threading.Event().wait(4.0)  # alive, but silent for longer than the group's timeout
            print(json.dumps("silent"), flush=True)
            os._exit(0)
        try:
            group.reduce_max([1])
        except RuntimeError:
            print(json.dumps("raised"), flush=True)
            os._exit(0)
        """,
    )
    assert results == [(0, "raised"), (0, "silent")]


def test_the_weight_group_carries_bytes_from_the_learner_to_the_server() -> None:
    results = run_pair(
        PRELUDE,
        """
        group = WeightGroup(rank, "127.0.0.1", port, 20.0)
        sums = []
        for size in (1, 1000, 1 << 20):
            tensor = torch.zeros(size, dtype=torch.uint8)
            if rank == WeightGroup.LEARNER_RANK:
                tensor = torch.arange(size).to(torch.uint8)
            group.broadcast(tensor)
            sums.append(int(tensor.long().sum()))
        group.close()
        group.close()
        print(json.dumps(sums))
        """,
    )
    expected = [int(torch.arange(size).to(torch.uint8).long().sum()) for size in (1, 1000, 1 << 20)]
    assert results == [(0, expected), (0, expected)]


@pytest.mark.parametrize("dies", [0, 1])
def test_a_lost_peer_raises_on_the_other_side(dies: int) -> None:
    results = run_pair(
        PRELUDE + f"dies = {dies}\n",
        """
        group = WeightGroup(rank, "127.0.0.1", port, 10.0)
        tensor = torch.zeros(1 << 24, dtype=torch.uint8)
        group.broadcast(tensor[:8].clone())
        if rank == dies:
            print(json.dumps("gone"), flush=True)
            os._exit(0)
        try:
            for _ in range(4):  # what fits into the socket's buffer still leaves
                group.broadcast(tensor)
        except RuntimeError:
            print(json.dumps("raised"))
        """,
    )
    assert [answer for _, answer in results] == (["gone", "raised"] if dies == 0 else ["raised", "gone"])


def test_the_server_listens_before_it_waits_and_can_give_up() -> None:
    port = free_port()
    seen: list[bool] = []

    def keep_waiting() -> bool:
        with socket.create_connection(("127.0.0.1", port), 5.0):
            seen.append(True)
        return len(seen) < 2

    with pytest.raises(RuntimeError, match="given up"):
        WeightGroup(WeightGroup.SERVER_RANK, "127.0.0.1", port, 30.0, keep_waiting)
    assert len(seen) == 2


def test_a_taken_port_is_an_error_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder, pytest.raises(OSError, match="in use"):
        WeightGroup(WeightGroup.SERVER_RANK, "127.0.0.1", holder.getsockname()[1], 30.0)


def test_a_single_process_needs_no_group() -> None:
    group = join_control_group(1.0)
    assert isinstance(group, SingleRank)
    assert group.reduce_max([3, -1]) == (3, -1)
    assert group.reduce_sum([1, 2.5]) == (1.0, 2.5)
    message = {"a": [1, 2]}
    assert group.broadcast(message) == message
    assert group.broadcast(message) is not message
    group.close()
