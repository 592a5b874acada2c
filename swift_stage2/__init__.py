"""Stage-2 training for detection VLMs: train on the model's own answers without waiting for them.

See ``docs/design/`` for the architecture, ``docs/extending.md`` for what may be added from outside;
``channel_b/__init__.py`` draws the background pipeline. The names below are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swift_stage2.channel_b.task import Task, register_task, try_task
    from swift_stage2.config import load_config
    from swift_stage2.training.stage2_trainer import Stage2Trainer

__all__ = ["Stage2Trainer", "Task", "load_config", "register_task", "try_task"]
__version__ = "0.1.0"

_HOMES = {
    "Stage2Trainer": "swift_stage2.training.stage2_trainer",
    "Task": "swift_stage2.channel_b.task",
    "load_config": "swift_stage2.config",
    "register_task": "swift_stage2.channel_b.task",
    "try_task": "swift_stage2.channel_b.task",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "Stage2Trainer":  # it loads ms-swift, which imports torchvision
        importlib.import_module("swift_stage2.compat").declare_operators()
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
