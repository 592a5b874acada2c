"""The keys that say what channel B learns from rollouts: corrected answers, rewards, or both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from swift_stage2.config.rollout import DecodingConfig, RolloutConfig
from swift_stage2.config.rules import NotNegative, Positive
from swift_stage2.errors import ConfigError

if TYPE_CHECKING:
    from swift_stage2.config.stage2_ab import ChannelBConfig

MOST_REWARD = 1_000_000  # a weight's, and a term's either way: sums of a whole run stay finite
REWARD_WEIGHTS = {"f1": 1.0, "iou": 1.0, "format": 0.5, "duplicates": 0.5, "misses": 0.5}
"""Of the terms that a shipped task's reward has."""

LEAST_TEMPERATURE = 0.1  # below it log-probabilities are those of logits times ten and more
_DEFAULT_LORA_DROPOUT = 0.05
_LEAVE_THE_MODEL = {"init_weights": ("true", "false", "gaussian"), "lora_bias": ("none",), "fsdp": ("",)}
"""ms-swift's arguments of an adapter, with the values that change nothing but the adapter; the first is the default."""


class Objective(StrEnum):
    """The tokens that channel B trains: its corrected answers, or its rollouts by their rewards."""

    CORRECTED_TARGET = "corrected_target"
    """The corrected answer in the place of every rollout."""
    GRPO = "grpo"
    """The rollouts of one row as they were sampled, each by how much better it is than the others."""
    MIXED = "mixed"
    """As ``grpo``, and one corrected answer of every row beside them."""


class Proximal(StrEnum):
    """The policy from which one update may not lead far."""

    CURRENT = "current"
    """The weights that train the pack: rollouts of older ones count by a capped importance weight."""
    BEHAVIOUR = "behaviour"
    """The weights that sampled: tokens whose probability has moved too far are clipped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    weights: Mapping[str, Annotated[float, Field(ge=0, le=MOST_REWARD)]] = field(default_factory=dict)
    """Weights of the reward's terms, the larger the better, by name; a term that is left out has its default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GrpoConfig:
    min_group: Annotated[int, Field(ge=2)] = 2
    """Rollouts of one row that are compared at least; of a smaller group nothing is trained."""
    scale_by_std: bool = True
    """True divides every advantage by the standard deviation of the rewards in its group."""
    proximal: Proximal = Proximal.CURRENT
    """``current``: importance weights, capped. ``behaviour``: the probability ratio to what sampled, clipped."""
    max_importance_weight: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 2.0
    """Cap of a token's importance weight; with ``proximal: behaviour``, of tokens with a negative advantage alone."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """With ``proximal: behaviour``, a token with a negative advantage is not trained below a ratio of 1 - clip_low."""
    clip_high: Positive = 0.28
    """With ``proximal: behaviour``, a token with a positive advantage is not trained above a ratio of 1 + clip_high."""
    kl_weight: NotNegative = 0.0
    """Weight of what keeps sampled tokens near the model without its adapter, with LoRA; 0 leaves it out."""
    target_in_group: bool = False
    """True adds the corrected answer of the best rollout to its group, with the reward that the task gives it."""
    target_weight: Positive = 1.0
    """Loss weight of the corrected answer's tokens, with ``objective: mixed``."""


def check_objective(
    objective: Objective, channel: ChannelBConfig, rollout: RolloutConfig, swift: Mapping[str, Any]
) -> None:
    """The rules between an objective, how rollouts are made, and ms-swift's arguments.

    Raises:
        ConfigError: groups that cannot be compared, or a distribution that the learner does not know.
    """
    num, grpo = rollout.num_generations, channel.grpo
    if objective is Objective.CORRECTED_TARGET:
        if num > 1:
            raise ConfigError(
                "rollout.num_generations above 1 needs stage2_ab.objective grpo or mixed",
                got=f"num_generations={num} objective={str(objective)!r}",
                remedy="write objective: grpo, or leave num_generations out",
            )
        return
    require_weight(objective, {**REWARD_WEIGHTS, **channel.reward.weights})
    if num < grpo.min_group:
        raise ConfigError(
            f"stage2_ab.objective: {objective} compares rollouts of one row",
            got=f"num_generations={num} min_group={grpo.min_group}",
            remedy=f"write rollout.num_generations: {max(4, grpo.min_group)} or more",
        )
    if grpo.target_in_group and objective is Objective.MIXED:
        raise ConfigError(
            "target_in_group is for stage2_ab.objective: grpo, because mixed trains the corrected answer anyway",
            got=f"target_in_group=true objective={str(objective)!r}",
            remedy="remove target_in_group",
        )
    for name, wanted in (("top_p", 1), ("top_k", -1), ("repetition_penalty", 1)):
        if (value := getattr(rollout.decoding, name)) != wanted:
            raise ConfigError(
                f"stage2_ab.objective: {objective} needs rollouts of the model's own distribution",
                got=f"rollout.decoding.{name}={value:g}",
                remedy=f"write {name}: {wanted}",
            )
    if not rollout.decoding.temperature >= LEAST_TEMPERATURE:
        default = DecodingConfig().temperature
        raise ConfigError(
            f"stage2_ab.objective: {objective} learns from rollouts that differ",
            got=f"rollout.decoding.temperature={rollout.decoding.temperature:g} (default {default:g}, nearly "
            "greedy)",
            remedy="write temperature: 1.0",
        )
    check_adapter(channel, has_adapter=not swift.get("model") or swift.get("tuner_type", "lora") != "full")
    for name, harmless in _LEAVE_THE_MODEL.items():
        if grpo.kl_weight and str(value := swift.get(name) or harmless[0]).lower() not in harmless:
            raise ConfigError(
                "stage2_ab.channel_b.grpo.kl_weight needs the model without its adapter to be there as it began",
                got=f"swift.{name}={value!r:.200}, which changes or shards it",
                remedy=f"remove {name}, or kl_weight",
            )
    # Without a section swift its arguments come from ms-swift's own command line.
    dropout = swift.get("lora_dropout", _DEFAULT_LORA_DROPOUT) if swift.get("model") else 0
    whose = "" if "lora_dropout" in swift else ", ms-swift's default"
    if swift.get("tuner_type", "lora") == "lora":
        refuse_dropout(objective, dropout, f"{whose}; write swift.lora_dropout: 0")


def require_weight(objective: Objective, weights: Mapping[str, float]) -> None:
    """Raises ConfigError: all terms of the reward have weight 0. ``weights`` are those of all terms of the task."""
    if not any(weights.values()):
        raise ConfigError(
            f"stage2_ab.objective: {objective} needs rewards that differ",
            got="channel_b.reward.weights of 0 for all terms",
            remedy="write one above 0",
        )


def refuse_dropout(objective: Objective, dropout: float, rest: str) -> None:
    """Raises ConfigError: ``dropout`` is not 0. ``rest`` says whose it is, and the remedy."""
    if dropout:
        raise ConfigError(
            f"stage2_ab.objective: {objective} compares the learner's probabilities with the servers', which "
            "have no dropout",
            got=f"lora_dropout={dropout}{rest}",
        )


def check_adapter(channel: ChannelBConfig, *, has_adapter: bool) -> None:
    """Raises ConfigError: the reference model is this one without its adapter, and it has none."""
    if (weight := channel.grpo.kl_weight) and not has_adapter:
        raise ConfigError(
            "stage2_ab.channel_b.grpo.kl_weight compares the model with itself without its adapter",
            got=f"kl_weight={weight:g} and a model that has none",
            remedy="write swift.tuner_type: lora, or remove kl_weight",
        )
