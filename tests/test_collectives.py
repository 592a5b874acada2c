"""The control group of two real processes, and of one."""

from __future__ import annotations

import datetime
from contextlib import suppress
from typing import Any

import pytest
import torch.distributed as dist
from gloo_pair import DEADLINE_S, join_job, run_pair
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import _get_default_store

from swift_stage2.collectives import GlooControlGroup, NoteBoard, SingleRank, join_control_group


def reduce_and_broadcast(rank: int, port: int) -> Any:
    join_job(rank, port)
    group = join_control_group(20.0)
    assert isinstance(group, GlooControlGroup)
    assert (group.world_size, group.rank) == (2, rank)
    answers = [
        group.reduce_max([rank, -rank, 2**40 + rank]),
        group.reduce_sum([0.5 + rank, 1e15]),
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
        (2.0, 2e15),
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
    assert group.reduce_sum([1, 2.5]) == (1.0, 2.5)
    message = {"a": [1, 2]}
    assert group.broadcast(message) == message
    assert group.broadcast(message) is not message
    group.close()


def test_a_note_reaches_another_rank_and_its_absence_is_no_wait() -> None:
    with_store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=60)
    )
    here, there = NoteBoard(with_store), NoteBoard(with_store)
    assert there.read("why") is None
    here.write("why", "pas de mémoire \udce4")
    assert there.read("why") == "pas de mémoire \\udce4"
    alone = NoteBoard()
    alone.write("why", "no memory")
    assert (alone.read("why"), alone.read("else")) == ("no memory", None)


class SilentStore:
    """A job's store that answers nobody."""

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("no answer")


def test_a_note_that_cannot_be_read_is_neither_there_nor_an_error_where_the_caller_says_so() -> None:
    notes = NoteBoard(SilentStore())
    assert notes.has("lost", otherwise=True)
    assert not notes.has("lost", otherwise=False)
    with pytest.raises(RuntimeError):
        notes.read("lost")
