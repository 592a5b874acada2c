"""The loss of sampled tokens against the surrogate of PPO, an importance-weighted log-probability, and sums by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from builders import config_of
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.compat import declare_operators
from swift_stage2.config import GrpoConfig, Proximal
from swift_stage2.errors import ConfigError
from swift_stage2.training.losses import (
    POLICY_SUMS,
    PolicyTerm,
    check_model,
    loss_with_aux_targets,
    token_factors,
)

VOCABULARY = 7
PPO = GrpoConfig(proximal=Proximal.BEHAVIOUR, clip_low=0.2, clip_high=0.28, max_importance_weight=1.5)
CAPPED = GrpoConfig(proximal=Proximal.CURRENT, max_importance_weight=1.5)
HELD = GrpoConfig(proximal=Proximal.CURRENT, max_importance_weight=1.5, kl_weight=0.3)
EDGES = [math.log(ratio) for ratio in (0.8, 1.28, 1.5)]
GAPS = st.floats(-1.5, 1.5).filter(lambda gap: min(abs(gap - edge) for edge in EDGES) > 1e-3)
FACTORS = st.sampled_from([-3.0, -1.0, -0.25, 0.0, 0.5, 2.0])


@dataclass(frozen=True)
class Batch:
    """One row of tokens, some of a prompt, some sampled, some of a target with a weight each."""

    logits: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    advantages: torch.Tensor
    behaviour: torch.Tensor
    temperature: float
    reference: torch.Tensor
    """Log-probability of every supervised token under a reference model."""

    @property
    def supervised(self) -> list[int]:
        """Places of tokens, of which the logits stand one place before."""
        return [place for place, label in enumerate(self.labels[0].tolist()) if label != -100]

    @property
    def sampled(self) -> list[int]:
        return [place for place in self.supervised if not self.behaviour[0, place].isnan()]


@st.composite
def batches(draw: st.DrawFn, gaps: st.SearchStrategy[float] = GAPS) -> Batch:
    """A gap is how far the log-probability of a sampled token has moved since it was sampled."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**30)))
    between = draw(st.lists(st.sampled_from(["prompt", "target", "sampled"]), max_size=11))
    kinds = ["prompt", *between, "sampled"]
    logits = torch.randn(1, len(kinds), VOCABULARY, dtype=torch.float64, generator=generator) * 2
    labels = torch.randint(VOCABULARY, (1, len(kinds)), generator=generator)
    weights, advantages = torch.zeros(len(kinds)).double(), torch.ones(1, len(kinds)).double()
    behaviour, temperature = torch.full_like(advantages, math.nan), draw(st.sampled_from([1.0, 0.7, 1.6]))
    for place, kind in enumerate(kinds):
        if kind == "prompt":
            labels[0, place] = -100
            continue
        weights[place], advantages[0, place] = 1.0, draw(FACTORS)
        if kind == "target":
            weights[place] = draw(st.sampled_from([0.5, 1.0, 3.0]))
        else:
            now = torch.log_softmax(logits[0, place - 1] / temperature, 0)[labels[0, place]]
            behaviour[0, place] = now - draw(gaps)
    reference = -4 * torch.rand(len(kinds) - kinds.count("prompt"), dtype=torch.float64, generator=generator)
    return Batch(logits.requires_grad_(), labels, weights, advantages, behaviour, temperature, reference)


def ours(batch: Batch, grpo: GrpoConfig) -> tuple[torch.Tensor, dict[str, float]]:
    """Gradient and sums, of a loss that is as ms-swift hands it over."""
    following, scale = torch.roll(batch.labels[0], -1), torch.roll(batch.weights, -1)
    plain = torch.nn.functional.cross_entropy(batch.logits[0], following, reduction="none") * scale
    outputs = SimpleNamespace(loss=plain, logits=batch.logits)
    reference = batch.reference if grpo.kl_weight else None
    policy = PolicyTerm(batch.advantages, batch.behaviour, batch.temperature, grpo, reference)
    loss = loss_with_aux_targets(
        outputs, batch.labels, loss_scale=scale, num_items_in_batch=None, policy=policy
    )
    assert policy.sums is not None
    sums = dict(zip(POLICY_SUMS, policy.sums.tolist(), strict=True))
    return torch.autograd.grad(loss, batch.logits)[0][0], sums


