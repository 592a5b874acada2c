"""A picture's size and turn are told as they are stored, whatever carries the tag."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image, ImageOps
from row_files import make_image

from swift_stage2.data.picture import look_at


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_stored_size_is_told_with_the_upright_one(tmp_path: Path, orientation: int) -> None:
    for suffix in ("png", "jpg", "webp"):
        path = make_image(tmp_path / f"a.{suffix}", orientation=orientation)
        picture = look_at(path)
        assert (picture.width, picture.height, picture.orientation) == (40, 30, orientation)
        with Image.open(path) as stored:
            assert ImageOps.exif_transpose(stored).size == picture.upright_size


def test_a_tiff_is_turned_by_whoever_opens_it(tmp_path: Path) -> None:
    picture = look_at(make_image(tmp_path / "a.tif", orientation=6))
    assert (picture.width, picture.height, picture.orientation) == (30, 40, 1)


def test_a_damaged_tag_turns_nothing(tmp_path: Path) -> None:
    path = Path(make_image(tmp_path / "a.jpg", orientation=6))
    content = path.read_bytes()
    path.write_bytes(content.replace(b"Exif\0\0MM", b"Exif\0\0ZZ").replace(b"Exif\0\0II", b"Exif\0\0ZZ"))
    assert look_at(str(path)).orientation == 1
