"""Stage *real-shapes*: models of real sizes from nothing, through a directory, and one pass forwards and backwards."""

from __future__ import annotations

from typing import Any

import torch

from swift_stage2.errors import CheckFailed
from swift_stage2.gpu_check.measuring import free_memory, peak_gib, timed
from swift_stage2.gpu_check.models import QWEN25_VL_3B, checkpoint, image_batch, make_qwen3_vl
from swift_stage2.gpu_check.stage import Context

_GIB = 1 << 30


def run(context: Context) -> None:
    """Raises ``CheckFailed`` where a loss or a gradient is not finite."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    note, device = context.figures.note, context.device
    directory, seconds = timed(device, lambda: checkpoint(QWEN25_VL_3B, context))
    note("make_and_save_s", seconds)
    free_memory(device)
    model, seconds = timed(
        device,
        lambda: Qwen2_5_VLForConditionalGeneration.from_pretrained(
            directory, dtype=getattr(torch, context.dtype), device_map=device
        ),
    )
    note("load_s", seconds)
    _pass(context, "qwen2_5_vl", model)
    del model
    free_memory(device)
    qwen3, seconds = timed(device, lambda: make_qwen3_vl(context))
    note("qwen3_vl_make_s", seconds)
    _pass(context, "qwen3_vl", qwen3)


def _pass(context: Context, name: str, model: Any) -> None:
    note, device = context.figures.note, context.device
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    note(f"{name}_weights_gib", weights / _GIB)
    batch = image_batch(model, context)

    def step() -> float:
        model.zero_grad(set_to_none=True)
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        return float(loss.detach())

    step()  # the first one also loads kernels
    loss, seconds = timed(device, step)
    note(f"{name}_forward_backward_s", seconds)
    note(f"{name}_peak_gib", peak_gib(device))
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    if not (0 < loss < 100 and 0 < norm < float("inf")):
        raise CheckFailed(f"{name}: loss and gradient must be finite and above zero, got {loss=} {norm=}")