def textbook(batch: Batch, grpo: GrpoConfig | None) -> torch.Tensor:
    """The gradient that autograd finds of what the papers write, as a mean over supervised tokens; None: REINFORCE."""

    def log_probs(places: list[int], temperature: float) -> torch.Tensor:
        rows = torch.log_softmax(batch.logits[0, [place - 1 for place in places]] / temperature, -1)
        return rows.gather(1, batch.labels[0, places, None])[:, 0]

    targets = [place for place in batch.supervised if place not in batch.sampled]
    own, advantages = log_probs(batch.sampled, batch.temperature), batch.advantages[0, batch.sampled]
    ratio = torch.exp(own - batch.behaviour[0, batch.sampled])
    if grpo is None:
        objective = advantages * own
    elif grpo.proximal is Proximal.BEHAVIOUR:
        clipped = ratio.clamp(1 - grpo.clip_low, 1 + grpo.clip_high)
        objective = torch.minimum(ratio * advantages, clipped * advantages)
        is_capped = (advantages < 0) & (ratio > grpo.max_importance_weight)
        objective = torch.where(is_capped, grpo.max_importance_weight * advantages * own, objective)
    else:
        objective = advantages * ratio.detach().clamp(max=grpo.max_importance_weight) * own
    if grpo is not None and grpo.kl_weight:
        above = batch.reference[[batch.supervised.index(place) for place in batch.sampled]] - own
        objective = objective - grpo.kl_weight * (torch.exp(above) - above - 1)
    factors = (batch.weights * batch.advantages[0])[targets]
    loss = -objective.sum() - (factors * log_probs(targets, 1.0)).sum()
    return torch.autograd.grad(loss / len(batch.supervised), batch.logits)[0][0]


def by_hand(batch: Batch, grpo: GrpoConfig) -> tuple[torch.Tensor, dict[str, float]]:
    """Gradient and sums, number by number."""
    logits, sums = batch.logits[0].detach().numpy(), dict.fromkeys(POLICY_SUMS, 0.0)
    gradient = np.zeros_like(logits)
    for place, reference in zip(batch.supervised, batch.reference.tolist(), strict=True):
        label, factor = int(batch.labels[0, place]), float(batch.advantages[0, place] * batch.weights[place])
        temperature = batch.temperature if place in batch.sampled else 1.0
        powers = [math.exp(logit / temperature) for logit in logits[place - 1]]
        shares = [power / math.fsum(powers) for power in powers]
        if place in batch.sampled:
            gap = math.log(shares[label]) - float(batch.behaviour[0, place])
            sums["policy_tokens"] += 1
            sums["policy_log_prob_gap"] += abs(gap)
            sums["policy_surprise"] -= math.log(shares[label])
            if grpo.proximal is Proximal.CURRENT:
                sums["policy_capped"] += math.exp(gap) > grpo.max_importance_weight
                factor *= min(math.exp(gap), grpo.max_importance_weight)
                if grpo.kl_weight:
                    ratio = math.exp(reference) / shares[label]
                    sums["policy_kl"] += ratio - math.log(ratio) - 1
                    factor += grpo.kl_weight * (ratio - 1)
            else:
                is_clipped = (factor > 0 and math.exp(gap) > 1.28) or (factor < 0 and math.exp(gap) < 0.8)
                is_capped = factor < 0 and math.exp(gap) > grpo.max_importance_weight
                sums["policy_clipped"] += is_clipped
                sums["policy_capped"] += is_capped
                factor *= 0.0 if is_clipped else grpo.max_importance_weight if is_capped else math.exp(gap)
        for token, share in enumerate(shares):
            gradient[place - 1, token] = factor * (share - (token == label)) / temperature
    return torch.from_numpy(gradient / len(batch.supervised)), sums


