"""A pipeline that makes a B step's packs when the step wants them, and nothing ahead.

The queue's ``reserve`` lets the real pipeline produce, waits until enough packs are there, and stops it again. How long
each step waited goes to ``waits.jsonl``. Put in place by the plugin ``inline_plugin``.
"""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from benchmarks.thread_times import DIRECTORY_VARIABLE, WAITS_FILE
from swift_stage2.channel_b.pipeline import Pipeline, StepView
from swift_stage2.channel_b.ready_queue import ReadyQueue, Reservation
from swift_stage2.channel_b.records import Pack

_DEADLINE_S = 120.0


class Producer(Protocol):
    """What the queue asks of its pipeline."""

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
        """The step that is being planned."""
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


def _note_wait(step: int, seconds: float) -> None:
    path = Path(os.environ[DIRECTORY_VARIABLE]) / WAITS_FILE
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "seconds": seconds}) + "\n")
