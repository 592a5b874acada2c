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

from swift_stage2.convert.import_report import ImportIssue
from swift_stage2.dataset.fault import Rule
from swift_stage2.demo.grounding_dataset import write_dataset
from swift_stage2.demo.scenes import SceneKind, Split

Row = dict[str, Any]
# What happens to an object, whether it is a row's all the same, and whether only a look at the picture shows it.
OBJECT_MISHAPS: dict[ImportIssue, tuple[bool, bool]] = {
    ImportIssue.CROWD: (False, False),
    ImportIssue.MASK: (True, False),
    ImportIssue.NO_BOX: (False, False),
    ImportIssue.NO_CLASS: (False, False),
    ImportIssue.NO_IMAGE: (False, False),
    ImportIssue.ID_TWICE: (True, False),
    ImportIssue.REPEATED: (True, True),
    ImportIssue.CLIPPED: (True, True),
    ImportIssue.OUTSIDE: (False, True),
    ImportIssue.FLAT: (False, True),
}
# What happens to a picture, and whether it has a row all the same.
IMAGE_MISHAPS: dict[ImportIssue, bool] = {
    ImportIssue.NO_PICTURE: False,
    ImportIssue.NOT_UTF8: False,
    ImportIssue.UNREADABLE: False,
    ImportIssue.ID_OF_TWO: False,
    ImportIssue.LISTED_TWICE: True,
    ImportIssue.ROTATED: True,
    ImportIssue.SIZE: True,
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
        self.counts = Counter[ImportIssue]()
        self.objects: dict[str, list[tuple[str, list[int]]]] = {}

    def add(self, row: Row) -> None:
        mishap = self._chance.choice([None, *IMAGE_MISHAPS])
        number = len(self.images)
        name = (
            f"{number}.png" if mishap is not ImportIssue.NOT_UTF8 else os.fsdecode(b"caf\xe9-%d.png" % number)
        )
        with Image.open(row["images"][0]) as opened:
            image = opened.convert("RGB")
        width, height = image.size
        exif = Image.Exif()
        if mishap is ImportIssue.ROTATED:
            exif[0x0112] = 6
        if mishap is not ImportIssue.NO_PICTURE:
            image.save(self._images_folder / name, exif=exif)
        if mishap is ImportIssue.UNREADABLE:
            file = self._images_folder / name
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        if mishap is ImportIssue.SIZE:
            width *= 2
        entry = {"id": f"image {number}", "file_name": name, "width": width, "height": height}
        self.images.append(entry)
        keys = [entry["id"]]
        if mishap is ImportIssue.LISTED_TWICE:
            keys.append(f"again {number}")
            self.images.append({**entry, "id": keys[1]})
        if mishap is ImportIssue.ID_OF_TWO:
            self.images.append({**entry, "file_name": f"other {name}"})
            image.save(self._images_folder / f"other {name}")
        if mishap:
            self.counts[mishap] += 1
        has_row = mishap is None or IMAGE_MISHAPS[mishap]
        objects = list(zip(row["objects"]["ref"], row["objects"]["bbox"], strict=True))
        kept = [each for each in objects if self._annotate(*each, keys, image.size, is_looked_at=has_row)]
        if has_row:
            self.objects[name] = sorted(kept)
            self.counts[ImportIssue.EMPTY] += not kept

    def _annotate(
        self, label: str, box: list[int], image_keys: list[Any], size: tuple[int, int], *, is_looked_at: bool
    ) -> bool:
        """True if the object must be a row's."""
        x1, y1, x2, y2 = box
        x, y, width, height = x1, y1, x2 - x1, y2 - y1
        mishap = self._chance.choice([None, None, *OBJECT_MISHAPS])
        if (mishap is ImportIssue.CLIPPED and x2 != size[0]) or (
            mishap is ImportIssue.ID_TWICE and not self.annotations
        ):
            mishap = None
        key = len(self.annotations) + 1000
        category = self.labels.setdefault(label, 7 * len(self.labels) + 1)
        entry: Row = {"id": key, "image_id": self._chance.choice(image_keys), "category_id": category}
        entry["bbox"] = [x, y, width, height]
        changes: dict[ImportIssue | None, Row] = {
            ImportIssue.CROWD: {"iscrowd": 1},
            ImportIssue.MASK: {
                "bbox": None,
                "segmentation": [[x1, y1, x2, y1, x2, y2], [x1, y2, x2, y2, x1, y1]],
            },
            ImportIssue.NO_BOX: {"bbox": [x, y, width]},
            ImportIssue.NO_CLASS: {"category_id": 5},
            ImportIssue.NO_IMAGE: {"image_id": "nobody's"},
            ImportIssue.CLIPPED: {"bbox": [x, y, width + 9, height]},
            ImportIssue.OUTSIDE: {"bbox": [size[0] + 3, y, width, height]},
            ImportIssue.FLAT: {"bbox": [x, y, 0, height]},
        }
        self.annotations.append(entry | changes.get(mishap, {}))
        if mishap is ImportIssue.REPEATED:
            self.annotations.append(dict(entry))
        if mishap is ImportIssue.ID_TWICE:  # of one more object, which is there as well
            self.annotations.append({**entry, "bbox": [x, y, width, 0]})
            self.counts[ImportIssue.FLAT] += is_looked_at
        if mishap is None:
            return True
        stays, needs_picture = OBJECT_MISHAPS[mishap]
        self.counts[mishap] += is_looked_at or not needs_picture
        return stays


def check(rows: list[Row], folder: Path, run_import: Importer, seed: int) -> Counter[ImportIssue]:
    """Writes rows with mishaps, imports them, compares; returns the counts, of which a caller wants some of each."""
    writer = MishapWriter(folder, seed)
    for row in rows:
        writer.add(row)
    chance = random.Random(seed)
    chance.shuffle(writer.images)
    chance.shuffle(writer.annotations)
    categories = [{"id": key, "name": label} for label, key in writer.labels.items()]
    source = write_coco(folder, writer.annotations, writer.images, categories)
    rotated = writer.counts[ImportIssue.ROTATED]
    found = run_import(
        "coco", source, "--boxes-on", "stored", advice={Rule.ROTATED: rotated} if rotated else {}
    )
    assert found.counts() == {issue.found: count for issue, count in writer.counts.items() if count}
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
    assert set(counts) >= {*OBJECT_MISHAPS, *IMAGE_MISHAPS, ImportIssue.EMPTY} - {ImportIssue.CLIPPED}
