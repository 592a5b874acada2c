"""Turns the lengths of waiting segments into the choice of those that fill the next pack.

The oldest segment, index 0, is always in; the rest is the exact best fill. Pure functions, called by
the pipeline whenever a segment arrives or the queue runs low.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import numpy as np
from numpy.typing import NDArray

from swift_stage2.errors import PackingError


def select_pack(lengths: Sequence[int], capacity: int) -> tuple[int, ...]:
    """Ascending indices of the best pack: largest total, then fewest segments, then smallest indices.

    ``lengths`` are tokens of the waiting segments, the oldest first; ``capacity`` is in tokens, too. Method: dynamic
    programming over (segment, total), from the last segment to the second, so that walking it forwards meets the
    lexicographically smallest choice. Time and memory are ``len(lengths) * capacity``, in numpy.

    Raises:
        PackingError: no lengths, a length that is not a positive integer, or one over capacity.
    """
    _check(lengths, capacity)
    sizes = [int(length) for length in lengths]
    if sum(sizes) <= capacity:
        return tuple(range(len(sizes)))
    room = int(capacity) - sizes[0]
    fewest, takes = _fill(sizes, room)
    left = int(np.flatnonzero(fewest < len(sizes))[-1])
    chosen = [0]
    for index, take in enumerate(takes, start=1):
        if take[left]:
            chosen.append(index)
            left -= sizes[index]
    return tuple(chosen)


def decide_pack(
    lengths: Sequence[int], capacity: int, min_fill_ratio: float, starving: bool
) -> tuple[int, ...] | None:
    """The segments to pack now, or None to wait for more.

    A pack that fills less than ``min_fill_ratio`` of the capacity waits, unless the queue is starving.

    Raises:
        PackingError: as ``select_pack``, but no lengths at all are a reason to wait.
    """
    if not lengths:
        return None
    chosen = select_pack(lengths, capacity)
    fill_ratio = sum(lengths[index] for index in chosen) / capacity
    return chosen if starving or fill_ratio >= min_fill_ratio else None


def _fill(sizes: list[int], room: int) -> tuple[NDArray[np.int32], list[NDArray[np.bool_]]]:
    """The ways in which segments 1, 2, … can fill ``room`` tokens.

    Returns:
        Per total, the fewest segments that give exactly it, ``len(sizes)`` where none do; and per
        segment and total, whether the fewest of it and its successors can include it.
    """
    never = len(sizes)
    fewest = np.full(room + 1, never, dtype=np.int32)
    fewest[0] = 0
    takes: list[NDArray[np.bool_]] = []
    for size in reversed(sizes[1:]):
        take = np.zeros(room + 1, dtype=np.bool_)
        if size <= room:
            with_it = fewest[: room + 1 - size] + 1
            take[size:] = (with_it <= fewest[size:]) & (with_it < never)
            fewest[size:] = np.where(take[size:], with_it, fewest[size:])
        takes.append(take)
    return fewest, takes[::-1]


def _check(lengths: Sequence[int], capacity: int) -> None:
    if not len(lengths):
        raise PackingError("a pack needs at least one segment, got lengths=[]; wait for the first one")
    if not _is_positive_integer(capacity):
        raise PackingError(
            f"a capacity must be a positive integer, got capacity={capacity!r}; set packing_length"
        )
    for index, length in enumerate(lengths):
        if not _is_positive_integer(length):
            raise PackingError(
                f"a segment's length must be a positive integer, got lengths[{index}]={length!r}; "
                "drop the segment"
            )
        if length > capacity:
            raise PackingError(
                f"a segment is never cut and must fit a pack, got lengths[{index}]={length} "
                f"capacity={capacity}; raise packing_length or quarantine the sample"
            )


def _is_positive_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) > 0
