"""A folder of YOLO's label files as annotated images: one text file per picture, one object per line.

A line is ``class cx cy width height`` in shares of the picture, perhaps with a confidence or key points behind, or
``class x y x y x y …`` around a mask. A picture and its file have the same relative name, as Ultralytics has it:
``images/train/a.jpg`` and ``labels/train/a.txt``.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from swift_stage2.data.sources import (
    AnnotatedImage,
    AnnotatedObject,
    AnnotatedSet,
    ImageFolder,
    ImportIssue,
    ImportReport,
    LabelSpelling,
    files_below,
    numbers,
    read_text,
    stem_of,
    whole,
)
from swift_stage2.errors import DatasetError
from swift_stage2.records import Box

_CLASS_FILES = ("data.yaml", "data.yml", "dataset.yaml", "classes.txt", "obj.names")
_SLACK = 0.01  # beyond 0 and 1, of what a tool has rounded


def read_yolo(
    root: Path, report: ImportReport, folder: ImageFolder, *, classes: Path | None = None
) -> AnnotatedSet:
    """``root`` holds the label files, in the folders in which ``folder`` holds the pictures.

    Raises:
        DatasetError: no pictures, no label file of any of them, or no file that names the classes.
    """
    pictures = folder.by_stem
    found = files_below(root, (".txt",), "SOURCE")
    class_file = _find_classes(root, classes)
    names, num_key_points = _read_classes(class_file)
    spelling = LabelSpelling(report)
    labels = {number: spelling.spell(name, f"class {number}") for number, name in names.items()}
    if not all(labels.values()):
        raise DatasetError(
            "a file of classes must name every class", got=f"names={names} in {class_file}", remedy="mend it"
        )
    files: defaultdict[str, list[str]] = defaultdict(list)
    for name in found:
        if os.path.basename(name) not in _CLASS_FILES and Path(root, name) != classes:
            files[stem_of(name)].append(name)
    if files.keys().isdisjoint(pictures):
        picture = folder.names[0]
        raise DatasetError(
            f"SOURCE must hold a label file {root}/{stem_of(picture)}.txt for {folder.folder}/{picture}, or one "
            "for another picture",
            got="none",
            remedy="name the two folders from which names are the same",
        )
    reader = _YoloReader(root, report, labels, num_key_points)
    images = [
        image for stem, each in pictures.items() if (image := reader.read(stem, each, files.get(stem, ())))
    ]
    for stem in sorted(files.keys() - pictures.keys()):
        report.add(ImportIssue.NO_PICTURE, f"{root}/{files[stem][0]}: its picture")
    return AnnotatedSet(images, list(dict.fromkeys(labels.values())), class_file)


@dataclass(frozen=True, slots=True)
class _YoloReader:
    root: Path
    report: ImportReport
    labels: Mapping[int, str]
    num_key_points: int
    """Values of key points behind a box."""

    def read(self, stem: str, pictures: Sequence[str], files: Sequence[str]) -> AnnotatedImage | None:
        """The image of one name; None where several pictures or label files have it, or its file cannot be read."""
        objects: list[AnnotatedObject] = []
        if len(pictures) > 1:
            self.report.add(ImportIssue.SEVERAL_PICTURES, f"{self.root}/{stem}.txt: {', '.join(pictures)}")
            return None
        if len(files) > 1:
            self.report.add(ImportIssue.TWO_CLAIMS, f"{pictures[0]}: {', '.join(files)}")
            return None
        if not files:
            self.report.add(ImportIssue.NO_LABEL_FILE, pictures[0])
        for file in files:
            try:
                objects += self._objects(self.root / file)
            except (OSError, ValueError) as error:
                self.report.add(ImportIssue.BROKEN_FILE, f"{self.root / file}: {error}")
                return None
        return AnnotatedImage(name=pictures[0], objects=objects, is_share=True)

    def _objects(self, path: Path) -> Iterator[AnnotatedObject]:
        for place, line in enumerate(read_text(path).split("\n"), start=1):
            if not line.strip():
                continue
            where = f"{path}:{place}"
            self.report.num_annotations += 1
            first, *fields = re.split(r"[ \t]+", line.strip(" \t\r"))
            label = self.labels.get(-1 if (number := whole(first)) is None else number)
            found = _read_values(fields, self.num_key_points)
            if label is None:
                self.report.add(ImportIssue.NO_CLASS, f"{where}: {line[:40]}")
            elif isinstance(found, ImportIssue):
                self.report.add(found, f"{where}: {line[:80]}")
            else:
                box, is_mask = found
                if is_mask:
                    self.report.add(ImportIssue.MASK, where)
                yield AnnotatedObject(label, box, where)


def _read_values(fields: Sequence[str], num_key_points: int) -> tuple[Box, bool] | ImportIssue:
    """The box behind a line's class and whether it is drawn around a mask; or the issue for which there is none.

    The number of values decides, and whether they are shares, which all of a polygon's are.
    """
    values = numbers(fields)
    if values is None or len(values) < 4:
        return ImportIssue.NO_BOX
    box, behind = values[:4], values[4:]
    is_confidence = len(behind) == 1 and 0 <= behind[0] <= 1
    if not behind or is_confidence or (num_key_points and len(behind) == num_key_points):
        x, y, width, height = box
        around = x - width / 2, y - height / 2, x + width / 2, y + height / 2
        return (around, False) if _are_shares(box) else ImportIssue.NOT_SHARES
    # A track id, or whether each key point is seen, is a whole number, which a polygon's edge may be as well.
    flags = behind[2::3] if len(behind) % 3 == 0 else behind[1:] if len(behind) == 2 else []
    may_be_flags = bool(flags) and all(each == int(each) for each in flags)
    if len(values) % 2 or may_be_flags or not _are_shares(values):
        return ImportIssue.NOT_SHARES
    xs, ys = values[::2], values[1::2]
    return (min(xs), min(ys), max(xs), max(ys)), True


def _are_shares(values: Sequence[float]) -> bool:
    return all(-_SLACK <= value <= 1 + _SLACK for value in values)


class _TextLoader(yaml.BaseLoader):
    """All is text, and stands once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        found = super().construct_mapping(node, deep=True)
        if len(found) != len(node.value):
            raise yaml.YAMLError(f"a key is written twice near line {node.start_mark.line + 1}")
        return found


