"""What a report tells of detection over steps, and of label errors that it suspects."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from evaluated_run import Scene, evaluated_run, grid_scene

from swift_stage2.cli import main
from swift_stage2.data.recorded import evaluations_directory

NUM_ROWS = 12
TRUTH = grid_scene(NUM_ROWS)
ADDED = ("car", (70, 70, 100, 100))
"""Where nothing true is."""


def without(scene: Scene, *rows: int) -> Scene:
    """The last object of these rows is not found."""
    return {row: objects[:-1] if row in rows else objects for row, objects in scene.items()}


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """The command's JSON."""
    assert main(["report", "--json", *map(str, arguments)]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def parts(found: dict[str, Any], key: str, name: str) -> list[dict[str, Any]]:
    """The parts of one section that have a field of this name."""
    return [part for part in found["sections"][key] if name in part]


def suspects(run_dir: Path) -> list[tuple[str, int, str]]:
    """(kind, row, label) of the file beside the page, in its order."""
    assert main(["report", str(run_dir)]) == 0
    lines = (run_dir / "label_suspects.jsonl").read_text().splitlines()
    return [(each["kind"], each["row"], each["label"]) for each in map(json.loads, lines)]


def test_precision_and_recall_over_steps_are_those_of_hand_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = [(0, 1, 2, 3, 4, 5), (0, 1), ()]
    evaluated_run(tmp_path, TRUTH, [without(TRUTH, *rows) for rows in missing])
    found = told(capsys, tmp_path)
    num_true = sum(map(len, TRUTH.values()))
    kept = [num_true - len(rows) for rows in missing]
    (table,) = parts(found, "detection", "rows")
    assert [row[:2] + row[4:] for row in table["rows"]] == [
        [str(step), str(NUM_ROWS), f"{2 * each / (each + num_true):.3f}"]
        for step, each in zip((8, 16, 24), kept, strict=True)
    ]


def test_an_answer_that_was_cut_off_says_nothing_of_what_it_lacks(tmp_path: Path) -> None:
    truth = {**TRUTH, 3: [*TRUTH[3], ("car", (10, 70, 40, 100))]}
    evaluated_run(tmp_path, truth, [without(TRUTH, 0), TRUTH, TRUTH])
    assert suspects(tmp_path) == [("truth never found", 3, "car")]
    for file in evaluations_directory(tmp_path).iterdir():
        lines = file.read_text().splitlines(keepends=True)
        file.write_text(
            "".join(line.replace('"stop"', '"length"' if '"row": 3,' in line else '"stop"') for line in lines)
        )
    assert suspects(tmp_path) == []


def test_a_planted_label_error_is_found_and_the_surest_comes_first(tmp_path: Path) -> None:
    truth = {**TRUTH, 3: [*TRUTH[3], ("car", (10, 70, 40, 100))]}  # nothing is there
    said = {**TRUTH, 6: [*TRUTH[6], ADDED]}  # row 6 lacks a label
    evaluated_run(tmp_path, truth, [without(said, 0), without(said, 1), without(said, 2)])
    assert sorted(suspects(tmp_path)) == [
        ("false in all versions", 6, "car"),
        ("truth never found", 3, "car"),
    ]
    found = [json.loads(line) for line in (tmp_path / "label_suspects.jsonl").read_text().splitlines()]
    assert [each["strength"] for each in found] == sorted((each["strength"] for each in found), reverse=True)
    assert {tuple(each["box"]) for each in found} == {(10, 70, 40, 100), ADDED[1]}
    assert "3.png" in (tmp_path / "report.html").read_text()


def test_another_label_in_all_versions_is_told_beside_the_truth(tmp_path: Path) -> None:
    truth = {**TRUTH, 4: [("dog", TRUTH[4][0][1])]}
    said = {**TRUTH, 4: [("car", TRUTH[4][0][1])]}
    evaluated_run(tmp_path, truth, [said] * 3)
    assert suspects(tmp_path) == [("truth never found", 4, "dog")]
    (line,) = (tmp_path / "label_suspects.jsonl").read_text().splitlines()
    assert json.loads(line)["predicted_instead"] == "car"


@pytest.mark.parametrize(
    "answers",
    [
        [TRUTH] * 4,
        [without(TRUTH, 0), without(TRUTH, 1), without(TRUTH, 2)],  # each is found by another
        [{**TRUTH, 6: [*TRUTH[6], ADDED]}] * 2 + [TRUTH],  # the last version does not say so
        [{**TRUTH, 6: [*TRUTH[6], ("car", (70 - 20 * n, 70, 100 - 20 * n, 100))]} for n in range(3)],
    ],
)
def test_a_healthy_set_has_no_suspect(tmp_path: Path, answers: Sequence[Scene]) -> None:
    evaluated_run(tmp_path, TRUTH, answers)
    assert suspects(tmp_path) == []


def test_two_versions_suspect_nothing_and_write_no_file(tmp_path: Path) -> None:
    evaluated_run(tmp_path, TRUTH, [without(TRUTH, 0)] * 2)
    assert main(["report", str(tmp_path)]) == 0
    assert not (tmp_path / "label_suspects.jsonl").exists()


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
