"""What a report tells of detection: curves, failures, suspected label errors; and of two runs compared."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from evaluated_run import Scene, evaluated_run, grid_scene
from run_files import CONFIG, RunFiles, balanced_ledger

from swift_stage2.cli import main
from swift_stage2.detections.recorded import evaluations_directory
from swift_stage2.telemetry.ledger import matches_path

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
    chart = next(each for each in parts(found, "detection", "series") if each["key"] == "detection")
    f1 = next(each for each in chart["series"] if each["name"] == "F1")
    num_true = sum(map(len, TRUTH.values()))
    kept = [num_true - len(rows) for rows in missing]
    assert f1["x"] == [8, 16, 24]
    assert f1["y"] == pytest.approx([2 * each / (each + num_true) for each in kept])
    assert all(low <= value <= high for low, value, high in zip(f1["low"], f1["y"], f1["high"], strict=True))
    assert f1["low"][0] < f1["y"][0] < f1["high"][0]
    errors = next(each for each in parts(found, "detection", "series") if each["key"] == "error_types")
    missed = next(each for each in errors["series"] if each["name"] == "Miss")
    assert missed["y"] == pytest.approx([100 * len(rows) / NUM_ROWS for rows in missing])


def test_files_of_evaluations_tell_what_matches_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    truth = {**TRUTH, 3: [*TRUTH[3], ("car", (10, 70, 40, 100))]}
    found = []
    for name in ("matches", "files"):
        evaluated_run(tmp_path / name, truth, [without(TRUTH, 0), TRUTH, TRUTH], in_files=name == "files")
        found.append(told(capsys, tmp_path / name)["sections"])
    for key in ("detection", "suspects"):
        assert found[0][key] == found[1][key]
    assert suspects(tmp_path / "files") == suspects(tmp_path / "matches") == [("truth never found", 3, "car")]
    for file in evaluations_directory(tmp_path / "files").iterdir():
        lines = file.read_text().splitlines(keepends=True)
        file.write_text(
            "".join(line.replace('"stop"', '"length"' if '"row": 3,' in line else '"stop"') for line in lines)
        )
    assert suspects(tmp_path / "files") == [], "an answer that was cut off says nothing of what it lacks"


def test_classes_and_numbers_of_objects_that_fail_most_come_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = {row: [each for each in objects if each[0] != "dog"] for row, objects in TRUTH.items()}
    last[1] = [*last[1], ADDED]
    evaluated_run(tmp_path, TRUTH, [TRUTH, TRUTH, last])
    by_class, by_number = [
        each for each in parts(told(capsys, tmp_path), "detection", "rows") if "fail most" in each["title"]
    ]
    num_dogs, num_cars = (
        sum(label == name for objects in TRUTH.values() for label, _ in objects) for name in ("dog", "car")
    )
    assert [row[:5] for row in by_class["rows"]] == [
        ["dog", str(num_dogs), "0", str(num_dogs), "0"],
        ["car", str(num_cars), str(num_cars), "0", "1"],
    ]
    wrong = {name: int(missed) + int(false) for name, _, _, missed, false, _ in by_number["rows"]}
    assert list(wrong.values()) == sorted(wrong.values(), reverse=True)
    assert sum(wrong.values()) == num_dogs + 1


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


FIRST = [without(TRUTH, 0, 1, 2, 3), without(TRUTH, 0, 1, 2)]
SECOND = [without(TRUTH, 4), without(TRUTH, 3)]


@pytest.fixture
def two_runs(tmp_path: Path) -> tuple[Path, Path]:
    return (
        evaluated_run(tmp_path / "a", TRUTH, FIRST, losses=[2.0, 1.5]),
        evaluated_run(tmp_path / "b", TRUTH, SECOND, b_ratio=0.3, objective="grpo", losses=[2.0, 1.0]),
    )


def test_settings_that_differ_behind_what_a_cell_shows_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [tmp_path / "a", tmp_path / "b"]
    for run_dir in runs:
        balanced_ledger(run_dir, num_samples=4).ledger.close()
        swift = {"system": f"{'x' * 200} {run_dir.name}"}
        RunFiles(run_dir, config={**CONFIG, "swift": swift}).start().train(8).end()
    assert "swift.system" in json.dumps(told(capsys, *runs))


def test_two_runs_are_compared_on_one_page_and_as_a_table(
    two_runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", *map(str, two_runs)]) == 0
    text = capsys.readouterr().out
    cells = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    assert ["stage2_ab.schedule.b_ratio", "0.5", "0.3"] in cells
    assert ["B steps run of wanted", "8 of 8 (100%)", "8 of 8 (100%)"] in cells
    assert f"page: {two_runs[1] / 'comparison.html'}" in text.replace("\n", "")
    assert "Their objectives differ (corrected_target and grpo)" in text
    page = (two_runs[1] / "comparison.html").read_text()
    assert all(str(each) in page for each in two_runs)
    assert not (two_runs[1] / "report.html").exists()
    found = told(capsys, *two_runs)
    (losses,) = parts(found, "loss", "series")
    assert [(each["name"], each["x"], each["y"]) for each in losses["series"]] == [
        ("a", [8, 16], [2.0, 1.5]),
        ("b", [8, 16], [2.0, 1.0]),
    ]


@pytest.mark.slow
def test_the_paired_interval_is_that_of_evaluate_compare(
    two_runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"role": "user", "content": "<image>find"}
    (tmp_path / "rows.jsonl").write_text(
        "".join(
            json.dumps(
                {
                    "messages": [row, {"role": "assistant", "content": "[]"}],
                    "images": [f"/absent/{number}.png"],
                    "objects": {"ref": [name for name, _ in objects], "bbox": [box for _, box in objects]},
                }
            )
            + "\n"
            for number, objects in TRUTH.items()
        )
    )
    for name, scene in (("a", FIRST[-1]), ("b", SECOND[-1])):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(
                json.dumps(
                    {
                        "image": f"/absent/{number}.png",
                        "width": 112,
                        "height": 112,
                        "objects": {
                            "ref": [each for each, _ in objects],
                            "bbox": [box for _, box in objects],
                        },
                    }
                )
                + "\n"
                for number, objects in scene.items()
            )
        )
    files = [str(tmp_path / name) for name in ("rows.jsonl", "a.jsonl", "b.jsonl")]
    assert main(["evaluate", "--json", "--data", files[0], "--compare", *files[1:]]) == 0
    expected = json.loads(capsys.readouterr().out)["metrics"]
    (table,) = parts(told(capsys, *two_runs), "comparison", "rows")
    cells = {name: values for name, *values in table["rows"]}
    for name in ("eval/f1", "eval/recall"):
        each = expected[name]
        assert cells[name][:4] == [
            f"{each['a']:.3f}",
            f"{each['b']:.3f}",
            f"{each['difference']:+.3f}",
            f"{each['low']:+.3f} … {each['high']:+.3f}",
        ]


def test_pictures_are_of_the_rows_that_the_two_answer_differently(two_runs: tuple[Path, Path]) -> None:
    assert main(["report", *map(str, two_runs)]) == 0
    page = (two_runs[1] / "comparison.html").read_text()
    data = page.split('id="galleries-data">')[1].split("</script>")[0]
    pictures = json.loads(data)["gallery"]["pictures"]
    # Rows 0 and 2 have one object, found by the second alone; row 1 and 3 two, of which one is missed.
    assert [each["name"] for each in pictures] == ["0.png", "2.png", "1.png", "3.png"]
    assert [each["outcomes"] for each in pictures] == [["b is better"]] * 3 + [["a is better"]]


def test_other_validation_rows_are_told_and_the_common_ones_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = {
        row: ([("bird", box) for _, box in objects] if row < 5 else objects) for row, objects in TRUTH.items()
    }
    evaluated_run(tmp_path / "a", TRUTH, [TRUTH])
    evaluated_run(tmp_path / "b", others, [others])
    found = told(capsys, tmp_path / "a", tmp_path / "b")
    (line, *_) = parts(found, "evaluations", "text")
    assert f"{NUM_ROWS} and {NUM_ROWS} at step 8, of which {NUM_ROWS - 5} are the same" in line["text"]
    (table,) = parts(found, "evaluations", "rows")
    assert [row[:2] for row in table["rows"]] == [["8", str(NUM_ROWS - 5)]]


def test_a_run_without_evaluations_is_compared_in_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluated_run(tmp_path / "a", TRUTH, [TRUTH])
    balanced_ledger(tmp_path / "b", num_samples=4).ledger.close()
    RunFiles(tmp_path / "b").start().train(8).end()
    found = told(capsys, tmp_path / "a", tmp_path / "b")
    (line,) = parts(found, "evaluations", "text")
    assert line["text"] == "b left no evaluation whose answers were kept."


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def _odd(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    broken = [lines[0].replace("[112,112]", "[0,112]"), lines[1].replace("10", "1e999"), "[" * 9000 + "\n"]
    path.write_text("".join([*broken, *lines[3:]]))


@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        pytest.param(_cut, marks=pytest.mark.slow),
        _odd,
        lambda path: path.write_bytes(b"\0" * 99),
    ],
)
def test_damaged_matches_end_in_no_traceback(
    two_runs: tuple[Path, Path], damage: Callable[[Path], object], capsys: pytest.CaptureFixture[str]
) -> None:
    damage(matches_path(two_runs[0], 0))
    in_files = evaluated_run(two_runs[0].parent / "c", TRUTH, FIRST, in_files=True)
    for path in (in_files / "evaluations").iterdir():
        damage(path)
    for given in (two_runs, two_runs[:1], [in_files]):
        assert main(["report", *map(str, given)]) == 0
    assert "Evaluations at equal steps" in capsys.readouterr().out


def test_an_absent_run_is_one_line(two_runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(two_runs[1])
    assert main(["report", *map(str, two_runs)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
