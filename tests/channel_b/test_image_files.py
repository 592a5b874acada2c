"""Pixels of a request: of all its images as they are, or not known."""

from __future__ import annotations

import base64
import io

import pytest
from PIL import Image

from swift_stage2.channel_b.image_files import num_pixels


def _picture(width: int, height: int, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, format=kind)
    return buffer.getvalue()


def _request(*images: bytes) -> dict[str, object]:
    return {"messages": [], "images": [base64.b64encode(image).decode() for image in images]}


def test_the_pixels_of_all_images_are_summed() -> None:
    assert num_pixels(_request(_picture(30, 20), _picture(7, 5, "JPEG"))) == 635


def test_a_picture_that_ends_early_still_has_its_size() -> None:
    assert num_pixels(_request(_picture(30, 20)[:-20])) == 600


@pytest.mark.parametrize("images", [(), (b"no picture",), (b"",), (_picture(2, 2), _picture(2, 2)[:10])])
def test_pixels_that_cannot_be_known_are_none(images: tuple[bytes, ...]) -> None:
    assert num_pixels(_request(*images)) is None


def test_what_is_no_base64_is_none() -> None:
    assert num_pixels({"images": ["a"]}) is None
