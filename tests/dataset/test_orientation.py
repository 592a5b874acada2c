"""After ``--apply-exif`` no tag decides what a box means: the box shows the same pixels as before, on any viewer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from row_files import make_image, make_row, write_rows

from swift_stage2.dataset.picture import look_at, write_upright
from swift_stage2.dataset.survey import survey
from swift_stage2.errors import DatasetError, UserError

BOX = (3, 5, 21, 11)
WHITE = 255


def _marked_image(path: Path, orientation: int) -> str:
    """Black, but for the box as stored."""
    pixels = np.zeros((30, 40, 3), np.uint8)
    pixels[BOX[1] : BOX[3], BOX[0] : BOX[2]] = WHITE
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(path, exif=exif.tobytes(), quality=100, subsampling=0)
    return str(path)


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.open(encoding="utf-8")]


def _white_box(image: Image.Image) -> tuple[int, int, int, int] | None:
    return image.convert("L").point(lambda value: WHITE * (value > WHITE // 2)).getbbox()


@pytest.mark.parametrize("orientation", range(2, 9))
@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_boxes_on_the_upright_picture_stay(tmp_path: Path, orientation: int, suffix: str) -> None:
    image = _marked_image(tmp_path / f"a.{suffix}", orientation)
    with Image.open(image) as stored:
        upright = ImageOps.exif_transpose(stored)
        seen = _white_box(upright)
    assert seen is not None
    source = write_rows(tmp_path / "rows.jsonl", [make_row(image, boxes=[seen])])
    write_upright(source, tmp_path / "new.jsonl")
    (row,) = _rows(tmp_path / "new.jsonl")
    assert tuple(row["objects"]["bbox"][0]) == seen
    with Image.open(row["images"][0]) as written:
        assert written.getexif().get(0x0112) is None
        assert written.tobytes() == upright.convert("RGB").tobytes()
    assert survey([tmp_path / "new.jsonl"]).counts == {}


def test_images_are_named_as_the_rows_name_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [make_row(make_image(path, orientation=6)) for path in (Path("a.jpg"), tmp_path / "b.jpg")]
    write_upright(write_rows(Path("rows.jsonl"), rows), Path("new.jsonl"))
    (relative,), (absolute,) = (row["images"] for row in _rows(Path("new.jsonl")))
    assert relative == "new-images/000000-a.png"
    assert absolute == str(tmp_path / "new-images" / "000001-b.png")
    assert Path(relative).is_file()


def test_lines_without_a_turned_image_are_copied_byte_by_byte(tmp_path: Path) -> None:
    image = make_image(tmp_path / "a.png")
    odd = [
        "{",
        "",
        '{"images":   ["' + image + '"], "é": "\\u00e9"}',
        "[1]",
        '{"images": ["/nowhere.png", 7]}',
    ]
    source = write_rows(tmp_path / "rows.jsonl", odd)
    done = write_upright(source, tmp_path / "new.jsonl")
    assert (tmp_path / "new.jsonl").read_bytes() == source.read_bytes()
    assert done == (0, 0)
    assert not (tmp_path / "new-images").exists()


def test_nothing_that_exists_is_written_over(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [make_row(make_image(tmp_path / "a.jpg", orientation=3))])
    before = source.read_bytes()
    with pytest.raises(UserError, match=r"which exists; name another one"):
        write_upright(source, source)
    (tmp_path / "new-images").mkdir()
    with pytest.raises(UserError, match=r"new-images, which exists"):
        write_upright(source, tmp_path / "new.jsonl")
    assert source.read_bytes() == before
    with pytest.raises(DatasetError, match="must be a readable UTF-8 file"):
        write_upright(tmp_path / "absent.jsonl", tmp_path / "other.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jpg", "new-images", "rows.jsonl"]


def test_an_image_that_is_damaged_in_its_middle_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    whole, damaged = (make_image(tmp_path / name, orientation=3) for name in ("a.jpg", "b.jpg"))
    content = bytearray(Path(damaged).read_bytes())
    start = content.index(b"\xff\xc4") + 5  # the first Huffman table's counts
    content[start : start + 16] = b"\xff" * 16
    Path(damaged).write_bytes(content)
    assert look_at(damaged) == look_at(whole)
    source = write_rows(tmp_path / "rows.jsonl", [make_row(whole), make_row(damaged)])
    with pytest.raises(DatasetError, match=r"an image must be whole, got .*/b\.jpg: .*; replace the file"):
        write_upright(source, tmp_path / "new.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jpg", "b.jpg", "rows.jsonl"]


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
