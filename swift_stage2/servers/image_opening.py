"""Opens the images of a request: base64 only, known formats only. Reads no file and no host.

Opening reads the header alone, decoding the pixels, too. Shared by learner, rollout server and merger.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
import struct

from PIL import Image, UnidentifiedImageError

from swift_stage2.errors import SampleError

# Decoders that run inside this process. Others start programs (EPS: Ghostscript) or are hardly ever used.
FORMATS = ("PNG", "JPEG", "WEBP", "AVIF", "BMP", "GIF", "TIFF", "JPEG2000", "PPM")
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
