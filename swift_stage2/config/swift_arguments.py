"""Section ``swift``: what may not be combined with channel B, and the argv for ms-swift's own parser.

The arguments themselves are ms-swift's and pass through unchanged; their names and values are checked
by its parser when training starts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from swift_stage2.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Unsupported:
    """One ms-swift argument whose value channel B cannot live with."""

    key: str
    refused: Callable[[Any], bool]
    reason: str
    remedy: str = "remove it"


def is_on(value: Any) -> bool:
    """True unless a switch of ms-swift's is off or not given."""
    word = value.lower() if isinstance(value, str) else value
    return word not in (None, False, 0, "", "false", "none", "null", "no", "off")


def _is_off(value: Any) -> bool:
    return value is not None and not is_on(value)


def _other_than(*allowed: object) -> Callable[[Any], bool]:
    return lambda value: value is not None and value not in allowed


def _above_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1


_FULL_WEIGHTS = "servers take full or merged LoRA weights only"
_THINKS = "answers must begin with their list of objects"
_GATHERED = "weights are gathered from FSDP2's shards on devices alone"
_QUANTISED = "servers take dense weights, and none compute what its forward pass does"

UNSUPPORTED = (
    Unsupported("task_type", _other_than("causal_lm"), "targets are token sequences", "use causal_lm"),
    Unsupported("tuner_type", _other_than("full", "lora"), _FULL_WEIGHTS, "use full or lora"),
    Unsupported("streaming", is_on, "sharding and exact resume need a data set of known length", "remove it"),
    Unsupported("sequence_parallel_size", _above_one, "a pack is trained by one rank", "use 1"),
    Unsupported("predict_with_generate", is_on, "evaluation would generate in the learner"),
    Unsupported("truncation_strategy", _other_than("delete"), "a cut answer is a wrong target", "use delete"),
    Unsupported("enable_thinking", is_on, _THINKS, "remove it, and train an Instruct model"),
    Unsupported("response_prefix", is_on, _THINKS),
    Unsupported("auto_find_batch_size", is_on, "a step would change while it runs"),
    Unsupported("average_tokens_across_devices", _is_off, "the loss is a mean over all ranks"),
    Unsupported("label_smoothing_factor", is_on, "its loss knows no weight per token"),
    Unsupported("quant_bits", _other_than(0, 4), _QUANTISED, "use 4, with quant_method: bnb"),
    Unsupported("quant_method", _other_than("bnb"), _QUANTISED, "use bnb, with quant_bits: 4"),
    Unsupported("deepspeed_autotp_size", _above_one, "no rank holds whole tensors to send"),
    Unsupported("fsdp", _other_than(False, "", "fsdp2"), _GATHERED, "write fsdp: fsdp2"),
    Unsupported("use_ray", is_on, "ranks are started by torchrun"),
)
_OF_ITS_OWN = (
    "objective grpo and mixed, target.missed_order: any and weights.duplicate have a loss of their own"
)
_WITH_OWN_LOSS = tuple(
    Unsupported(key, is_on, _OF_ITS_OWN, "remove it, or these") for key in ("enable_dft_loss", "loss_type")
)


PLUGIN_PREFIX = "_swift_external_"  # of the modules that ms-swift makes of external_plugins

_ONE_PLACE = ("model", "resume_from_checkpoint")  # the other arguments that name places take several


def named_places(arguments: Mapping[str, Any], key: str) -> list[str]:
    """The paths and hub ids that one argument names; none where it is not given.

    Raises:
        ConfigError: it is something else, as a number, or empty text among others.
    """
    value = arguments.get(key)
    if value is None or value == "":
        return []
    takes_several = key not in _ONE_PLACE
    places = value if isinstance(value, list | tuple) and takes_several else [value]
    if not all(isinstance(place, str) and place for place in places):
        kind = "a path or a list of paths" if takes_several else "a path"
        raise ConfigError(f"swift.{key} must be {kind}", got=f"{key}={value!r}")
    return list(places)


