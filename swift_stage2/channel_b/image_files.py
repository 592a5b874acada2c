"""Where the images of a row lie and which pixels they are: the one rule for who sends them and who looks at them.

Pixels are taken as they are stored. An EXIF orientation changes nothing here or in ms-swift, but some servers turn
pictures by it, so it is taken out of what they are sent.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

from PIL import ExifTags, Image

from swift_stage2.errors import SampleError
from swift_stage2.records import find_image
from swift_stage2.servers.image_opening import FORMATS, open_image
from swift_stage2.whole_file import read_regular

UPRIGHT = 1
_UNREADABLE = (Image.DecompressionBombError, OSError, SyntaxError, ValueError)
_TAGS = ("exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp")  # where Pillow looks for an orientation
_MARKS = (b"Exif", b"eXIf", b"exif", b"EXIF", b"tiff:Orientation")
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")


def orientation_of(image: Image.Image) -> int:
    """EXIF orientation 1 to 8; ``UPRIGHT`` where there is none that means anything. Decodes no pixels."""
    if image.format == "PNG" and not any(tag in image.info for tag in _TAGS):
        return UPRIGHT  # Pillow would decode it to look behind its pixels
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, UPRIGHT)
    except (OSError, ValueError, SyntaxError, KeyError):  # a damaged tag turns no picture
        return UPRIGHT
    return value if isinstance(value, int) and UPRIGHT <= value <= 8 else UPRIGHT


def without_orientation(content: bytes) -> bytes:
    """An image file whose pixels nobody will turn: ``content`` itself, or its stored pixels as a PNG without the tag.

    A file that is no readable image is passed on unchanged, and the server decides about it.
    """
    if not any(mark in content for mark in _MARKS):
        return content
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            if image.format == "PNG" and b"eXIf" in content:
                image.load()  # the tag may stand behind the pixels
            if orientation_of(image) == UPRIGHT:
                return content
            pixels = image.copy() if image.mode in _PNG_MODES else image.convert("RGB")
    except _UNREADABLE:
        return content
    for tag in _TAGS:
        pixels.info.pop(tag, None)
    buffer = io.BytesIO()
    pixels.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def image_as_base64(image: Any) -> str:
    """An image of a row, as a request carries it: ``image`` is a path, a mapping with one or with bytes, or a picture.

    Raises:
        SampleError: it cannot be read, or is none that a server of ours takes.
    """
    content = content_of(image)
    open_image(content)  # what no server of ours takes is told here, and sent to none
    return base64.b64encode(without_orientation(content)).decode("ascii")


def content_of(image: Any) -> bytes:
    """The file of a row's image, given as to ``image_as_base64``. Raises SampleError: it cannot be read."""
    if isinstance(image, Mapping):
        return image.get("bytes") or _read_image(str(image.get("path")))
    if isinstance(image, str):
        return _read_image(image)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def _read_image(path: str) -> bytes:
    path = find_image(path)
    try:
        return read_regular(path)
    except OSError as error:
        raise SampleError("an image must be a readable file", got=f"path={path}: {error.strerror}") from error
