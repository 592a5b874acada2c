"""What a file tells of an image without decoding it: its stored size, its EXIF orientation, whether it is whole.

Whole means that the file ends as its format ends; where it does not, the image is decoded and the decoder has the
say. Damage in the middle of a whole file shows only when everything is decoded (``decode``).
"""

from __future__ import annotations

import io
import os
import warnings
from dataclasses import dataclass
from typing import IO

from PIL import Image

from swift_stage2.channel_b.image_files import RASTER_FORMATS, orientation_of
from swift_stage2.records import find_image

UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning)
_TAIL_BYTES = 4096
_ENDS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}


@dataclass(frozen=True, slots=True)
class Picture:
    """Width and height as stored, before any rotation; ``orientation`` is 1 for an upright picture."""

    width: int
    height: int
    orientation: int

    @property
    def upright_size(self) -> tuple[int, int]:
        """Width and height as a viewer shows it."""
        turned = self.orientation >= 5
        return (self.height, self.width) if turned else (self.width, self.height)


def look_at(path: str | bytes, *, decode: bool = False) -> Picture:
    """Reads the header and the end of an image file, or of its content; with ``decode`` all of it.

    Raises:
        OSError, ValueError, SyntaxError, Image.DecompressionBombError: it is no image, or not all of it is there.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        with _opened(path) as file, Image.open(file, formats=RASTER_FORMATS) as image:
            width, height = image.size
            position = file.tell()
            tail = _tail(file)
            file.seek(position)
            # A PNG may carry the tag behind its pixels, and says so only once it is decoded.
            late_tag = image.format == "PNG" and b"eXIf" in tail
            if decode or late_tag or _ENDS.get(str(image.format), b"\0none") not in tail:
                image.load()
            return Picture(width, height, orientation_of(image))


def _opened(path: str | bytes) -> IO[bytes]:
    return io.BytesIO(path) if isinstance(path, bytes) else open(find_image(path), "rb")


def _tail(file: IO[bytes]) -> bytes:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _TAIL_BYTES))
    return file.read()
