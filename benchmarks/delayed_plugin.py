"""ms-swift plugin of ``bench staleness``: the real learner, inline production, and the queue of ``delayed_queue``."""

from __future__ import annotations

from benchmarks.delayed_queue import DelayedQueue
from benchmarks.inline_pipeline import InlinePipeline
from swift_stage2 import assembly

assembly.ReadyQueue = DelayedQueue  # type: ignore[attr-defined, assignment]
assembly.Pipeline = InlinePipeline  # type: ignore[attr-defined, assignment]
