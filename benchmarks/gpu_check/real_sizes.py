"""Stages *real-shapes* and *round-memory*: models of real sizes made, saved and loaded; what a round costs at them.

A lack of memory must cost only the round.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.gpu_check.measuring import free_memory, peak_gib, timed
from benchmarks.gpu_check.models import (
    QWEN25_VL_3B,
    QWEN25_VL_7B,
    TINY,
    checkpoint,
    image_batch,
    make_model,
    make_qwen3_vl,
)
from benchmarks.gpu_check.stage import Context
from swift_stage2.errors import CheckFailed
from swift_stage2.weights.bucket import WeightBucket
from swift_stage2.weights.export import WeightExport

_BUCKET_BYTES = 512 << 20
_GIB = 1 << 30
_BALLAST_BYTES = 1 << 20
_MOST_BALLAST = 4096


def shapes(context: Context) -> None:
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
    _forward_and_backward(context, "qwen2_5_vl", model)
    del model
    free_memory(device)
    qwen3, seconds = timed(device, lambda: make_qwen3_vl(context))
    note("qwen3_vl_make_s", seconds)
    _forward_and_backward(context, "qwen3_vl", qwen3)


def _forward_and_backward(context: Context, name: str, model: Any) -> None:
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


def round_memory(context: Context) -> None:
    """Raises ``CheckFailed`` where a round that got no memory was not refused, or changed what the next one sends."""
    sizes = (TINY,) if context.rehearsal else (QWEN25_VL_3B, QWEN25_VL_7B)
    for shape in sizes:
        model = make_model(shape, context)
        _measure(context, f"{shape.name}_full", WeightExport(model))
        if shape is sizes[0]:
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
        with _starved_of_memory(context.device):
            WeightBucket(export.read(bucket)).pack({})
    except RuntimeError as error:  # torch's own class for a GPU without memory is one of them
        context.figures.note("without_memory", f"{type(error).__name__}, the round fails")
    else:
        raise CheckFailed("a pack without memory must fail, and it did not")
    free_memory(context.device)
    if WeightBucket(export.read(bucket)).pack({}).checksums != before:
        raise CheckFailed("weights must be the same after a round that got no memory, they are not")


@contextmanager
def _starved_of_memory(device: str) -> Iterator[None]:
    """A context in which this process gets no more memory on the device: a limit, and all below it taken."""
    if device == "cpu":
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (_address_space_bytes() + 4 * _BALLAST_BYTES, before[1]))
    else:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved(device) / total, device)
    ballast: list[torch.Tensor] = []
    try:
        try:
            while len(ballast) < _MOST_BALLAST:
                ballast.append(torch.empty(_BALLAST_BYTES, dtype=torch.uint8, device=device))
        except RuntimeError:
            pass  # that is what was wanted
        yield
    finally:
        ballast.clear()
        if device == "cpu":
            resource.setrlimit(resource.RLIMIT_AS, before)
        else:
            torch.cuda.set_per_process_memory_fraction(1.0, device)


def _address_space_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
