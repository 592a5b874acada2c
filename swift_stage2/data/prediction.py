"""Rows with their truth and the predictions beside them: one row's answer, and files of both.

A file of predictions holds one JSON object per line, and one line per row of the data: ``image`` as the row names it,
``width`` and ``height`` of the stored image, ``objects: {ref, bbox}`` with boxes x1, y1, x2, y2 or points x, y in its
pixels; perhaps ``scores`` of the objects, ``log_probs`` of their tokens (``{label, box}`` each), ``answer`` (the
model's text) and ``finish_reason``. Other keys are left alone. The n-th line that names an image answers the n-th row
that does, so the order of different images is free.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from swift_stage2.channel_b.answer_templates import fill_placeholders, require_templates
from swift_stage2.channel_b.dialects import DIALECTS, Dialect
from swift_stage2.channel_b.matching import MAX_COORDINATE
from swift_stage2.channel_b.object_scores import ObjectLogProbs, ScoreWay
from swift_stage2.channel_b.parsing import TrueObjects, parse_rollout, read_ground_truth
from swift_stage2.data.files import read_lines
from swift_stage2.data.picture import UNREADABLE, images_of, look_at, path_of
from swift_stage2.errors import ConfigError, DatasetError, SampleError, UserError
from swift_stage2.whole_file import write_whole

FAILED = "failed"
"""``finish_reason`` of a row that brought no answer."""
TRUNCATED = "length"
_DECIMALS = 2
_Side = Annotated[int, Field(ge=1)]
_Coordinate = Annotated[FiniteFloat, Field(ge=-MAX_COORDINATE, le=MAX_COORDINATE)]


@dataclass(frozen=True, slots=True)
class LabelledBoxes:
    """Labels and boxes (x1, y1, x2, y2) or points (x, y), one of each per object."""

    ref: tuple[str, ...] = ()
    bbox: tuple[tuple[_Coordinate, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One line of the file."""

    image: str
    width: _Side
    height: _Side
    objects: LabelledBoxes
    scores: tuple[FiniteFloat, ...] | None = None
    log_probs: tuple[ObjectLogProbs, ...] | None = None
    answer: str | None = None
    finish_reason: str | None = None

    def fault(self, num_coordinates: int = 4) -> str:
        """The first rule that it breaks, or nothing; every object has so many numbers."""
        num_boxes = len(self.objects.bbox)
        columns = [each for each in (self.objects.ref, self.scores, self.log_probs) if each is not None]
        if any(len(each) != num_boxes for each in columns):
            return "every object needs one ref, one bbox and, where there are any, one score and one of log_probs"
        if odd := [place for place in self.objects.bbox if len(place) != num_coordinates]:
            what = "points of two numbers" if num_coordinates == 2 else "boxes of four numbers"
            return f"objects.bbox must hold {what}, as the data does, got bbox={list(odd[0])}"
        bad = next((box for box in self.objects.bbox if box[0] > box[-2] or box[1] > box[-1]), None)
        return f"a box must have x1 <= x2 and y1 <= y2, got bbox={list(bad)}" if bad else ""

    def scored(self, way: ScoreWay | None) -> Self:
        """With the scores that its log-probabilities give; None: without scores."""
        found = self.log_probs or ()
        return replace(self, scores=None if way is None else tuple(each.score(way) for each in found))


def log_probs_of(predictions: Sequence[Prediction | None]) -> list[ObjectLogProbs] | None:
    """Of all objects, in their order; None if some have none."""
    found = [each for each in predictions if each is not None and each.objects.bbox]
    if any(each.log_probs is None for each in found):
        return None
    return [one for each in found for one in each.log_probs or ()]


def in_pixels(
    objects: Sequence[tuple[str, Sequence[float]]], space: tuple[int, int], size: tuple[int, int]
) -> LabelledBoxes:
    """Labels and boxes or points of a template's ``space`` (width, height) in an image of ``size``."""
    scale = size[0] / space[0], size[1] / space[1]
    places = (
        tuple(round(value * scale[axis % 2], _DECIMALS) for axis, value in enumerate(place))
        for _, place in objects
    )
    return LabelledBoxes(tuple(as_text(label) for label, _ in objects), tuple(places))


