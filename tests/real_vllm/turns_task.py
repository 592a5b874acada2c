"""A task whose reward tells conversations apart also where the model has never learned a second turn."""

from __future__ import annotations

from typing import Any, ClassVar

from swift_stage2 import register_task
from swift_stage2.channel_b.detection import DetectionTask
from swift_stage2.records import Rollout


@register_task("whole_talk")
class WholeTalk(DetectionTask):
    reward_terms: ClassVar = {"length": 1.0}

    def reward(self, rollout: Rollout, truth: Any, target: Any) -> dict[str, float]:
        """The characters of all turns."""
        return {"length": float(len("".join((*rollout.earlier_texts, rollout.text))))}
