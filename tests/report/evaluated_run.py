"""Runs of which every evaluated answer is known: scenes with true objects, and what each version says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from run_files import RunFiles

from swift_stage2.data.prediction import LabelledBoxes, as_line
from swift_stage2.data.recorded import RecordedRow, evaluation_file, evaluations_directory

Objects = Sequence[tuple[str, Sequence[int]]]
Scene = Mapping[int, Objects]
"""By row of the validation set, its objects: label and box."""


def grid_scene(num_rows: int, num_objects: int = 2) -> dict[int, list[tuple[str, list[int]]]]:
    """Objects that lie apart from each other; rows hold from 1 to ``num_objects`` cars and dogs."""
    return {
        row: [
            (
                "car" if (row + number) % 2 else "dog",
                [10 + 50 * number, 10 + row % 5, 40 + 50 * number, 50 + row % 7],
            )
            for number in range(1 + row % num_objects)
        ]
        for row in range(num_rows)
    }


def evaluated_run(
    run_dir: Path,
    truth: Scene,
    answers: Sequence[Scene],
) -> Path:
    """A whole run that was evaluated every 8 steps, at a version of its own each time."""
    run = RunFiles(run_dir).start()
    for said in answers:
        run.train(8)
        write_file(run, truth, said)
        run.evaluate()
    run.end()
    return run_dir


def write_file(run: RunFiles, truth: Scene, said: Scene) -> None:
    rows = [
        RecordedRow(
            image=f"{row}.png",
            width=112,
            height=112,
            objects=_boxes(said[row]),
            answer=f"row {row}",
            finish_reason="stop",
            row=row,
            file=f"/absent/{row}.png",
            truth=_boxes(truth[row]),
        )
        for row in truth
    ]
    path = evaluation_file(evaluations_directory(run.run_dir), run.step, run.version)
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(as_line(row) + "\n" for row in rows))


def _boxes(objects: Objects) -> LabelledBoxes:
    return LabelledBoxes(tuple(label for label, _ in objects), tuple(tuple(box) for _, box in objects))  # type: ignore[misc]