def answer_flags(predictions: Sequence[Prediction | None], dialect: Dialect) -> dict[str, NDArray[np.int64]]:
    """Per answer 0 or 1, by the name of the metric: cut off, not wholly readable though it ended, or not there."""
    ends = [prediction.finish_reason if prediction else FAILED for prediction in predictions]
    flags = {
        "truncated_ratio": [end == TRUNCATED for end in ends],
        "failed_ratio": [end == FAILED for end in ends],
    }
    if any(each and each.answer is not None for each in predictions):
        flags["invalid_ratio"] = [
            bool(each and each.answer is not None and end != TRUNCATED and _is_invalid(each.answer, dialect))
            for each, end in zip(predictions, ends, strict=True)
        ]
    return {name: np.array(values, dtype=np.int64) for name, values in flags.items()}


def _is_invalid(answer: str, dialect: Dialect) -> bool:
    parsed = parse_rollout(answer, dialect)
    return bool(parsed.lost) or not parsed.is_whole


def lost_objects(predictions: Sequence[Prediction | None], dialect: Dialect) -> dict[str, Counter[str]]:
    """By reason ``objects`` that do not count, and ``answers`` that lost any; ``unclosed``: answers not read whole."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for answer in (each.answer for each in predictions if each and each.answer is not None):
        parsed = parse_rollout(answer, dialect)
        unclosed = {} if parsed.is_whole else {"unclosed": len(parsed.objects)}
        for reason, count in (parsed.lost | unclosed).items():
            found[reason].update(objects=count, answers=1)
    return found


def as_text(label: str) -> str:
    """``label`` without halves of surrogate pairs, which a model may write and no file can hold."""
    return label.encode("utf-8", "replace").decode("utf-8")


_FORM = TypeAdapter(Prediction)


@dataclass(frozen=True, slots=True)
class TrueRow:
    """One row of the data. ``image`` is its first, as the row names it."""

    number: int
    image: str
    truth: TrueObjects
    row: Mapping[str, Any]


def read_rows(path: Path, num_coordinates: int = 4) -> list[TrueRow]:
    """Every row of a JSONL data set of boxes, or of points where objects have 2 coordinates.

    Raises:
        DatasetError: the file cannot be read, or a line is none that ``read_row`` reads.
    """
    rows = [
        read_row(line, number, f"{path}:{place}", num_coordinates)
        for number, (place, line) in enumerate(numbered_lines(path, "a data set"))
    ]
    if not rows:
        raise DatasetError("a data set must hold rows", got=f"none in {path}", remedy="name another file")
    return rows


def read_row(line: str, number: int, where: str, num_coordinates: int = 4) -> TrueRow:
    """Raises DatasetError: the line has no image or no list of boxes in pixels; names ``where`` it stands."""
    try:
        row = json.loads(line)
        image = path_of(next(iter(images_of(row)), None))
        messages = row.get("messages")
        if not isinstance(image, str) or not messages:
            raise SampleError("a row needs messages and images=[PATH]", got="none")
        if not isinstance(messages, list) or not isinstance(messages[-1], Mapping):
            raise SampleError("messages must be a list of objects", got=f"{str(messages)[:80]}")
        objects = row.get("objects") or {}
        if (units := objects.get("bbox_type", "real")) != "real":
            raise SampleError("boxes must be in pixels of the stored image", got=f"bbox_type={units!r}")
        truth = read_ground_truth(row, num_coordinates)
        "".join((image, *truth.labels)).encode()  # half of a surrogate pair is no text
        return TrueRow(number, image, truth, row)
    except (ValueError, AttributeError, TypeError, RecursionError, SampleError) as error:
        found = error.found if isinstance(error, SampleError) else str(error)
        raise DatasetError(
            f"{where}: {found}", remedy="mend the row, swift-stage2 data check shows all such rows"
        ) from error


def read_prediction(line: str, where: str, num_coordinates: int = 4) -> Prediction:
    """Raises DatasetError: the line is no prediction of such objects; names ``where`` it stands."""
    try:
        prediction = _FORM.validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        member = ".".join(map(str, first["loc"])) or "the line"
        raise DatasetError(
            f"{where}: {member}: {first['msg']}", remedy="write it as docs/design/formats.md says"
        ) from error
    if fault := prediction.fault(num_coordinates):
        raise DatasetError(f"{where}: {fault}", remedy="mend the line")
    return prediction


def read_predictions(path: Path, rows: Sequence[TrueRow]) -> list[Prediction | None]:
    """The prediction of every row, None where there is none.

    Raises:
        DatasetError: a line is no prediction, is of an image that no row (left) has or of another size than that image,
            or some have scores and some not.
    """
    waiting: defaultdict[str, deque[int]] = defaultdict(deque)
    for row in rows:
        waiting[row.image].append(row.number)
    found: list[Prediction | None] = [None] * len(rows)
    num_coordinates, scored, places = coordinates_of_rows(rows), set[bool](), dict[int, int]()
    for number, line in numbered_lines(path, "predictions"):
        prediction = read_prediction(line, f"{path}:{number}", num_coordinates)
        if not waiting[prediction.image]:
            raise DatasetError(
                f"{path}:{number}: every line must answer a row of the data",
                got=f"image={prediction.image!r} that no row (left) names",
                remedy="give the data that was predicted on",
            )
        row_number = waiting[prediction.image].popleft()
        found[row_number], places[row_number] = prediction, number
        if prediction.objects.bbox:
            scored.add(prediction.scores is not None)
    if len(scored) > 1:
        raise DatasetError(f"{path}: all lines must have scores, or none", remedy="write them alike")
    for row_number, number in places.items():  # one tells: a wrong size is wrong in most lines
        if _is_of_image_size(found[row_number], f"{path}:{number}"):
            break
    return found


def _is_of_image_size(prediction: Prediction | None, place: str) -> bool:
    """False where nothing tells: the image is not here, or its row's answer failed. Raises DatasetError: it is not."""
    if prediction is None or prediction.finish_reason == FAILED:
        return False
    try:
        picture = look_at(prediction.image)
    except UNREADABLE:
        return False
    if (prediction.width, prediction.height) != (picture.width, picture.height):
        raise DatasetError(
            f"{place}: width and height must be those of the stored image",
            got=f"{prediction.width} x {prediction.height} for {prediction.image}, which has {picture.width} x "
            f"{picture.height}",
            remedy="write boxes in its pixels, and its size",
        )
    return True


