"""Opens images: what a request may bring (base64 of known formats, no file, no host), and what a row names.

Opening reads the header alone, decoding the pixels, too. Pixels are taken as they are stored. An EXIF orientation
changes nothing here or in ms-swift, but some servers turn pictures by it, so it is taken out of what they are sent.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
import struct
from collections.abc import Mapping
from typing import Any

from PIL import ExifTags, Image, UnidentifiedImageError

from swift_stage2.errors import SampleError
from swift_stage2.whole_file import find_image, read_regular

# Decoders that run inside this process. Others start programs (EPS: Ghostscript) or are hardly ever used.
FORMATS = ("PNG", "JPEG", "WEBP", "AVIF", "BMP", "GIF", "TIFF", "JPEG2000", "PPM")
UPRIGHT = 1
_TAGS = ("exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp")  # where Pillow looks for an orientation
_MARKS = (b"Exif", b"eXIf", b"exif", b"EXIF", b"tiff:Orientation")
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
_DATA_URL = re.compile(r"data:[\w.+-]+/[\w.+-]+;base64,")
# Pillow raises these on files that are broken on purpose: decoders index, unpack and divide by what they read.
_UNREADABLE = (
    OSError,
    ValueError,
    SyntaxError,
    TypeError,
    LookupError,
    ArithmeticError,
    RuntimeError,
    struct.error,
    Image.DecompressionBombError,
)


def decode_base64(data: str) -> bytes:
    """The bytes of base64 text, bare or as a data URL. Raises SampleError for anything else, paths too."""
    prefix = _DATA_URL.match(data)
    try:
        return base64.b64decode(data[prefix.end() :] if prefix else data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise SampleError(f"an image must be base64 of an image file: {error}") from error


def refuse_deep_pixels(image: Image.Image) -> None:
    """The one rule of learner, servers, evaluation, import and data check for pixels that 8 bits do not hold.

    Raises:
        ValueError: they are 16 or 32 bits or floats, which Pillow would cut at 255 in making RGB of them.
    """
    if image.mode.startswith(("I", "F")):
        raise ValueError(
            f"its pixels are {image.mode} (16 or 32 bits or floats), which would be cut at 255, to white all over "
            "mostly; scale it to 8 bits"
        )


def open_image(content: bytes) -> Image.Image:
    """An image whose header has been read. Raises SampleError: none of ``FORMATS``, broken, or of deep pixels."""
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except _UNREADABLE as error:
        got = "none of them" if isinstance(error, UnidentifiedImageError) else _first_line(error)
        raise SampleError(f"an image must be {', '.join(FORMATS[:-1])} or {FORMATS[-1]}", got=got) from error
    try:
        refuse_deep_pixels(image)
    except ValueError as error:
        raise SampleError(f"an image must have 8 bits for each colour: {error}") from error
    return image


def decode_image(data: str) -> Image.Image:
    """A whole base64 image as RGB; its size was checked when it came. Raises SampleError."""
    image = open_image(decode_base64(data))
    try:
        return image if image.mode == "RGB" else image.convert("RGB")
    except _UNREADABLE as error:
        raise SampleError(f"an image must be whole: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


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
