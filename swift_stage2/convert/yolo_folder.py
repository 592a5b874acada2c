"""A folder of YOLO's label files as annotated images: one text file per picture, one object per line.

A line is ``class cx cy width height`` in shares of the picture, or ``class x y x y x y …`` around a mask. A picture
and its file have the same relative name, as Ultralytics has it: ``images/train/a.jpg`` and ``labels/train/a.txt``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

from swift_stage2.convert.annotated_image import AnnotatedImage, spell_label
from swift_stage2.convert.exact_numbers import Quad, added, are_coordinates, exact, exact_quad, subtracted
from swift_stage2.convert.folder_files import IMAGE_SUFFIXES, files_below
from swift_stage2.convert.tally import Oddity, Tally
from swift_stage2.errors import DatasetError
from swift_stage2.whole_file import read_regular_text

_CLASS_FILES = ("data.yaml", "data.yml", "dataset.yaml", "classes.txt", "obj.names")
_HALF = Decimal("0.5")


class YoloFolder:
    """``root`` holds the label files, in the folders in which ``images`` holds the pictures.

    Raises:
        DatasetError: no pictures, no label file of any of them, or no file that names the classes.
    """

    def __init__(self, root: Path, images: Path, tally: Tally, *, classes: Path | None = None) -> None:
        self._root, self._tally = root, tally
        self._images = files_below(images, IMAGE_SUFFIXES, "--images")
        self._orphans = set(files_below(root, (".txt",), "SOURCE"))
        self._class_file = classes or _find_class_file(root)
        self._classes, self._has_points = _read_classes(self._class_file, tally)
        self._orphans -= {os.path.relpath(self._class_file, root)}
        if self._orphans.isdisjoint(map(_label_file, self._images)):
            raise DatasetError(
                f"SOURCE must hold a label file {root}/{_label_file(self._images[0])} for {images}/{self._images[0]}, "
                "or one for another picture, got none; name the two folders from which names are the same"
            )

    def __len__(self) -> int:
        return len(self._images)

    def labels(self) -> Sequence[str]:
        return list(dict.fromkeys(self._classes.values()))

    def __iter__(self) -> Iterator[AnnotatedImage]:
        known, seen = frozenset(self._orphans), set[str]()
        for name in self._images:
            file = _label_file(name)
            if file in seen:
                self._tally.tell(Oddity.SECOND, name)
                continue
            seen.add(file)
            if file not in known:
                self._tally.tell(Oddity.NO_LABEL_FILE, name)
                yield AnnotatedImage(name=name, objects=(), is_share=True)
                continue
            try:
                text = read_regular_text(self._root / file, "utf-8-sig")
                if "\0" in text:  # which is UTF-8, too; as a crash leaves files
                    raise ValueError("it holds zero bytes, so it is no text")
            except (OSError, ValueError) as error:
                self._tally.tell(Oddity.BROKEN_FILE, f"{file}: {error}")
                continue
            yield self._read(name, file, text.splitlines())
        for orphan in sorted(known - seen):
            self._tally.tell(Oddity.ABSENT, f"that of {orphan}")

    def _read(self, name: str, file: str, lines: Sequence[str]) -> AnnotatedImage:
        objects: list[tuple[str, Quad | None]] = []
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}:{number}"
            self._tally.num_annotations += 1
            first, *fields = line.split()
            label = self._classes.get(first)
            box = self._box(fields, where)
            if label is None:
                self._tally.tell(Oddity.NO_CATEGORY, where)
                continue
            if box is None:
                self._tally.tell(Oddity.NO_BOX, where)
            objects.append((label, box))
        return AnnotatedImage(name=name, objects=objects, is_share=True)

    def _box(self, fields: Sequence[str], where: str) -> Quad | None:
        try:
            values = list(map(float, fields))
        except ValueError:
            return None
        if not are_coordinates(values, len(values)):
            return None
        if len(values) in (4, 5) or (self._has_points and len(values) > 4):  # the fifth is a score
            x, y, width, height = map(exact, values[:4])
            half_width, half_height = width * _HALF, height * _HALF
            return (
                subtracted(x, half_width),
                subtracted(y, half_height),
                added(x, half_width),
                added(y, half_height),
            )
        if len(values) < 6 or len(values) % 2:
            return None
        self._tally.tell(Oddity.MASK, where)
        xs, ys = values[::2], values[1::2]
        return exact_quad((min(xs), min(ys), max(xs), max(ys)))


class _TextLoader(yaml.BaseLoader):
    """All is text, and stands where it is meant: ten lines of aliases can stand for any amount of it."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it holds a YAML alias (*name); write the value itself")
        return super().compose_node(parent, index)


def _label_file(image: str) -> str:
    return os.path.splitext(image)[0] + ".txt"


def _find_class_file(root: Path) -> Path:
    places = [folder / name for folder in (root, *root.absolute().parents[:2]) for name in _CLASS_FILES]
    for place in places:
        if os.path.isfile(place):
            return place
    raise DatasetError(
        f"YOLO's label files hold numbers, and data.yaml or classes.txt names their classes, got neither in {root} nor "
        "in the two folders above; name the file with --classes"
    )


def _read_classes(file: Path, tally: Tally) -> tuple[Mapping[str, str], bool]:
    """Labels by the number that stands for them, and whether objects have key points behind their boxes.

    Raises:
        DatasetError: it cannot be read, or names no classes.
    """
    try:
        text = read_regular_text(file, "utf-8-sig")
        if file.suffix in (".yaml", ".yml"):
            content = yaml.load(text, _TextLoader)
        else:
            content = {"names": text.rstrip().splitlines()}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise DatasetError(f"a file of classes must be UTF-8 text, got {file}: {error}; mend it") from error
    content = content if isinstance(content, Mapping) else {}
    names = content.get("names")
    pairs = names if isinstance(names, Mapping) else dict(enumerate(names if isinstance(names, list) else ()))
    classes = {str(number): spell_label(str(name)) for number, name in pairs.items()}
    if not classes or not all(classes.values()):
        raise DatasetError(f"a file of classes must name every class, got names={names} in {file}; mend it")
    for number, name in pairs.items():
        if classes[str(number)] != str(name).strip():
            tally.tell(Oddity.RESPELT, f"{name} → {classes[str(number)]}")
    return classes, "kpt_shape" in content
