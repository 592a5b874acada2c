"""Random weights at the real shapes of Qwen-VL, made on the device, with the demo's tiny tokenizer and processor.

The numbers are those of the published ``config.json`` files; nothing is looked up.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.stage import Context
from swift_stage2.demo.tiny_model import (
    IMAGE_TOKEN_ID,
    VIDEO_TOKEN_ID,
    build_model,
    build_processor,
    build_tokenizer,
    save_model,
)

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
    """A random Qwen2.5-VL of that shape."""
    with made_on(context.device, context.dtype):
        return build_model(
            0, vocab_size=shape.vocab_size or len(build_tokenizer()), text=shape.text, vision=shape.vision
        )


def make_qwen3_vl(context: Context) -> Any:
    """A random Qwen3-VL-4B with 2 of its 36 layers and 2 of its 24 vision blocks; tiny in the rehearsal."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    sizes = (64, 128, 4, 32, 2048) if context.rehearsal else (2560, 9728, 32, 128, 151_936)
    hidden, intermediate, num_heads, head_dim, vocab_size = sizes
    rope = {"rope_type": "default", "mrope_interleaved": True, "rope_theta": 5e6,
            "mrope_section": [4, 6, 6] if context.rehearsal else [24, 20, 20]}  # fmt: skip
    text = {"hidden_size": hidden, "intermediate_size": intermediate, "num_attention_heads": num_heads,
            "num_key_value_heads": num_heads // 4, "head_dim": head_dim, "num_hidden_layers": 2,
            "vocab_size": vocab_size, "rope_parameters": rope}  # fmt: skip
    vision = {"depth": 2, "deepstack_visual_indexes": [0, 1], "out_hidden_size": hidden}
    if context.rehearsal:
        vision |= {"hidden_size": 64, "num_heads": 2, "intermediate_size": 128}
    config = Qwen3VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True,
        image_token_id=IMAGE_TOKEN_ID, video_token_id=VIDEO_TOKEN_ID,
        vision_start_token_id=3, vision_end_token_id=4,
    )  # fmt: skip
    with made_on(context.device, context.dtype):
        return Qwen3VLForConditionalGeneration(config)  # type: ignore[no-untyped-call]


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
