"""Stage *round-memory*: what a round's own work costs at real sizes, and that a lack of memory costs only the round."""

from __future__ import annotations

from typing import Any

import torch

from swift_stage2.errors import CheckFailed
from swift_stage2.gpu_check.measuring import free_memory, peak_gib, starved, timed
from swift_stage2.gpu_check.models import QWEN25_VL_3B, QWEN25_VL_7B, TINY, make_model
from swift_stage2.gpu_check.stage import Context
from swift_stage2.weights.bucket import WeightBucket
from swift_stage2.weights.export import WeightExport

_BUCKET_BYTES = 512 << 20
_GIB = 1 << 30


def run(context: Context) -> None:
    """Raises ``CheckFailed`` where a round that got no memory was not refused, or changed what the next one sends."""
    shapes = (TINY,) if context.rehearsal else (QWEN25_VL_3B, QWEN25_VL_7B)
    for shape in shapes:
        model = make_model(shape, context)
        _measure(context, f"{shape.name}_full", WeightExport(model))
        if shape is shapes[0]:
            _starve(context, WeightExport(model))
        _measure(context, f"{shape.name}_lora", WeightExport(_with_lora(model)))
        del model
        free_memory(context.device)


def _with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "v_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.01)  # zeros would merge to what was there
    return adapted


def _measure(context: Context, name: str, export: WeightExport) -> None:
    note, device = context.figures.note, context.device
    free_memory(device)
    resting_gib = peak_gib(device)
    read_s = pack_s = 0.0
    num_bytes = 0
    for names in export.plan(_BUCKET_BYTES):
        tensors, seconds = timed(device, lambda names=names: export.read(names))  # type: ignore[misc]
        read_s += seconds
        packed, seconds = timed(device, lambda tensors=tensors: WeightBucket(tensors).pack({}))  # type: ignore[misc]
        pack_s += seconds
        num_bytes += packed.flat.numel()
        del tensors, packed
    note(f"{name}_gib", num_bytes / _GIB)
    note(f"{name}_read_s", read_s)
    note(f"{name}_pack_and_sum_s", pack_s)
    note(f"{name}_peak_over_weights_gib", peak_gib(device) - resting_gib)


def _starve(context: Context, export: WeightExport) -> None:
    """A bucket is packed, packed again without memory, and packed a third time."""
    bucket = max(export.plan(_BUCKET_BYTES), key=lambda names: len(names))
    before = WeightBucket(export.read(bucket)).pack({}).checksums
    free_memory(context.device)
    try:
        with starved(context.device):
            WeightBucket(export.read(bucket)).pack({})
    except RuntimeError as error:  # torch's own class for a GPU without memory is one of them
        context.figures.note("without_memory", f"{type(error).__name__}, the round fails")
    else:
        raise CheckFailed("a pack without memory must fail, and it did not")
    free_memory(context.device)
    if WeightBucket(export.read(bucket)).pack({}).checksums != before:
        raise CheckFailed("weights must be the same after a round that got no memory, they are not")
