"""What a report tells of detection over steps, and of label errors that it suspects."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from evaluated_run import Scene, evaluated_run, grid_scene, write_file
from run_files import RunFiles

from swift_stage2.cli import main
from swift_stage2.data.recorded import evaluations_directory

NUM_ROWS = 12
TRUTH = grid_scene(NUM_ROWS)
ADDED = ("car", (70, 70, 100, 100))
"""Where nothing true is."""


def without(scene: Scene, *rows: int) -> Scene:
    """The last object of these rows is not found."""
    return {row: objects[:-1] if row in rows else objects for row, objects in scene.items()}


class Told:
    """The command's JSON."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def rows(self, run_dir: Path, section: str) -> list[list[str]]:
        """Of the section's one table."""
        assert main(["report", "--json", str(run_dir)]) == 0
        parts = json.loads(self._capsys.readouterr().out)["sections"][section]
        return [row for part in parts for row in part.get("rows", ())]

    def suspects(self, run_dir: Path) -> list[tuple[str, str, str]]:
        """(what, row, label) in their order."""
        return [(what, row, label) for row, label, what, *_ in self.rows(run_dir, "suspects")]


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    return Told(capsys)


def test_precision_and_recall_over_steps_are_those_of_hand_counts(tmp_path: Path, told: Told) -> None:
    missing = [(0, 1, 2, 3, 4, 5), (0, 1), ()]
    evaluated_run(tmp_path, TRUTH, [without(TRUTH, *rows) for rows in missing])
    num_true = sum(map(len, TRUTH.values()))
    kept = [num_true - len(rows) for rows in missing]
    assert [row[:2] + row[4:] for row in told.rows(tmp_path, "detection")] == [
        [str(step), str(NUM_ROWS), f"{2 * each / (each + num_true):.3f}"]
        for step, each in zip((8, 16, 24), kept, strict=True)
    ]


def test_scores_are_told_of_evaluations_that_have_them(
    tmp_path: Path, told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {row: [ADDED, *objects] for row, objects in TRUTH.items()}
    evaluated_run(tmp_path, TRUTH, [said, said])
    file = max(evaluations_directory(tmp_path).iterdir())
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    scored = ({**line, "scores": [0.2] + [1.0] * (len(line["objects"]["ref"]) - 1)} for line in lines)
    file.write_text("".join(json.dumps(line) + "\n" for line in scored))
    old, new = told.rows(tmp_path, "detection")
    error = f"{0.2 * 12 / sum(map(len, said.values())):.3f}"
    assert (old[3] != "1.000", old[5:], new[3:4] + new[5:]) == (True, ["–", "–"], ["1.000", old[3], error])
    assert main(["report", "--json", str(tmp_path)]) == 0
    assert f"Scores help: AP is 1.000 with and {old[3]} without them." in capsys.readouterr().out


def test_only_evaluations_that_the_log_tells_of_count_and_the_last_of_what_was_asked_anew(
    tmp_path: Path, told: Told
) -> None:
    run = RunFiles(tmp_path).start().train(8)
    for version, said in enumerate((TRUTH, without(TRUTH, 0, 1), TRUTH)):
        run.version = version
        write_file(run, TRUTH, said)
        if version < 2:
            run.evaluate()
    run.end()
    (row,) = told.rows(tmp_path, "detection")
    assert (row[0], row[-1]) == ("8", f"{16 * 2 / (16 + 18):.3f}")


def test_an_answer_that_was_cut_off_says_nothing_of_what_it_lacks(tmp_path: Path, told: Told) -> None:
    truth = {**TRUTH, 3: [*TRUTH[3], ("car", (10, 70, 40, 100))]}
    evaluated_run(tmp_path, truth, [without(TRUTH, 0), TRUTH, TRUTH])
    assert told.suspects(tmp_path) == [("truth never found", "3", "car")]
    for file in evaluations_directory(tmp_path).iterdir():
        lines = file.read_text().splitlines(keepends=True)
        file.write_text(
            "".join(line.replace('"stop"', '"length"' if '"row": 3,' in line else '"stop"') for line in lines)
        )
    assert told.suspects(tmp_path) == []


def test_a_planted_label_error_is_found_and_the_surest_comes_first(tmp_path: Path, told: Told) -> None:
    truth = {**TRUTH, 3: [*TRUTH[3], ("car", (10, 70, 40, 100))]}  # nothing is there
    said = {**TRUTH, 6: [*TRUTH[6], ADDED]}  # row 6 lacks a label
    evaluated_run(tmp_path, truth, [without(said, 0), without(said, 1), without(said, 2)])
    assert sorted(told.suspects(tmp_path)) == [
        ("false in all versions", "6", "car"),
        ("truth never found", "3", "car"),
    ]
    found = told.rows(tmp_path, "suspects")
    assert [row[4] for row in found] == sorted((row[4] for row in found), reverse=True)
    assert {(row[3], row[5]) for row in found} == {
        ("10, 70, 40, 100", "/absent/3.png"),
        ("70, 70, 100, 100", "/absent/6.png"),
    }


def test_another_label_in_all_versions_is_told_beside_the_truth(tmp_path: Path, told: Told) -> None:
    truth = {**TRUTH, 4: [("dog", TRUTH[4][0][1])]}
    said = {**TRUTH, 4: [("car", TRUTH[4][0][1])]}
    evaluated_run(tmp_path, truth, [said] * 3)
    assert told.suspects(tmp_path) == [("truth never found, they say 'car'", "4", "dog")]


@pytest.mark.parametrize(
    "answers",
    [
        [TRUTH] * 4,
        [without(TRUTH, 0)] * 2,  # too few versions
        [without(TRUTH, 0), without(TRUTH, 1), without(TRUTH, 2)],  # each is found by another
        [{**TRUTH, 6: [*TRUTH[6], ADDED]}] * 2 + [TRUTH],  # the last version does not say so
        [{**TRUTH, 6: [*TRUTH[6], ("car", (70 - 20 * n, 70, 100 - 20 * n, 100))]} for n in range(3)],
    ],
)
def test_a_healthy_set_has_no_suspect(tmp_path: Path, told: Told, answers: Sequence[Scene]) -> None:
    evaluated_run(tmp_path, TRUTH, answers)
    assert told.suspects(tmp_path) == []


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def _odd(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    broken = [lines[0].replace("112", "0"), lines[1].replace("10", "1e999"), "[" * 9000 + "\n"]
    path.write_text("".join([*broken, *lines[3:]]))


@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        _cut,
        _odd,
        lambda path: path.write_bytes(b"\0" * 99),
    ],
)
def test_damaged_rows_end_in_no_traceback(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    evaluated_run(tmp_path, TRUTH, [without(TRUTH, 0), TRUTH, TRUTH])
    for path in evaluations_directory(tmp_path).iterdir():
        damage(path)
    assert main(["report", str(tmp_path)]) == 0
