"""Entries of a pack's batch that stand beside its labels and that ms-swift does not know: columns, and tokens
instead of the labels (``channel_b/targets.py``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from swift_stage2.channel_b.encoding import ALTERNATIVE_TOKENS
from swift_stage2.columns import COLUMNS, Per
from swift_stage2.training.policy_loss import PolicyTerm


def cut_aux_targets(inputs: dict[str, Any], cut: Callable[[dict[str, Any]], None]) -> None:
    """Before ms-swift's ``cut`` takes the places that are not supervised out of labels and ``loss_scale``: as there."""

    def kept(values: torch.Tensor) -> torch.Tensor:
        both = {"labels": inputs["labels"], "loss_scale": values}
        cut(both)
        cut_values: torch.Tensor = both["loss_scale"]
        return cut_values

    for name in [name for name, column in COLUMNS.items() if name in inputs and column.per is Per.TOKEN]:
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
