"""ms-swift plugin: the real learner whose channel B is made inline, with a forced lag, or in alternating blocks.

``PIPELINE_VARIABLE`` says which. Inline: a B step's packs are made when the step wants them, and nothing ahead; how
long each step waited goes to ``waits.jsonl``. Lagging: whole reservations wait in a line, where freshness does not
reach them, and are trained so many versions later. Switched: the pipeline is told in every other block that no server
is proven, a state that it knows: it makes nothing and sleeps.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from benchmarks.clocks import DIRECTORY_VARIABLE
from swift_stage2.channel_b.pipeline import Pipeline, StepView
from swift_stage2.channel_b.ready_queue import ReadyQueue, Reservation
from swift_stage2.records import Pack

PIPELINE_VARIABLE = "SWIFT_STAGE2_BENCH_PIPELINE"
INLINE, LAGGING, SWITCHED = "inline", "lagging", "switched"
LAG_VARIABLE = "SWIFT_STAGE2_FORCED_LAG"
"""Versions between the making of a pack and its training."""
FIRST_VERSION_VARIABLE = "SWIFT_STAGE2_FIRST_B_VERSION"
"""The first version under which B is trained, that of the longest lag, so that all arms train as many B steps."""
BLOCK_VARIABLE = "SWIFT_STAGE2_BLOCK_STEPS"
"""How many steps a block has."""
WAITS_FILE = "waits.jsonl"
_DEADLINE_S = 120.0
_ON = (1, 2)


class Producer(Protocol):
    """The queue asks this of its pipeline."""

    @property
    def next_step(self) -> int: ...

    def produce(self) -> bool: ...

    def rest(self) -> None: ...


class InlineQueue(ReadyQueue[Pack]):
    """A ready queue that is filled while a step waits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pipeline: Producer | None = None
        self._num_wanted = 0
        self._enough = threading.Event()

    def offer(self, pack: Pack, *, current_version: int) -> None:
        super().offer(pack, current_version=current_version)
        if self.pipeline is not None and self._depth >= self._num_wanted:
            self.pipeline.rest()
            self._enough.set()

    def reserve(self, n: int, *, current_version: int, min_tokens: int = 0) -> Reservation[Pack] | None:
        assert self.pipeline is not None
        began = time.perf_counter()
        super().reserve(0, current_version=current_version)  # what is stale goes
        if self._depth < n:
            self._num_wanted = n
            self._enough.clear()
            if self.pipeline.produce():
                self._enough.wait(timeout=_DEADLINE_S)
        _note_wait(self.pipeline.next_step, time.perf_counter() - began)
        return super().reserve(n, current_version=current_version, min_tokens=min_tokens)

    @property
    def _depth(self) -> int:
        return self.statistics().depth


class InlinePipeline(Pipeline):
    """Produces between ``produce`` and ``rest`` only."""

    def __init__(self, *, queue: InlineQueue, **parts: Any) -> None:
        super().__init__(queue=queue, **parts)
        self._latest: StepView | None = None
        queue.pipeline = self

    @property
    def next_step(self) -> int:
        return 0 if self._latest is None else self._latest.step + 1

    def observe(self, view: StepView) -> None:
        self._latest = view
        self.rest()

    def produce(self) -> bool:
        """From the learner's thread. False before the first step: nothing can be made."""
        if self._latest is None:
            return False
        super().observe(self._latest)
        return True

    def rest(self) -> None:
        """No new batch is begun; the one in progress is packed."""
        if self._latest is not None:
            super().observe(replace(self._latest, max_prompts=0))


class DelayedQueue(InlineQueue):
    """Gives what was made ``lag`` versions before, or longer ago if no step wanted any just then."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lag = int(os.environ[LAG_VARIABLE])
        self._first_version = int(os.environ[FIRST_VERSION_VARIABLE])
        self._waiting: deque[tuple[int, Reservation[Pack]]] = deque()

    def reserve(self, n: int, *, current_version: int, min_tokens: int = 0) -> Reservation[Pack] | None:
        if current_version + self._lag < self._first_version:
            return None
        made = super().reserve(n, current_version=current_version, min_tokens=min_tokens)
        if made is None:
            return None
        self._waiting.append((current_version, made))
        version, _ = self._waiting[0]
        if current_version < self._first_version or version > current_version - self._lag:
            return None
        return self._waiting.popleft()[1]


class SwitchedPipeline(Pipeline):
    """Produces in blocks that are on."""

    def observe(self, view: StepView) -> None:
        working = is_on(view.step, int(os.environ[BLOCK_VARIABLE]))
        super().observe(view if working else replace(view, max_prompts=0))


def is_on(step: int, num_block_steps: int) -> bool:
    """Blocks go off, on, on, off and again, so that a drift of the machine falls on both."""
    return (step // num_block_steps) % 4 in _ON


def _note_wait(step: int, seconds: float) -> None:
    path = Path(os.environ[DIRECTORY_VARIABLE]) / WAITS_FILE
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "seconds": seconds}) + "\n")


_PARTS: dict[str, dict[str, Any]] = {
    INLINE: {"make_queue": InlineQueue, "make_pipeline": InlinePipeline},
    LAGGING: {"make_queue": DelayedQueue, "make_pipeline": InlinePipeline},
    SWITCHED: {"make_pipeline": SwitchedPipeline},
}

if PIPELINE_VARIABLE in os.environ:
    from swift_stage2 import Stage2Trainer  # isort: skip, it must be imported before torchvision

    from swift_stage2.assembly import start_run
    from swift_stage2.training.stage2_trainer import register_trainer

    class BenchTrainer(Stage2Trainer):
        """The trainer of the bench's jobs."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            start = partial(start_run, **_PARTS[os.environ[PIPELINE_VARIABLE]])
            super().__init__(*args, **{"start_run": start, **kwargs})

    register_trainer(BenchTrainer)
