"""Turns the images of a request into pictures. Paths and addresses are never opened."""

from __future__ import annotations

import base64
import binascii
import io
from typing import Any

from PIL import Image

from swift_stage2.errors import SampleError


def decode_image(data: Any) -> Image.Image:
    """A base64 image, bare or as a data URL, as RGB. Raises SampleError when it is none."""
    try:
        raw = base64.b64decode(str(data).rpartition(";base64,")[2], validate=True)
        image = Image.open(io.BytesIO(raw))
        image.load()
    except (binascii.Error, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise SampleError(f"an image must be base64 of an image file: {error}") from error
    return image if image.mode == "RGB" else image.convert("RGB")
