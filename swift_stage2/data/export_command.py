"""``swift-stage2 export coco PREDICTIONS.jsonl --output OUT.json``: rows or predictions as COCO's JSON.

Of an imported file, boxes come back to a millionth of a pixel.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swift_stage2.data.files import require_boxes
from swift_stage2.data.picture import UNREADABLE, look_at
from swift_stage2.data.prediction import (
    LabelledBoxes,
    Prediction,
    numbered_lines,
    read_prediction,
    read_row,
)
from swift_stage2.data.sources import short
from swift_stage2.errors import DatasetError, UserError
from swift_stage2.runtime.output import check_new_file, progress_bar, say
from swift_stage2.runtime.parser import CommandParser
from swift_stage2.whole_file import whole_file


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Raises UserError: what is there cannot be exported or written; then nothing is."""
    options = _parse(argv)
    check_new_file(options.output, force=options.force, sources=[options.rows])
    require_boxes(options.rows, "export coco")
    try:
        with whole_file(options.output) as file, progress_bar(None, f"export {options.rows}"):
            content = coco_of(options.rows, options.images)
            json.dump(content, file)
            file.write("\n")
    except OSError as error:
        raise UserError(
            "--output must be a file that can be written", got=str(error), remedy="name another"
        ) from error
    say(f"{options.output}: {len(content['annotations']):,} objects of {len(content['images']):,} images")
    return 0


def coco_of(path: Path, folder: Path | None) -> dict[str, list[dict[str, Any]]]:
    """The content of a COCO file. Names are relative to ``folder``; without one they are as rows have them.

    Raises:
        DatasetError: a line is no prediction or row.
    """
    images: dict[str, dict[str, Any]] = {}
    categories: dict[str, int] = {}
    annotations: list[dict[str, Any]] = []
    for number, line in numbered_lines(path, "PREDICTIONS"):
        where = f"{path}:{number}"
        found = _as_prediction(line, where) if _is_row(line) else read_prediction(line, where)
        name = found.image if folder is None else _relative(found.image, folder)
        size = {"width": found.width, "height": found.height}
        image = images.setdefault(name, {"id": len(images) + 1, "file_name": name, **size})
        scores = found.scores or (None,) * len(found.objects.ref)
        for label, (x, y, x2, y2), score in zip(found.objects.ref, found.objects.bbox, scores, strict=True):
            category_id = categories.setdefault(label, len(categories) + 1)
            box = [short(each) for each in (x, y, x2 - x, y2 - y)]
            ids = {"id": len(annotations) + 1, "image_id": image["id"], "category_id": category_id}
            more = {} if score is None else {"score": score}
            annotations.append({**ids, "bbox": box, "area": box[2] * box[3], "iscrowd": 0, **more})
    if not images:
        raise DatasetError("PREDICTIONS must hold lines", got=f"none in {path}", remedy="name another file")
    named = [{"id": key, "name": label} for label, key in categories.items()]
    return {"images": list(images.values()), "categories": named, "annotations": annotations}


def _relative(path: str, folder: Path) -> str:
    """As it is where it does not lie in ``folder``."""
    prefix = os.path.join(folder, "")
    if path.startswith(prefix):  # whatever follows is the name, as its source spelt it
        return path[len(prefix) :]
    name = os.path.relpath(path, folder)
    return path if name.startswith(os.pardir) else name


def _is_row(line: str) -> bool:
    try:
        return "messages" in json.loads(line)
    except (ValueError, TypeError, RecursionError):  # whoever reads it tells why
        return False


def _as_prediction(line: str, where: str) -> Prediction:
    """A row's objects as if they were predicted."""
    row = read_row(line, 0, where)
    try:
        picture = look_at(row.image)
    except UNREADABLE as error:
        raise DatasetError(
            "a row must name a picture that can be read",
            got=f"{row.image} at {where}: {error}",
            remedy="mend the path",
        ) from error
    boxes = tuple((x1, y1, x2, y2) for x1, y1, x2, y2 in row.truth.boxes)
    objects = LabelledBoxes(row.truth.labels, boxes)
    return Prediction(image=row.image, width=picture.width, height=picture.height, objects=objects)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="swift-stage2 export",
        exit_statuses="0 done",
        description="Turns rows or predictions into another format.",
    )
    formats = parser.add_subparsers(dest="format", required=True, metavar="FORMAT")
    coco = formats.add_parser(
        "coco",
        help="COCO's JSON",
        description="Writes images, categories and annotations.",
        exit_statuses="0 done",
    )
    add = coco.add_argument
    add("rows", type=Path, metavar="PREDICTIONS.jsonl", help="predictions, or rows of training data")
    add("--output", type=Path, required=True, metavar="OUT.json", help="the file to write")
    add(
        "--images",
        type=Path,
        metavar="DIR",
        help="the folder that images' names start from, as import had it",
    )
    add("--force", action="store_true", help="replace OUT.json if it exists")
    return parser.parse_args(argv)
