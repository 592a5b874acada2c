"""Clocks of ranks against each other, over a control group whose members leave together."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from swift_stage2.telemetry.trace import ClockOffset, align_clocks

PATIENCE_S = 20.0


class Room:
    """Where threads meet as ranks do."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size)
        self.texts = [""] * world_size

    def meet(self) -> int:
        return self.barrier.wait(PATIENCE_S)

    def gather(self, rank: int, text: str) -> tuple[str, ...]:
        self.texts[rank] = text
        self.meet()
        texts = tuple(self.texts)
        self.meet()
        return texts

    def align(self, rank: int, ahead_ns: int = 0) -> ClockOffset:
        return align_clocks(self.meet, partial(self.gather, rank), lambda: time.time_ns() + ahead_ns)


def test_a_rank_finds_by_how_much_its_clock_is_ahead() -> None:
    ahead_ns = [0, 3600 * 10**9, -5 * 10**9]
    room = Room(len(ahead_ns))
    with ThreadPoolExecutor(len(ahead_ns)) as pool:
        offsets = list(pool.map(room.align, range(len(ahead_ns)), ahead_ns))
    for offset, ahead in zip(offsets, ahead_ns, strict=True):
        assert abs(offset.offset_ns - ahead) <= offset.uncertainty_ns < PATIENCE_S * 10**9
    assert offsets[0].offset_ns == 0
    assert offsets[1].correction_ns == offsets[1].offset_ns


def test_ranks_that_share_a_clock_are_not_moved() -> None:
    """However late one of them is: who enters last spends the least time inside, who waits the most."""
    room = Room(2)
    for _ in range(20):
        with ThreadPoolExecutor(2) as pool:
            offsets = list(pool.map(room.align, (0, 1)))
        assert [offset.correction_ns for offset in offsets] == [0, 0]


def test_an_offset_within_its_uncertainty_corrects_nothing() -> None:
    assert ClockOffset(900, 1000).correction_ns == 0
    assert ClockOffset(-900, 1000).correction_ns == 0
    assert ClockOffset(-1100, 1000).correction_ns == -1100


def test_a_single_rank_is_its_own_clock() -> None:
    assert Room(1).align(0, 5).offset_ns == 0
