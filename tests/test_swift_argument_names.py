"""Names of ms-swift's arguments, looked at before anything slow is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_stage2.errors import ConfigError
from swift_stage2.swift_argument_names import known_names, main, refuse_unknown


def test_known_names_and_their_beginnings_pass() -> None:
    refuse_unknown(["learning_rate", "learning_r"], {"learning_rate", "model"})


def test_a_misspelt_name_is_told_with_the_right_one() -> None:
    with pytest.raises(ConfigError, match="got 'learning_rat_e'; did you mean 'learning_rate'"):
        refuse_unknown(["model", "learning_rat_e"], {"learning_rate", "model"})
    with pytest.raises(ConfigError, match="got 'zzz'; remove it"):
        refuse_unknown(["zzz"], {"learning_rate"})


def test_ms_swifts_own_names_are_known() -> None:
    names = known_names()
    assert {"model", "dataset", "learning_rate", "tuner_type", "deepspeed", "external_plugins"} <= names


def test_every_example_names_only_what_ms_swift_knows() -> None:
    for file in (Path(__file__).parents[1] / "configs").glob("*.yaml"):
        assert main(str(file)) == 0


def test_the_program_says_it_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("swift: {learnin_rate: 1}\nstage2_ab: {schedule: {b_ratio: 0}}\n")
    assert main(str(file)) == 2
    out = capsys.readouterr().out
    assert "did you mean 'learning_rate'?" in out
    assert out.count("\n") == 1
