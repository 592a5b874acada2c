"""Rows that evaluations during training leave: RUN_DIR/evaluations/step<due step>.v<version>.jsonl, one file each.

A line is one of a file of predictions, with ``row`` (its number in the validation set), ``file`` (the image's absolute
path), ``truth`` in the same pixels, ``failure`` of a row that was given up, and the evaluation's ``due_step``, ``step``
(at which it began) and ``version``. Objects have scores where servers gave log-probabilities for every answer.
Rank 0 writes a file whole, beside training, once all ranks have ended; the event log says which evaluations count.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from swift_stage2.channel_b.dialects import Dialect
from swift_stage2.channel_b.object_scores import DEFAULT_WAY
from swift_stage2.channel_b.parsing import TrueObjects
from swift_stage2.config.swift_arguments import SCORED
from swift_stage2.data.picture import UNREADABLE, images_of, look_at, path_of
from swift_stage2.data.prediction import (
    FAILED,
    TRUNCATED,
    LabelledBoxes,
    Prediction,
    answer_flags,
    as_line,
    as_text,
    in_pixels,
    log_probs_of,
)
from swift_stage2.data.scores import DetectionScores, detection_data
from swift_stage2.records import Rollout, image_paths
from swift_stage2.runtime.background import BackgroundCall
from swift_stage2.scheduling.evaluation_schedule import RunningEvaluation
from swift_stage2.whole_file import regular_lines, write_whole

if TYPE_CHECKING:  # a report must open without torch
    from swift_stage2.channel_b.preprocessing import ScoredRollout

logger = logging.getLogger(__name__)

_END_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRow(Prediction):
    """One line. ``truth`` is None of a task without boxes or points."""

    row: int
    file: str | None = None
    truth: LabelledBoxes | None = None
    failure: str | None = None
    """Why it was given up."""


_FORM = TypeAdapter(RecordedRow)


def recorded_row(
    number: int,
    row: Mapping[str, Any],
    truth: Any,
    answer: tuple[Rollout, ScoredRollout] | None = None,
    failure: str | None = None,
) -> RecordedRow:
    """Row ``number`` of the validation set with its ``truth``, as the task read it; without an ``answer`` why not.

    Looks at the header of the row's first image. A row without an image file has the template's space for its size.
    """
    first = next(iter(images_of(row)), None)
    name, content = path_of(first), first.get("bytes") if isinstance(first, Mapping) else None
    files = image_paths(row)
    judged = answer[1] if answer else None
    space = (judged.space if judged else None) or (1, 1)
    size = space
    with suppress(*UNREADABLE):
        if source := name if isinstance(name, str) else content:
            picture = look_at(source)
            size = picture.width, picture.height
    match = judged.target.match if judged else None
    told = _in_row_pixels(row, truth, size) if isinstance(truth, TrueObjects) else None
    found = in_pixels(match.predicted, space, size) if match else LabelledBoxes()
    true = None
    if told is not None:
        true = LabelledBoxes(told.labels, told.boxes)
    elif match:
        true = in_pixels(match.truth, space, size)
    return RecordedRow(
        image=name if isinstance(name, str) else "",
        width=size[0],
        height=size[1],
        objects=found,
        log_probs=judged.log_probs if judged and match else None,
        answer=as_text(answer[0].text) if answer else None,
        finish_reason=(TRUNCATED if answer[0].truncated else "stop") if answer else FAILED,
        row=number,
        file=files[0] if files else None,
        truth=true,
        failure=failure,
    )


def _in_row_pixels(row: Mapping[str, Any], truth: TrueObjects, size: tuple[int, int]) -> TrueObjects:
    is_share = (row.get("objects") or {}).get("bbox_type") == "norm1"
    factors = size if is_share else (1, 1)
    boxes = (tuple(value * factors[axis % 2] for axis, value in enumerate(box)) for box in truth.boxes)
    return TrueObjects(truth.labels, tuple(boxes))


def with_scores(rows: Sequence[RecordedRow]) -> list[RecordedRow]:
    """The rows with scores of their objects, if log-probabilities give one of each."""
    way = DEFAULT_WAY if log_probs_of(rows) else None
    return [row.scored(way) for row in rows]


def scores_of(rows: Sequence[RecordedRow], dialect: Dialect) -> dict[str, float]:
    """``SCORED`` by name, as `evaluate` computes them; absent where nothing was counted or the task has no boxes."""
    truths = [TrueObjects(row.truth.ref, row.truth.bbox) for row in rows if row.truth is not None]
    places = (place for row in rows for side in (row.objects, row.truth) if side for place in side.bbox)
    if not rows or len(truths) < len(rows) or any(len(place) != 4 for place in places):
        return {}
    found = DetectionScores(detection_data(truths, rows), answer_flags(rows, dialect)).points()
    return {name: found[f"eval/{name}"] for name in SCORED if f"eval/{name}" in found}


@dataclass(frozen=True, slots=True)
class Scored:
    """One evaluation's scores, and what went wrong with its file or with them, if anything did."""

    evaluation: RunningEvaluation
    scores: Mapping[str, float]
    fault: str = ""


