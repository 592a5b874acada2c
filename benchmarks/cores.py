"""The cores that processes run on: halves of this machine's, and who is started there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


def split_cores() -> tuple[set[int], set[int]]:
    """The learner's half of the cores and everybody else's; of one core both get that."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    return (set(cores[:half]), set(cores[half:])) if half else (set(cores), set(cores))


@contextmanager
def started_on(cores: set[int]) -> Iterator[None]:
    """Processes started inside run on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
