"""A folder of YOLO's label files as annotated images: one text file per picture, one object per line.

A line is ``class cx cy width height`` in shares of the picture, perhaps with a confidence, a track id or key points
behind, or ``class x y x y x y …`` around a mask. A picture and its file have the same relative name, as Ultralytics
has it: ``images/train/a.jpg`` and ``labels/train/a.txt``.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from swift_stage2.data.import_report import ImportIssue, ImportReport
from swift_stage2.data.sources import (
    AnnotatedImage,
    AnnotatedObject,
    ImageFolder,
    LabelSpelling,
    files_below,
    lines_of,
    numbers,
    read_text,
    stem_of,
    whole,
)
from swift_stage2.errors import DatasetError
from swift_stage2.records import Box

_CLASS_FILES = ("data.yaml", "data.yml", "dataset.yaml", "classes.txt", "obj.names")
_SLACK = 0.01  # beyond 0 and 1, of what a tool has rounded


class YoloFolder:
    """``root`` holds the label files, in the folders in which ``folder`` holds the pictures.

    Raises:
        DatasetError: no pictures, no label file of any of them, or no file that names the classes.
    """

    def __init__(
        self, root: Path, report: ImportReport, folder: ImageFolder, *, classes: Path | None = None
    ) -> None:
        self._root, self._report = root, report
        self._pictures = folder.by_stem
        found = files_below(root, (".txt",), "SOURCE")
        self.class_file, names, self._num_key_points = _find_classes(root, classes)
        spelling = LabelSpelling(report)
        self._labels = {number: spelling.spell(name, f"class {number}") for number, name in names.items()}
        if not all(self._labels.values()):
            raise DatasetError(
                "a file of classes must name every class",
                got=f"names={names} in {self.class_file}",
                remedy="mend it",
            )
        self._files: defaultdict[str, list[str]] = defaultdict(list)
        for name in found:
            if os.path.basename(name) not in _CLASS_FILES and Path(root, name) != classes:
                self._files[stem_of(name)].append(name)
        if self._files.keys().isdisjoint(self._pictures):
            picture = folder.names[0]
            raise DatasetError(
                f"SOURCE must hold a label file {root}/{stem_of(picture)}.txt for {folder.folder}/{picture}, or one "
                "for another picture",
                got="none",
                remedy="name the two folders from which names are the same",
            )

    def __len__(self) -> int:
        return len(self._pictures)

    def labels(self) -> Sequence[str]:
        return list(dict.fromkeys(self._labels.values()))

    def __iter__(self) -> Iterator[AnnotatedImage]:
        for stem, pictures in self._pictures.items():
            files = self._files.get(stem, [])
            if len(pictures) > 1:
                self._report.add(
                    ImportIssue.SEVERAL_PICTURES, f"{self._root}/{stem}.txt: {', '.join(pictures)}"
                )
            elif len(files) > 1:
                self._report.add(ImportIssue.TWO_CLAIMS, f"{pictures[0]}: {', '.join(files)}")
            elif not files:
                self._report.add(ImportIssue.NO_LABEL_FILE, pictures[0])
                yield AnnotatedImage(name=pictures[0], objects=(), is_share=True)
            else:
                path = self._root / files[0]
                try:
                    lines = lines_of(read_text(path))
                except (OSError, ValueError) as error:
                    self._report.add(ImportIssue.BROKEN_FILE, f"{path}: {error}")
                    continue
                yield AnnotatedImage(
                    name=pictures[0], objects=list(self._objects(path, lines)), is_share=True
                )
        for stem in sorted(self._files.keys() - self._pictures.keys()):
            self._report.add(ImportIssue.NO_PICTURE, f"{self._root}/{self._files[stem][0]}: its picture")

    def _objects(self, path: Path, lines: Sequence[str]) -> Iterator[AnnotatedObject]:
        for place, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}:{place}"
            self._report.num_annotations += 1
            first, *fields = re.split(r"[ \t]+", line.strip(" \t"))
            label = self._labels.get(-1 if (number := whole(first)) is None else number)
            if label is None:
                self._report.add(ImportIssue.NO_CLASS, f"{where}: {line[:40]}")
                continue
            found = _read_values(fields, self._num_key_points)
            if isinstance(found, ImportIssue):
                self._report.add(found, f"{where}: {line[:80]}")
                continue
            box, note = found
            if note:
                self._report.add(note, where)
            yield AnnotatedObject(label, box, where)


def _read_values(fields: Sequence[str], num_key_points: int) -> tuple[Box, ImportIssue | None] | ImportIssue:
    """The box behind a line's class, and an issue that must be told of it; or the issue for which it is none.

    The number of values decides, and whether they are shares, which all of a polygon's are.
    """
    values = numbers(fields)
    if values is None or len(values) < 4:
        return ImportIssue.NO_BOX
    behind, is_box = values[4:], _are_shares(values[:4])
    if not behind or (num_key_points and len(behind) == num_key_points):
        return (_around_centre(values), None) if is_box else ImportIssue.NOT_SHARES
    if len(behind) == 1:
        is_confidence, is_track = 0 <= behind[0] <= 1, behind[0] > 1 and behind[0] == int(behind[0])
        note = None if is_confidence else ImportIssue.BEHIND_BOX
        is_read = is_box and (is_confidence or is_track)  # not an angle
        return (_around_centre(values), note) if is_read else ImportIssue.NOT_SHARES
    # A track id, or whether each key point is seen, is a whole number, which a polygon's edge may be as well.
    flags = behind[2::3] if len(behind) % 3 == 0 else behind[1:] if len(behind) == 2 else []
    are_whole = bool(flags) and all(each >= 0 and each == int(each) for each in flags)
    if len(values) % 2 == 0 and _are_shares(values):
        if are_whole:
            return ImportIssue.UNCLEAR
        xs, ys = values[::2], values[1::2]
        return (min(xs), min(ys), max(xs), max(ys)), ImportIssue.MASK
    if is_box and are_whole and (0 <= behind[0] <= 1 if len(behind) == 2 else max(flags) <= 2):
        return _around_centre(values), ImportIssue.BEHIND_BOX
    return ImportIssue.NO_BOX if _are_shares(values) else ImportIssue.NOT_SHARES


def _are_shares(values: Sequence[float]) -> bool:
    return all(-_SLACK <= value <= 1 + _SLACK for value in values)


def _around_centre(values: Sequence[float]) -> Box:
    x, y, width, height = values[:4]
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


class _TextLoader(yaml.BaseLoader):
    """All is text, and stands once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        found = super().construct_mapping(node, deep=True)
        if len(found) != len(node.value):
            raise yaml.YAMLError(f"a key is written twice near line {node.start_mark.line + 1}")
        return found


