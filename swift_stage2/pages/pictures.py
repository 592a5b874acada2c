"""Images with boxes to page through, as data for the page's script, which puts every text in as text.

A path comes from a data set: it is opened as an image of a known raster format and as nothing else, only if it is a
regular file, and only if it is of a bounded size.
"""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Container, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from PIL import Image

from swift_stage2.servers.image_opening import FORMATS
from swift_stage2.whole_file import open_regular

GALLERY_KEY = "gallery"
MOST_SIDE = 384
"""Pixels of a thumbnail's longer side."""
_MOST_PIXELS = 100_000_000
_QUALITY = 70
DrawnBox = tuple[str | float, ...]


class UnreadableImage(Exception):
    """There is no picture; the message says why."""


class Filter(StrEnum):
    """A property to choose pictures by; several may hold, except the first."""

    ALL_MATCHED = "all matched"
    MISSED = "has missed"
    FALSE = "has false"
    NOTHING_FOUND = "nothing found"
    DROPPED = "dropped objects"


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One image with boxes. ``image`` numbers the gallery's thumbnails; None with ``trouble``, which says why not."""

    image: int | None
    trouble: str | None
    name: str
    facts: tuple[str, ...]
    fate: str
    space: tuple[int, int]
    boxes: tuple[DrawnBox, ...]
    """(a kind of ``Gallery.legend``; x1, y1, x2, y2 or x, y; label). Ground truth first, predictions lie on top."""
    outcomes: tuple[str, ...]
    """Of ``Gallery.filters``."""
    rollout: str
    target: str
    group: str | None = None
    """Heading of the pictures that belong together, which stand one after another; None of one by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gallery:
    pictures: tuple[Picture, ...]
    thumbnails: tuple[str, ...]
    """Data URIs."""
    num_matches: int
    """Of which the pictures are the first."""
    backward: str = "Newer"
    forward: str = "Older"
    texts: tuple[str, str] = ("Rollout", "Target")
    """Titles of a picture's two texts."""
    filters: tuple[str, ...] = tuple(map(str, Filter))
    legend: tuple[tuple[str, str], ...] = (
        ("truth", "ground truth, matched"),
        ("matched", "prediction, matched"),
        ("missed", "ground truth, missed"),
        ("false", "prediction, false"),
    )
    """Kinds of box, each a class of the style sheet, and what they mean."""

    def count(self, chosen: str) -> int:
        return sum(chosen in picture.outcomes for picture in self.pictures)


class Thumbnails:
    """The images of one gallery, each opened once."""

    def __init__(self) -> None:
        self._uris: list[str] = []
        self._seen: dict[str | None, tuple[int | None, str | None]] = {None: (None, "the image has no path")}

    def add(self, path: str | None) -> tuple[int | None, str | None]:
        """Its number, or None and why there is none: ``Picture.image`` and ``trouble``."""
        if path is not None and path not in self._seen:
            try:
                self._uris.append(thumbnail(path))
                self._seen[path] = len(self._uris) - 1, None
            except UnreadableImage as reason:
                self._seen[path] = None, str(reason)
        return self._seen[path]

    @property
    def uris(self) -> tuple[str, ...]:
        """Of all that could be opened."""
        return tuple(self._uris)


def filters_of(num_true: int, missed: Sized, false: Sized, num_dropped: int = 0) -> tuple[str, ...]:
    """All that hold; ``NOTHING_FOUND``: there was something and none of it was matched."""
    holds = {
        Filter.MISSED: len(missed),
        Filter.FALSE: len(false),
        Filter.NOTHING_FOUND: num_true and len(missed) == num_true,
        Filter.DROPPED: num_dropped,
    }
    return tuple(str(name) for name, held in holds.items() if held) or (str(Filter.ALL_MATCHED),)


def drawn_boxes(
    objects: Iterable[tuple[str, Sequence[float]]],
    alone: Container[int],
    without_partner: str,
    with_partner: str,
) -> Iterator[DrawnBox]:
    """(label, place) of objects as boxes of two kinds; ``alone`` are the numbers of those without a partner."""
    for index, (label, place) in enumerate(objects):
        yield (without_partner if index in alone else with_partner, *place, label)


def thumbnail(path: str) -> str:
    """A data URI of a WebP image of at most ``MOST_SIDE`` pixels a side.

    Raises:
        UnreadableImage: the file is absent, no image, damaged or too large.
    """
    try:
        if not Path(path).is_file():
            raise UnreadableImage("there is no such file here")
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with open_regular(path) as file, Image.open(file, formats=FORMATS) as image:
                return _encode(image)
    except UnreadableImage:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UnreadableImage("the image has too many pixels") from error
    except Exception as error:  # decoders of damaged files raise anything
        raise UnreadableImage(f"no image that can be read: {type(error).__name__}") from error


def open_within(image: Image.Image, most_side: int) -> Image.Image:
    """The opened image in RGB, of at most ``most_side`` pixels a side. Raises UnreadableImage: it is too large."""
    if image.width * image.height > min(_MOST_PIXELS, Image.MAX_IMAGE_PIXELS or _MOST_PIXELS):
        raise UnreadableImage(f"the image has too many pixels: {image.width} × {image.height}")
    image.draft("RGB", (most_side, most_side))
    small = image.convert("RGB")
    small.thumbnail((most_side, most_side))
    return small


def _encode(image: Image.Image) -> str:
    small, buffer = open_within(image, MOST_SIDE), io.BytesIO()
    small.save(buffer, "WEBP", quality=_QUALITY, icc_profile=None)  # a profile may be larger than the picture
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"
