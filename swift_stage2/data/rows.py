"""A picture's rows: its boxes, put on the picture that is there, and the question and answer about them.

Every box lies inside its picture, as large as that is, and has an area.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from swift_stage2.channel_b.answer_templates import standard_template
from swift_stage2.channel_b.dialects import Dialect
from swift_stage2.data.picture import UNREADABLE, StoredPicture, look_at
from swift_stage2.data.row_check import BOX_MARK, LABEL_MARK
from swift_stage2.data.sources import AnnotatedImage, AnnotatedObject, ImportIssue, ImportReport, short
from swift_stage2.errors import UserError
from swift_stage2.records import Box
from swift_stage2.servers.image_opening import UPRIGHT

_IMAGE_MARK = "<image>"
LABELS = "{labels}"
_PLACEHOLDER = re.compile(r"\{\s*labels?\s*\}", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """A picture that a row can name, and its boxes in pixels."""

    path: str
    objects: list[tuple[str, Box]]


@dataclass(frozen=True, slots=True)
class ImagePlacer:
    """The folder where pictures lie; boxes are taken on their pixels as they are stored."""

    folder: Path
    report: ImportReport

    def place(self, image: AnnotatedImage) -> PlacedImage | None:
        """None for an image that cannot be read, or of which no row can be made; all is told to the report."""
        path = os.path.join(self.folder, image.name)
        picture = self._look_at(path)
        if picture is None:
            return None
        objects = image.objects
        if not image.is_share and objects and all(max(each.box) <= 1 for each in objects):
            self.report.add(ImportIssue.SHARES, f"{objects[0].where}: {path}")
            return None
        size = picture.width, picture.height
        if image.size not in (None, size):
            written, real = ("x".join(map(str, each)) for each in (image.size or (), size))
            self.report.add(ImportIssue.SIZE, f"{image.name}: {written}, the picture has {real}")
        placed: list[tuple[str, Box]] = []
        for label, edges, where in self._once(image.objects):
            box = self._inside(_pixels(edges, size) if image.is_share else edges, size, where)
            if box is not None:
                placed.append((label, box))
        if not placed:
            self.report.add(ImportIssue.EMPTY, path)
        return PlacedImage(path, placed)

    def _once(self, objects: Sequence[AnnotatedObject]) -> list[tuple[str, Box, str]]:
        """Each once."""
        found: dict[tuple[str, Box], str] = {}
        for label, box, where in objects:
            if found.setdefault((label, box), where) is not where:
                self.report.add(ImportIssue.REPEATED, f"{where} as {found[label, box]}")
        return [(label, box, where) for (label, box), where in found.items()]

    def _look_at(self, path: str) -> StoredPicture | None:
        try:
            path.encode()  # JSON takes no other name
            picture = look_at(path)
        except FileNotFoundError:
            self.report.add(ImportIssue.NO_PICTURE, path)
        except UNREADABLE as error:
            self.report.add(ImportIssue.UNREADABLE, f"{path}: {error}")
        else:
            if picture.orientation != UPRIGHT:
                self.report.add(ImportIssue.ROTATED, path)
            return picture
        return None

    def _inside(self, box: Box, size: tuple[int, int], where: str) -> Box | None:
        """The part of a box that lies on the picture, as whole numbers where it has them; None if it has no area."""
        x1, y1, x2, y2 = box = tuple(map(short, box))  # type: ignore[assignment]
        inside = max(x1, 0), max(y1, 0), min(x2, size[0]), min(y2, size[1])
        if x1 >= x2 or y1 >= y2:
            self.report.add(ImportIssue.FLAT, where)
        elif inside[0] >= inside[2] or inside[1] >= inside[3]:
            self.report.add(ImportIssue.OUTSIDE, where)
        else:
            if inside != box:
                self.report.add(ImportIssue.CLIPPED, where)
            return inside
        return None


def _pixels(shares: Box, size: tuple[int, int]) -> Box:
    x1, y1, x2, y2 = shares
    return x1 * size[0], y1 * size[1], x2 * size[0], y2 * size[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStyle:
    """``prompt`` may hold ``{labels}``, which stands for all ``labels``.

    Raises:
        UserError: a prompt that no row can have.
    """

    prompt: str
    dialect: Dialect
    labels: Sequence[str] = ()

    def __post_init__(self) -> None:
        if LABEL_MARK in self.prompt or BOX_MARK in self.prompt or self.prompt.count(_IMAGE_MARK) > 1:
            raise UserError(
                f"--prompt may hold {_IMAGE_MARK} once, and neither {LABEL_MARK} nor {BOX_MARK}",
                got=f"prompt={self.prompt!r}",
                remedy="take them out",
            )
        if near := set(_PLACEHOLDER.findall(self.prompt)) - {LABELS}:
            raise UserError(f"--prompt knows {LABELS}", got=min(near), remedy="correct it")

    def row(self, image: PlacedImage) -> str:
        """The line of a picture, with its line break."""
        prompt = self.prompt.replace(LABELS, ", ".join(self.labels))
        messages = [
            {"role": "user", "content": prompt if _IMAGE_MARK in prompt else _IMAGE_MARK + prompt},
            {"role": "assistant", "content": _answer(self.dialect, len(image.objects))},
        ]
        labels, boxes = [label for label, _ in image.objects], [box for _, box in image.objects]
        row = {"messages": messages, "images": [image.path], "objects": {"ref": labels, "bbox": boxes}}
        return json.dumps(row, ensure_ascii=False) + "\n"


@lru_cache(1024)
def _answer(dialect: Dialect, num_objects: int) -> str:
    """With a mark for each label and box, which ms-swift fills."""
    answer = standard_template(dialect).write([(LABEL_MARK, (0, 0, 0, 0))] * num_objects)
    return answer.replace("[0, 0, 0, 0]", BOX_MARK)
