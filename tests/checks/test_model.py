"""Checkpoints and models are refused before anything is loaded."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from builders import config_of

from swift_stage2.checks.model import check_model, recorded_plugins, refuse_transposed_experts
from swift_stage2.errors import ConfigError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    for mark in ("config.json", "adapter_config.json", "trainer_state.json"):
        (tmp_path / "good").mkdir(exist_ok=True)
        (tmp_path / "good" / mark).write_text("{}")
    (tmp_path / "good" / "tokenizer.json").write_text("{}")
    return tmp_path / "good"


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
    for text in ("{", '{"external_plugins": null}'):
        (checkpoint / "args.json").write_text(text)
        assert recorded_plugins(checkpoint, "X") == []


@pytest.mark.parametrize("place", ["./model", "runs/a/checkpoint-7", "model", "run/last-checkpoint"])
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


@pytest.mark.parametrize("value", [5, [None], [5]])
def test_adapters_may_be_several_and_must_be_paths(value: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"swift\.adapters must be a path or a list of paths, got adapters="
    ):
        check_model({"model": "org/hub-model", "adapters": value})


@pytest.mark.parametrize(
    ("architecture", "engine", "is_refused"),
    [
        ("Qwen3VLMoeForConditionalGeneration", "vllm", True),
        ("Qwen3VLMoeForConditionalGeneration", "swift", True),
        ("Qwen3VLMoeForConditionalGeneration", "transformers", False),
        ("Qwen3VLForConditionalGeneration", "vllm", False),
    ],
)
def test_experts_that_vllm_would_read_transposed_are_refused(
    checkpoint: Path, architecture: str, engine: str, is_refused: bool
) -> None:
    (checkpoint / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    config = config_of({"swift.model": str(checkpoint), "launch.servers": [{"engine": engine}]})
    with pytest.raises(ConfigError, match="engine: transformers") if is_refused else nullcontext():
        refuse_transposed_experts(config)
