"""Pictures of an evaluation's rows: what has which colour where, of boxes and of points, and what cannot be drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from swift_stage2.data.drawing import Drawing, UnreadableImage, draw
from swift_stage2.errors import SampleError

Colour = tuple[int, int, int]
TRUTH, MATCHED, MISSED, FALSE = (0, 114, 178), (0, 158, 115), (184, 116, 0), (214, 39, 143)
WHITE = (255, 255, 255)
MOST_SIDE = 640
BOXES = Drawing(
    truth=(("car", (100.0, 100.0, 200.0, 200.0)), ("dog", (300.0, 100.0, 380.0, 160.0))),
    predicted=(("car", (110.0, 110.0, 210.0, 210.0)), ("cat", (20.0, 300.0, 80.0, 380.0))),
    pairs=((0, 0, 0.68),),
)


@pytest.fixture
def row(tmp_path: Path) -> dict[str, Any]:
    Image.new("RGB", (400, 400), "white").save(tmp_path / "white.png")
    return {"images": [str(tmp_path / "white.png")]}


def drawn(drawing: Drawing, row: dict[str, Any], size: tuple[int, int] = (400, 400)) -> Image.Image:
    images = row["images"]
    return draw(drawing, images[0] if isinstance(images, list) else images, size, "IoU", MOST_SIDE)


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
    for place in ((150, 150), (340, 130), (50, 340), (390, 390)):
        assert is_near(picture, place, WHITE), "nothing but outlines"
    assert picture.size[0] == 400
    assert picture.size[1] > 400, "the legend is below the picture"


def test_labels_stand_on_their_colour_above_predictions_and_below_the_truth(row: dict[str, Any]) -> None:
    picture = drawn(BOXES, row)
    for place, colour in (
        ((111, 95), MATCHED),
        ((101, 204), TRUTH),
        ((21, 285), FALSE),
        ((301, 164), MISSED),
    ):
        assert is_near(picture, place, colour), (place, colour)


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


def test_small_images_are_enlarged_and_large_ones_reduced(tmp_path: Path) -> None:
    Image.new("RGB", (100, 50), "white").save(tmp_path / "small.png")
    Image.new("RGB", (2000, 1000), "white").save(tmp_path / "large.jpg")
    box = Drawing((("car", (50.0, 10.0, 90.0, 40.0)),), (), ())
    small = drawn(box, {"images": [str(tmp_path / "small.png")]}, (100, 50))
    assert small.size[0] == 400
    assert is_near(small, (200, 100), MISSED)
    large = Drawing((("car", (1000.0, 200.0, 1800.0, 800.0)),), (), ())
    picture = drawn(
        large, {"images": {"bytes": (tmp_path / "large.jpg").read_bytes(), "path": None}}, (2000, 1000)
    )
    assert picture.size[0] == MOST_SIDE
    assert is_near(picture, (MOST_SIDE // 2, 160), MISSED)


def test_whatever_a_model_says_is_drawn_inside_the_picture(row: dict[str, Any]) -> None:
    odd = (
        ("x" * 500, (0.0, 0.0, 400.0, 400.0)),
        ("狗\n\x1b[2J \u202e", (399.0, 399.0, 9e9, 9e9)),
        ("", (300.0, 300.0, 10.0, 10.0)),
        ("c", (-5.0, -5.0, -1.0, -1.0)),
    )
    picture = drawn(Drawing((), odd, ()), row)
    assert picture.size[0] == 400
    assert is_near(picture, (1, 200), FALSE)


def test_what_is_no_image_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: dict[str, Any]
) -> None:
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(OSError, match="cannot identify image"):
        drawn(BOXES, {"images": [str(tmp_path / "text.png")]})
    with pytest.raises(SampleError, match=r"absent\.png"):
        drawn(BOXES, {"images": [str(tmp_path / "absent.png")]})
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 399 * 400)
    with pytest.raises(UnreadableImage, match="too many pixels"):
        drawn(BOXES, row)
