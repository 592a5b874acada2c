"""Random weights at the real shapes of Qwen-VL, and stage *round-memory*, which uses them.

Models are made on the device, with the demo's tiny tokenizer and processor. The numbers are those of the published
``config.json`` files; nothing is looked up. A lack of memory must cost only the round.
"""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.device import free_memory, peak_gib, timed
from benchmarks.gpu_check.stage import CheckFailed, Context
from benchmarks.tiny_model import (
    IMAGE_TOKEN_ID,
    build_model,
    build_processor,
    build_tokenizer,
    save_model,
)
from swift_stage2.weights.copy_stream import Copy
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.snapshot import SnapshotFile
from swift_stage2.weights.tensors import checksums_by_name

_ROPE = {"type": "mrope", "rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6}
_VISION = {
    "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
    "fullatt_block_indexes": [7, 15, 23, 31],
}  # fmt: skip
_GRID = (1, 8, 8)
_MERGED = 4


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes that differ from the tiny model's."""

    name: str
    vocab_size: int | None = None
    text: Mapping[str, Any] = field(default_factory=dict)
    vision: Mapping[str, Any] = field(default_factory=dict)


TINY = ModelShape("tiny")
TINY_WIDE = ModelShape("tiny-wide", text={"intermediate_size": 32_768})
"""A merge of one of its matrices takes 16 MiB; one of the tiny model's fits what a process has free below its limit."""
QWEN25_VL_3B = ModelShape(
    "Qwen2.5-VL-3B",
    151_936,
    {"hidden_size": 2048, "intermediate_size": 11_008, "num_hidden_layers": 36, "num_attention_heads": 16,
     "num_key_value_heads": 2, "rope_scaling": _ROPE},
    {**_VISION, "out_hidden_size": 2048},
)  # fmt: skip
QWEN25_VL_7B = ModelShape(
    "Qwen2.5-VL-7B",
    152_064,
    {"hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28,
     "num_key_value_heads": 4, "rope_scaling": _ROPE, "tie_word_embeddings": False},
    {**_VISION, "out_hidden_size": 3584},
)  # fmt: skip


WIDE_4_LAYERS = ModelShape(
    "Qwen2.5-VL-3B-4-layers",
    QWEN25_VL_3B.vocab_size,
    {**QWEN25_VL_3B.text, "num_hidden_layers": 4},
    {**QWEN25_VL_3B.vision, "depth": 4, "fullatt_block_indexes": [1, 3]},
)
"""The widths of 3B with 4 of its 36 layers and 32 vision blocks: several rounds of it fit the time of a stage."""


@contextmanager
def made_on(device: str, dtype: str) -> Iterator[None]:
    """A context in which models are made there, in torch's ``dtype``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def make_model(shape: ModelShape, context: Context) -> Any:
    with made_on(context.device, context.dtype):
        return build_model(
            0, vocab_size=shape.vocab_size or len(build_tokenizer()), text=shape.text, vision=shape.vision
        )


def image_batch(model: Any, context: Context) -> dict[str, torch.Tensor]:
    """One row: an image of noise in 16 tokens, and some text; labels are the text."""
    vision = model.config.vision_config
    num_patches = _GRID[0] * _GRID[1] * _GRID[2]
    num_values = 3 * vision.temporal_patch_size * vision.patch_size**2
    text = list(range(20, 40))
    ids = torch.tensor([[3, *[IMAGE_TOKEN_ID] * (num_patches // _MERGED), 4, *text]])
    pixels = torch.randn(num_patches, num_values, generator=torch.Generator().manual_seed(0))
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE_TOKEN_ID).int(),
        "labels": torch.where(ids < text[0], -100, ids),
        "image_grid_thw": torch.tensor([_GRID]),
        "pixel_values": pixels.to(getattr(torch, context.dtype)),
    }
    return {name: tensor.to(context.device) for name, tensor in batch.items()}


def checkpoint(shape: ModelShape, context: Context) -> Path:
    """The directory of a random model of that shape, tiny in the rehearsal; written once for all stages of a check."""
    directory = context.scratch / f"model-{shape.name}"
    if not directory.exists():
        partial = context.scratch / "model.partial"
        shutil.rmtree(partial, ignore_errors=True)
        model = make_model(TINY if context.rehearsal else shape, context)
        save_model(model, build_processor(build_tokenizer()), partial)
        partial.rename(directory)
    return directory


_BUCKET_BYTES = 512 << 20
_GIB = 1 << 30
_BALLAST_BYTES = 1 << 20
_MOST_BALLAST = 4096


def round_memory(context: Context) -> None:
    """Raises ``CheckFailed`` where a round that got no memory was not refused, or changed what the next one sends."""
    sizes = (TINY_WIDE,) if context.rehearsal else (QWEN25_VL_3B, QWEN25_VL_7B)
    for shape in sizes:
        model = make_model(shape, context)
        _measure(context, f"{shape.name}_full", WeightExport(model))
        adapted = WeightExport(with_lora(model))
        if shape is sizes[0]:
            _starve(context, adapted)
        _measure(context, f"{shape.name}_lora", adapted)
        del model, adapted
        free_memory(context.device)


def with_lora(model: Any) -> Any:
    """The model under adapters that add something to its weights."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "v_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.01)  # zeros would merge to what was there
    return adapted


def _measure(context: Context, name: str, export: WeightExport) -> None:
    note, device = context.note, context.device
    free_memory(device)
    resting_gib = peak_gib(device)
    snapshot, reserve_s = timed(
        device, lambda: SnapshotFile(export.manifest(), bucket_bytes=_BUCKET_BYTES, pinned=export.on_gpu)
    )
    copy_all(export, snapshot)
    _, copy_s = timed(device, lambda: copy_all(export, snapshot))
    _, sum_s = timed(device, lambda: sums_of(snapshot))
    note(f"{name}_gib", snapshot.num_bytes / _GIB)
    note(f"{name}_reserve_s", reserve_s)
    note(f"{name}_snapshot_s", copy_s)
    note(f"{name}_sum_s", sum_s)
    note(f"{name}_peak_over_weights_gib", peak_gib(device) - resting_gib)


def copy_all(export: WeightExport, snapshot: SnapshotFile, copy: Copy = torch.Tensor.copy_) -> None:
    """As a sync round fills its snapshot."""
    for names in export.plan(_BUCKET_BYTES):
        snapshot.put(export.read(names), copy)


def sums_of(snapshot: SnapshotFile) -> dict[str, str]:
    return checksums_by_name(snapshot.tensors)


def _starve(context: Context, export: WeightExport) -> None:
    """Weights that must be merged are copied, copied again without memory, and copied a third time."""
    snapshot = SnapshotFile(export.manifest(), bucket_bytes=_BUCKET_BYTES, pinned=export.on_gpu)
    copy_all(export, snapshot)
    before = sums_of(snapshot)
    free_memory(context.device)
    try:
        with _starved_of_memory(context.device):
            copy_all(export, snapshot)
    except RuntimeError as error:  # torch's own class for a GPU without memory is one of them
        context.note("without_memory", f"{type(error).__name__}, the round fails")
    else:
        raise CheckFailed("a merge without memory must fail, and it did not")
    free_memory(context.device)
    copy_all(export, snapshot)
    if sums_of(snapshot) != before:
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