def coordinates_of_rows(rows: Sequence[TrueRow]) -> int:
    """2 of points, 4 of boxes, also where no row has an object."""
    return next((len(row.truth.boxes[0]) for row in rows if row.truth.boxes), 4)


def answer_dialect(rows: Sequence[TrueRow]) -> Dialect:
    """The dialect that the answer of the first row is written in; where none reads it, the first of such objects."""
    message, truth, count = rows[0].row["messages"][-1], rows[0].truth, coordinates_of_rows(rows)
    dialects = [each for each in DIALECTS.values() if each.num_coordinates == count]
    for dialect in dialects:
        with suppress(ConfigError):
            objects = list(zip(truth.labels, truth.boxes, strict=True))
            require_templates(fill_placeholders(str(message.get("content")), objects), dialect)
            return dialect
    return dialects[0]


def as_line(prediction: Prediction, **more: object) -> str:
    """As it stands in a file, without a line's end; ``more`` are other keys."""
    known = {name: value for name, value in asdict(prediction).items() if value is not None}
    return json.dumps(known | more)


def write_predictions(path: Path, predictions: Sequence[Prediction]) -> None:
    """Raises UserError: the file cannot be written."""
    write_file(path, "".join(as_line(each) + "\n" for each in predictions))


def check_folder(folder: Path) -> None:
    """Tells what is wrong with a folder before the work for it. Raises UserError: no file can be written in it."""
    nearest = next(each for each in (folder, *folder.absolute().parents) if os.path.lexists(each))
    if not (os.path.isdir(nearest) and os.access(nearest, os.W_OK | os.X_OK)):
        raise UserError(
            "--output must be a folder that can be written",
            got=f"{folder} where {nearest} cannot",
            remedy="name another folder",
        )


def write_file(path: Path, text: str) -> None:
    """Puts a file in its place whole, its folder too. Raises UserError: it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text, errors="replace", is_private=True)
    except OSError as error:
        raise UserError(
            f"{path} must be a file that can be written: {error.strerror}",
            remedy="name another place with --output",
        ) from error


def numbered_lines(path: Path, what: str) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, counted from 1. Raises DatasetError: ``what`` is no file that can be read."""
    for number, line in enumerate(read_lines(path, what), start=1):
        if line.strip():
            yield number, line.decode(errors="surrogateescape")  # which no reader of JSON takes for text
