"""Turns an image file into a small picture that a page can hold, or into one line that says why not.

A path comes from a data set: it is opened as an image of a known raster format and as nothing else, only if it is a
regular file, and only if it is of a bounded size.
"""

from __future__ import annotations

import base64
import io
import warnings
from pathlib import Path

from PIL import Image

MOST_SIDE = 384
"""Pixels of the longer side."""
_MOST_PIXELS = 100_000_000
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # none that runs another program
_QUALITY = 70


class UnreadableImage(Exception):
    """There is no picture; the message says why."""


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
            with Image.open(path, formats=_FORMATS) as image:
                return _encode(image)
    except UnreadableImage:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UnreadableImage("the image has too many pixels") from error
    except Exception as error:  # decoders of damaged files raise anything
        raise UnreadableImage(f"no image that can be read: {type(error).__name__}") from error


def _encode(image: Image.Image) -> str:
    if image.width * image.height > min(_MOST_PIXELS, Image.MAX_IMAGE_PIXELS or _MOST_PIXELS):
        raise UnreadableImage(f"the image has too many pixels: {image.width} × {image.height}")
    image.draft("RGB", (MOST_SIDE, MOST_SIDE))
    small = image.convert("RGB")
    small.thumbnail((MOST_SIDE, MOST_SIDE))
    buffer = io.BytesIO()
    small.save(buffer, "WEBP", quality=_QUALITY, icc_profile=None)  # a profile may be larger than the picture
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"
