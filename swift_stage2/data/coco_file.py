"""COCO's JSON as annotated images.

Ids are compared as they are written, a number and its text alike. Annotations may stand before images and categories.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from swift_stage2.data.import_report import ImportIssue, ImportReport
from swift_stage2.data.sources import (
    AnnotatedImage,
    AnnotatedObject,
    ImageFolder,
    LabelSpelling,
    flag,
    in_order,
    numbers,
    read_text,
    whole,
)
from swift_stage2.errors import DatasetError
from swift_stage2.records import Box


class CocoFile:
    """One file, which is read when this is made; its pictures lie in ``folder``.

    Raises:
        DatasetError: it cannot be read, is no COCO file of boxes, or gives two names to one class id.
    """

    def __init__(self, path: Path, report: ImportReport, folder: ImageFolder) -> None:
        self._path, self._report, self._folder = path, report, folder
        content = _read_json(path)
        lists = {key: value for key, value in content.items() if isinstance(value, list)}
        if "annotations" not in lists:  # else all images would be told to show nothing
            raise DatasetError(
                "SOURCE must be COCO's JSON and list annotations",
                got=f"{', '.join(sorted(lists))[:80] or 'no list'} in {path}",
                remedy="name the file with the annotations, or write annotations: [] if no image shows an object",
            )
        self._written: dict[tuple[str, str], Any] = {}
        self._sizes: dict[str, tuple[int, int] | None] = {}
        self._name_of: dict[str, str | None] = {}
        self._ambiguous: set[str] = set()
        self._labels = self._read_categories(lists.get("categories", ()))
        self._read_images(lists.get("images", ()))
        if not self._name_of:
            raise DatasetError(
                "SOURCE must be COCO's JSON and list images with file_name and id",
                got=f"none in {path}",
                remedy="name another file",
            )
        self._objects: defaultdict[str, list[AnnotatedObject]] = defaultdict(list)
        self._read_annotations(lists.get("annotations", ()))

    def _read_categories(self, categories: Sequence[Any]) -> dict[str, str]:
        names: dict[str, str] = {}
        spelling = LabelSpelling(self._report)
        labels: dict[str, str] = {}
        for place, category in enumerate(categories):
            key, name = self._id("categories", category, "id"), _text(category, "name")
            where = f"{self._path} categories[{place}]"
            if key is None or name is None:
                self._report.add(ImportIssue.BROKEN_ENTRY, where)
                continue
            if names.setdefault(key, name) != name:
                raise DatasetError(
                    "a category id must stand for one name",
                    got=f"id {key} of {names[key]!r} and {name!r} in {where}",
                    remedy="give each category an id of its own",
                )
            if label := spelling.spell(name, f"id {key}"):
                labels[key] = label
        return labels

    def _read_images(self, images: Sequence[Any]) -> None:
        for place, image in enumerate(images):
            key, written = self._id("images", image, "id"), _text(image, "file_name")
            where = f"{self._path} images[{place}]"
            if key is None or written is None:
                self._report.add(ImportIssue.BROKEN_ENTRY, where)
                continue
            name = self._folder.find(written, where, self._report)
            if key in self._name_of and self._name_of[key] != name:
                self._report.add(
                    ImportIssue.ID_OF_TWO, f"{where}: id {key} of {self._name_of[key]} and {name}"
                )
                self._ambiguous |= {each for each in (self._name_of[key], name) if each}
            elif name is not None and name in self._sizes:
                self._report.add(ImportIssue.LISTED_TWICE, f"{where}: {name}")
            self._name_of.setdefault(key, name)
            if name is not None:
                width, height = whole(image.get("width")), whole(image.get("height"))
                is_size = width and height and width > 0 and height > 0
                self._sizes.setdefault(name, (width, height) if is_size else None)  # type: ignore[arg-type]

    def _read_annotations(self, annotations: Sequence[Any]) -> None:
        seen: dict[str, object] = {}
        self._report.num_annotations = len(annotations)
        for place, annotation in enumerate(annotations):
            key = self._id("annotations", annotation, "id")
            where = f"{self._path} annotations[{place}]" + (f" (id {key})" if key is not None else "")
            image, category = (
                self._id(*each)
                for each in (("images", annotation, "image_id"), ("categories", annotation, "category_id"))
            )
            if image is None or category is None:
                self._report.add(ImportIssue.BROKEN_ENTRY, where)
            elif image not in self._name_of:
                self._report.add(ImportIssue.NO_IMAGE, f"{where}: image_id {image}")
            elif category not in self._labels:
                self._report.add(ImportIssue.NO_CLASS, f"{where}: category_id {category}")
            else:
                content = image, category, repr(annotation.get("bbox"))
                if key is not None and seen.setdefault(key, content) != content:
                    self._report.add(ImportIssue.ID_TWICE, where)
                box = self._box(annotation, where)
                if box is not None and (name := self._name_of[image]):
                    self._objects[name].append(AnnotatedObject(self._labels[category], box, where))

    def _id(self, of: str, element: Any, member: str) -> str | None:
        """An id as text; None where there is none. Told where the same id was a number before, or a text."""
        value = element.get(member) if isinstance(element, Mapping) else None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
            return None
        first = self._written.setdefault((of, str(value)), value)
        if type(first) is not type(value):
            self._report.add(ImportIssue.ID_FORM, f"{self._path}: {member} {value!r} and {first!r}")
        return str(value)

    def _box(self, annotation: Mapping[str, Any], where: str) -> Box | None:
        is_crowd = flag(annotation.get("iscrowd"))
        if is_crowd is not False:
            shown = f"{where}: iscrowd={annotation.get('iscrowd')!r}"
            self._report.add(ImportIssue.BAD_FLAG if is_crowd is None else ImportIssue.CROWD, shown)
            return None
        box = numbers(annotation.get("bbox"), 4)
        around = None if box and box[2] and box[3] else _box_of_mask(annotation.get("segmentation"))
        if around is not None:
            self._report.add(ImportIssue.MASK, where)
            box = around
        if box is None:
            self._report.add(ImportIssue.NO_BOX, f"{where}: bbox={annotation.get('bbox')!r:.60}")
            return None
        x, y, width, height = box
        return in_order((x, y, x + width, y + height), where, self._report)

    def labels(self) -> Sequence[str]:
        return list(dict.fromkeys(self._labels.values()))

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[AnnotatedImage]:
        for name, size in self._sizes.items():
            if name not in self._ambiguous:
                yield AnnotatedImage(name=name, objects=self._objects[name], size=size)


def _read_json(path: Path) -> Mapping[str, Any]:
    """The object that a file holds, without masks of what has a box.

    Raises:
        DatasetError: it cannot be read, or is none.
    """
    text = ""
    try:
        text = read_text(path)
        content = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        hint = ": a comma stands before it" if text[: error.pos].rstrip().endswith(",") else ""
        raise DatasetError(
            "SOURCE must be COCO's JSON",
            got=f"{path}: {error.msg} at line {error.lineno}, column {error.colno}{hint}",
            remedy="mend it",
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise DatasetError(
            "SOURCE must be a readable file of JSON", got=f"{path}: {error}", remedy="check it"
        ) from error
    if not isinstance(content, Mapping):
        raise DatasetError(
            "SOURCE must be COCO's JSON, one object", got=str(path), remedy="name another file"
        )
    return content


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(members)
    if len(found) != len(members):
        keys = [key for key, _ in members]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"an object has {twice!r} twice, and one would be lost")
    box = found.get("bbox")
    if isinstance(box, list) and numbers(box[2:], 2) and box[2] and box[3]:
        found.pop("segmentation", None)  # most of a file's bytes
    return found


def _text(element: Any, member: str) -> str | None:
    value = element.get(member) if isinstance(element, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    return str(value) if str(value).strip() else None


def _box_of_mask(mask: Any) -> list[float] | None:
    """x, y, width and height around polygons; None of one that cannot be read, and of a run-length mask."""
    parts = [numbers(part) for part in mask] if isinstance(mask, list) else []
    if not parts or any(part is None or len(part) % 2 or not part for part in parts):
        return None
    xs, ys = ([value for part in parts for value in (part or ())[start::2]] for start in (0, 1))
    return [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)]
