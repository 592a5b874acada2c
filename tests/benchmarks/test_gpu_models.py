"""The shapes that are called real have the number of parameters that the published checkpoints have."""

from __future__ import annotations

import pytest

from benchmarks.gpu_check.real_shapes import QWEN25_VL_3B, QWEN25_VL_7B, WIDE_4_LAYERS, ModelShape, made_on
from swift_stage2.demo.tiny_model import build_model


def _num_parameters(shape: ModelShape) -> int:
    assert shape.vocab_size is not None
    with made_on("meta", "bfloat16"):
        model = build_model(0, vocab_size=shape.vocab_size, text=shape.text, vision=shape.vision)
    assert {parameter.element_size() for parameter in model.parameters()} == {2}
    return sum(parameter.numel() for parameter in model.parameters())


# ``total_size`` of each checkpoint's model.safetensors.index.json, in bytes of bfloat16.
@pytest.mark.parametrize(
    ("shape", "num_bytes"), [(QWEN25_VL_3B, 7_509_245_952), (QWEN25_VL_7B, 16_584_333_312)], ids=lambda it: ""
)
def test_a_real_shape_has_the_published_number_of_parameters(shape: ModelShape, num_bytes: int) -> None:
    assert 2 * _num_parameters(shape) == num_bytes


def test_the_learners_model_is_small_enough_for_several_rounds() -> None:
    assert _num_parameters(WIDE_4_LAYERS) < 1_000_000_000