def refuse_unsupported(arguments: Mapping[str, Any], *, has_own_loss: bool = False) -> None:
    """Raises ConfigError: an argument of the tables above has a refused value, or two do not go together.

    ``has_own_loss``: as ``Stage2AbConfig`` tells.
    """
    for rule in (*UNSUPPORTED, *(_WITH_OWN_LOSS if has_own_loss else ())):
        if rule.key in arguments and rule.refused(arguments[rule.key]):
            raise ConfigError(
                f"swift.{rule.key} is not supported with channel B ({rule.reason})",
                got=f"{rule.key}={arguments[rule.key]!r:.200}",
                remedy=f"{rule.remedy}, or write b_ratio: 0",
            )
    sharded = "fsdp" if is_on(arguments.get("fsdp")) else "deepspeed"
    if is_on(arguments.get("quant_bits")) and (sharded == "fsdp" or "zero3" in str(arguments.get(sharded))):
        raise ConfigError(
            "swift.quant_bits needs whole weights on every rank (a shard of 4-bit weights cannot be read alone)",
            got=f"{sharded}={arguments[sharded]!r:.200}",
            remedy="write deepspeed: zero2, or remove it",
        )
    if is_on(arguments.get("quant_bits")) and not arguments.get("quant_method"):
        raise ConfigError(
            "swift.quant_bits needs swift.quant_method (ms-swift quantises nothing without it)",
            got=f"quant_bits={arguments['quant_bits']!r:.200} alone",
            remedy="write quant_method: bnb",
        )
    if sharded != "fsdp":
        return
    for other in ("deepspeed", "save_only_model"):
        if is_on(arguments.get(other)):
            raise ConfigError(
                f"ms-swift takes swift.fsdp or swift.{other}, not both",
                got=f"{other}={arguments[other]!r:.200}",
                remedy="remove one of them",
            )
    resumed = arguments.get("resume_from_checkpoint")
    if resumed and arguments.get("tuner_type", "lora") != "full":
        raise ConfigError(
            "swift.resume_from_checkpoint is not supported with LoRA under FSDP2 (Accelerate does not load "
            "into what ms-swift makes of a resumed adapter)",
            got=f"resume_from_checkpoint={resumed!r}",
            remedy="remove one of them",
        )


_TRUTHS = ("no", "off", "false", "yes", "on", "true")
_NAMES = {
    "report_to": "write report_to: none for no tracker",
    "deepspeed": "remove the key to train without DeepSpeed",
}


def refuse_values(arguments: Mapping[str, Any]) -> None:
    """Raises ConfigError: a truth value for a name, by which a run would end once its servers are up."""
    for key, remedy in _NAMES.items():
        value = arguments.get(key)
        for name in value if isinstance(value, list | tuple) else [value]:
            if str(name).lower() in _TRUTHS:
                raise ConfigError(
                    f"swift.{key} must be a name, no truth value", got=f"{key}={name!r}", remedy=remedy
                )


def as_argv(arguments: Mapping[str, Any]) -> list[str]:
    """``{"a": 1, "b": [2, 3], "c": None}`` becomes ``["--a", "1", "--b", "2", "3"]``.

    Lists expand, booleans become ``true`` or ``false``, mappings become JSON, None is left out.
    """
    argv: list[str] = []
    for name, value in arguments.items():
        if value is not None:
            values = value if isinstance(value, list | tuple) else [value]
            argv += [f"--{name}", *(_as_word(item) for item in values)]
    return argv


def _as_word(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return json.dumps(value)
    return str(value)


# Which metric of the evaluations on the servers chooses the best model: metric_for_best_model: eval_f1 (or eval/f1).
# Any other name is ms-swift's own evaluation's, and nothing here applies.
COUNTED = ("precision", "recall", "f1", "mean_iou", "truncated_ratio")
"""Sums over ranks, which every rank knows when an evaluation ends. A task may have others of its own."""
SCORED = (
    *("ap", "ap50", "ap75", "ar", "precision_50_95", "recall_50_95", "f1_50_95"),
    *("invalid_ratio", "failed_ratio", "ap_without_scores", "ece"),
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
        return
    got = f"swift.{_KEY}: {swift[_KEY]}"
    if not every_steps:
        raise ConfigError(
            f"{got} needs evaluations on the servers",
            got="stage2_ab.evaluation.every_steps=0",
            remedy="write every_steps: 200, or remove it",
        )
    if name in SCORED:
        raise ConfigError(
            f"{got} must be a metric that every rank knows when an evaluation ends, and rank 0 computes this "
            "one beside training",
            remedy=_ONE_OF_COUNTED,
        )
    strategy = swift.get("eval_strategy", swift.get("save_strategy", "steps"))
    if strategy not in ("no", False):
        raise ConfigError(
            f"{got} is no metric of ms-swift's own evaluation",
            got=f"eval_strategy={strategy!r}",
            remedy="write eval_strategy: 'no'",
        )
    if swift.get("load_best_model_at_end"):
        raise ConfigError(
            f"swift.load_best_model_at_end is not supported with {got}: Hugging Face looks for a checkpoint's "
            "tensors by the names of the model in memory, others are saved, and it goes on with the last "
            "weights",
            remedy="write save_strategy: best and remove it, for nothing after training uses them",
        )


def require_metric(swift: Mapping[str, Any], of_task: Collection[str]) -> None:
    """Raises ConfigError: no evaluation will have that name. ``of_task`` are the task's own."""
    name, known = best_metric(swift), (*COUNTED, *of_task)
    if name is not None and name not in known:
        raise ConfigError(
            f"swift.{_KEY} must be a metric of evaluations",
            got=swift[_KEY],
            remedy=f"write one of {', '.join(f'eval/{each}' for each in known)}",
        )
