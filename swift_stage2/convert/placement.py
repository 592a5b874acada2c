"""Puts a source's boxes on the picture that is there, as large as it is: every box inside, and with an area."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from swift_stage2.channel_b.image_files import UPRIGHT
from swift_stage2.convert.annotated_image import AnnotatedImage
from swift_stage2.convert.exact_numbers import Quad, exact, multiplied
from swift_stage2.convert.tally import Oddity, Tally
from swift_stage2.dataset.picture import UNREADABLE, DrawnOn, StoredPicture, look_at

_ZERO = exact(0)


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """A picture that a row can name, and its boxes in pixels of it; ``hidden``: labels of objects that were dropped."""

    path: str
    name: str
    objects: list[tuple[str, Quad]]
    hidden: set[str]


@dataclass(frozen=True, slots=True)
class ImagePlacer:
    """Where pictures lie, and on which picture boxes were drawn: as stored, or as a viewer turns it."""

    folder: Path
    boxes_on: DrawnOn
    tally: Tally

    def place(self, image: AnnotatedImage) -> PlacedImage | None:
        """None for an image that is not there, or of which no row can be made; all is told to the tally."""
        path = os.path.join(self.folder, image.name)
        picture = self._look_at(path, image.name)
        if picture is None:
            return None
        size = picture.upright_size if self.boxes_on is DrawnOn.UPRIGHT else (picture.width, picture.height)
        self._compare_sizes(image, picture, size)
        placed: list[tuple[str, Quad]] = []
        hidden: set[str] = set()
        for label, box in image.objects:
            if box is not None:
                box = self._inside(_pixels(box, size) if image.is_share else box, size, image.name)
            if box is None:
                hidden.add(label)
            else:
                placed.append((label, box))
        if not placed:
            self.tally.tell(Oddity.EMPTY, image.name)
        return PlacedImage(path, image.name, placed, hidden)

    def _look_at(self, path: str, name: str) -> StoredPicture | None:
        try:
            path.encode()
            picture = look_at(path)
        except UnicodeEncodeError:
            self.tally.tell(Oddity.NOT_UTF8, name)
        except FileNotFoundError:
            self.tally.tell(Oddity.ABSENT, name)
        except UNREADABLE:
            self.tally.tell(Oddity.UNREADABLE, name)
        else:
            if picture.orientation != UPRIGHT:
                self.tally.tell(Oddity.ROTATED, name)
            return picture
        return None

    def _compare_sizes(self, image: AnnotatedImage, picture: StoredPicture, size: tuple[int, int]) -> None:
        if image.size is None or image.size == size:
            return
        is_turned = picture.orientation != UPRIGHT and image.size == picture.upright_size
        self.tally.tell(Oddity.UPRIGHT if is_turned else Oddity.SIZE, image.name)

    def _inside(self, box: Quad, size: tuple[int, int], name: str) -> Quad | None:
        """The part of a box that lies on the picture; None if it has no area, as floats have it."""
        x1, y1, x2, y2 = box
        width, height = map(exact, size)
        inside = max(x1, _ZERO), max(y1, _ZERO), min(x2, width), min(y2, height)
        if _is_flat(box):
            self.tally.tell(Oddity.FLAT, name)
        elif _is_flat(inside):
            self.tally.tell(Oddity.OUTSIDE, name)
        else:
            if inside != box:
                self.tally.tell(Oddity.CLIPPED, name)
            return inside
        return None


def _is_flat(box: Quad) -> bool:
    x1, y1, x2, y2 = map(float, box)
    return x1 >= x2 or y1 >= y2


def _pixels(shares: Quad, size: tuple[int, int]) -> Quad:
    width, height = map(exact, size)
    x1, y1, x2, y2 = shares
    return multiplied(x1, width), multiplied(y1, height), multiplied(x2, width), multiplied(y2, height)
