"""A file for ``swift rollout --external_plugins``: without a GPU there are no devices to count."""

from __future__ import annotations

import torch
from swift.arguments import RolloutArguments


def register() -> None:
    """ms-swift imports plugin files before it counts devices."""
    if torch.cuda.is_available():
        return
    if not hasattr(RolloutArguments, "_check_device_count"):
        raise RuntimeError(
            "swift_stage2_cpu was written for another release of ms-swift: no _check_device_count"
        )
    RolloutArguments._check_device_count = lambda self: None


register()
