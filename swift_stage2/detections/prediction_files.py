"""Reads rows with their truth and the predictions beside them, and writes predictions.

A file of predictions holds one JSON object per line, and one line per row of the data: ``image`` as the row names it,
``width`` and ``height`` of the stored image, ``objects: {ref, bbox}`` with boxes x1, y1, x2, y2 in its pixels; perhaps
``scores`` of the objects, ``answer`` (the model's text) and ``finish_reason``. Other keys are left alone. The n-th line
that names an image answers the n-th row that does, so the order of different images is free.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from swift_stage2.channel_b.answer_format import fill_placeholders, read_format
from swift_stage2.channel_b.dialects import DIALECTS, OBJECT_LIST, Dialect
from swift_stage2.channel_b.parsing import TrueObjects, read_ground_truth
from swift_stage2.dataset.picture import UNREADABLE, look_at
from swift_stage2.detections.prediction import FAILED, Prediction
from swift_stage2.errors import ConfigError, DatasetError, SampleError, UserError, cut_remedy
from swift_stage2.whole_file import regular_lines, write_whole

_FORM = TypeAdapter(Prediction)
_MOST_LOOKED_AT = 256  # images: a wrong size is wrong in most lines, and a network's disk is slow


@dataclass(frozen=True, slots=True)
class TrueRow:
    """One row of the data. ``image`` is its first, as the row names it."""

    number: int
    image: str
    truth: TrueObjects
    row: Mapping[str, Any]


def read_rows(path: Path) -> list[TrueRow]:
    """Every row of a JSONL data set.

    Raises:
        DatasetError: the file cannot be read, or a row has no image or no list of objects in pixels.
    """
    rows: list[TrueRow] = []
    for number, line in _lines(path, "a data set"):
        try:
            row = json.loads(line)
            images = row.get("images") or []
            image = images[0] if isinstance(images, list) and images else images
            image = image.get("path") if isinstance(image, Mapping) else image
            messages = row.get("messages")
            if not isinstance(image, str) or not messages:
                raise SampleError("a row needs messages and images=[PATH], got none")
            if not isinstance(messages, list) or not isinstance(messages[-1], Mapping):
                raise SampleError(f"messages must be a list of objects, got {str(messages)[:80]}")
            if (units := (row.get("objects") or {}).get("bbox_type", "real")) != "real":
                raise SampleError(f"boxes must be in pixels of the stored image, got bbox_type={units!r}")
            refuse_points(row, f"{path}:{number}")
            truth = read_ground_truth(row)
            "".join((image, *truth.labels)).encode()  # half of a surrogate pair is no text
            rows.append(TrueRow(len(rows), image, truth, row))
        except (ValueError, AttributeError, RecursionError, SampleError) as error:
            found = cut_remedy(str(error))[0]
            raise DatasetError(
                f"{path}:{number}: {found}; mend the row, swift-stage2 data check shows all such rows"
            ) from error
    if not rows:
        raise DatasetError(f"a data set must hold rows, got none in {path}; name another file")
    return rows


def refuse_points(row: Mapping[str, Any], place: str) -> None:
    """Raises DatasetError: the row's objects are points, which have no AP."""
    boxes = row["objects"].get("bbox") if row.get("objects") else None
    points = (
        [box for box in boxes if isinstance(box, list) and len(box) == 2] if isinstance(boxes, list) else []
    )
    if points:
        raise DatasetError(
            f"{place}: evaluate measures boxes, got the point bbox={points[0]}; a run tells precision, recall, F1 and "
            "mean distance of points: set stage2_ab.evaluation.every_steps"
        )


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
    scored, places = set(), dict[int, int]()
    for number, line in _lines(path, "predictions"):
        try:
            prediction = _FORM.validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the line"
            raise DatasetError(
                f"{path}:{number}: {where}: {first['msg']}; write it as docs/design/formats.md says"
            ) from error
        if fault := prediction.fault():
            raise DatasetError(f"{path}:{number}: {fault}; mend the line")
        if not waiting[prediction.image]:
            raise DatasetError(
                f"{path}:{number}: every line must answer a row of the data, got image={prediction.image!r} that no "
                "row (left) names; give the data that was predicted on"
            )
        row_number = waiting[prediction.image].popleft()
        found[row_number], places[row_number] = prediction, number
        if prediction.objects.bbox:
            scored.add(prediction.scores is not None)
    if len(scored) > 1:
        raise DatasetError(f"{path}: all lines must have scores, or none; write them alike")
    step = -(-len(places) // _MOST_LOOKED_AT) or 1
    for row_number in list(places)[::step]:
        _refuse_other_size(found[row_number], f"{path}:{places[row_number]}")
    return found


def _refuse_other_size(prediction: Prediction | None, place: str) -> None:
    """An image that is not here, and a row whose answer failed, tell nothing."""
    if prediction is None or prediction.finish_reason == FAILED:
        return
    with suppress(*UNREADABLE):
        picture = look_at(prediction.image)
        if (prediction.width, prediction.height) != (picture.width, picture.height):
            raise DatasetError(
                f"{place}: width and height must be those of the stored image, got {prediction.width} x "
                f"{prediction.height} for {prediction.image}, which has {picture.width} x {picture.height}; write "
                "boxes in its pixels, and its size"
            )


def answer_dialect(rows: Sequence[TrueRow]) -> Dialect:
    """The dialect that the answer of the first row is written in; ``object_list`` where none reads it."""
    message, truth = rows[0].row["messages"][-1], rows[0].truth
    for dialect in DIALECTS.values():
        with suppress(ConfigError):
            objects = list(zip(truth.labels, truth.boxes, strict=True))
            read_format(fill_placeholders(str(message.get("content")), objects), dialect)
            return dialect
    return OBJECT_LIST


def write_predictions(path: Path, predictions: Sequence[Prediction]) -> None:
    """Raises UserError: the file cannot be written."""
    lines = [
        json.dumps({name: value for name, value in asdict(each).items() if value is not None}) + "\n"
        for each in predictions
    ]
    write_file(path, "".join(lines))


def check_folder(folder: Path) -> None:
    """Tells what is wrong with a folder before the work for it. Raises UserError: no file can be written in it."""
    nearest = next(each for each in (folder, *folder.absolute().parents) if os.path.lexists(each))
    if not (os.path.isdir(nearest) and os.access(nearest, os.W_OK | os.X_OK)):
        raise UserError(
            f"--output must be a folder that can be written, got {folder} where {nearest} cannot; name another folder"
        )


def write_file(path: Path, text: str) -> None:
    """Puts a file in its place whole, its folder too. Raises UserError: it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text, is_private=True)
    except OSError as error:
        raise UserError(
            f"{path} must be a file that can be written: {error.strerror}; name another folder with --output"
        ) from error


def _lines(path: Path, what: str) -> Iterator[tuple[int, str]]:
    try:
        for number, line in enumerate(regular_lines(path), start=1):
            if line.strip():
                yield number, line.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(
            f"{what} must be a readable UTF-8 file, got {path}: {error}; check the path"
        ) from error
