"""ms-swift plugin of ``bench overlap``: the real learner with the queue and the pipeline of ``inline_pipeline``."""

from __future__ import annotations

from benchmarks.inline_pipeline import InlinePipeline, InlineQueue
from swift_stage2 import assembly

assembly.ReadyQueue = InlineQueue  # type: ignore[attr-defined, assignment]
assembly.Pipeline = InlinePipeline  # type: ignore[attr-defined, assignment]
