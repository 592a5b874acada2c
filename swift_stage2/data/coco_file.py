"""COCO's JSON as annotated images.

Ids are compared as they are written, a number and its text alike. Annotations may stand before images and categories.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swift_stage2.data.sources import (
    AnnotatedImage,
    AnnotatedObject,
    AnnotatedSet,
    ImageFolder,
    ImportIssue,
    ImportReport,
    LabelSpelling,
    flag,
    numbers,
    read_text,
    size_of,
)
from swift_stage2.errors import DatasetError
from swift_stage2.records import Box


def read_coco(path: Path, report: ImportReport, folder: ImageFolder, *, with_masks: bool) -> AnnotatedSet:
    """The content of one file, whose pictures lie in ``folder``.

    Raises:
        DatasetError: it cannot be read, is no COCO file of boxes, or gives two names to one class id.
    """
    reader = _CocoReader(path, report, _read_json(path, None if with_masks else _without_mask))
    labels = reader.labels()
    names, sizes = reader.images(folder)
    objects = reader.objects(names, labels)
    images = [AnnotatedImage(name=name, objects=objects[name], size=size) for name, size in sizes.items()]
    return AnnotatedSet(images, list(dict.fromkeys(labels.values())))


@dataclass(frozen=True, slots=True)
class _CocoReader:
    path: Path
    report: ImportReport
    content: Mapping[str, Any]
    written: dict[tuple[str, str], Any] = field(default_factory=dict)
    """Ids of each kind as text, and how the first of them is written."""

    def labels(self) -> dict[str, str]:
        """By id of their category."""
        names: dict[str, str] = {}
        spelling, labels = LabelSpelling(self.report), dict[str, str]()
        for where, category in self._entries("categories"):
            key, name = self._id("categories", category, "id"), _text(category, "name")
            if key is None or name is None:
                self.report.add(ImportIssue.BROKEN_ENTRY, where)
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

    def images(self, folder: ImageFolder) -> tuple[dict[str, str | None], dict[str, tuple[int, int] | None]]:
        """Pictures by id, None where there is none; and the sizes of those that one id names."""
        names: dict[str, str | None] = {}
        sizes: dict[str, tuple[int, int] | None] = {}
        of_two: set[str | None] = set()
        for where, image in self._entries("images"):
            key, written = self._id("images", image, "id"), _text(image, "file_name")
            if key is None or written is None:
                self.report.add(ImportIssue.BROKEN_ENTRY, where)
                continue
            name = folder.find(written, where, self.report)
            if name is not None:
                sizes.setdefault(name, size_of(image.get("width"), image.get("height")))
            if names.setdefault(key, name) != name:
                self.report.add(ImportIssue.ID_OF_TWO, f"{where}: id {key} of {names[key]} and {name}")
                of_two |= {names[key], name}
        if not names:
            raise DatasetError(
                "SOURCE must be COCO's JSON and list images with file_name and id",
                got=f"none in {self.path}",
                remedy="name another file",
            )
        return names, {name: size for name, size in sizes.items() if name not in of_two}

    def objects(
        self, names: Mapping[str, str | None], labels: Mapping[str, str]
    ) -> Mapping[str, list[AnnotatedObject]]:
        """By picture."""
        found: defaultdict[str, list[AnnotatedObject]] = defaultdict(list)
        seen: dict[str, object] = {}
        for where, annotation in self._entries("annotations"):
            self.report.num_annotations += 1
            key = self._id("annotations", annotation, "id")
            image = self._id("images", annotation, "image_id")
            category = self._id("categories", annotation, "category_id")
            if key is not None:
                where += f" (id {key})"
            if image is None or category is None:
                self.report.add(ImportIssue.BROKEN_ENTRY, where)
            elif image not in names:
                self.report.add(ImportIssue.NO_IMAGE, f"{where}: image_id {image}")
            elif category not in labels:
                self.report.add(ImportIssue.NO_CLASS, f"{where}: category_id {category}")
            else:
                content = image, category, repr(annotation.get("bbox"))
                if key is not None and seen.setdefault(key, content) != content:
                    self.report.add(ImportIssue.ID_TWICE, where)
                box = self._box(annotation, where)
                if box is not None and (name := names[image]):
                    segmentation = annotation.get("segmentation")
                    found[name].append(AnnotatedObject(labels[category], box, where, segmentation))
        return found

    def _entries(self, kind: str) -> Iterator[tuple[str, Any]]:
        """Each with its place."""
        entries = self.content.get(kind)
        for number, entry in enumerate(entries if isinstance(entries, list) else ()):
            yield f"{self.path} {kind}[{number}]", entry

    def _id(self, kind: str, entry: Any, member: str) -> str | None:
        """An id as text; None where there is none. Told where the same id was a number before, or a text."""
        value = entry.get(member) if isinstance(entry, Mapping) else None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
            return None
        first = self.written.setdefault((kind, str(value)), value)
        if type(first) is not type(value):
            self.report.add(ImportIssue.ID_FORM, f"{self.path}: {member} {value!r} and {first!r}")
        return str(value)

    def _box(self, annotation: Mapping[str, Any], where: str) -> Box | None:
        is_crowd, box = flag(annotation.get("iscrowd")), numbers(annotation.get("bbox"), 4)
        if is_crowd is not False:
            issue = ImportIssue.BAD_FLAG if is_crowd is None else ImportIssue.CROWD
            self.report.add(issue, f"{where}: iscrowd={annotation.get('iscrowd')!r}")
        elif box is None:
            self.report.add(ImportIssue.NO_BOX, f"{where}: bbox={annotation.get('bbox')!r:.60}")
        else:
            x, y, width, height = box
            return x, y, x + width, y + height
        return None


def _read_json(path: Path, hook: Callable[[dict[str, Any]], Any] | None) -> Mapping[str, Any]:
    """The object that a file holds. Raises DatasetError: it cannot be read, or is none of COCO's."""
    try:
        content = json.loads(read_text(path), object_hook=hook)
    except (OSError, ValueError, RecursionError) as error:
        raise DatasetError(
            "SOURCE must be a readable file of JSON", got=f"{path}: {error}", remedy="check it"
        ) from error
    lists = content if isinstance(content, Mapping) else {}
    if not isinstance(lists.get("annotations"), list):  # else all images would be told to show nothing
        raise DatasetError(
            "SOURCE must be COCO's JSON and list annotations",
            got=f"{', '.join(sorted(lists))[:80] or 'none'} in {path}",
            remedy="name the file with the annotations, or write annotations: [] if no image shows an object",
        )
    return lists


def _without_mask(members: dict[str, Any]) -> dict[str, Any]:
    members.pop("segmentation", None)  # most of a file's bytes
    return members


def _text(entry: Any, member: str) -> str | None:
    value = entry.get(member) if isinstance(entry, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    return str(value) if str(value).strip() else None
