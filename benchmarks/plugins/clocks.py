"""ms-swift plugin: callbacks that read a clock at the end of every step and write all readings when training ends.

``ThreadClock`` notes what the threads use. ``StepClock``, given to both arms of ``bench overhead``, notes the time that
stage 2's own code takes; under plain ``swift sft`` there is nothing of it to find. Arms that run at the same time meet
before their first step.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from swift_stage2.compat import declare_operators

declare_operators()  # before ms-swift imports torchvision

from swift.callbacks import TrainerCallback, callbacks_map  # noqa: E402

from benchmarks.clocks import (  # noqa: E402
    DIRECTORY_VARIABLE,
    MEETING_VARIABLE,
    STEP_CLOCK,
    THREAD_CLOCK,
    ExclusiveTimer,
    read_times,
)
from swift_stage2.collectives import GlooControlGroup, SingleRank  # noqa: E402

_MEETING_DEADLINE_S = 300.0
_MEETING_POLL_S = 0.01
_PACKAGE = "swift_stage2."
_PER_STEP_HOOK = "get_batch_samples"


class ThreadClock(TrainerCallback):  # type: ignore[misc]
    """One rank's clock. Keeps all readings in memory while it trains."""

    def __init__(self, args: Any, trainer: Any) -> None:
        super().__init__(args, trainer)
        self._readings: list[dict[str, int]] = []

    def read(self) -> dict[str, int]:
        return read_times()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._readings.append(self.read())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        directory = Path(os.environ[DIRECTORY_VARIABLE])
        directory.mkdir(parents=True, exist_ok=True)
        columns = {name: [reading[name] for reading in self._readings] for name in self.read()}
        path = directory / f"rank{self.args.process_index}.json"
        path.write_text(json.dumps(columns) + "\n", encoding="utf-8")


class StepClock(ThreadClock):
    """``end_ns[i]`` is the end of step i, ``hooks_ns[i]`` what our hooks took up to there, ``agree_ns[i]`` agreeing.

    ``tokens[i]`` is how many tokens the model has read up to there, padding included, where the Trainer counts them.
    """

    def __init__(self, args: Any, trainer: Any) -> None:
        super().__init__(args, trainer)
        self._timer = ExclusiveTimer()

    def read(self) -> dict[str, int]:
        spent = self._timer.total_ns
        return {
            "end_ns": time.perf_counter_ns(),
            "hooks_ns": spent.get("hooks", 0),
            "agree_ns": spent.get("agree", 0),
            "tokens": int(self.trainer.state.num_input_tokens_seen),
        }

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        instrument(self.trainer, self._timer)
        if MEETING_VARIABLE in os.environ:
            place, number = os.environ[MEETING_VARIABLE].rsplit(":", 1)
            meet(Path(place), int(number))


def meet(place: Path, number: int, deadline_s: float = _MEETING_DEADLINE_S) -> None:
    """Waits until so many processes have come to ``place``, which is made by the first.

    Raises TimeoutError: not all have come in time.
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
    name = _PER_STEP_HOOK
    theirs = (cls for cls in type(trainer).__mro__ if not cls.__module__.startswith(_PACKAGE))
    base = next(cls for cls in theirs if name in vars(cls))
    setattr(base, name, timer.timed("ms-swift", vars(base)[name]))
    setattr(trainer, name, timer.timed("hooks", getattr(trainer, name)))
    for callback in trainer.callback_handler.callbacks:
        if type(callback).__module__.startswith(_PACKAGE):
            callback.on_step_end = timer.timed("hooks", callback.on_step_end)
    for group in (SingleRank, GlooControlGroup):
        for name in ("reduce_max", "gather"):
            setattr(group, name, timer.timed("agree", vars(group)[name]))


callbacks_map[THREAD_CLOCK] = ThreadClock
callbacks_map[STEP_CLOCK] = StepClock
