"""The detection task with the configuration's defaults; loads neither torch nor ms-swift."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swift_stage2.channel_b.detection import DetectionTask
from swift_stage2.channel_b.dialects import DIALECTS
from swift_stage2.channel_b.targets import TokenGroup
from swift_stage2.config import MatchingConfig


def make_task(
    dialect: str = "object_list", weights: Mapping[TokenGroup, float] | None = None, **settings: Any
) -> DetectionTask:
    """``settings`` are the task's own, or of section ``matching``."""
    own = {name: settings.pop(name) for name in ("missed_order", "weighs_duplicates") if name in settings}
    all_weights = dict.fromkeys(TokenGroup, 1.0) | dict(weights or {})
    return DetectionTask(
        dialect=DIALECTS[dialect], matching=MatchingConfig(**settings), weights=all_weights, **own
    )