class EvaluationKeeper:
    """Rank 0's: writes what evaluations left and scores it, each on a thread of its own. The main thread's."""

    def __init__(self, directory: Path | None, dialect: Dialect) -> None:
        """``directory`` None writes nothing."""
        self._directory = directory
        self._dialect = dialect
        self._calls: list[tuple[RunningEvaluation, BackgroundCall[Scored]]] = []

    def take(self, evaluation: RunningEvaluation, parts: Sequence[str]) -> None:
        """Begins with one that has ended; ``parts`` are the ranks' lines, without an evaluation."""
        call = BackgroundCall(lambda: self._keep(evaluation, parts), "evaluation-scores")
        self._calls.append((evaluation, call))

    def finished(self, timeout_s: float = 0.0) -> Iterator[Scored]:
        """Those that are done within ``timeout_s``, each once."""
        end = time.monotonic() + timeout_s
        for each in list(self._calls):
            if not each[1].ended_within(max(0.0, end - time.monotonic())):
                continue
            self._calls.remove(each)
            yield each[1].result_within(0.0)

    def close(self) -> Iterator[Scored]:
        """The last ones. What has not ended in time is left to the process's end: files are whole or not there."""
        yield from self.finished(_END_S)
        late, self._calls = self._calls, []
        for evaluation, _ in late:
            yield Scored(evaluation, {}, f"scores were not ready {_END_S:g} s after the end of training")

    def _keep(self, evaluation: RunningEvaluation, parts: Sequence[str]) -> Scored:
        scores: Mapping[str, float] = {}
        faults: list[str] = []
        try:
            lines = (line for part in parts for line in part.splitlines())
            rows = sorted((_FORM.validate_json(line) for line in lines), key=lambda row: row.row)
            rows = with_scores(rows)
            lacking = sum(bool(row.objects.bbox) and row.log_probs is None for row in rows)
            if lacking and any(row.log_probs for row in rows):
                faults.append(f"{lacking} answers have no log-probabilities, so objects have no scores")
            try:
                self._write(evaluation, rows)
            except OSError as error:
                faults.append(str(error))
            scores = scores_of(rows, self._dialect)
        except Exception as error:  # top of a thread: told as a warning, for training needs none of this
            logger.debug("an evaluation could not be scored", exc_info=True)
            faults.append(f"{type(error).__name__}: {error}")
        return Scored(evaluation, scores, "; ".join(faults))

    def _write(self, evaluation: RunningEvaluation, rows: Sequence[RecordedRow]) -> None:
        if self._directory is None or not rows:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        path = evaluation_file(self._directory, evaluation.due_step, evaluation.version)
        facts = {
            "due_step": evaluation.due_step,
            "step": evaluation.begun_step,
            "version": evaluation.version,
        }
        write_whole(path, "".join(as_line(row, **facts) + "\n" for row in rows), is_private=True)


def evaluations_directory(run_dir: Path) -> Path:
    return run_dir / "evaluations"


def evaluation_file(directory: Path, due_step: int, version: int) -> Path:
    return directory / f"step{due_step:06d}.v{version:06d}.jsonl"


def read_recorded(path: Path) -> Iterator[RecordedRow]:
    """The rows of one evaluation. Lines of another form are left out; there is none without the file."""
    with suppress(OSError):
        for line in regular_lines(path):
            with suppress(ValueError, RecursionError):
                yield _FORM.validate_json(line)
