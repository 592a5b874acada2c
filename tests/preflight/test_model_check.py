"""A missing checkpoint is the user's mistake, told before anything is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swift_stage2.errors import ConfigError
from swift_stage2.preflight.model import check_hub_ids, check_model


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


def test_a_hub_id_is_not_looked_for() -> None:
    check_model({"model": "Qwen/Qwen2.5-VL-3B-Instruct"})


def test_an_id_that_is_also_a_directory_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "first").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"swift\.model must hold config\.json, got model='runs/first'"):
        check_model({"model": "runs/first"})


@pytest.mark.parametrize("place", ["/no/such/model", "./model", "runs/a/checkpoint-7", "model"])
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


def test_a_mistyped_checkpoint_to_resume_from_is_no_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        check_model({"model": "org/hub-model", "resume_from_checkpoint": "nowhere/checkpoint-5"})
    assert str(refused.value) == (
        "swift.resume_from_checkpoint must be a directory that exists, got "
        "resume_from_checkpoint='nowhere/checkpoint-5'; check the path"
    )


@pytest.mark.parametrize("value", [5, True, False, {"a": 1}, [None], ["runs/checkpoint-5"]])
def test_what_is_no_path_is_told_with_what_to_write(value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        check_model({"model": "org/hub-model", "resume_from_checkpoint": value})
    assert str(refused.value) == (
        f"swift.resume_from_checkpoint must be a path, got resume_from_checkpoint={value!r}; "
        "write resume_from_checkpoint: RUN_DIR/checkpoint-N"
    )


@pytest.mark.parametrize("value", [5, [None], [5]])
def test_adapters_may_be_several_and_must_be_paths(value: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"swift\.adapters must be a path or a list of paths, got adapters="
    ):
        check_model({"model": "org/hub-model", "adapters": value})


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Hugging Face's cache with one copy of ``owner/cached``."""
    copy = tmp_path / "hub" / "models--owner--cached" / "snapshots" / "abc"
    copy.mkdir(parents=True)
    (copy / "config.json").write_text("{}")
    (tmp_path / "hub" / "models--owner--cached" / "refs").mkdir()
    (tmp_path / "hub" / "models--owner--cached" / "refs" / "main").write_text("abc")
    return tmp_path / "hub"


@pytest.mark.parametrize(
    ("hub_id", "variables", "told"),
    [
        ("owner/absent", {}, "got 'owner/absent', which is in no cache; name a directory, or unset"),
        ("owner/absent", {"USE_HF": "1"}, "got 'owner/absent', which is in no cache"),
        ("owner/cached", {}, "set USE_HF=1, or name its copy {copy}, or unset HF_HUB_OFFLINE"),
    ],
)
def test_without_a_network_a_server_refuses_a_hub_id_on_one_line(
    cache: Path, hub_id: str, variables: dict[str, str], told: str
) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "swift_stage2", "rollout", hub_id, "--port", "0"],
        env=dict(os.environ) | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache)} | variables,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert told.format(copy=cache / "models--owner--cached" / "snapshots" / "abc") in result.stderr


@pytest.mark.parametrize("argument", ["model", "adapters"])
def test_without_a_network_a_configuration_with_a_hub_id_is_refused(
    argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    swift = {argument: "owner/absent-everywhere"}
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=rf"swift\.{argument} must be on this machine while HF_HUB_OFFLINE"):
        check_hub_ids(swift)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    check_hub_ids(swift)
