"""The table of wrong inputs: every case has a name of its own and spoils something."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from benchmarks.wrong_inputs import cases
from benchmarks.wrong_inputs.case import Setup, SetupMaker
from benchmarks.wrong_inputs.cases import all_cases


def _pictures(setup: Setup) -> list[bytes]:
    return [path.read_bytes() for path in sorted((setup.folder / "images").iterdir())]


def test_every_case_has_a_name_of_its_own_and_can_be_made(tmp_path: Path) -> None:
    maker, names = SetupMaker(tmp_path, 41001, 41002), set()
    untouched = maker.make(tmp_path / "untouched")
    for number, case in enumerate(all_cases()):
        setup = maker.make(tmp_path / str(number))
        case.spoil(setup)
        setup.save()
        names.add((case.area, case.wrong, case.command))
        if case.command in ("launch run.yaml", "data check rows.jsonl"):
            same = (setup.config, setup.rows, _pictures(setup)) == (
                untouched.config,
                untouched.rows,
                _pictures(untouched),
            )
            assert not same or setup.files or setup.environment != untouched.environment, case.wrong
    assert len(names) == number + 1 > 500


def test_a_word_that_is_no_verb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "cases.yaml"
    table.write_text(yaml.safe_dump([{"area": "a", "cases": [{"wrong": "w", "told": "t", "sett": {}}]}]))
    monkeypatch.setattr(cases, "_CASES", table)
    with pytest.raises(ValueError, match="sett"):
        list(all_cases())
