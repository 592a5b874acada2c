from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

from benchmarks.tiny_model import (
    END_OF_TURN_ID,
    IMAGE_TOKEN_ID,
    build_model,
    build_processor,
    build_tokenizer,
    save_model,
)
from swift_stage2.demo.scenes import SceneKind, make_scene

TOKENIZER = build_tokenizer()
OBJECT_MAP = '{"object_1": {"desc": "red square", "bbox_2d": [1, 22, 333, <|coord_4|>]}}'


def _ids(text: str) -> list[int]:
    ids: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return ids


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=60) | st.text(alphabet='[]{}"_:, 0123456789labeldigit', max_size=60))
def test_any_text_survives_tokenising(text: str) -> None:
    assert TOKENIZER.decode(_ids(text)) == text


def test_whole_numbers_are_single_tokens_wherever_they_stand() -> None:
    for number in range(1000):
        before, middle, after = (_ids(text) for text in ("[", f"[{number}]", "]"))
        assert len(middle) == len(before) + 1 + len(after)
    assert len({_ids(str(number))[0] for number in range(1000)}) == 1000


def test_a_saved_directory_is_complete(tmp_path: Path) -> None:
    model = build_model(3, vocab_size=len(TOKENIZER))
    save_model(model, build_processor(TOKENIZER), tmp_path)
    loaded = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
    assert END_OF_TURN_ID in loaded.generation_config.eos_token_id
    processor = AutoProcessor.from_pretrained(tmp_path)
    assert processor.tokenizer(OBJECT_MAP)["input_ids"] == _ids(OBJECT_MAP)
    image = make_scene(SceneKind.SHAPES, 0).image
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Detect all objects."}]}],
        add_generation_prompt=True,
    )
    ids = processor(text=[prompt], images=[image], return_tensors="pt")["input_ids"][0].tolist()
    assert ids.count(IMAGE_TOKEN_ID) == 16


def test_the_committed_checkpoint_is_small_float32_and_documented(stage1_directory: Path) -> None:
    files = list(stage1_directory.iterdir())
    assert sum(file.stat().st_size for file in files) <= 8 * 2**20
    weights = load_file(stage1_directory / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert "python -m scripts.make_stage1" in (stage1_directory / "README.md").read_text()