def _find_classes(root: Path, named: Path | None) -> tuple[Path, Mapping[int, str], int]:
    """The file of classes, its content, and the number of values of key points.

    Raises:
        DatasetError: there is none, one cannot be read, or two near ``root`` disagree.
    """
    places = [folder / name for folder in (root, *root.absolute().parents[:2]) for name in _CLASS_FILES]
    files = [named] if named else [place for place in places if os.path.isfile(place)]
    if not files:
        raise DatasetError(
            "YOLO's label files hold numbers, and data.yaml or classes.txt names their classes",
            got=f"neither in {root} nor in the two folders above",
            remedy="name the file with --classes",
        )
    found = [(file, *_read_classes(file)) for file in files]
    for file, classes, _ in found[1:]:
        if classes != found[0][1]:
            raise DatasetError(
                "files of classes near SOURCE must agree",
                got=f"{found[0][0]} and {file}",
                remedy="name the right one with --classes",
            )
    return found[0][0], found[0][1], max(num for _, _, num in found)


def _read_classes(file: Path) -> tuple[Mapping[int, str], int]:
    """Names by number, and how many values key points have. Raises DatasetError: it names no classes, or no texts."""
    try:
        text = read_text(file)
        if file.suffix in (".yaml", ".yml"):
            content = yaml.load(text, _TextLoader)
        else:
            content = {"names": lines_of(text.rstrip())}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        words = " ".join(str(error).split())
        raise DatasetError(
            "a file of classes must be UTF-8 text", got=f"{file}: {words}", remedy="mend it"
        ) from error
    content = content if isinstance(content, Mapping) else {}
    names, shape = content.get("names"), content.get("kpt_shape")
    pairs = list(names.items() if isinstance(names, Mapping) else enumerate(names or ()))
    numbered = {whole(number): name for number, name in pairs}
    is_text = all(isinstance(name, str) and name.strip() for name in numbered.values())
    if not pairs or None in numbered or len(numbered) != len(pairs) or not is_text or isinstance(names, str):
        raise DatasetError(
            "a file of classes must name every class once, each by a text",
            got=f"names={str(names)[:120]} in {file}",
            remedy="mend it",
        )
    points = numbers(shape, 2)
    num_values = int(points[0] * points[1]) if points else 0
    return {number: str(name) for number, name in numbered.items() if number is not None}, num_values
