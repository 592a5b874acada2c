"""Small data sets of other programs, drawn by code, and what ``import`` makes of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from swift_stage2.data import import_command
from swift_stage2.data.files import Rule
from swift_stage2.data.sources import ImportIssue
from swift_stage2.data.survey import survey

SIZE = (64, 48)
CATEGORIES = ({"id": 3, "name": "cat"}, {"id": 7, "name": "dog"})


def draw(path: Path, *, size: tuple[int, int] = SIZE, orientation: int | None = None) -> Path:
    """A picture, with an EXIF orientation where one is asked for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    exif = Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    Image.new("RGB", size, "navy").save(path, exif=exif.tobytes() if orientation else b"")
    return path


def annotation(number: int, image_id: Any = 1, **members: Any) -> dict[str, Any]:
    return {"id": number, "image_id": image_id, "category_id": 3, "bbox": [1, 2, 10, 20], **members}


def write_coco(
    folder: Path,
    annotations: Iterable[Any] = (),
    images: Iterable[Any] | None = None,
    categories: Sequence[Any] = CATEGORIES,
) -> Path:
    """One picture, ``a.png`` of id 1, unless others are given."""
    if images is None:
        draw(folder / "images" / "a.png")
        images = [{"id": 1, "file_name": "a.png", "width": SIZE[0], "height": SIZE[1]}]
    (folder / "images").mkdir(exist_ok=True)
    path = folder / "coco.json"
    content = {"info": {"year": 1}, "annotations": list(annotations), "images": list(images)}
    path.write_text(json.dumps(content | {"categories": list(categories)}), encoding="utf-8")
    return path


def write_yolo(folder: Path, labels: Mapping[str, str], classes: str = "cat\ndog\n") -> Path:
    """A picture for each label file."""
    root = folder / "labels"
    for name, text in labels.items():
        draw(folder / "images" / f"{name}.png")
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / f"{name}.txt").write_bytes(text.encode())
    (root / "classes.txt").write_text(classes, encoding="utf-8")
    return root


def thing(box: tuple[object, ...], *, label: str = "cat", more: str = "") -> str:
    edges = zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)
    return f"<object><name>{label}</name>{more}<bndbox>{''.join(f'<{e}>{v}</{e}>' for e, v in edges)}</bndbox></object>"


def write_voc(folder: Path, objects: str, picture: str = "a.png", filename: str = "a.png") -> Path:
    """One more file of XML, named as the picture is."""
    draw(folder / "images" / picture)
    root = folder / "xml"
    root.mkdir(exist_ok=True)
    size = f"<size><width>{SIZE[0]}</width><height>{SIZE[1]}</height></size>"
    text = f"<annotation><filename>{filename}</filename>{size}{objects}</annotation>"
    (root / f"{Path(picture).stem}.xml").write_text(text, encoding="utf-8")
    return root


@dataclass(frozen=True)
class Imported:
    """Rows by image name, and the lines that were printed."""

    rows: list[dict[str, Any]]
    told: str
    path: Path

    def of(self, name: str) -> list[tuple[str, list[float]]]:
        """Labels and boxes of an image's one row."""
        (row,) = [row for row in self.rows if row["images"][0].endswith("/" + name)]
        return list(zip(row["objects"]["ref"], row["objects"]["bbox"], strict=True))

    @property
    def names(self) -> list[str]:
        return [Path(row["images"][0]).name for row in self.rows]

    def counts(self) -> dict[ImportIssue, int]:
        """The summary's table: what was met, and how often."""
        cells = [[cell.strip() for cell in line.split("│")] for line in self.told.splitlines()]
        counts = {row[1]: int(row[2]) for row in cells if len(row) > 3 and row[2].isdecimal()}
        return {issue: counts[issue.found] for issue in ImportIssue if issue.found in counts}


class Importer:
    """Runs ``import``, reads what it wrote, and has ``data check`` look at it."""

    def __init__(
        self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.folder, self._capsys = folder, capsys
        monkeypatch.setenv("COLUMNS", "240")  # no cell of the table is folded
        # What other tests import may have put another mapping in the place of the one that rich has kept.
        monkeypatch.setattr(Console, "_environ", os.environ)

    def __call__(
        self,
        kind: str,
        source: Path,
        *options: str,
        advice: Mapping[Rule, int] | None = None,
        num_coordinates: int = 4,
    ) -> Imported:
        """``advice``: what the check has to say of the rows, which have no fault."""
        output = self.folder / "out" / "train.jsonl"
        argv = [
            kind,
            str(source),
            "--images",
            str(self.folder / "images"),
            "--output",
            str(output),
            "--force",
        ]
        assert import_command.main([*argv, *options]) == 0
        findings = survey([output], num_coordinates=num_coordinates)
        assert findings.num_faults == 0, findings.faults
        assert findings.counts == (advice or {})
        rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
        return Imported(rows, self._capsys.readouterr().out, output)
