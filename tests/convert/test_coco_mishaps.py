"""COCO in, whole: a truth is written as COCO with mishaps, counted as they are made; truth and counts come back.

The truth is drawn shapes, and web pages that a browser shows.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from drawn_sources import Importer, write_coco
from PIL import Image

from swift_stage2.convert.tally import Oddity
from swift_stage2.dataset.fault import Rule
from swift_stage2.demo.grounding_dataset import write_dataset
from swift_stage2.demo.scenes import SceneKind, Split

Row = dict[str, Any]
# What happens to an object, whether it is a row's all the same, and whether only a look at the picture shows it.
OBJECT_MISHAPS: dict[Oddity, tuple[bool, bool]] = {
    Oddity.CROWD: (False, False),
    Oddity.MASK: (True, False),
    Oddity.NO_BOX: (False, False),
    Oddity.NO_CATEGORY: (False, False),
    Oddity.NO_IMAGE: (False, False),
    Oddity.ID_TWICE: (True, False),
    Oddity.REPEATED: (True, False),
    Oddity.CLIPPED: (True, True),
    Oddity.OUTSIDE: (False, True),
    Oddity.FLAT: (False, True),
}
# What happens to a picture, and whether it has a row all the same.
IMAGE_MISHAPS: dict[Oddity, bool] = {
    Oddity.ABSENT: False,
    Oddity.NOT_UTF8: False,
    Oddity.UNREADABLE: False,
    Oddity.TWO_FILES: False,
    Oddity.LISTED_TWICE: True,
    Oddity.ROTATED: True,
    Oddity.SIZE: True,
}


class MishapWriter:
    """Writes rows as a COCO file; ``counts`` and ``objects``, by image name, are what its reader must find."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._images_folder = folder / "images"
        self._images_folder.mkdir()
        self._chance = random.Random(seed)
        self.images: list[Row] = []
        self.annotations: list[Row] = []
        self.labels: dict[str, int] = {}
        self.counts = Counter[Oddity]()
        self.objects: dict[str, list[tuple[str, list[int]]]] = {}

    def add(self, row: Row) -> None:
        mishap = self._chance.choice([None, *IMAGE_MISHAPS])
        number = len(self.images)
        name = f"{number}.png" if mishap is not Oddity.NOT_UTF8 else os.fsdecode(b"caf\xe9-%d.png" % number)
        with Image.open(row["images"][0]) as opened:
            image = opened.convert("RGB")
        width, height = image.size
        exif = Image.Exif()
        if mishap is Oddity.ROTATED:
            exif[0x0112] = 6
        if mishap is not Oddity.ABSENT:
            image.save(self._images_folder / name, exif=exif)
        if mishap is Oddity.UNREADABLE:
            file = self._images_folder / name
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        if mishap is Oddity.SIZE:
            width *= 2
        entry = {"id": f"image {number}", "file_name": name, "width": width, "height": height}
        self.images.append(entry)
        keys = [entry["id"]]
        if mishap is Oddity.LISTED_TWICE:
            keys.append(f"again {number}")
            self.images.append({**entry, "id": keys[1]})
        if mishap is Oddity.TWO_FILES:
            self.images.append({**entry, "file_name": f"other {name}"})
            image.save(self._images_folder / f"other {name}")
        if mishap:
            self.counts[mishap] += 1
        has_row = mishap is None or IMAGE_MISHAPS[mishap]
        objects = list(zip(row["objects"]["ref"], row["objects"]["bbox"], strict=True))
        kept = [each for each in objects if self._annotate(*each, keys, image.size, is_looked_at=has_row)]
        if has_row:
            self.objects[name] = sorted(kept)
            self.counts[Oddity.EMPTY] += not kept

    def _annotate(
        self, label: str, box: list[int], image_keys: list[Any], size: tuple[int, int], *, is_looked_at: bool
    ) -> bool:
        """True if the object must be a row's."""
        x1, y1, x2, y2 = box
        x, y, width, height = x1, y1, x2 - x1, y2 - y1
        mishap = self._chance.choice([None, None, *OBJECT_MISHAPS])
        if (mishap is Oddity.CLIPPED and x2 != size[0]) or (
            mishap is Oddity.ID_TWICE and not self.annotations
        ):
            mishap = None
        key = len(self.annotations) + 1000
        category = self.labels.setdefault(label, 7 * len(self.labels) + 1)
        entry: Row = {"id": key, "image_id": self._chance.choice(image_keys), "category_id": category}
        entry["bbox"] = [x, y, width, height]
        changes: dict[Oddity | None, Row] = {
            Oddity.CROWD: {"iscrowd": 1},
            Oddity.MASK: {"bbox": None, "segmentation": [[x1, y1, x2, y1, x2, y2], [x1, y2, x2, y2, x1, y1]]},
            Oddity.NO_BOX: {"bbox": [x, y, width]},
            Oddity.NO_CATEGORY: {"category_id": 5},
            Oddity.NO_IMAGE: {"image_id": "nobody's"},
            Oddity.CLIPPED: {"bbox": [x, y, width + 9, height]},
            Oddity.OUTSIDE: {"bbox": [size[0] + 3, y, width, height]},
            Oddity.FLAT: {"bbox": [x, y, 0, height]},
        }
        self.annotations.append(entry | changes.get(mishap, {}))
        if mishap is Oddity.REPEATED:
            self.annotations.append(dict(entry))
        if mishap is Oddity.ID_TWICE:  # of one more object, which is there as well
            self.annotations.append({**entry, "image_id": "nobody's"})
            self.counts[Oddity.NO_IMAGE] += 1
        if mishap is None:
            return True
        stays, needs_picture = OBJECT_MISHAPS[mishap]
        self.counts[mishap] += is_looked_at or not needs_picture
        return stays


