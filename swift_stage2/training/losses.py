"""The loss of a pack, with what stands beside its labels and ms-swift does not know: columns, and tokens instead of the
labels (``channel_b/targets.py``); and the loss of tokens that the model sampled, by their advantages.

The decoupled clipped objective (Hilton et al., 2022, arXiv:2110.00641) knows three policies: the one that sampled
(*behaviour*), the one from which an update may not lead far (*proximal*), and the one that is trained. A pack is
trained once, so the weights that train it are themselves the proximal policy of ``Proximal.CURRENT``: nothing is
clipped, and what remains is an importance weight, capped as in V-trace (Espeholt et al., 2018, arXiv:1802.01561). With
``Proximal.BEHAVIOUR`` it is the clipped objective of PPO (Schulman et al., 2017, arXiv:1707.06347), whose ratio nothing
bounds where a token with a negative advantage has become likelier (Ye et al., 2020, arXiv:1912.09729): there, too, it
is capped.

Either way the gradient is that of the log-probability times a factor without a gradient of its own. So each token keeps
the cross-entropy that ms-swift computes, times its factor, and all that holds of supervised packs holds of these. That
is also so of the divergence from a reference model, by the estimator k3 of Schulman (2020,
http://joschu.net/blog/kl-approx.html), as GRPO adds it to its loss (Shao et al., 2024, arXiv:2402.03300).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from swift_stage2.channel_b.encoding import ALTERNATIVE_TOKENS, IGNORED_LABEL
from swift_stage2.columns import ADVANTAGES, BEHAVIOUR, COLUMNS
from swift_stage2.config import GrpoConfig, Proximal, Stage2Config
from swift_stage2.config.objective import check_adapter, refuse_dropout

POLICY_SUMS = (
    "policy_tokens",
    "policy_clipped",
    "policy_capped",
    "policy_log_prob_gap",
    "policy_surprise",
    "policy_kl",
)
"""Counters of ``telemetry/metrics.py`` that ``token_factors`` adds up, in the order of its vector."""
_MOST_GAP = (
    20.0  # nats; beyond it a ratio says nothing, and an infinite one times an advantage of 0 is no number
)


def set_text_positions(inputs: dict[str, Any]) -> None:
    """Puts the places of text first in ``position_ids`` of a row that holds several, of shape (4, 1, places) then.

    Hugging Face keeps the packed parts apart by that alone, unless flash attention does. ms-swift's collator leaves
    them beside, where its ``compute_loss`` takes them for the lengths of the parts.
    """
    positions, of_text = inputs.get("position_ids"), inputs.get("text_position_ids")
    if positions is None or positions.ndim != 3:
        return
    if of_text is None and len(positions) == 4:  # a pack of channel B
        inputs["text_position_ids"] = positions[0]
    elif of_text is not None and len(positions) == 3:
        inputs["position_ids"] = torch.cat([of_text[None], positions])


def check_model(model: nn.Module, config: Stage2Config) -> None:
    """Refuses an adapter that does not go with rewards. One of an earlier stage brings settings of its own.

    On CPUs with bf16 bitsandbytes packs 4 bits anew, in place, in the first pass of an evaluation, and its own reader
    then reads them wrongly: layers are told not to.

    Raises:
        ConfigError: ``kl_weight`` without an adapter, or an adapter with dropout.
    """
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
    if not (config.b_enabled and config.stage2_ab.uses_rewards):
        return
    check_adapter(config.stage2_ab.channel_b, has_adapter=hasattr(model, "disable_adapter"))
    shares = [
        each.p for name, each in model.named_modules() if ".lora_dropout." in name and hasattr(each, "p")
    ]
    rest = (
        " of the adapter; write swift.lora_dropout: 0, or 0 into the adapter_config.json of one from before"
    )
    refuse_dropout(config.stage2_ab.objective, max(shares, default=0.0), rest)


@dataclass(eq=False)
class PolicyTerm:
    """The entries of a pack's batch that weigh its sampled tokens, beside its labels; both of shape (1, places)."""

    advantages: torch.Tensor
    behaviour: torch.Tensor
    temperature: float
    grpo: GrpoConfig
    reference: torch.Tensor | None = None
    """Once ``ask_reference`` was called: the log-probability of every trained token under the reference model."""
    sums: torch.Tensor | None = None
    """Once ``weigh`` was called: ``POLICY_SUMS``, on the batch's device, so that nothing waits for them."""

    @classmethod
    def of(cls, columns: Mapping[str, torch.Tensor], config: Stage2Config) -> PolicyTerm | None:
        """From the columns of a batch; None of one without advantages."""
        if (advantages := columns.get(ADVANTAGES.name)) is None:
            return None
        behaviour = columns.get(BEHAVIOUR.name)
        if behaviour is None:  # targets alone
            behaviour = torch.full_like(advantages, BEHAVIOUR.filler)
        return cls(
            advantages, behaviour, config.rollout.decoding.temperature, config.stage2_ab.channel_b.grpo
        )

    def ask_reference(
        self, module: Any, compute_loss: Callable[[Any, dict[str, Any]], Any], inputs: Mapping[str, Any]
    ) -> None:
        """Before ``weigh``, if ``kl_weight`` is not 0: one more forward pass, of the module without its adapter.

        ``compute_loss`` is ms-swift's, which prepares logits and labels alike for both.
        """

        def keep(outputs: Any, labels: torch.Tensor, *, loss_scale: torch.Tensor, **_: Any) -> torch.Tensor:
            next_labels, behaviour = (torch.roll(each, -1, dims=-1)[0] for each in (labels, self.behaviour))
            losses = self._losses(outputs, next_labels, behaviour, loss_scale)
            trained = next_labels != IGNORED_LABEL
            self.reference = -(losses[trained] / loss_scale[trained])
            outputs.logits = None  # ms-swift would count their tokens in the accuracy of what is trained
            return losses.sum()

        with torch.no_grad(), module.disable_adapter():
            compute_loss(module, {**inputs, "compute_loss_func": keep})

    def weigh(
        self, outputs: Any, labels: torch.Tensor, loss_scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of every *next* label with its factor, and the factors; both of shape (places,).

        ``outputs``, ``labels`` and ``loss_scale`` are as ``loss_with_aux_targets`` takes them. Where rollouts were
        sampled at another temperature than 1, sampled tokens have the cross-entropy of the logits over it.
        """
        next_labels, advantages, behaviour = (
            torch.roll(each, -1, dims=-1)[0] for each in (labels, self.advantages, self.behaviour)
        )
        trained = next_labels != IGNORED_LABEL
        losses = self._losses(outputs, next_labels, behaviour, loss_scale)
        factors = torch.ones_like(losses)
        factors[trained], self.sums = token_factors(
            -(losses[trained] / loss_scale[trained]),
            advantages[trained],
            behaviour[trained],
            self.grpo,
            self.reference,
        )
        return losses * factors, factors

    def _losses(
        self, outputs: Any, next_labels: torch.Tensor, behaviour: torch.Tensor, loss_scale: torch.Tensor
    ) -> torch.Tensor:
        """The weighted cross-entropy of every next label, of sampled ones at the temperature of the rollouts."""
        losses: torch.Tensor = outputs.loss
        if self.temperature == 1:
            return losses
        rows = ((next_labels != IGNORED_LABEL) & ~torch.isnan(behaviour)).nonzero()[:, 0]
        scaled = outputs.logits[0, rows].float() / self.temperature
        own = cross_entropy(scaled, next_labels[rows], reduction="none") * loss_scale[rows]
        return losses.index_put((rows,), own)


def token_factors(
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    behaviour: torch.Tensor,
    grpo: GrpoConfig,
    reference: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factor of every token's cross-entropy, and ``POLICY_SUMS``.

    Args:
        log_probs: of the tokens under the weights that are trained, at the temperature of the rollouts.
        advantages: of each token; of one that was not sampled it is the factor itself.
        behaviour: log-probabilities under the weights that sampled; NaN of a token that was not.
        reference: log-probabilities under the reference model; None, with ``kl_weight`` 0, is no divergence from it.

    All of one shape, whose every entry is a token that is trained.
    """
    log_probs = log_probs.detach()
    sampled = ~torch.isnan(behaviour)
    gap = torch.where(sampled, log_probs - behaviour, 0.0)
    ratio = torch.exp(gap.clamp(max=_MOST_GAP))
    capped, clipped = ratio > grpo.max_importance_weight, torch.zeros_like(sampled)
    if grpo.proximal is Proximal.BEHAVIOUR:
        capped = capped & (advantages < 0)
        is_high = (advantages > 0) & (ratio > 1 + grpo.clip_high)
        clipped = is_high | ((advantages < 0) & (ratio < 1 - grpo.clip_low))
    weight = torch.where(capped, grpo.max_importance_weight, ratio)
    factors, divergence = advantages * weight.masked_fill(clipped, 0), torch.zeros_like(ratio)
    if reference is not None:
        above = torch.where(sampled, reference - log_probs, 0.0).clamp(max=_MOST_GAP)
        divergence = torch.expm1(above) - above
        factors = factors + grpo.kl_weight * torch.expm1(above)
    sums = sampled, clipped, capped, gap.abs(), -torch.where(sampled, log_probs, 0.0), divergence
    return factors, torch.stack([each.float().sum() for each in sums])


def cut_aux_targets(inputs: dict[str, Any], cut: Callable[[dict[str, Any]], None]) -> None:
    """Before ms-swift's ``cut`` takes the places that are not supervised out of labels and ``loss_scale``: as there."""

    def kept(values: torch.Tensor) -> torch.Tensor:
        both = {"labels": inputs["labels"], "loss_scale": values}
        cut(both)
        cut_values: torch.Tensor = both["loss_scale"]
        return cut_values

    for name in [name for name in COLUMNS if name in inputs]:
        inputs[name] = kept(inputs[name])
    for name in [name for name in ALTERNATIVE_TOKENS if name in inputs]:
        places = kept(torch.arange(inputs["labels"].shape[1], device=inputs["labels"].device)[None])[0]
        moved = torch.searchsorted(places, inputs[name][:, 0].contiguous())  # supervised, so they are kept
        inputs[name] = torch.stack([moved, inputs[name][:, 1]], dim=1)


def loss_with_aux_targets(
    outputs: Any,
    labels: torch.Tensor,
    *,
    loss_scale: torch.Tensor,
    num_items_in_batch: Any,
    alternatives: torch.Tensor | None = None,
    duplicates: torch.Tensor | None = None,
    duplicate_weight: float = 0.0,
    policy: PolicyTerm | None = None,
    **_: Any,
) -> torch.Tensor:
    """The batch's loss as ms-swift sums it up, with what other tokens at a place, and advantages, make of it.

    Where ``alternatives`` are as right, ``-log p(label)`` becomes ``-log (p(label) + sum of p(alternative))``. Every
    one of ``duplicates`` adds ``-log (1 - p)``, the unlikelihood of Welleck et al. (2020), times ``duplicate_weight``.

    Args:
        outputs: ``loss``, per place the weighted loss of the *next* label; ``logits``, (1, places, vocabulary).
        labels: of shape (1, places).
        loss_scale: weights of the next labels, of shape (places,).
        alternatives: (place of a label, other token), of shape (pairs, 2), ascending.
        duplicates: likewise.
        policy: gives every place a factor, 1 without it.
    """
    each_loss: torch.Tensor = outputs.loss
    factors = torch.ones_like(each_loss)
    if policy is None:
        loss = each_loss.sum()
    else:
        weighted, factors = policy.weigh(outputs, labels, loss_scale)
        loss = weighted.sum()
    if alternatives is not None:
        rows, gaps = _gaps(outputs.logits, labels, alternatives)
        places, place = torch.unique_consecutive(rows, return_inverse=True)
        # log (1 + sum of exp(gaps)) per place, about its largest term; the 1 is the label itself.
        top = gaps.new_zeros(len(places)).scatter_reduce(0, place, gaps.detach(), "amax")
        total = torch.exp(-top).scatter_add(0, place, torch.exp(gaps - top[place]))
        loss = loss - ((top + torch.log(total)) * loss_scale[places] * factors[places]).sum()
    if duplicates is not None:
        rows, gaps = _gaps(outputs.logits, labels, duplicates)
        # The label's own loss knows the sum over the vocabulary. A probability of 1 has no finite unlikelihood.
        probabilities = torch.exp(gaps - each_loss[rows] / loss_scale[rows]).clamp(max=1 - 1e-6)
        loss = loss - duplicate_weight * (torch.log1p(-probabilities) * factors[rows]).sum()
    num_items = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return loss / num_items


def _gaps(
    logits: torch.Tensor, labels: torch.Tensor, pairs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of the logits of some (place, token), and how far each token's logit lies above the label's."""
    rows, tokens = pairs[:, 0] - 1, pairs[:, 1]
    both = torch.cat([rows, rows]), torch.cat([tokens, labels[0, rows + 1]])
    picked: torch.Tensor = _PickedLogits.apply(logits, *both)  # type: ignore[no-untyped-call]
    token_logits, label_logits = picked.float().chunk(2)
    return rows, token_logits - label_logits


class _PickedLogits(torch.autograd.Function):
    """Some logits of one row of a batch. Their gradient is sparse: a dense one would be as large as all logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, places: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places, tokens)
        ctx.shape = logits.shape
        return logits[0, places, tokens]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        places, tokens = ctx.saved_tensors
        indices = torch.stack([torch.zeros_like(places), places, tokens])
        unchecked = torch.sparse.check_sparse_tensor_invariants(False)  # type: ignore[no-untyped-call]
        with unchecked:  # torch 2.11 warns of an argument that says the same
            return torch.sparse_coo_tensor(indices, gradients[0], ctx.shape), None, None
