from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.clocks import (
    ExclusiveTimer,
    since,
)
from benchmarks.plugins.clocks import instrument


class Clock:
    """Nanoseconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def work(self, nanoseconds: int) -> None:
        self.now += nanoseconds


def test_an_outer_call_is_not_charged_for_its_inner_ones() -> None:
    clock = Clock()
    timer = ExclusiveTimer(clock)
    theirs = timer.timed("ms-swift", lambda: clock.work(100))

    def ours() -> str:
        clock.work(3)
        theirs()
        clock.work(4)
        return "batches"

    timed = timer.timed("hooks", ours)
    clock.work(1000)
    assert timed() == "batches"
    clock.work(1000)
    timed()
    assert timer.total_ns == {"hooks": 14, "ms-swift": 200}


class PlainTrainer:
    def get_batch_samples(self) -> str:
        return "plain"


def _trainer_of_ours(clock: Clock) -> Any:
    class Base:
        def get_batch_samples(self) -> str:
            clock.work(100)
            return "theirs"

    class Callback:
        def on_step_end(self) -> None:
            clock.work(20)

    class Ours(Base):
        def get_batch_samples(self) -> str:
            clock.work(7)
            return super().get_batch_samples() + " and ours"

    Ours.__module__ = Callback.__module__ = "swift_stage2.trainer"
    trainer = Ours()
    trainer.callback_handler = SimpleNamespace(callbacks=[Callback(), PlainTrainer()])  # type: ignore[attr-defined]
    return trainer


@pytest.fixture
def unpatched_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts back what instrumenting does to classes of the package."""
    from benchmarks.plugins import clocks as step_clock

    for group in (step_clock.SingleRank, step_clock.GlooControlGroup):
        for name in ("reduce_max", "gather"):
            monkeypatch.setattr(group, name, vars(group)[name])


@pytest.mark.usefixtures("unpatched_groups")
def test_hooks_are_overrides_less_what_they_call_and_callbacks() -> None:
    clock = Clock()
    timer, trainer = ExclusiveTimer(clock), _trainer_of_ours(clock)
    instrument(trainer, timer)
    assert trainer.get_batch_samples() == "theirs and ours"
    trainer.callback_handler.callbacks[0].on_step_end()
    assert timer.total_ns == {"hooks": 27, "ms-swift": 100}


def test_the_columns_of_a_clock_count_from_the_end_of_the_warm_up() -> None:
    second = 1_000_000_000
    assert since({"x": [5 * second, 6 * second, 8 * second]}, "x", 2) == 2.0
