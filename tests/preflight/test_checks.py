"""The one list of checks: who has what it needs, the order, and the words that every program uses."""

from __future__ import annotations

import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from swift_stage2.config import Stage2Config
from swift_stage2.config.binding import bind
from swift_stage2.errors import ConfigError, DatasetError, UserError
from swift_stage2.preflight.checks import CHECKS, Found, Known, due_checks, run_checks


def config(**swift: Any) -> Stage2Config:
    data = {"swift": {"model": "org/model", **swift}, "stage2_ab": {"schedule": {"b_ratio": 0}}}
    return bind(Stage2Config, data)


def test_every_need_is_a_field_that_is_asked_for_and_every_name_is_its_own() -> None:
    assert {check.needs for check in CHECKS} == {field.name for field in fields(Known)}
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_only_checks_whose_needs_are_there_are_run() -> None:
    assert list(due_checks(Known())) == []
    assert [check.name for check in due_checks(Known(num_validation_rows=0))] == ["validation set"]
    assert [check.name for check in due_checks(Known(files=True, rows=True))] == [
        "model directory",
        "plugins",
        "data sets",
        "hub ids",
    ]


def test_the_first_error_ends_the_list() -> None:
    wrong = config(model="/nowhere/model", dataset=["/nowhere/rows.jsonl"])
    with pytest.raises(ConfigError, match=r"swift\.model must be a directory"):
        run_checks(wrong, Known(files=True, rows=True))
    with pytest.raises(DatasetError, match=r"swift\.dataset must name files"):
        run_checks(wrong, Known(rows=True))


def served(url: str) -> Stage2Config:
    data = {"stage2_ab": {"schedule": {"b_ratio": 0.5}}, "rollout": {"servers": [{"base_url": url}]}}
    return bind(Stage2Config, data)


def key_of(run: Stage2Config) -> Found | None:
    (check,) = (check for check in CHECKS if check.name == "API key")
    return check.find(run, Known(addresses=True))


def test_a_key_is_said_to_be_set_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    run = served("http://127.0.0.1:8000")
    assert key_of(run) == Found("SWIFT_ROLLOUT_API_KEY is not set: right for servers without a key")
    monkeypatch.setenv("SWIFT_ROLLOUT_API_KEY", "s3cret")
    assert key_of(run) == Found("SWIFT_ROLLOUT_API_KEY is set; it is sent to every server")
    monkeypatch.setenv("SWIFT_ROLLOUT_API_KEY", "with blank")
    with pytest.raises(ConfigError, match=r"; set SWIFT_ROLLOUT_API_KEY to printable ASCII .*") as refused:
        run_checks(run, Known(addresses=True))
    assert "with blank" not in str(refused.value)


def test_no_key_for_a_server_that_others_reach_is_told() -> None:
    told: list[str] = []
    run_checks(served("http://10.0.0.7:8000"), Known(addresses=True), told.append)
    assert "servers[0].base_url listens on 10.0.0.7 without a key: whoever reaches it" in told[0]
    found = key_of(served("http://10.0.0.7:8000"))
    assert found
    assert found.remedy == "start the servers with a key and set SWIFT_ROLLOUT_API_KEY to it"


def test_a_plugin_that_is_not_there_is_told_with_its_key(tmp_path: Path) -> None:
    (check,) = (check for check in CHECKS if check.name == "plugins")
    with pytest.raises(
        ConfigError, match=r"swift\.external_plugins must name Python files, got '.*nowhere\.py'"
    ):
        check.find(config(external_plugins=[str(tmp_path / "nowhere.py")]), Known(files=True))
    assert check.find(config(), Known(files=True)) is None


def test_half_a_rank_environment_is_refused() -> None:
    with pytest.raises(UserError, match="torchrun's variables come together"):
        run_checks(config(), Known(rank_environment={"RANK": "0"}))


@pytest.mark.parametrize(("rank", "num_told"), [("0", 3), ("1", 0)])
def test_the_first_rank_tells_every_fault_of_every_data_set(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    rank: str,
    num_told: int,
) -> None:
    monkeypatch.setenv("RANK", rank)
    (tmp_path / "a.jsonl").write_text("{\n[1]\n")
    (tmp_path / "b.jsonl").write_text("{\n")
    wrong = config(dataset=[str(tmp_path / "a.jsonl")], val_dataset=[str(tmp_path / "b.jsonl")])
    with caplog.at_level(logging.ERROR), pytest.raises(DatasetError, match="2 of 2 rows have faults"):
        run_checks(wrong, Known(rows=True))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == num_told, told
    assert sum(line.startswith("swift.val_dataset: ") for line in told) == num_told // 3


def test_an_earlier_run_is_not_written_over(tmp_path: Path) -> None:
    run = config(output_dir=str(tmp_path), add_version=False)
    run_checks(run, Known(run_directory=True))
    (tmp_path / "checkpoint-7").mkdir()
    with pytest.raises(ConfigError, match="checkpoint-7; go on with that run by --resume"):
        run_checks(run, Known(run_directory=True))


def test_an_accelerator_that_is_not_cuda_is_refused_unless_the_learner_computes_on_the_cpu() -> None:
    with pytest.raises(UserError, match="got npu"):
        run_checks(config(), Known(devices=("npu", 0)))
    run_checks(config(use_cpu=True), Known(devices=("npu", 0)))