@pytest.mark.parametrize("grpo", [PPO, CAPPED, HELD], ids=["behaviour", "current", "kl"])
@given(batch=batches())
def test_gradient_and_sums_are_those_of_the_textbook_and_of_sums_by_hand(
    grpo: GrpoConfig, batch: Batch
) -> None:
    """``behaviour``: -min(r·A, clip(r)·A). ``current``: -A · min(r without gradient, cap) · log p, and k3 of a KL."""
    gradient, sums = ours(batch, grpo)
    expected, counted = by_hand(batch, grpo)
    torch.testing.assert_close(gradient, textbook(batch, grpo), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)
    assert sums == pytest.approx(counted, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("proximal", Proximal)
@given(batch=batches(gaps=st.just(0.0)))
def test_at_first_use_the_gradient_is_that_of_reinforce(proximal: Proximal, batch: Batch) -> None:
    """The weights that train have sampled: nothing is clipped or capped, and A·log p is trained."""
    gradient, sums = ours(batch, GrpoConfig(proximal=proximal))
    torch.testing.assert_close(gradient, textbook(batch, None), rtol=1e-5, atol=1e-6)
    assert (sums["policy_clipped"], sums["policy_capped"]) == (0, 0)
    assert sums["policy_log_prob_gap"] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(
    ("grpo", "advantage", "factors", "counted"),
    [
        (PPO, 2.0, [1.0, 1.58, 1.62, 2.54, 0, 0], [6, 2, 0]),
        (PPO, -1.0, [0, 0, -0.81, -1.27, -1.29, -1.5], [6, 2, 1]),
        (CAPPED, 2.0, [1.0, 1.58, 1.62, 2.54, 2.58, 3.0], [6, 0, 1]),
        (CAPPED, -1.0, [-0.5, -0.79, -0.81, -1.27, -1.29, -1.5], [6, 0, 1]),
    ],
)
def test_clipped_are_good_tokens_that_rose_and_bad_ones_that_fell_and_weights_are_capped(
    grpo: GrpoConfig, advantage: float, factors: list[float], counted: list[int]
) -> None:
    ratios = torch.tensor([0.5, 0.79, 0.81, 1.27, 1.29, 3.0])
    behaviour = torch.full_like(ratios, math.log(0.25))
    found, sums = token_factors(behaviour + ratios.log(), torch.full_like(ratios, advantage), behaviour, grpo)
    assert found.tolist() == pytest.approx(factors)
    assert sums[:3].tolist() == counted


# --- the model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objective", "b_ratio", "dropout", "kl_weight", "refused"),
    [
        (
            "grpo",
            0.5,
            0.05,
            0.0,
            "got lora_dropout=0.05 of the adapter; write swift.lora_dropout: 0, or 0 into",
        ),
        ("mixed", 0.5, 0.1, 0.0, "got lora_dropout=0.1 of the adapter"),
        ("grpo", 0.5, None, 0.1, "got kl_weight=0.1 and a model that has none"),
        ("grpo", 0.5, 0.0, 0.1, None),
        ("grpo", 0.5, None, 0.0, None),
        ("grpo", 0.0, None, 0.1, None),
        ("corrected_target", 0.5, 0.05, 0.1, None),
        ("corrected_target", 0.5, None, 0.1, None),
    ],
)
def test_an_adapter_that_does_not_go_with_rewards_is_refused(
    objective: str, b_ratio: float, dropout: float | None, kl_weight: float, refused: str | None
) -> None:
    """``check_model`` reads dropout from the model, because a loaded adapter keeps that of its adapter_config.json."""
    declare_operators()  # before peft imports transformers
    from peft import LoraConfig, get_peft_model

    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.3))
    if dropout is not None:
        model = get_peft_model(model, LoraConfig(target_modules=["0"], lora_dropout=dropout))  # type: ignore[arg-type]
    settings = {"schedule": {"b_ratio": b_ratio}, "objective": objective}
    config = config_of(
        {"swift": {}, "stage2_ab": settings, "stage2_ab.channel_b.grpo.kl_weight": kl_weight},
        {"rollout.num_generations": 4, "rollout.decoding.temperature": 1.0}
        if objective != "corrected_target"
        else {},
    )
    if refused is None:
        check_model(model, config)
    else:
        with pytest.raises(ConfigError, match=refused):
            check_model(model, config)
