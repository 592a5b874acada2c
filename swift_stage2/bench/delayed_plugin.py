"""ms-swift plugin of ``bench staleness``: the real learner, inline production, and the queue of ``delayed_queue``."""

from __future__ import annotations

from swift_stage2 import assembly
from swift_stage2.bench.delayed_queue import DelayedQueue
from swift_stage2.bench.inline_pipeline import InlinePipeline

assembly.ReadyQueue = DelayedQueue  # type: ignore[attr-defined, assignment]
assembly.Pipeline = InlinePipeline  # type: ignore[attr-defined, assignment]
