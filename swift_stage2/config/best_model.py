"""Which metric of the evaluations on the servers chooses the best model, and what ms-swift's arguments must say for it.

``swift.metric_for_best_model: eval_f1`` (or ``eval/f1``) names one. Any other name is ms-swift's own evaluation's, and
nothing here applies.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from swift_stage2.errors import ConfigError

COUNTED = ("precision", "recall", "f1", "mean_iou", "truncated_ratio")
"""Sums over ranks, which every rank knows when an evaluation ends. A task may have others of its own."""
SCORED = (
    "ap",
    "ap50",
    "ap75",
    "ar",
    "precision_50_95",
    "recall_50_95",
    "f1_50_95",
    "invalid_ratio",
    "failed_ratio",
)
"""Those that rank 0 computes beside training, where the task has boxes."""
_KEY = "metric_for_best_model"
_ONE_OF_COUNTED = f"write one of {', '.join(f'eval_{each}' for each in COUNTED)}"


def best_metric(swift: Mapping[str, Any]) -> str | None:
    """The metric's name without ``eval``; None where ms-swift's own evaluation chooses, or nothing does."""
    name = swift.get(_KEY)
    if not isinstance(name, str):
        return None
    if name.startswith("eval/"):
        return name.removeprefix("eval/")
    short = name.removeprefix("eval_")
    return short if short in (*COUNTED, *SCORED) else None


def refuse_best_model(swift: Mapping[str, Any], every_steps: int) -> None:
    """Raises ConfigError: the metric would end in a traceback of Hugging Face's, or choose nothing in silence."""
    name = best_metric(swift)
    if name is None:
        # As others write them: mAP, F1.
        written = str(swift.get(_KEY, "")).removeprefix("eval_").lower()
        if {written, written.removeprefix("m")} & {*COUNTED, *SCORED}:
            raise ConfigError(
                f"swift.{_KEY} must be written as evaluations call it, got {swift[_KEY]}; {_ONE_OF_COUNTED}"
            )
        return
    got = f"swift.{_KEY}: {swift[_KEY]}"
    if not every_steps:
        raise ConfigError(
            f"{got} needs evaluations on the servers, got stage2_ab.evaluation.every_steps=0; write every_steps: 200, "
            "or remove it"
        )
    if name in SCORED:
        raise ConfigError(
            f"{got} must be a metric that every rank knows when an evaluation ends, and rank 0 computes this one "
            f"beside training; {_ONE_OF_COUNTED}"
        )
    strategy = swift.get("eval_strategy", swift.get("save_strategy", "steps"))
    if strategy not in ("no", False):
        raise ConfigError(
            f"{got} is no metric of ms-swift's own evaluation, got eval_strategy={strategy!r}; write eval_strategy: "
            "'no'"
        )
    if swift.get("load_best_model_at_end"):
        raise ConfigError(
            f"swift.load_best_model_at_end is not supported with {got}: Hugging Face looks for a checkpoint's tensors "
            "by the names of the model in memory, others are saved, and it goes on with the last weights; write "
            "save_strategy: best and remove it, for nothing after training uses them"
        )
    if name == "truncated_ratio" and swift.get("greater_is_better", True) is not False:
        raise ConfigError(f"{got} is better when it is lower; write greater_is_better: false")


def require_metric(swift: Mapping[str, Any], of_task: Collection[str]) -> None:
    """Raises ConfigError: no evaluation will have that name. ``of_task`` are the task's own."""
    name, known = best_metric(swift), (*COUNTED, *of_task)
    if name is not None and name not in known:
        raise ConfigError(
            f"swift.{_KEY} must be a metric of evaluations, got {swift[_KEY]}; write one of "
            f"{', '.join(f'eval/{each}' for each in known)}"
        )
