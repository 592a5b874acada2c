"""The gallery: what is drawn into a picture, what became of its sample, and files that are no picture."""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from run_files import RunFiles, picture

from swift_stage2.data.drawing import Drawing, gallery_image
from swift_stage2.report.content import Gallery
from swift_stage2.report.quality import RankMatch, gallery_of, matches_of
from swift_stage2.report.run_data import read_run


def matches(tmp_path: Path, *each: dict[str, Any]) -> list[RankMatch]:
    run = RunFiles(tmp_path)
    run.start()
    for number, values in enumerate(each):
        run.match(**{"sample": [0, number, number, 0], **values})
    run.end()
    return matches_of(read_run([tmp_path]).ranks)


def gallery(tmp_path: Path, *each: dict[str, Any], size: int = 200) -> Gallery:
    return gallery_of(matches(tmp_path, *each), size)


def test_the_newest_come_first_and_no_more_than_asked_for(tmp_path: Path) -> None:
    found = gallery(tmp_path, *({"rollout": str(number)} for number in range(9)), size=3)
    assert [dict(shown.texts)["Rollout"] for shown in found.pictures] == ["8", "7", "6"]
    assert found.told == "3 of 9 matches, the newest first."
    assert gallery_of(matches(tmp_path), 0).pictures == ()


def image_of(uri: str) -> Image.Image:
    head, _, data = uri.partition(",")
    assert head == "data:image/webp;base64"
    return Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")


def test_a_picture_is_small_and_has_its_boxes(tmp_path: Path) -> None:
    path = picture(tmp_path / "big.png", (1200, 600))
    boxes = {"truth": [[200, 100, 1000, 500]], "predicted": [[10, 10, 60, 60]], "pairs": []}
    (shown,) = gallery(tmp_path, {"images": [path, path], "space": [1200, 600], **boxes}).pictures
    image = image_of(shown.image)
    assert image.width == 384
    assert image.height < 240, "the picture and its legend"
    assert "first of 2 images" in shown.facts
    red, green, blue = image.getpixel((200 * 384 // 1200 + 1, 96))  # type: ignore[misc]
    assert red > green > blue, "the left line of the missed object"
    assert len({*image.getpixel((20, 96))}) == 1, "the grey picture beside it"  # type: ignore[misc]


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "bmp", "gif", "tiff", "ppm"])
def test_every_raster_format_is_read(tmp_path: Path, suffix: str) -> None:
    (shown,) = gallery(tmp_path, {"images": [picture(tmp_path / f"image.{suffix}")]}).pictures
    assert shown.image.startswith("data:image/webp")


def test_what_is_no_picture_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("<script>alert(1)</script>")
    (tmp_path / "vector.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    (tmp_path / "program.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    whole = Path(picture(tmp_path / "whole.png"))
    (tmp_path / "torn.png").write_bytes(whole.read_bytes()[:80])
    os.mkfifo(tmp_path / "pipe.png")  # opening it would wait for ever
    names = ["text.png", "vector.svg", "program.eps", "torn.png", "pipe.png", "absent.png"]
    for name in [*names, ".", "null\0byte", "x" * 9000]:
        image, trouble = gallery_image(Drawing((), (), ()), str(tmp_path / name), (9, 9))
        assert image == ""
        assert trouble
    (shown,) = gallery(tmp_path, {"images": [None]}).pictures
    assert shown.trouble == "the image has no path"


def test_an_image_with_too_many_pixels_is_never_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = picture(tmp_path / "image.png")
    for most in (112 * 112 - 1, 112 * 112 // 3):  # Pillow warns of the first and refuses the second
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", most)
        image, trouble = gallery_image(Drawing((), (), ()), path, (9, 9))
        assert image == ""
        assert trouble


def test_a_picture_of_an_evaluation_was_never_trained(tmp_path: Path) -> None:
    (shown,) = gallery(tmp_path, {"purpose": "evaluation", "sample": [2**31 - 1, 2, 7, 0]}).pictures
    assert shown.fate == "evaluation, never trained"
    assert shown.facts[0] == "row 7 of the validation set, rank 0"
