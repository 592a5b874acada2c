"""Checkpoints and models are refused before anything is loaded, families against ms-swift's own registry."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import changed
from golden import Golden, name_of

from swift_stage2.checks.model import (
    _PLAIN_BOXES,
    _THINKING,
    check_family,
    check_model,
    recorded_plugins,
)
from swift_stage2.compat import declare_operators
from swift_stage2.config import Stage2Config, load_config
from swift_stage2.config.yaml_text import write_yaml
from swift_stage2.errors import ConfigError

PLACEHOLDERS = '[{"bbox_2d": <bbox>, "label": "<ref-object>"}]'
WRITTEN_OUT = '[{"bbox_2d": [1, 2, 30, 40], "label": "a"}]'


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    for mark in ("config.json", "adapter_config.json", "trainer_state.json"):
        (tmp_path / "good").mkdir(exist_ok=True)
        (tmp_path / "good" / mark).write_text("{}")
    (tmp_path / "good" / "tokenizer.json").write_text("{}")
    return tmp_path / "good"


def test_checkpoints_that_exist_pass(checkpoint: Path) -> None:
    check_model({"model": str(checkpoint)})
    check_model(
        {"model": str(checkpoint), "adapters": [str(checkpoint)], "resume_from_checkpoint": str(checkpoint)}
    )
    check_model({"adapters": str(checkpoint)})


def test_a_model_without_tokenizer_is_refused(checkpoint: Path) -> None:
    """transformers 5 would make an empty one without a word, and a server would serve with it."""
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"swift\.model must hold its tokenizer, got model=.* with none of"):
        check_model({"model": str(checkpoint)})
    check_model({"resume_from_checkpoint": str(checkpoint)})


def test_an_adapter_in_a_models_place_is_told_how_to_be_merged(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    command = rf"swift export --adapters {checkpoint} --merge_lora true"
    with pytest.raises(ConfigError, match=rf"^--model must hold config\.json, got an adapter .*{command}"):
        check_model({"model": str(checkpoint)}, of="--")


def test_plugins_of_the_run_are_taken_from_outside_of_the_checkpoint_alone(checkpoint: Path) -> None:
    inside, outside = checkpoint / "inside.py", checkpoint.parent / "outside.py"
    for plugin in (inside, outside):
        plugin.write_text("")
    (checkpoint.parent / "link.py").symlink_to(inside)

    def record(*plugins: object) -> None:
        (checkpoint / "args.json").write_text(
            json.dumps({"external_plugins": [str(each) for each in plugins]})
        )

    assert recorded_plugins(checkpoint, "X") == []
    record(outside)
    assert recorded_plugins(checkpoint, "X") == [str(outside)]
    for plugin in (inside, checkpoint / ".." / "good" / "inside.py", checkpoint.parent / "link.py"):
        record(outside, plugin)
        with pytest.raises(ConfigError, match=r"may not bring its own code.*then write X$"):
            recorded_plugins(checkpoint, "X")
    record(checkpoint.parent / "gone.py")
    with pytest.raises(ConfigError, match=r"must be there, got .*gone\.py; write X$"):
        recorded_plugins(checkpoint, "X")
    for text in ("[]", "{", '{"external_plugins": "a.py"}', '{"external_plugins": null}'):
        (checkpoint / "args.json").write_text(text)
        assert recorded_plugins(checkpoint, "X") == []


@pytest.mark.parametrize(
    "place",
    [
        "/no/such/model",
        "./model",
        "runs/a/checkpoint-7",
        "model",
        "run/last-checkpoint",
        "run/best-checkpoint",
    ],
)
@pytest.mark.parametrize("argument", ["model", "adapters", "resume_from_checkpoint"])
def test_a_missing_directory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=rf"swift\.{argument} must be a directory that exists, got {argument}="
    ):
        check_model({argument: [place] if argument == "adapters" else place})


@pytest.mark.parametrize("mark", ["config.json", "adapter_config.json", "trainer_state.json"])
def test_a_directory_that_is_no_checkpoint_is_named_with_what_it_lacks(checkpoint: Path, mark: str) -> None:
    (checkpoint / mark).unlink()
    everything: dict[str, Any] = dict.fromkeys(
        ("model", "adapters", "resume_from_checkpoint"), str(checkpoint)
    )
    with pytest.raises(ConfigError, match=f"must hold {mark}"):
        check_model(everything)


def test_no_checkpoint_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"swift\.model must name a checkpoint, got none"):
        check_model({"dataset": ["d.jsonl"]})


@pytest.mark.parametrize("value", [5, [None], [5]])
def test_adapters_may_be_several_and_must_be_paths(value: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"swift\.adapters must be a path or a list of paths, got adapters="
    ):
        check_model({"model": "org/hub-model", "adapters": value})


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
    swift = {
        "model": str(checkpoint),
        "dataset": [str(directory / "rows.jsonl")],
        "output_dir": str(directory / "out"),
        **settings,
    }
    data = changed(
        {"swift": swift, "stage2_ab.schedule.b_ratio": b_ratio, "launch.servers": [{"engine": engine}]}
    )
    file = directory / "config.yaml"
    file.write_text(write_yaml(data))
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


NOT_TRAINABLE: list[tuple[str, dict[str, Any]]] = [
    ("Qwen3VLForConditionalGeneration", {"model": "Qwen3-VL-2B-Thinking"}),
    (
        "Qwen3VLForConditionalGeneration",
        {"model": "models--Qwen--Qwen3-VL-2B-Thinking-FP8/snapshots/0a1b"},
    ),
    ("Qwen3_5ForConditionalGeneration", {}),
    ("InternS1ForConditionalGeneration", {"answer": WRITTEN_OUT}),
    ("InternVLForConditionalGeneration", {}),
    ("Glm4vForConditionalGeneration", {}),
    ("Qwen3VLMoeForConditionalGeneration", {"engine": "vllm"}),
    ("Qwen3VLMoeForConditionalGeneration", {"engine": "swift"}),
]
NAMES = [f"{architecture}, {name_of(settings)}" for architecture, settings in NOT_TRAINABLE]
MESSAGES = Golden(__file__, NAMES)


@pytest.mark.parametrize(
    ("architecture", "settings", "case"),
    [(*case, name) for case, name in zip(NOT_TRAINABLE, NAMES, strict=True)],
    ids=NAMES,
)
def test_what_cannot_work_is_refused_with_its_remedy(
    tmp_path: Path, architecture: str, settings: dict[str, Any], case: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_family(_config(tmp_path, architecture, **settings))
    MESSAGES.check(case, str(caught.value).replace(f"{tmp_path}/", ""))


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
