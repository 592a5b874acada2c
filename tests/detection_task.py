"""The detection task with the configuration's defaults; loads neither torch nor ms-swift."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swift_stage2.channel_b.detection import DetectionTask
from swift_stage2.channel_b.dialects import DIALECTS
from swift_stage2.channel_b.targets import TokenGroup


def make_task(
    dialect: str = "object_list", weights: Mapping[TokenGroup, float] | None = None, **settings: Any
) -> DetectionTask:
    defaults: dict[str, Any] = {
        "iou_threshold": 0.3,
        "top_k": 10,
        "unmatched_prediction_cost": 1.0,
        "unmatched_ground_truth_cost": 1.0,
        "same_label": False,
    }
    all_weights = dict.fromkeys(TokenGroup, 1.0) | dict(weights or {})
    return DetectionTask(dialect=DIALECTS[dialect], weights=all_weights, **(defaults | settings))
