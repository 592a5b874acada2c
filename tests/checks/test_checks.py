"""The one list of checks: who has what it needs, the order; and the doctor's rows, with what rests on what."""

from __future__ import annotations

import importlib.util
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from builders import config_of, servers_at

from swift_stage2.checks import checks
from swift_stage2.checks.checks import (
    CHECKS,
    CheckResult,
    CheckStage,
    Verdict,
    due_checks,
    failed,
    left_out,
    ok,
    run_checks,
    warning,
)
from swift_stage2.checks.doctor import CheckRun
from swift_stage2.config import Stage2Config
from swift_stage2.errors import ConfigError, DatasetError, ServerFault


def config(**swift: Any) -> Stage2Config:
    """A run without channel B."""
    return config_of({"stage2_ab.schedule.b_ratio": 0, "swift": {"model": "org/model", **swift}})


def found_by(name: str, run: Stage2Config, known: CheckStage) -> CheckResult[None] | None:
    """What one check of the list finds."""
    (check,) = (check for check in CHECKS if check.name == name)
    return check.find(run, known)


FILES = CheckStage(files=True)


def test_every_need_is_a_field_that_is_asked_for_and_every_name_is_its_own() -> None:
    assert {check.needs for check in CHECKS} == {field.name for field in fields(CheckStage)}
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_only_checks_whose_needs_are_there_are_run() -> None:
    assert list(due_checks(CheckStage())) == []
    assert [check.name for check in due_checks(CheckStage(num_validation_rows=0))] == ["validation set"]
    assert [check.name for check in due_checks(CheckStage(files=True, rows=True))] == [
        "model directory",
        "packages",
        "resume",
        "plugins",
        "disk directory",
        "data sets",
    ]


def test_the_first_error_ends_the_list() -> None:
    wrong = config(model="/nowhere/model", dataset=["/nowhere/rows.jsonl"])
    with pytest.raises(ConfigError, match=r"swift\.model must be a directory"):
        run_checks(wrong, CheckStage(files=True, rows=True))
    with pytest.raises(DatasetError, match=r"swift\.dataset must name files"):
        run_checks(wrong, CheckStage(rows=True))


def key_of(url: str) -> CheckResult[None] | None:
    return found_by("API key", config_of(servers_at(url)), CheckStage(addresses=True))


def test_a_key_is_said_to_be_set_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "http://127.0.0.1:8000"
    assert key_of(url) == ok("SWIFT_ROLLOUT_API_KEY is not set: right for servers without a key")
    monkeypatch.setenv("SWIFT_ROLLOUT_API_KEY", "s3cret")
    assert key_of(url) == ok("SWIFT_ROLLOUT_API_KEY is set; it is sent to every server")
    monkeypatch.setenv("SWIFT_ROLLOUT_API_KEY", "with blank")
    with pytest.raises(ConfigError, match=r"; set SWIFT_ROLLOUT_API_KEY to printable ASCII .*") as refused:
        key_of(url)
    assert "with blank" not in str(refused.value)


def test_a_package_that_a_setting_needs_and_that_is_not_installed_is_told_before_anything_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed: dict[str, object] = {}
    monkeypatch.setattr(importlib.util, "find_spec", installed.get)
    with pytest.raises(ConfigError, match=r"got deepspeed='zero3' and no such package; install the extra .*"):
        found_by("packages", config(deepspeed="zero3"), FILES)
    found_by("packages", config(), FILES)
    with pytest.raises(ConfigError, match=r"got attn_impl='flash_attn' and no such package"):
        found_by("packages", config(attn_impl="flash_attn"), FILES)
    installed |= {"deepspeed": object(), "kernels": object()}
    found_by("packages", config(deepspeed="zero3"), FILES)
    found_by("packages", config(attn_impl="flash_attn"), FILES)


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
def test_checkpoints_that_cannot_be_resumed_are_warned_of(
    swift: dict[str, Any], is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(checks, "CHECKS", [check for check in CHECKS if check.name == "resume"])
    run_checks(config(**swift), FILES, told.append)
    assert bool(told) == is_told
    assert all("LoRA under FSDP2 cannot be resumed" in line for line in told)


def test_a_plugin_or_a_disk_directory_that_is_not_there_is_told_with_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(directory: Path) -> None:
        sync = {"transport": "disk", "disk_directory": str(directory)}
        found_by("disk directory", config_of({"rollout.sync": sync}), FILES)

    with pytest.raises(ConfigError, match=r"swift\.external_plugins must name Python files, got '.*/none'"):
        found_by("plugins", config(external_plugins=[str(tmp_path / "none")]), FILES)
    find(tmp_path)
    with pytest.raises(ConfigError, match="disk_directory must be a directory that the learner's user can"):
        find(tmp_path / "none")
    monkeypatch.setenv("RANK", "1")
    find(tmp_path / "none")  # rank 0 alone writes


# --- rows of the doctor --------------------------------------------------------------------------------


def raising(error: Exception) -> Any:
    def work() -> CheckResult[None]:
        raise error

    return work


def never() -> CheckResult[None]:
    raise AssertionError("this check must not run")


@pytest.mark.parametrize("is_failed", [True, False])
def test_what_rests_on_a_check_that_did_not_pass_is_not_run_and_names_the_first_cause(
    is_failed: bool,
) -> None:
    check_run = CheckRun()
    first = check_run.check(
        "first", lambda: failed("broken", "mend it") if is_failed else left_out("no wish")
    )
    second = check_run.check("second", never, needs=[first])
    third = check_run.check("third", never, needs=[second])
    assert second.verdict is third.verdict is Verdict.NOT_CHECKED
    assert second.found == third.found == ("since first failed" if is_failed else "no wish")
    assert second.counts_as_failed is third.counts_as_failed is is_failed
    assert check_run.num_failed == is_failed


def test_a_warning_lets_the_next_check_run_on_its_value() -> None:
    check_run = CheckRun()
    first = check_run.check("first", lambda: warning("odd", "change it", 3))
    assert check_run.check("second", lambda: ok(str(first.result + 1)), needs=[first]).found == "4"


@pytest.mark.parametrize(
    ("error", "found", "fix"),
    [
        (
            ConfigError("a must be b", got="a=1", remedy="write a: b; or c"),
            "a must be b, got a=1",
            "write a: b; or c",
        ),
        (ConfigError("a must be b"), "a must be b", "the usual"),
        (ServerFault("status 500: x; y"), "status 500: x; y", "the usual"),
        (RuntimeError("two\nlines of s3cret"), "RuntimeError: two lines of ***", "the usual"),
    ],
)
def test_an_error_becomes_a_failed_row_of_one_line_with_its_remedy_and_without_secrets(
    error: Exception, found: str, fix: str
) -> None:
    row = CheckRun(secrets=("s3cret", "")).check("x", raising(error), fix="the usual")
    assert (row.verdict, row.found, row.fix) == (Verdict.FAILED, found, fix)


def test_checks_with_nothing_to_say_have_no_row() -> None:
    check_run = CheckRun()
    shown = check_run.show(config_of(servers_at("http://127.0.0.1:1")), CheckStage(addresses=True))
    assert [(row.check, row.verdict) for row in check_run.findings] == [("API key", Verdict.OK)]
    assert shown["addresses of hosts"].passed
