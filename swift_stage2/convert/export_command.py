"""``swift-stage2 export coco PREDICTIONS.jsonl --output OUT.json``: rows or predictions as COCO's JSON.

A whole data set, or with ``--truth`` results that have the ids of a COCO file. Of an imported file, boxes come back to
a millionth of a pixel.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from swift_stage2.convert.coco_file import CocoFile
from swift_stage2.convert.import_report import ImportReport
from swift_stage2.convert.sources import short
from swift_stage2.dataset.picture import UNREADABLE, look_at
from swift_stage2.detections.prediction import (
    LabelledBoxes,
    Prediction,
    numbered_lines,
    read_prediction,
    read_row,
)
from swift_stage2.errors import DatasetError, UserError
from swift_stage2.terminal.output import check_new_file, say
from swift_stage2.terminal.parser import CommandParser
from swift_stage2.terminal.progress import progress_bar
from swift_stage2.whole_file import whole_file


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Raises UserError: what is there cannot be exported or written; then nothing is."""
    options = _parse(argv)
    sources = [options.rows, *([options.truth] if options.truth else [])]
    check_new_file(options.output, force=options.force, sources=sources)
    size = os.path.getsize(options.rows) if os.path.isfile(options.rows) else None
    export = CocoExport(options.images, options.truth)
    try:
        with whole_file(options.output) as file, progress_bar(size, "rows") as move_to:
            export.read(options.rows, move_to)
            json.dump(export.content(), file)
            file.write("\n")
    except OSError as error:
        raise UserError(f"--output must be a file that can be written, got {error}; name another") from error
    say(f"{options.output}: {len(export.annotations):,} objects of {len(export.names):,} images")
    if export.num_unknown:
        say(
            f"{export.num_unknown:,} objects have a label that {options.truth} does not know, and were left out"
        )
    return 0


class CocoExport:
    """``folder``: that names are relative to; without one they are as rows have them.

    With ``truth`` what is written are results for it, and a label that it does not know is left out.
    """

    def __init__(self, folder: Path | None, truth: Path | None) -> None:
        self._folder, self._truth = folder, truth
        known = CocoFile(truth, ImportReport(), what="--truth", images_alone=True) if truth else None
        self._image_ids: dict[str, Any] = dict(known.image_ids()) if known else {}
        self._category_ids: dict[str, Any] = dict(known.category_ids()) if known else {}
        self._images: list[dict[str, Any]] = []
        self.annotations: list[dict[str, Any]] = []
        self.names: dict[str, None] = {}
        self.num_unknown = 0

    def read(self, path: Path, on_progress: Callable[[int], None]) -> None:
        """Reads all lines; ``on_progress`` is told the bytes so far.

        Raises:
            DatasetError: a line is no prediction or row, or names an image that the truth does not list.
            UserError: no image lies in the folder.
        """
        num_bytes, is_within = 0, False
        for number, line in numbered_lines(path, "PREDICTIONS"):
            where = f"{path}:{number}"
            found = read_prediction(line, where) if '"messages"' not in line else _as_prediction(line, where)
            inside = self._name(found.image)
            is_within, name = is_within or inside is not None, found.image if inside is None else inside
            self.names[name] = None
            if name not in self._image_ids:
                if self._truth is not None:
                    raise DatasetError(
                        f"every image must be one of {self._truth}, got {name} at {where}; name the folder that its "
                        "names start from with --images"
                    )
                image_id = self._image_ids[name] = len(self._image_ids) + 1
                size = {"width": found.width, "height": found.height}
                self._images.append({"id": image_id, "file_name": name, **size})
            self._annotate(self._image_ids[name], found)
            on_progress(num_bytes := num_bytes + len(line))
        if not self.names:
            raise DatasetError(f"PREDICTIONS must hold lines, got none in {path}; name another file")
        if not is_within:
            raise UserError(
                f"--images must be a folder that images lie in, got {self._folder}, and the first of others is "
                f"{next(iter(self.names))}; name the folder that import was given"
            )

    def _annotate(self, image_id: Any, found: Prediction) -> None:
        scores = found.scores or (None,) * len(found.objects.ref)
        for label, (x, y, x2, y2), score in zip(found.objects.ref, found.objects.bbox, scores, strict=True):
            if self._truth is None:
                self._category_ids.setdefault(label, len(self._category_ids) + 1)
            elif label not in self._category_ids:
                self.num_unknown += 1
                continue
            box = [short(each) for each in (x, y, x2 - x, y2 - y)]
            members = {"image_id": image_id, "category_id": self._category_ids[label], "bbox": box}
            if self._truth is None:
                members |= {"id": len(self.annotations) + 1, "area": box[2] * box[3], "iscrowd": 0}
            if self._truth is not None or score is not None:
                members["score"] = 1.0 if score is None else score  # COCO's results need one
            self.annotations.append(members)

    def content(self) -> Any:
        """The file's, a list of results where there is a truth."""
        if self._truth is not None:
            return self.annotations
        categories = [{"id": key, "name": label} for label, key in self._category_ids.items()]
        return {"images": self._images, "categories": categories, "annotations": self.annotations}

    def _name(self, path: str) -> str | None:
        """Relative to the folder; None where it does not lie in there."""
        if self._folder is None:
            return path
        prefix = os.path.join(self._folder, "")
        if path.startswith(prefix):  # whatever follows is the name, as its source spelt it
            return path[len(prefix) :]
        name = os.path.relpath(path, self._folder)
        return None if name.startswith(os.pardir) else name


def _as_prediction(line: str, where: str) -> Prediction:
    """A row's objects as if they were predicted."""
    row = read_row(line, 0, where)
    try:
        picture = look_at(row.image)
    except UNREADABLE as error:
        raise DatasetError(
            f"a row must name a picture that can be read, got {row.image} at {where}: {error}; mend the path"
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
        help="COCO's JSON: a data set, or results for one",
        description="Writes images, categories and annotations; with --truth, a list of results instead.",
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
    truth_help = "write results that have this COCO file's ids of images and classes"
    add("--truth", type=Path, metavar="COCO.json", help=truth_help)
    add("--force", action="store_true", help="replace OUT.json if it exists")
    return parser.parse_args(argv)
