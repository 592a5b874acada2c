"""Pictures of an evaluation's rows: what has which colour where, of boxes and of points, and what cannot be drawn."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from swift_stage2.data.drawing import Drawing, draw, gallery_image

Colour = tuple[int, int, int]
TRUTH, MATCHED, MISSED, FALSE = (0, 114, 178), (0, 158, 115), (184, 116, 0), (214, 39, 143)
WHITE = (255, 255, 255)
BOXES = Drawing(
    truth=(("car", (100.0, 100.0, 200.0, 200.0)), ("dog", (300.0, 100.0, 380.0, 160.0))),
    predicted=(("car", (110.0, 110.0, 210.0, 210.0)), ("cat", (20.0, 300.0, 80.0, 380.0))),
    pairs=((0, 0, 0.68),),
)


@pytest.fixture
def row(tmp_path: Path) -> dict[str, Any]:
    Image.new("RGB", (384, 384), "white").save(tmp_path / "white.png")
    return {"images": [str(tmp_path / "white.png")]}


def drawn(drawing: Drawing, row: dict[str, Any], size: tuple[int, int] = (384, 384)) -> Image.Image:
    return draw(drawing, row["images"][0], size)


def is_near(picture: Image.Image, place: tuple[int, int], colour: Colour) -> bool:
    """The line there may be a pixel off, and JPEG changes its colour a little."""
    x, y = place
    near = [picture.getpixel((x + dx, y + dy)) for dx in (-1, 0, 1) for dy in (-1, 0, 1)]
    return any(max(abs(a - b) for a, b in zip(each, colour, strict=True)) < 40 for each in near)  # type: ignore[arg-type]


def test_true_matched_missed_and_false_boxes_have_colours_of_their_own(row: dict[str, Any]) -> None:
    picture = drawn(BOXES, row)
    for place, colour in (
        ((100, 150), TRUTH), ((200, 130), TRUTH), ((210, 180), MATCHED), ((160, 210), MATCHED),
        ((300, 130), MISSED), ((380, 130), MISSED), ((20, 340), FALSE), ((60, 380), FALSE),
    ):  # fmt: skip
        assert is_near(picture, place, colour), (place, colour)
    for place in ((150, 150), (340, 130), (50, 340), (375, 375)):
        assert is_near(picture, place, WHITE), "nothing but outlines"
    assert picture.size == (384, 384)


def test_points_are_drawn_as_rings_and_crosses(row: dict[str, Any]) -> None:
    points = Drawing(
        (("car", (100.0, 100.0)), ("dog", (300.0, 100.0))),
        (("car", (200.0, 200.0)), ("cat", (300.0, 300.0))),
        ((0, 0, 0.4),),
    )
    picture = drawn(points, row)
    for place, colour in (
        ((100, 94), TRUTH),
        ((300, 94), MISSED),
        ((200, 200), MATCHED),
        ((300, 300), FALSE),
    ):
        assert is_near(picture, place, colour), (place, colour)
    assert is_near(picture, (100, 100), WHITE)


def test_whatever_a_model_says_is_drawn_inside_the_picture(row: dict[str, Any]) -> None:
    odd = (
        ("x" * 500, (0.0, 0.0, 384.0, 384.0)),
        ("狗\n\x1b[2J \u202e", (383.0, 383.0, 9e9, 9e9)),
        ("", (300.0, 300.0, 10.0, 10.0)),
        ("c", (-5.0, -5.0, -1.0, -1.0)),
    )
    picture = drawn(Drawing((), odd, ()), row)
    assert picture.size[0] == 384
    assert is_near(picture, (1, 200), FALSE)


def test_a_small_image_is_enlarged_and_a_large_one_reduced(tmp_path: Path) -> None:
    for name, size in (("small.png", (100, 50)), ("large.jpg", (2000, 1000))):
        Image.new("RGB", size, "white").save(tmp_path / name)
        box = tuple(share * size[axis % 2] for axis, share in enumerate((0.5, 0.2, 0.9, 0.8)))
        found = draw(Drawing((("car", box),), (), ()), str(tmp_path / name), size)
        width = {"small.png": 400, "large.jpg": 384}[name]
        assert found.width == width
        assert is_near(found, (width // 2, width // 4), MISSED)


def test_what_is_no_picture_is_one_line(
    tmp_path: Path, row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.png").write_text("<script>alert(1)</script>")
    (tmp_path / "vector.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    (tmp_path / "program.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    (tmp_path / "torn.png").write_bytes(Path(row["images"][0]).read_bytes()[:80])
    os.mkfifo(tmp_path / "pipe.png")  # opening it would wait for ever
    names = ["text.png", "vector.svg", "program.eps", "torn.png", "pipe.png", "absent.png"]
    for name in [*names, ".", "null\0byte", "x" * 9000]:
        image, trouble = gallery_image(BOXES, str(tmp_path / name), (9, 9))
        assert image == ""
        assert trouble
    for most in (384 * 384 - 1, 384 * 384 // 3):  # Pillow warns of the first and refuses the second
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", most)
        assert gallery_image(BOXES, row["images"][0], (9, 9))[0] == ""
