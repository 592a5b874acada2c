"""The images of a data set: stored size, EXIF orientation and wholeness without decoding.

Whole means that the file ends as its format ends; where it does not, the image is decoded and the decoder has the
say. Damage in the middle of a whole file shows only when everything is decoded (``decode``).
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from PIL import Image, UnidentifiedImageError

from swift_stage2.servers.image_opening import FORMATS, orientation_of, refuse_deep_pixels
from swift_stage2.whole_file import find_image, open_regular

UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning)
TURN = "mogrify -auto-orient FILES"
"""ImageMagick's command that writes turned pictures upright."""
PLAIN_MODES = ("RGB", "L")
"""Of pixels that stay what they are when they are read as RGB."""
_TAIL_BYTES = 4096
_ENDS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}


@dataclass(frozen=True, slots=True)
class StoredPicture:
    """Width and height as stored, before any rotation; ``orientation`` is 1 for an upright picture.

    ``mode``: Pillow's, of the pixels; they are read as RGB, without what is transparent, whatever it is.
    """

    width: int
    height: int
    orientation: int
    mode: str = "RGB"

    @property
    def upright_size(self) -> tuple[int, int]:
        """Width and height as a viewer shows it."""
        turned = self.orientation >= 5
        return (self.height, self.width) if turned else (self.width, self.height)


def look_at(path: str | bytes, *, decode: bool = False) -> StoredPicture:
    """Reads the header and the end of an image file, or of its content; with ``decode`` all of it.

    Raises:
        OSError, ValueError, SyntaxError, Image.DecompressionBombError: it is no image of a format that is read, not all
            of it is there, or its pixels have more than 8 bits.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        with (
            io.BytesIO(path) if isinstance(path, bytes) else open_regular(find_image(path)) as file,
            _open_image(file) as image,
        ):
            refuse_deep_pixels(image)
            width, height = image.size
            position = file.tell()
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            tail = file.read()
            file.seek(position)
            # A PNG may carry the tag behind its pixels, and says so only once it is decoded.
            late_tag = image.format == "PNG" and b"eXIf" in tail
            if decode or late_tag or _ENDS.get(str(image.format), b"\0none") not in tail:
                image.load()
            return StoredPicture(width, height, orientation_of(image), image.mode)


def _open_image(file: BinaryIO) -> Image.Image:
    try:
        return Image.open(file, formats=FORMATS)
    except UnidentifiedImageError as error:
        raise ValueError(f"it is none of {', '.join(FORMATS)}, which are read") from error


def images_of(row: Mapping[str, Any]) -> list[Any]:
    """A row's images as it names them."""
    images = row.get("images") or []
    return images if isinstance(images, list) else [images]


def path_of(image: Any) -> Any:
    """The path that an entry of a row's ``images`` names, if it is one."""
    return image.get("path") if isinstance(image, Mapping) else image
