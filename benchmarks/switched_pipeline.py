"""ms-swift plugin of ``bench interference``: the real pipeline, told in every other block that no server is proven.

That is a state it knows: it makes nothing and sleeps until the learner's next word. All else is what a user runs.
"""

from __future__ import annotations

import os
from dataclasses import replace

from benchmarks.switched_blocks import STEPS_VARIABLE, SWITCH_INTERVAL_VARIABLE, is_on
from swift_stage2 import assembly, stage2_run
from swift_stage2.channel_b.pipeline import Pipeline, StepView


class SwitchedPipeline(Pipeline):
    """Produces in blocks that are on."""

    def observe(self, view: StepView) -> None:
        working = is_on(view.step, int(os.environ[STEPS_VARIABLE]))
        super().observe(view if working else replace(view, max_prompts=0))


assembly.Pipeline = SwitchedPipeline  # type: ignore[attr-defined]
if interval := os.environ.get(SWITCH_INTERVAL_VARIABLE):
    stage2_run.SWITCH_INTERVAL_S = float(interval)
