"""Halves of the cores are disjoint, and only what is started inside runs on them."""

from __future__ import annotations

import os

import pytest

from benchmarks.cores import split_cores, started_on


@pytest.mark.parametrize(
    ("usable", "halves"), [({3}, ({3}, {3})), ({4, 7}, ({4}, {7})), ({0, 1, 2, 3, 4}, ({0, 1}, {2, 3, 4}))]
)
def test_halves_are_disjoint_where_there_are_two_cores(
    usable: set[int], halves: tuple[set[int], set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: usable)
    assert split_cores() == halves


def test_only_what_is_started_inside_runs_on_the_cores() -> None:
    before = os.sched_getaffinity(0)
    with started_on({max(before)}):
        assert os.sched_getaffinity(0) == {max(before)}
    assert os.sched_getaffinity(0) == before
