"""The control group of two real processes, and of one."""

from __future__ import annotations

import datetime
from contextlib import suppress
from typing import Any

import pytest
import torch.distributed as dist
from gloo_pair import DEADLINE_S, join_job, run_pair
from torch.distributed.distributed_c10d import _get_default_store

from swift_stage2.collectives import GlooControlGroup, SingleRank, join_control_group

pytestmark = [pytest.mark.slow, pytest.mark.ci]


def reduce_and_broadcast(rank: int, port: int) -> Any:
    join_job(rank, port)
    group = join_control_group(20.0)
    assert isinstance(group, GlooControlGroup)
    assert (group.world_size, group.rank) == (2, rank)
    answers = [
        group.reduce_max([rank, -rank, 2**40 + rank]),
        group.broadcast({"from": rank, "text": "é", "numbers": [1, None]}),
        group.broadcast("" if rank == 0 else "ignored"),
        group.gather("é\udcff" * rank),
    ]
    group.close()
    dist.destroy_process_group()
    return answers


def test_the_control_group_reduces_and_broadcasts_alike_on_both_ranks() -> None:
    expected = [
        (1, 0, 2**40 + 1),
        {"from": 0, "text": "é", "numbers": [1, None]},
        "",
        ("", "é\\udcff"),
    ]
    assert run_pair(reduce_and_broadcast) == [expected, expected]


def wait_for_a_silent_rank(rank: int, port: int) -> str:
    join_job(rank, port)
    group = GlooControlGroup(1.0)
    if rank == 1:
        with suppress(RuntimeError):  # alive, but silent, until rank 0 has ended, which keeps the store
            _get_default_store().wait(["nobody sets it"], datetime.timedelta(seconds=DEADLINE_S / 2))
        return "silent"
    try:
        group.reduce_max([1])
    except RuntimeError:
        return "raised"
    return "returned"


def test_a_rank_that_never_comes_ends_the_others_call_by_the_deadline() -> None:
    assert run_pair(wait_for_a_silent_rank) == ["raised", "silent"]


def test_a_single_process_needs_no_group() -> None:
    group = join_control_group(1.0)
    assert isinstance(group, SingleRank)
    assert group.reduce_max([3, -1]) == (3, -1)
    message = {"a": [1, 2]}
    assert group.broadcast(message) == message
    assert group.broadcast(message) is not message
    group.close()
