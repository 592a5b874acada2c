"""The one list of checks: who has what it needs, the order, and the words that every program uses."""

from __future__ import annotations

import importlib.util
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from builders import config_of, servers_at

from swift_stage2.checks.checks import (
    CHECKS,
    DOES_NOT_APPLY,
    CheckResult,
    Known,
    Verdict,
    due_checks,
    ok,
    run_checks,
)
from swift_stage2.config import Stage2Config
from swift_stage2.errors import ConfigError, DatasetError


def config(**swift: Any) -> Stage2Config:
    """A run without channel B."""
    return config_of({"stage2_ab.schedule.b_ratio": 0, "swift": {"model": "org/model", **swift}})


def found_by(name: str, run: Stage2Config, known: Known) -> CheckResult[None]:
    """What one check of the list finds."""
    (check,) = (check for check in CHECKS if check.name == name)
    return check.find(run, known)


FILES = Known(files=True)


def test_every_need_is_a_field_that_is_asked_for_and_every_name_is_its_own() -> None:
    assert {check.needs for check in CHECKS} == {field.name for field in fields(Known)}
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_only_checks_whose_needs_are_there_are_run() -> None:
    assert list(due_checks(Known())) == []
    assert [check.name for check in due_checks(Known(num_validation_rows=0))] == ["validation set"]
    assert [check.name for check in due_checks(Known(files=True, rows=True))] == [
        "model directory",
        "DeepSpeed",
        "resume",
        "plugins",
        "disk directory",
        "data sets",
    ]


def test_the_first_error_ends_the_list() -> None:
    wrong = config(model="/nowhere/model", dataset=["/nowhere/rows.jsonl"])
    with pytest.raises(ConfigError, match=r"swift\.model must be a directory"):
        run_checks(wrong, Known(files=True, rows=True))
    with pytest.raises(DatasetError, match=r"swift\.dataset must name files"):
        run_checks(wrong, Known(rows=True))


def served(url: str) -> Stage2Config:
    return config_of(servers_at(url))


def key_of(run: Stage2Config) -> CheckResult[None]:
    return found_by("API key", run, Known(addresses=True))


def test_a_key_is_said_to_be_set_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    run = served("http://127.0.0.1:8000")
    assert key_of(run) == ok("SWIFT_ROLLOUT_API_KEY is not set: right for servers without a key")
    monkeypatch.setenv("SWIFT_ROLLOUT_API_KEY", "s3cret")
    assert key_of(run) == ok("SWIFT_ROLLOUT_API_KEY is set; it is sent to every server")
    monkeypatch.setenv("SWIFT_ROLLOUT_API_KEY", "with blank")
    with pytest.raises(ConfigError, match=r"; set SWIFT_ROLLOUT_API_KEY to printable ASCII .*") as refused:
        run_checks(run, Known(addresses=True))
    assert "with blank" not in str(refused.value)


def test_deepspeed_that_is_configured_and_not_installed_is_told_before_anything_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed: dict[str, object] = {}
    monkeypatch.setattr(importlib.util, "find_spec", installed.get)
    with pytest.raises(ConfigError, match=r"got deepspeed='zero3' and no such package; install the extra .*"):
        found_by("DeepSpeed", config(deepspeed="zero3"), FILES)
    assert found_by("DeepSpeed", config(), FILES) == DOES_NOT_APPLY
    installed["deepspeed"] = object()
    assert found_by("DeepSpeed", config(deepspeed="zero3"), FILES) == ok("DeepSpeed is installed")


@pytest.mark.parametrize(
    ("swift", "is_told"),
    [
        ({"fsdp": "fsdp2"}, True),  # LoRA is ms-swift's default
        ({"fsdp": "fsdp2", "tuner_type": "lora", "save_strategy": "steps"}, True),
        ({"fsdp": "fsdp2", "save_strategy": "no"}, False),
        ({"fsdp": "fsdp2", "tuner_type": "full"}, False),
        ({"tuner_type": "lora"}, False),
    ],
)
def test_checkpoints_that_cannot_be_resumed_are_warned_of(swift: dict[str, Any], is_told: bool) -> None:
    found = found_by("resume", config(**swift), FILES)
    assert (found.verdict is Verdict.WARNING) == is_told
    assert found == DOES_NOT_APPLY or "LoRA under FSDP2 cannot be resumed" in found.found


def test_a_plugin_that_is_not_there_is_told_with_its_key(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"swift\.external_plugins must name Python files, got '.*nowhere\.py'"
    ):
        found_by("plugins", config(external_plugins=[str(tmp_path / "nowhere.py")]), FILES)
    assert found_by("plugins", config(), FILES) == DOES_NOT_APPLY


def test_a_disk_directory_that_the_learner_cannot_write_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(directory: Path) -> CheckResult[None]:
        sync = {"transport": "disk", "disk_directory": str(directory)}
        return found_by("disk directory", config_of({"rollout.sync": sync}), FILES)

    assert find(tmp_path) == ok(f"weights travel by {tmp_path}, which can be written")
    with pytest.raises(
        ConfigError, match="disk_directory must be a directory that the learner's user can write"
    ):
        find(tmp_path / "none")
    monkeypatch.setenv("RANK", "1")
    assert find(tmp_path / "none") == DOES_NOT_APPLY, "rank 0 alone writes"
    assert found_by("disk directory", config(), FILES) == DOES_NOT_APPLY
