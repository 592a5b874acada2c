"""One row as a picture: its image, true and predicted objects, and how close those of a pair are.

Galleries of HTML pages hold it as a data URI. A path comes from a data set: it is opened as an
image of a known raster format and as nothing else, only if it is a regular file of a bounded size.
"""

from __future__ import annotations

import base64
import io
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from PIL import Image, ImageDraw, ImageFont
from pydantic import FiniteFloat

from swift_stage2.errors import SampleError
from swift_stage2.servers.image_opening import FORMATS, content_of

_SIDE, _QUALITY = 384, 60
"""Pixels of a picture's longer side, and WebP's quality."""
_LEAST_SIDE = 320  # smaller images are enlarged, so that labels can be read
_TRUTH, _MATCHED, _MISSED, _FALSE = "#0072b2", "#009e73", "#b87400", "#d6278f"
_TEXT_PIXELS, _LINE_PIXELS, _RADIUS = 13, 18, 6
_MOST_CHARACTERS = 24  # of a label
_MOST_PIXELS = 100_000_000
# Pillow's own font knows Latin letters. These are looked for where the system keeps fonts.
_OTHER_FONTS = (
    "NotoSansCJK-Regular.ttc",
    "wqy-zenhei.ttc",
    "wqy-microhei.ttc",
    "DroidSansFallback.ttf",
    "DejaVuSans.ttf",
)
_Place = tuple[FiniteFloat, ...]


@dataclass(frozen=True, slots=True)
class Drawing:
    """Labels and places (x1, y1, x2, y2 of a box, x, y of a point) in pixels of the stored image."""

    truth: tuple[tuple[str, _Place], ...]
    predicted: tuple[tuple[str, _Place], ...]
    pairs: tuple[tuple[int, int, float], ...]
    """Prediction, truth, IoU or closeness."""


def gallery_image(drawing: Drawing, path: str, space: tuple[int, int] | None = None) -> tuple[str, str]:
    """A data URI and nothing, or nothing and why the image cannot be read; ``space`` as ``draw`` takes it."""
    if not path:
        return "", "the image has no path"
    try:
        canvas = draw(drawing, path, space)
    except SampleError as reason:
        return "", str(reason)
    except Exception as error:  # decoders of damaged files raise anything
        return "", f"no image that can be read: {type(error).__name__}"
    buffer = io.BytesIO()
    canvas.save(buffer, "WEBP", quality=_QUALITY)
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}", ""


def draw(drawing: Drawing, path: str, space: tuple[int, int] | None = None) -> Image.Image:
    """The picture: true objects blue, or orange if missed; predicted ones green with their closeness, or pink if false.

    ``space``: width and height that places are measured in; None is the stored image's own.

    Raises:
        SampleError, OSError and whatever else decoders raise: the image cannot be read.
    """
    picture, size = _opened(path)
    width, height = space or size
    if (factor := math.ceil(_LEAST_SIDE / max(picture.size))) > 1:
        picture = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    pen = _Pen(ImageDraw.Draw(picture), (picture.width / width, picture.height / height), picture.size)
    close = {prediction: value for prediction, _, value in drawing.pairs}
    found = {truth for _, truth, _ in drawing.pairs}
    for number, (label, place) in enumerate(drawing.truth):
        pen.mark(place, _cut(label), _TRUTH if number in found else _MISSED, is_true=True)
    for number, (label, place) in enumerate(drawing.predicted):
        text = f"{_cut(label)} {close[number]:.2f}" if number in close else _cut(label)
        pen.mark(place, text, _MATCHED if number in close else _FALSE, is_true=False)
    pen.write_labels()
    return picture


def _opened(path: str) -> tuple[Image.Image, tuple[int, int]]:
    """The image in RGB, of at most ``_SIDE`` pixels a side, and its stored size."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        with Image.open(io.BytesIO(content_of(path)), formats=FORMATS) as opened:
            if opened.width * opened.height > min(_MOST_PIXELS, Image.MAX_IMAGE_PIXELS or _MOST_PIXELS):
                raise SampleError(f"the image has too many pixels: {opened.width} × {opened.height}")
            size = opened.size
            opened.draft("RGB", (_SIDE, _SIDE))
            small = opened.convert("RGB")
    small.thumbnail((_SIDE, _SIDE))
    return small, size


@dataclass(frozen=True, slots=True)
class _Pen:
    canvas: ImageDraw.ImageDraw
    scale: tuple[float, float]
    size: tuple[int, int]
    labels: list[tuple[float, float, str, str]] = field(default_factory=list)
    """x, y, text and colour."""

    def mark(self, place: Sequence[float], label: str, colour: str, *, is_true: bool) -> None:
        """A box or a point. Labels of predictions stand above it, those of the truth below, both inside the picture."""
        corners = [
            min(max(value * self.scale[axis % 2], 0.0), self.size[axis % 2] - 1.0)
            for axis, value in enumerate(place)
        ]
        if len(corners) == 4:
            x1, y1, x2, y2 = corners
            self.canvas.rectangle(
                (x1, y1, max(x1, x2), max(y1, y2)), outline=colour, width=3 if is_true else 2
            )
        else:
            x1, y1, x2, y2 = (corners[axis] + way * _RADIUS for way in (-1, 1) for axis in (0, 1))
            if is_true:
                self.canvas.ellipse((x1, y1, x2, y2), outline=colour, width=3)
            else:
                self.canvas.line((x1, y1, x2, y2), fill=colour, width=2)
                self.canvas.line((x1, y2, x2, y1), fill=colour, width=2)
        above = y1 - _LINE_PIXELS
        if is_true or above < 0:
            above = y2 if is_true or len(corners) == 2 else y1
        self.labels.append((x1, above, label, colour))

    def write_labels(self) -> None:
        """Last, so that no line crosses them."""
        for x, y, label, colour in self.labels:
            width = self.canvas.textlength(label, _font(label)) + 4
            x = min(max(x, 0.0), max(0.0, self.size[0] - width))
            y = min(max(y, 0.0), max(0.0, self.size[1] - _LINE_PIXELS))
            self.canvas.rectangle((x, y, x + width, y + _LINE_PIXELS - 2), fill=colour)
            self.canvas.text((x + 2, y), label, "white", _font(label))


def _cut(label: str) -> str:
    line = " ".join(label.split())
    return line if len(line) <= _MOST_CHARACTERS else f"{line[: _MOST_CHARACTERS - 1]}…"


def _font(text: str) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return _load_font(all(ord(letter) < 256 or letter == "…" for letter in text))


@lru_cache(2)
def _load_font(is_latin: bool) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    for name in () if is_latin else _OTHER_FONTS:
        try:
            return ImageFont.truetype(name, _TEXT_PIXELS)
        except OSError:
            continue
    return ImageFont.load_default(_TEXT_PIXELS)