def _find_classes(root: Path, named: Path | None) -> Path:
    """The file of classes: the one that is ``named``, or the nearest. Raises DatasetError: there is none."""
    places = [folder / name for folder in (root, *root.absolute().parents[:2]) for name in _CLASS_FILES]
    found = named or next(filter(os.path.isfile, places), None)
    if found is None:
        raise DatasetError(
            "YOLO's label files hold numbers, and data.yaml or classes.txt names their classes",
            got=f"neither in {root} nor in the two folders above",
            remedy="name the file with --classes",
        )
    return found


def _read_classes(file: Path) -> tuple[Mapping[int, str], int]:
    """Names by number, and how many values key points have. Raises DatasetError: it names no classes, or no texts."""
    try:
        text = read_text(file)
        is_yaml = file.suffix in (".yaml", ".yml")
        content = yaml.load(text, _TextLoader) if is_yaml else {"names": text.rstrip().split("\n")}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        words = " ".join(str(error).split())
        raise DatasetError(
            "a file of classes must be UTF-8 text", got=f"{file}: {words}", remedy="mend it"
        ) from error
    content = content if isinstance(content, Mapping) else {}
    names, points = content.get("names"), numbers(content.get("kpt_shape"), 2)
    pairs = list(names.items() if isinstance(names, Mapping) else enumerate(names or ()))
    numbered = {whole(number): name for number, name in pairs}
    is_text = all(isinstance(name, str) and name.strip() for name in numbered.values())
    if not pairs or None in numbered or len(numbered) != len(pairs) or not is_text or isinstance(names, str):
        raise DatasetError(
            "a file of classes must name every class once, each by a text",
            got=f"names={str(names)[:120]} in {file}",
            remedy="mend it",
        )
    num_values = int(points[0] * points[1]) if points else 0
    return {number: str(name) for number, name in numbered.items() if number is not None}, num_values
