"""What ms-swift refuses is told in one line that names the argument."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_model import STAGE1

from swift_stage2.demo import tiny_template
from swift_stage2.errors import ConfigError
from swift_stage2.preflight import swift_parsing

PLUGIN = Path(tiny_template.__file__)


def refusal(capfd: pytest.CaptureFixture[str], output_dir: Path, *arguments: str) -> str:
    given = f"--model {STAGE1} --model_type stage2_tiny_vl --template stage2_tiny_vl --use_cpu true".split()
    with pytest.raises(ConfigError) as refused:
        swift_parsing.parse_swift_arguments([*given, "--output_dir", str(output_dir), *arguments])
    assert "usage:" not in capfd.readouterr().err
    message = str(refused.value)
    assert "\n" not in message
    return message


def test_a_value_of_the_wrong_type_is_named_without_the_usage(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    message = refusal(capfd, tmp_path, "--learning_rate", "much")
    assert message.startswith("ms-swift refuses section swift: argument --learning_rate")
    assert "invalid float value: 'much'" in message


def test_what_ms_swift_checks_after_parsing_is_told_in_its_words(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "Please input the training dataset" in refusal(capfd, tmp_path)


def test_words_that_belong_to_no_argument_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    given = ["--dataset", str(rows), "--add_version", "false"]
    message = refusal(capfd, tmp_path, *given, "--learnin_rate", "1")
    assert message.endswith("section swift, got 'learnin_rate'; did you mean 'learning_rate'?")
    assert "got 'no_such_thing'; remove it" in refusal(capfd, tmp_path, *given, "--no_such_thing=1")


def test_a_backend_for_ranks_needs_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("Default process group has not been initialized")

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("swift_stage2.preflight.swift_parsing.parse_args", refuse)
    assert "start it with torchrun" in refusal(capfd, tmp_path)
