"""Turns the lengths of waiting segments into the choice of those that fill the next pack.

The oldest segment, index 0, is always in; the rest fills what it leaves. Pure functions, called by the pipeline
whenever a segment arrives or the queue runs low.
"""

from __future__ import annotations

from collections.abc import Sequence

from swift_stage2.errors import PackingError


def select_pack(lengths: Sequence[int], capacity: int) -> tuple[int, ...]:
    """Ascending indices of the fullest pack; the younger of two segments is left out where either would do.

    ``lengths`` are tokens of the waiting segments, the oldest first; ``capacity`` is in tokens, too.

    Raises:
        PackingError: no lengths, a length that is not positive, or one over capacity.
    """
    _check(lengths, capacity)
    fits = (1 << capacity - lengths[0] + 1) - 1
    totals = [1]  # bit n of totals[i]: some of the segments 1 to i hold n tokens together
    for length in lengths[1:]:
        totals.append((totals[-1] | totals[-1] << length) & fits)
    rest, left = [], totals[-1].bit_length() - 1
    for index in range(len(lengths) - 1, 0, -1):
        if not totals[index - 1] >> left & 1:
            rest.append(index)
            left -= lengths[index]
    return (0, *reversed(rest))


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


def _check(lengths: Sequence[int], capacity: int) -> None:
    if not len(lengths):
        raise PackingError("a pack needs at least one segment, got lengths=[]; wait for the first one")
    for index, length in enumerate(lengths):
        if length <= 0:
            raise PackingError(
                f"a segment's length must be positive, got lengths[{index}]={length}; drop the segment"
            )
        if length > capacity:
            raise PackingError(
                f"a segment is never cut and must fit a pack, got lengths[{index}]={length} "
                f"capacity={capacity}; raise packing_length or quarantine the sample"
            )
