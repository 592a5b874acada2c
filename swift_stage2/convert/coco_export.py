"""Rows or predictions as COCO's JSON: a whole data set, or results with the ids of a COCO file that holds the truth.

Of an imported file, boxes come back to a millionth of a pixel.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from swift_stage2.convert.coco_file import CocoFile
from swift_stage2.convert.import_report import ImportReport
from swift_stage2.convert.source_text import MOST, numbers
from swift_stage2.dataset.files import read_lines
from swift_stage2.dataset.picture import UNREADABLE, look_at, path_of
from swift_stage2.errors import DatasetError, UserError
from swift_stage2.records import Box

_DIGITS = 6  # of a pixel


@dataclass(frozen=True, slots=True)
class _Listing:
    """One line: an image with its objects."""

    path: str
    size: tuple[int, int] | None
    labels: Sequence[str]
    boxes: Sequence[Box]
    scores: Sequence[float | None]


@dataclass(slots=True)
class CocoExport:
    """``images``: the folder that names are relative to; without one they are as rows have them.

    ``truth``: a COCO file; what is written are results for it then, and a label that it does not know is left out.
    """

    rows: Path
    images: Path | None
    truth: Path | None
    num_images: int = 0
    num_objects: int = 0
    num_unknown: int = 0
    num_within: int = 0
    """Times that an image of ``images`` was met."""
    image_ids: dict[str, Any] = field(default_factory=dict)
    category_ids: dict[str, Any] = field(default_factory=dict)

    def write(self, file: TextIO, on_progress: Callable[[int], None]) -> None:
        """Writes to ``file``; ``on_progress`` is told bytes of ``rows`` so far.

        Raises:
            DatasetError: a line is no prediction or row, or names an image that the truth does not list.
            UserError: no image lies in ``images``.
        """
        if self.truth is not None:
            known = CocoFile(self.truth, ImportReport(), what="--truth", images_alone=True)
            self.image_ids, self.category_ids = dict(known.image_ids()), dict(known.category_ids())
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        seen: dict[str, None] = {}
        for where, listing in self._read(on_progress):
            name = self._name(listing.path)
            seen[name] = None
            if name not in self.image_ids:
                self._refuse_unlisted(name, where)
                self.image_ids[name] = len(self.image_ids) + 1
                width, height = listing.size or _size_of(listing.path, where)
                images.append(
                    {"id": self.image_ids[name], "file_name": name, "width": width, "height": height}
                )
            for label, box, score in zip(listing.labels, listing.boxes, listing.scores, strict=True):
                if self.truth is None:
                    self.category_ids.setdefault(label, len(self.category_ids) + 1)
                if label in self.category_ids:
                    self.num_objects += 1
                    annotations.append(
                        self._annotation(self.image_ids[name], self.category_ids[label], box, score)
                    )
                else:
                    self.num_unknown += 1
        if not seen:
            raise DatasetError(f"PREDICTIONS must hold lines, got none in {self.rows}; name another file")
        if self.images is not None and not self.num_within:
            raise UserError(
                f"--images must be a folder that images lie in, got {self.images}, and the first of others is "
                f"{next(iter(seen))}; name the folder that import was given"
            )
        self.num_images = len(seen)
        categories = [{"id": key, "name": label} for label, key in self.category_ids.items()]
        whole = {"images": images, "categories": categories, "annotations": annotations}
        json.dump(whole if self.truth is None else annotations, file)
        file.write("\n")

    def _refuse_unlisted(self, name: str, where: str) -> None:
        if self.truth is not None:
            raise DatasetError(
                f"every image must be one of {self.truth}, got {name} at {where}; name the folder that its names "
                "start from with --images"
            )

    def _annotation(self, image_id: Any, category_id: Any, box: Box, score: float | None) -> dict[str, Any]:
        x, y, x2, y2 = box
        width, height = _short(x2 - x), _short(y2 - y)
        members: dict[str, Any] = {"image_id": image_id, "category_id": category_id}
        if self.truth is None:
            members = {"id": self.num_objects, **members, "area": width * height, "iscrowd": 0}
        if self.truth is not None or score is not None:
            members["score"] = 1.0 if score is None else score  # COCO's results need one
        return {**members, "bbox": [x, y, width, height]}

    def _name(self, path: str) -> str:
        """Relative to ``images`` where it lies in there."""
        if self.images is None:
            return path
        prefix = os.path.join(self.images, "")
        if path.startswith(prefix):  # whatever follows is the name, as its source spelt it
            self.num_within += 1
            return path[len(prefix) :]
        name = os.path.relpath(path, self.images)
        if name.startswith(os.pardir):
            return path
        self.num_within += 1
        return name

    def _read(self, on_progress: Callable[[int], None]) -> Iterator[tuple[str, _Listing]]:
        num_bytes = 0
        for number, line in enumerate(read_lines(self.rows, "PREDICTIONS"), start=1):
            num_bytes += len(line)
            if line.strip():
                where = f"{self.rows}:{number}"
                yield where, _read_line(line, where)
                on_progress(num_bytes)


def _read_line(line: bytes, where: str) -> _Listing:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"every line must be one JSON object, got {where}: {error}; mend it") from error
    row = row if isinstance(row, Mapping) else {}
    images = row["image"] if "image" in row else row.get("images")
    path = path_of(images[0] if isinstance(images, list) and len(images) == 1 else images)
    if not isinstance(path, str):
        raise DatasetError(
            f"every line must be a row or a prediction that names one image, got image={str(images)[:80]} at {where}; "
            "name it"
        )
    objects = row.get("objects")
    objects = objects if isinstance(objects, Mapping) else {}
    labels, boxes, scores = objects.get("ref") or [], objects.get("bbox") or [], row.get("scores") or []
    if objects.get("bbox_type", "real") != "real" or not all(
        isinstance(each, list) for each in (labels, boxes, scores)
    ):
        raise DatasetError(
            f"objects must be lists ref and bbox, in pixels, and scores a list, got {where}; write them so"
        )
    if not len(labels) == len(boxes) or len(scores) not in (0, len(boxes)):
        raise DatasetError(
            f"every object needs a label and a box, and all or none a score, got num_ref={len(labels)} "
            f"num_bbox={len(boxes)} num_scores={len(scores)} at {where}; mend the line"
        )
    for label, box in zip(labels, boxes, strict=True):
        if not isinstance(label, str) or not _are_numbers(box, 4) or box[0] > box[2] or box[1] > box[3]:
            raise DatasetError(
                f"an object must be a text and x1 <= x2, y1 <= y2, got label={label!r} bbox={box} at {where}; mend it"
            )
    if not _are_numbers(scores, len(scores)):
        raise DatasetError(f"scores must be numbers, got scores={scores} at {where}; mend the line")
    return _Listing(
        path=path,
        size=_written_size(row, where),
        labels=labels,
        boxes=[(box[0], box[1], box[2], box[3]) for box in boxes],
        scores=list(map(float, scores)) or [None] * len(boxes),
    )


def _are_numbers(values: Any, count: int) -> bool:
    return numbers(values, count) is not None and not any(isinstance(each, str) for each in values)


def _short(length: float) -> float:
    """Without the last bits of a difference: 0.3 - 0.1 is 0.2."""
    rounded = round(length, _DIGITS)
    return int(rounded) if rounded == int(rounded) else rounded


def _written_size(row: Mapping[str, Any], where: str) -> tuple[int, int] | None:
    """Width and height as the line says them; None if it leaves a side out."""
    width, height = row.get("width"), row.get("height")
    if width is None or height is None:
        return None
    if not all(type(side) is int and 0 < side <= MOST for side in (width, height)):
        raise DatasetError(
            f"width and height must be whole numbers of pixels, got width={width} height={height} at {where}; "
            "mend the line"
        )
    return width, height


def _size_of(path: str, where: str) -> tuple[int, int]:
    try:
        picture = look_at(path)
    except UNREADABLE as error:
        raise DatasetError(
            f"a line without width and height must name a picture that can be read, got {path} at {where}: {error}; "
            "write both, or mend the path"
        ) from error
    return picture.width, picture.height
