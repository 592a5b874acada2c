"""The rules of docs/data.md for each family, on tiny random models of its classes by ms-swift's own templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from data.row_files import ANSWER, make_row
from family_models import FAMILIES, family_template, load_family
from real_model import answer_and_objects, boxes_of, make_encoder, make_task, sample_of, summed_loss
from safetensors.torch import load_file

from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.checks.packing_isolation import IsolationChange, isolation_batches, measure_isolation
from swift_stage2.errors import ConfigError
from swift_stage2.weights.export import WeightExport

WIDTH, HEIGHT = 150, 100
BOX = (30, 10, 90, 77)
# Qwen2-VL and Qwen2.5-VL resize to multiples of 28 pixels, Qwen3-VL to multiples of 32; 0..1000 knows no pixels.
RESIZED = (28 * 5, 28 * 4)
THOUSANDTHS = (1000, 1000)
SPACES = {
    "qwen2_vl": THOUSANDTHS,
    "qwen2_5_vl": RESIZED,
    "qwen3_vl": THOUSANDTHS,
    "qwen3_vl_moe": THOUSANDTHS,
    "internvl": THOUSANDTHS,
}
# ``hf_to_vllm_mapper`` of each family's class in vLLM 0.32.0 (qwen2_vl.py, qwen2_5_vl.py, qwen3_vl.py, interns1.py).
_QWEN2 = {
    "model.language_model.": "language_model.model.",
    "model.visual.": "visual.",
    "lm_head.": "language_model.lm_head.",
    "model.": "language_model.model.",
}
_QWEN3 = {
    "model.visual.": "visual.",
    "lm_head.": "language_model.lm_head.",
    "model.language_model.": "language_model.model.",
}
_INTERN = {
    "lm_head.": "language_model.lm_head.",
    "model.language_model.": "language_model.model.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}
VLLM_PREFIXES = {
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "internvl": _INTERN,
}
VLLM_MODULES = ("language_model.", "visual.", "vision_tower.", "multi_modal_projector.")


@dataclass(frozen=True)
class Loaded:
    name: str
    model: Any
    template: Any
    encoder: Encoder


@pytest.fixture(
    scope="module",
    params=[
        name if name == "qwen2_5_vl" else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES
    ],
)
def family(request: pytest.FixtureRequest) -> Loaded:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QWENVL_BBOX_FORMAT", "new")  # as a run sets it
        model, processor = load_family(request.param)
        template = family_template(model, processor)
    return Loaded(request.param, model, template, make_encoder(template, packing_length=4000))


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    from PIL import Image

    path = tmp_path_factory.mktemp("images") / "a.png"
    pixels = torch.randint(0, 256, (HEIGHT, WIDTH, 3), generator=torch.Generator().manual_seed(1))
    Image.fromarray(pixels.to(torch.uint8).numpy()).save(path)
    return str(path)


def _row(image: str, answer: str = ANSWER, label: str = "cup") -> dict[str, Any]:
    question = f"<image>Where is the {label}?"
    return make_row(image, answer=answer, labels=[label], boxes=[BOX], prompt=question)


def _box_in(space: tuple[int, int]) -> list[int]:
    return [
        round(value * size / whole)
        for value, size, whole in zip(BOX, space * 2, (WIDTH, HEIGHT) * 2, strict=True)
    ]


def _written_out(name: str) -> str:
    return json.dumps([{"bbox_2d": _box_in(SPACES[name]), "label": "cup"}])


# --- coordinates -----------------------------------------------------------------------------------


def test_boxes_are_in_the_space_that_the_family_learned(family: Loaded, image: str) -> None:
    prompt = family.encoder.encode_prompt(sample_of(_row(image)))
    assert prompt.space == SPACES[family.name]
    assert boxes_of(family.encoder, sample_of(_row(image))) == (tuple(_box_in(SPACES[family.name])),)


def test_placeholders_become_plain_json_but_for_internvl(family: Loaded, image: str) -> None:
    text = family.encoder.answer_of(sample_of(_row(image)))
    box = _box_in(SPACES[family.name])
    if family.name == "internvl":
        assert text == f'[{{"bbox_2d": <box>[{box}]</box>, "label": "<ref>cup</ref>"}}]'
        with pytest.raises(ConfigError, match="must be the format of channel A's answers"):
            make_task().learn([_row(image)], sample_of(_row(image)), family.encoder)
    else:
        assert text == f'[{{"bbox_2d": {box}, "label": "cup"}}]'


def test_answers_that_are_written_out_are_learned_by_every_family(family: Loaded, image: str) -> None:
    row = _row(image, _written_out(family.name))
    task = make_task()
    task = task.learn([row], sample_of(row), family.encoder)
    answer, objects = answer_and_objects(family.encoder, sample_of(row))
    task.check_answer(answer, objects)
    assert answer == _written_out(family.name)


# --- packing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attn_impl", "dtype"),
    [
        ("sdpa", torch.float32),
        pytest.param("sdpa", torch.bfloat16, marks=pytest.mark.slow),
        ("eager", torch.float32),
        pytest.param("eager", torch.bfloat16, marks=(pytest.mark.slow)),
    ],
    ids=str,
)
def test_packed_segments_do_not_see_each_other(
    family: Loaded, image: str, attn_impl: str, dtype: torch.dtype
) -> None:
    model = family.model.to(dtype)
    model.set_attn_implementation(attn_impl)
    samples = [
        sample_of(_row(image, _written_out(family.name), label), n)
        for n, label in enumerate(("cup", "red car"))
    ]
    batches = isolation_batches(family.encoder, make_task(), samples)

    def loss(batch: Mapping[str, Any], **settings: Any) -> float:
        inputs = {**batch, "pixel_values": batch["pixel_values"].to(dtype), **settings}
        return summed_loss(model, inputs)

    try:
        assert measure_isolation(batches, lambda b: loss(b, use_cache=False)) == IsolationChange(0.0, 0.0)
        assert not measure_isolation(batches, lambda b: loss(b, use_cache=True)).is_isolated, (
            "the check is blind"
        )
    finally:
        family.model.to(torch.float32).set_attn_implementation("sdpa")


# --- names of tensors ------------------------------------------------------------------------------


def _saved(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()
    }


def _at_vllm(name: str, prefixes: Mapping[str, str]) -> str:
    for prefix, replacement in prefixes.items():
        if name.startswith(prefix):
            name = name.replace(prefix, replacement, 1)
    return name


def test_vllm_gives_a_push_the_places_that_it_gives_the_checkpoint(family: Loaded, tmp_path: Path) -> None:
    """Qwen2-VL's, Qwen2.5-VL's and InternVL's files have older names than the module, which the export uses."""
    family.model.save_pretrained(tmp_path)
    exported = [spec.name for spec in WeightExport(family.model).manifest()]
    prefixes = VLLM_PREFIXES[family.name]
    places = {_at_vllm(name, prefixes) for name in exported}
    assert len(places) == len(exported)
    assert all(place.startswith(VLLM_MODULES) for place in places)
    assert places == {_at_vllm(name, prefixes) for name in _saved(tmp_path)}


# --- thinking --------------------------------------------------------------------------------------


def test_a_template_that_thinks_first_is_refused() -> None:
    model, processor = load_family("qwen3_vl")
    with pytest.raises(
        ConfigError, match=r"begins them with '<think>\\n'; train a model whose template adds nothing"
    ):
        make_encoder(family_template(model, processor, enable_thinking=True))
