"""ms-swift plugin: notes when every optimizer step ends, and the time that stage 2's own code took in it.

Given as a file to both arms of ``bench overhead``; keeps all numbers in memory and writes them when training
ends. Under plain ``swift sft`` there is nothing of stage 2 to find, and nothing is instrumented. Arms that run at
the same time meet before their first step.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swift_stage2.cpu_torchvision import declare_operators

declare_operators()  # before ms-swift imports torchvision

from swift.callbacks import TrainerCallback, callbacks_map  # noqa: E402

from swift_stage2.collectives import GlooControlGroup, SingleRank  # noqa: E402

NAME = "stage2_step_clock"
DIRECTORY_VARIABLE = "SWIFT_STAGE2_STEP_CLOCK"
MEETING_VARIABLE = "SWIFT_STAGE2_STEP_CLOCK_MEETING"
"""A directory and how many ranks of all arms meet there, with a colon between; not set: nobody is waited for."""
_MEETING_DEADLINE_S = 300.0
_MEETING_POLL_S = 0.01
_PACKAGE = "swift_stage2."
_PER_STEP_HOOKS = ("get_batch_samples",)


class ExclusiveTimer:
    """Nanoseconds per owner of nested calls; while an inner call runs, the outer one's time stands still."""

    def __init__(self, now_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now_ns = now_ns
        self._owners: list[str] = []
        self._since_ns = 0
        self.total_ns: dict[str, int] = {}

    def timed(self, owner: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` with its own time added to ``owner``."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._charge()
            self._owners.append(owner)
            try:
                return function(*args, **kwargs)
            finally:
                self._charge()
                self._owners.pop()

        return call

    def _charge(self) -> None:
        now = self._now_ns()
        if self._owners:
            owner = self._owners[-1]
            self.total_ns[owner] = self.total_ns.get(owner, 0) + now - self._since_ns
        self._since_ns = now


class StepClock(TrainerCallback):  # type: ignore[misc]
    """One rank's clock. ``end_ns[i]`` is the end of step i, ``hooks_ns[i]`` what our hooks took up to there."""

    def __init__(self, args: Any, trainer: Any) -> None:
        super().__init__(args, trainer)
        self._timer = ExclusiveTimer()
        self._end_ns: list[int] = []
        self._hooks_ns: list[int] = []
        self._agree_ns: list[int] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        instrument(self.trainer, self._timer)
        if MEETING_VARIABLE in os.environ:
            place, number = os.environ[MEETING_VARIABLE].rsplit(":", 1)
            meet(Path(place), int(number))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end_ns.append(time.perf_counter_ns())
        self._hooks_ns.append(self._timer.total_ns.get("hooks", 0))
        self._agree_ns.append(self._timer.total_ns.get("agree", 0))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        directory = Path(os.environ[DIRECTORY_VARIABLE])
        directory.mkdir(parents=True, exist_ok=True)
        numbers = {"end_ns": self._end_ns, "hooks_ns": self._hooks_ns, "agree_ns": self._agree_ns}
        (directory / f"rank{self.args.process_index}.json").write_text(json.dumps(numbers))


def meet(place: Path, number: int, deadline_s: float = _MEETING_DEADLINE_S) -> None:
    """Waits until so many processes have come to ``place``, which is made by the first.

    Raises:
        TimeoutError: not all have come in time.
    """
    place.mkdir(parents=True, exist_ok=True)
    (place / str(os.getpid())).touch()
    end = time.monotonic() + deadline_s
    while (come := len(os.listdir(place))) < number:
        if time.monotonic() >= end:
            raise TimeoutError(
                f"{number} ranks must begin to train within {deadline_s:.0f} s of the first, got {come}"
            )
        time.sleep(_MEETING_POLL_S)


def instrument(trainer: Any, timer: ExclusiveTimer) -> None:
    """Times what stage 2 adds to a step: its overrides less what they call of ms-swift, and its callbacks.

    "agree" is apart: the all-reduces of the control group, in which a rank also waits for the slowest one.
    """
    if not type(trainer).__module__.startswith(_PACKAGE):
        return
    for name in _PER_STEP_HOOKS:
        base = next(
            cls
            for cls in type(trainer).__mro__
            if name in vars(cls) and not cls.__module__.startswith(_PACKAGE)
        )
        setattr(base, name, timer.timed("ms-swift", vars(base)[name]))
        setattr(trainer, name, timer.timed("hooks", getattr(trainer, name)))
    for callback in trainer.callback_handler.callbacks:
        if type(callback).__module__.startswith(_PACKAGE) and not isinstance(callback, StepClock):
            callback.on_step_end = timer.timed("hooks", callback.on_step_end)
    for group in (SingleRank, GlooControlGroup):
        for name in ("reduce_max", "reduce_sum"):
            setattr(group, name, timer.timed("agree", vars(group)[name]))


callbacks_map[NAME] = StepClock
