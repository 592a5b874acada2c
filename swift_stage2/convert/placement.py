"""Puts a source's boxes on the picture that is there, as large as it is: every box inside, and with an area."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from swift_stage2.channel_b.image_files import UPRIGHT
from swift_stage2.convert.annotated_image import AnnotatedImage, AnnotatedObject
from swift_stage2.convert.import_report import ImportIssue, ImportReport
from swift_stage2.dataset.picture import PLAIN_MODES, UNREADABLE, DrawnOn, StoredPicture, look_at
from swift_stage2.records import Box

_DIGITS = 6  # of a pixel


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """A picture that a row can name, and its boxes in pixels; ``hidden``: labels of objects that were left out."""

    path: str
    name: str
    objects: list[tuple[str, Box]]
    hidden: set[str]


@dataclass(frozen=True, slots=True)
class ImagePlacer:
    """Where pictures lie, and on which picture boxes were drawn: as stored, or as a viewer turns it."""

    folder: Path
    boxes_on: DrawnOn
    report: ImportReport

    def place(self, image: AnnotatedImage) -> PlacedImage | None:
        """None for an image that cannot be read, or of which no row can be made; all is told to the report."""
        path = os.path.join(self.folder, image.name)
        picture = self._look_at(path)
        if picture is None:
            return None
        boxes = [each.box for each in image.objects if each.box is not None]
        if not image.is_share and boxes and all(max(box) <= 1 for box in boxes):
            first = next(each.where for each in image.objects if each.box is not None)
            self.report.add(ImportIssue.SHARES, f"{first}: {path}")
            return None
        size = picture.upright_size if self.boxes_on is DrawnOn.UPRIGHT else (picture.width, picture.height)
        self._compare_sizes(image, picture, size)
        placed: list[tuple[str, Box]] = []
        hidden = {each.label for each in image.objects if each.box is None}
        for label, written, where in self._once(image.objects):
            box = self._inside(_pixels(written, size) if image.is_share else written, size, where)
            if box is None:
                hidden.add(label)
            else:
                placed.append((label, box))
        if not placed:
            self.report.add(ImportIssue.EMPTY, path)
        return PlacedImage(path, image.name, placed, hidden)

    def _once(self, objects: Sequence[AnnotatedObject]) -> list[tuple[str, Box, str]]:
        """Those with a box, each once."""
        found: dict[tuple[str, Box], str] = {}
        for label, box, where in objects:
            if box is not None and found.setdefault((label, box), where) is not where:
                self.report.add(ImportIssue.REPEATED, f"{where} as {found[label, box]}")
        return [(label, box, where) for (label, box), where in found.items()]

    def _look_at(self, path: str) -> StoredPicture | None:
        try:
            path.encode()
            picture = look_at(path)
        except UnicodeEncodeError:
            self.report.add(ImportIssue.NOT_UTF8, path)
        except FileNotFoundError:
            self.report.add(ImportIssue.NO_PICTURE, path)
        except UNREADABLE as error:
            self.report.add(ImportIssue.UNREADABLE, f"{path}: {error}")
        else:
            if picture.orientation != UPRIGHT:
                self.report.add(ImportIssue.ROTATED, path)
            if picture.mode not in PLAIN_MODES:
                self.report.add(ImportIssue.COLOURS, f"{path}: {picture.mode}")
            return picture
        return None

    def _compare_sizes(self, image: AnnotatedImage, picture: StoredPicture, size: tuple[int, int]) -> None:
        if image.size is None or image.size == size:
            return
        is_turned = picture.orientation != UPRIGHT and image.size == picture.upright_size
        written, real = ("x".join(map(str, each)) for each in (image.size, size))
        shown = f"{image.name}: {written}, the picture has {real}"
        self.report.add(ImportIssue.UPRIGHT if is_turned else ImportIssue.SIZE, shown)

    def _inside(self, box: Box, size: tuple[int, int], where: str) -> Box | None:
        """The part of a box that lies on the picture, as whole numbers where it has them; None if it has no area."""
        box = _rounded(box)
        x1, y1, x2, y2 = box
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


def _rounded(box: Box) -> Box:
    """Without the last bits of a sum: 0.1 + 0.2 ends at 0.3."""
    x1, y1, x2, y2 = (
        int(value) if value == int(value) else value for value in (round(each, _DIGITS) for each in box)
    )
    return x1, y1, x2, y2


def _pixels(shares: Box, size: tuple[int, int]) -> Box:
    x1, y1, x2, y2 = shares
    return x1 * size[0], y1 * size[1], x2 * size[0], y2 * size[1]
