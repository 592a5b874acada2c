"""What is refused of models before anything starts, against ms-swift's own registry of models and templates."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swift_stage2.compat import declare_operators
from swift_stage2.config import Stage2Config, load_config
from swift_stage2.errors import ConfigError
from swift_stage2.preflight.model_family import _PLAIN_BOXES, _THINKING, check_family
from swift_stage2.starter_config import write_yaml

PLACEHOLDERS = '[{"bbox_2d": <bbox>, "label": "<ref-object>"}]'
WRITTEN_OUT = '[{"bbox_2d": [1, 2, 30, 40], "label": "a"}]'


def _config(
    directory: Path, architecture: str, answer: str = PLACEHOLDERS, model: str = "", **settings: Any
) -> Stage2Config:
    checkpoint = directory / (model or "checkpoint-10")
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    (checkpoint / "tokenizer.json").write_text("{}")
    row = {
        "messages": [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": answer}],
        "images": ["a.png"],
        "objects": {"ref": ["a"], "bbox": [[1, 2, 30, 40]]},
    }
    (directory / "rows.jsonl").write_text(json.dumps(row) + "\n")
    engine, b_ratio = settings.pop("engine", "transformers"), settings.pop("b_ratio", 0.1)
    file = directory / "config.yaml"
    file.write_text(
        write_yaml(
            {
                "swift": {
                    "model": str(checkpoint),
                    "dataset": [str(directory / "rows.jsonl")],
                    "output_dir": str(directory / "out"),
                    **settings,
                },
                "stage2_ab": {"schedule": {"b_ratio": b_ratio}},
                "rollout": {"servers": [{"base_url": "http://127.0.0.1:8000"}]},
                "launch": {"servers": [{"engine": engine}]},
            }
        )
    )
    return load_config(file)


@pytest.mark.parametrize(
    "architecture",
    [
        *("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
        *("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
    ],
)
def test_what_works_is_not_refused(tmp_path: Path, architecture: str) -> None:
    check_family(_config(tmp_path, architecture))
    check_family(_config(tmp_path / "named", architecture, model="Qwen3-VL-2B-Thinking-notes/checkpoint-10"))


@pytest.mark.parametrize(
    ("architecture", "settings", "expected"),
    [
        (
            "Qwen3VLForConditionalGeneration",
            {"model": "Qwen3-VL-2B-Thinking"},
            "Thinking.*train an Instruct model",
        ),
        (
            "Qwen3VLForConditionalGeneration",
            {"model": "models--Qwen--Qwen3-VL-2B-Thinking-FP8/snapshots/0a1b"},
            "which thinks first; train an Instruct model",
        ),
        (
            "Qwen3_5ForConditionalGeneration",
            {},
            r"\(Qwen3_5ForConditionalGeneration\), which thinks first; train",
        ),
        ("InternS1ForConditionalGeneration", {"answer": WRITTEN_OUT}, "which thinks first"),
        (
            "InternVLForConditionalGeneration",
            {},
            "in another format; write labels and boxes out in every answer",
        ),
        (
            "Glm4vForConditionalGeneration",
            {},
            "in another format; write labels and boxes out in every answer",
        ),
        (
            "Qwen3VLMoeForConditionalGeneration",
            {"engine": "vllm"},
            r"engine='vllm', .* set launch\.servers\[\]",
        ),
        (
            "Qwen3VLMoeForConditionalGeneration",
            {"engine": "swift"},
            r"engine='swift', .* or train a dense model",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_its_remedy(
    tmp_path: Path, architecture: str, settings: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        check_family(_config(tmp_path, architecture, **settings))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("command", ["launch", "train", "doctor"])
def test_every_command_says_so_before_anything_starts(tmp_path: Path, command: str) -> None:
    _config(tmp_path, "Qwen3VLForConditionalGeneration", model="Qwen3-VL-2B-Thinking")
    arguments = [sys.executable, "-m", "swift_stage2", command, str(tmp_path / "config.yaml")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == (1 if command == "doctor" else 2)
    assert "which thinks first" in " ".join((done.stdout + done.stderr).split())
    assert not (tmp_path / "out").exists()


def test_other_models_may_list_boxes_that_are_written_out(tmp_path: Path) -> None:
    check_family(_config(tmp_path, "InternVLForConditionalGeneration", WRITTEN_OUT))


def test_a_plugin_may_bring_a_template_of_its_own(tmp_path: Path) -> None:
    check_family(_config(tmp_path, "InternVLForConditionalGeneration", external_plugins="plugin.py"))


def test_a_run_without_channel_b_may_train_any_model(tmp_path: Path) -> None:
    check_family(_config(tmp_path, "InternS1ForConditionalGeneration", b_ratio=0, enable_thinking=True))


# --- the names against ms-swift --------------------------------------------------------------------


def _registered() -> Iterator[tuple[str, Any]]:
    """(architecture, template) of every multi-modal model that generates text."""
    declare_operators()
    from swift.model import MODEL_MAPPING
    from swift.template import TEMPLATE_MAPPING

    for meta in MODEL_MAPPING.values():
        if not meta.is_multimodal:
            continue
        for template in {meta.template, *(group.template for group in meta.model_groups)} - {None}:
            if template.endswith(("_emb", "_embedding", "reranker", "reranker_m0")):
                continue  # these say nothing
            for architecture in meta.architectures:
                yield architecture, TEMPLATE_MAPPING[template]


def test_plain_boxes_are_what_ms_swift_writes_plainly() -> None:
    plain: set[str] = set()
    for architecture, meta in _registered():
        template = meta.template_cls.__new__(meta.template_cls)
        template.bbox_format = "new"  # read from QWENVL_BBOX_FORMAT, which a run sets
        written = template.replace_bbox([1, 2, 3, 4], 0, None), template.replace_ref("a", 0, None)
        if written == (["[1, 2, 3, 4]"], ["a"]):
            plain.add(architecture)
    assert plain >= _PLAIN_BOXES
    assert plain - _PLAIN_BOXES - _THINKING == set()


def test_thinking_names_are_what_ms_swift_begins_with_thoughts() -> None:
    """Of the models that write plain boxes, or think whatever template they are given."""
    prefixes: dict[str, set[str]] = {}
    for architecture, meta in _registered():
        thinks = meta.is_thinking and not meta.non_thinking_prefix
        prefix = meta.thinking_prefix if thinks else meta.non_thinking_prefix
        prefixes.setdefault(architecture, set()).add(prefix)
    assert all(all(prefixes[architecture]) for architecture in _THINKING)
    assert not any(any(prefixes[architecture]) for architecture in _PLAIN_BOXES)