def check(rows: list[Row], folder: Path, run_import: Importer, seed: int) -> Counter[Oddity]:
    """Writes rows with mishaps, imports them, compares; returns the counts, of which a caller wants some of each."""
    writer = MishapWriter(folder, seed)
    for row in rows:
        writer.add(row)
    chance = random.Random(seed)
    chance.shuffle(writer.images)
    chance.shuffle(writer.annotations)
    categories = [{"id": key, "name": label} for label, key in writer.labels.items()]
    source = write_coco(folder, writer.annotations, writer.images, categories)
    rotated = writer.counts[Oddity.ROTATED]
    found = run_import(
        "coco", source, "--boxes-on", "stored", advice={Rule.ROTATED: rotated} if rotated else {}
    )
    assert found.counts() == {oddity.found: count for oddity, count in writer.counts.items() if count}
    assert {name: sorted(found.of(name)) for name in found.names} == writer.objects
    return writer.counts


def rows_of(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("seed", range(4))
def test_shapes_with_mishaps(tmp_path: Path, run_import: Importer, seed: int) -> None:
    rows = rows_of(write_dataset(tmp_path / "scenes", SceneKind.SHAPES, 60, Split.TRAIN, seed))
    (tmp_path / "coco").mkdir()
    for row in rows[::5]:  # some reach to the edge, where a box can be clipped and stay what it was
        row["objects"]["bbox"][0] = [*row["objects"]["bbox"][0][:2], 112, row["objects"]["bbox"][0][3]]
    run_import.folder = tmp_path / "coco"
    counts = check(rows, tmp_path / "coco", run_import, seed)
    assert set(counts) >= {*OBJECT_MISHAPS, *IMAGE_MISHAPS, Oddity.EMPTY} - {Oddity.CLIPPED}


LINES = "".join(
    f'<p>to <a href="#">a link</a> <button>button {number}</button> and <input></p>' for number in range(9)
)


@pytest.mark.browser
@pytest.mark.slow
def test_pages_with_mishaps(tmp_path: Path, run_import: Importer) -> None:
    """Links that the window's right edge cuts are clipped."""
    (tmp_path / "pages").mkdir()
    wide = f"<!DOCTYPE html><body style='width: 900px'><h1>heading</h1>{LINES}<a href='#'>{'long ' * 99}</a>"
    for number in range(3):
        (tmp_path / "pages" / f"{number}.html").write_text(wide)
    rows = run_import("pages", tmp_path / "pages", "--num", "12", "--sides", "200-400").rows
    (tmp_path / "coco").mkdir()
    run_import.folder = tmp_path / "coco"
    counts = check(rows, tmp_path / "coco", run_import, 0)
    assert set(counts) >= {*OBJECT_MISHAPS}
