"""A turned picture is the same pixels to everybody: both channels, both kinds of servers, doctor and gallery.

The policy is that pixels are taken as they are stored. The reference is the same picture without the tag.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data.row_files import make_row
from PIL import Image, ImageOps
from real_model import boxes_of, make_encoder, make_template, sample_of

from swift_stage2.data.drawing import Drawing, gallery_image
from swift_stage2.data.picture import look_at
from swift_stage2.servers.image_opening import decode_image, without_orientation

SUFFIXES = ["jpg", "png", "webp"]
SIZE = (168, 112)


def _save(path: Path, orientation: int | None) -> str:
    pixels = np.zeros((SIZE[1], SIZE[0], 3), np.uint8)
    pixels[:, : SIZE[0] // 2] = (250, 10, 10)
    pixels[: SIZE[1] // 2] //= 2
    exif = Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    Image.fromarray(pixels).save(path, exif=exif.tobytes() if orientation else b"", quality=90)
    return str(path)


def _row(image: str) -> dict[str, Any]:
    return make_row(image, boxes=[[1, 2, 160, 100]])


def _same(left: Any, right: Any) -> bool:
    return left["input_ids"] == right["input_ids"] and torch.equal(
        left["pixel_values"], right["pixel_values"]
    )


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("orientation", [2, 6])
def test_everybody_takes_the_stored_pixels(tmp_path: Path, suffix: str, orientation: int) -> None:
    plain, turned = (
        _save(tmp_path / f"plain.{suffix}", None),
        _save(tmp_path / f"turned.{suffix}", orientation),
    )
    encoder, template = make_encoder(), make_template()

    one, other = (encoder.encode_prompt(sample_of(_row(image))) for image in (plain, turned))
    assert boxes_of(encoder, sample_of(_row(plain))) == boxes_of(encoder, sample_of(_row(turned)))
    assert _same(one.encoding, other.encoding), "channel B"
    assert _same(template.encode(_row(plain)), template.encode(_row(turned))), "channel A"

    template.set_mode("transformers")
    requests = [encoder.request(sample_of(_row(image))) for image in (plain, turned)]
    stock = [template.encode({**request}) for request in requests]
    assert _same(*stock), "a stock server"
    ours = [
        template.encode({**request, "images": [decode_image(image) for image in request["images"]]})
        for request in requests
    ]
    assert _same(*ours), "our server"

    picture = look_at(turned)
    assert (picture.width, picture.height) == SIZE, "the check before a run, and the doctor's"
    shown = [gallery_image(Drawing((), (), ()), path, SIZE) for path in (plain, turned)]
    assert shown[0] == shown[1], "the gallery"
    assert shown[0][0]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_server_that_turns_pictures_has_nothing_to_turn(tmp_path: Path, suffix: str) -> None:
    """vLLM turns what still carries the tag, on the way to its model; ms-swift's resized image would carry it on."""
    turned = _save(tmp_path / f"turned.{suffix}", 6)
    (sent,) = make_encoder().request(sample_of(_row(turned)))["images"]
    with Image.open(io.BytesIO(base64.b64decode(sent))) as image, Image.open(turned) as stored:
        seen = ImageOps.exif_transpose(image)
        assert seen.size == SIZE
        assert seen.convert("RGB").tobytes() == stored.convert("RGB").tobytes()


def test_a_picture_without_the_tag_is_sent_as_it_is(tmp_path: Path) -> None:
    for suffix in (*SUFFIXES, "bmp", "gif"):
        content = Path(_save(tmp_path / f"plain.{suffix}", None)).read_bytes()
        assert without_orientation(content) is content
    upright = Path(_save(tmp_path / "upright.jpg", 1)).read_bytes()
    assert without_orientation(upright) is upright
