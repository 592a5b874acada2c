"""What may decide whether a sample's rollout comes in time; the selection audit compares who was trained by it."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping, Sized
from typing import Any

from PIL import Image, UnidentifiedImageError

from swift_stage2.records import Sample

_UNREADABLE = (
    UnidentifiedImageError,
    Image.DecompressionBombError,
    OSError,
    SyntaxError,
    ValueError,
    binascii.Error,
)


def num_objects(sample: Sample) -> int:
    """Objects in the ground truth; 1 of a task whose truth has no length."""
    return len(sample.truth) if isinstance(sample.truth, Sized) else 1


def num_pixels(request: Mapping[str, Any]) -> int | None:
    """Pixels of all images of an ``/infer/`` request before any resizing; only headers are decoded.

    None without images, or with one that is no picture: what becomes of such a request is the server's to say.
    """
    try:
        return sum(_pixels_of(image) for image in request.get("images") or ()) or None
    except _UNREADABLE:
        return None


def _pixels_of(image: str) -> int:
    with Image.open(io.BytesIO(base64.b64decode(image))) as picture:
        return picture.width * picture.height
