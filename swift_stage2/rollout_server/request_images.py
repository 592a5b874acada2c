"""Turns the images of a request into pictures. Paths and addresses are never opened."""

from __future__ import annotations

from PIL import Image

from swift_stage2.servers.image_opening import decode_base64, load_image


def decode_image(data: str) -> Image.Image:
    """A base64 image, bare or as a data URL, as RGB; its size was checked when it came. Raises SampleError."""
    return load_image(decode_base64(data))
