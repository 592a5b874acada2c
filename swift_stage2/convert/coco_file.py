"""COCO's JSON as annotated images: read once, element by element, and kept in columns of 48 bytes per annotation.

Ids are whatever JSON has, numbers or texts. Annotations may stand before images and categories.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_stage2.convert.annotated_image import AnnotatedImage, spell_label
from swift_stage2.convert.exact_numbers import Quad, added, are_coordinates, exact
from swift_stage2.convert.json_arrays import read_arrays
from swift_stage2.convert.tally import Oddity, Tally
from swift_stage2.errors import DatasetError

_UNKNOWN = -1
_NO_ID = -(1 << 62)  # the first of those that annotations without one are given
_Id = int | float | str
_IDS = (int, float, str)  # the same; asking a union takes three times as long


@dataclass(slots=True)
class _Images:
    """Every picture once, by its name."""

    tally: Tally
    numbers: dict[str, int] = field(default_factory=dict)
    sizes: list[tuple[int, int] | None] = field(default_factory=list)
    by_id: dict[_Id, int] = field(default_factory=dict)
    ambiguous: set[int] = field(default_factory=set)

    def add(self, image: Any) -> None:
        name, key = _members(image, "file_name", "id", what="image")
        is_new = name not in self.numbers
        number = self.numbers.setdefault(str(name), len(self.numbers))
        if is_new:
            width, height = image.get("width"), image.get("height")
            is_size = isinstance(width, int) and isinstance(height, int) and width > 0 and height > 0
            self.sizes.append((width, height) if is_size else None)
        first = self.by_id.setdefault(key, number)
        if first != number:
            self.tally.tell(Oddity.TWO_FILES, f"id {key}: {name}")
            self.ambiguous |= {first, number}
        elif not is_new:
            self.tally.tell(Oddity.LISTED_TWICE, name)


class _Annotations:
    """Columns, one value per annotation but for ``boxes``, which has x, y, width and height."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self.boxes = array("d")
        self.image_keys = array("i")
        self.category_keys = array("i")
        self.ids = array("q")
        self.image_ids: dict[_Id, int] = {}
        self.category_ids: dict[_Id, int] = {}
        self.hidden: list[tuple[int, int]] = []
        """Image and class of each one that was dropped."""

    def add(self, annotation: Any) -> None:
        image_id, category_id = _members(annotation, "image_id", "category_id", what="annotation")
        image_key = self.image_ids.setdefault(image_id, len(self.image_ids))
        category_key = self.category_ids.setdefault(category_id, len(self.category_ids))
        self._tally.num_annotations += 1
        key = annotation.get("id")
        if annotation.get("iscrowd"):
            self._tally.tell(Oddity.CROWD, f"id {key}")
            quad = None
        elif (quad := self._box(annotation)) is None:
            self._tally.tell(Oddity.NO_BOX, f"id {key}")
        if quad is None:
            self.hidden.append((image_key, category_key))
            return
        self.boxes.extend(quad)
        self.image_keys.append(image_key)
        self.category_keys.append(category_key)
        self.ids.append(hash(key) if isinstance(key, _IDS) else _NO_ID + len(self.ids))

    def _box(self, annotation: Mapping[str, Any]) -> Sequence[float] | None:
        written = annotation.get("bbox")
        box = list(map(float, written)) if written and are_coordinates(written, 4) else None
        if box and box[2] > 0 and box[3] > 0:
            return box
        around = _box_of_mask(annotation.get("segmentation"))
        if around is None:
            return box
        self._tally.tell(Oddity.MASK, f"id {annotation.get('id')}")
        return around

    def repeated(self) -> NDArray[np.bool_]:
        """Which annotations say again what another of the same id says; others of one id are told alone."""
        ids = np.asarray(self.ids)
        order = np.argsort(ids, kind="stable")
        repeated = np.zeros(len(ids), bool)
        for place in np.flatnonzero(ids[order[1:]] == ids[order[:-1]]):
            first, second = int(order[place]), int(order[place + 1])
            repeated[second] = self._content(first) == self._content(second)
            oddity = Oddity.REPEATED if repeated[second] else Oddity.ID_TWICE
            self._tally.tell(oddity, f"id {ids[second]}")
        return repeated

    def _content(self, number: int) -> tuple[object, ...]:
        box = self.boxes[4 * number : 4 * number + 4]
        return self.image_keys[number], self.category_keys[number], *box


class CocoFile:
    """One file, which is read when this is made. Errors call it ``what``; one of ``images_alone`` is enough if that is.

    Raises:
        DatasetError: it cannot be read, or is no COCO file of boxes.
    """

    def __init__(
        self,
        path: Path,
        tally: Tally,
        on_progress: Callable[[int], None] = lambda num_characters: None,
        *,
        what: str = "SOURCE",
        images_alone: bool = False,
    ) -> None:
        self._tally = tally
        self._images = _Images(tally)
        self._annotations = _Annotations(tally)
        self._labels: dict[_Id, str] = {}
        add = {
            "images": self._images.add,
            "annotations": self._annotations.add,
            "categories": self._add_category,
        }
        arrays: set[str] = set()
        for key, element in read_arrays(path, on_progress, what, arrays.add):
            if key in add:
                try:
                    add[key](element)
                except DatasetError as error:
                    raise DatasetError(f"{path}: {error}") from error
        if not self._images.numbers:
            raise DatasetError(
                f"{what} must be COCO's JSON and list images, got none in {path}; name another file"
            )
        if "annotations" not in arrays and not images_alone:  # else all images would be told to show nothing
            raise DatasetError(
                f"{what} must be COCO's JSON and list annotations, got {', '.join(sorted(arrays))[:80]} alone in "
                f"{path}; name the file with the annotations, or write annotations: [] if no image shows an object"
            )

    def _add_category(self, category: Any) -> None:
        name, key = _members(category, "name", "id", what="category")
        self._labels[key] = label = spell_label(str(name))
        if not label:
            raise DatasetError(f"every category needs a name, got {str(category)[:80]!r}; mend it")
        if label != name:
            self._tally.tell(Oddity.RESPELT, f"{name} → {label}")

    def labels(self) -> Sequence[str]:
        return list(dict.fromkeys(self._labels.values()))

    def __len__(self) -> int:
        return len(self._images.numbers)

    def image_ids(self) -> Mapping[str, _Id]:
        """The first id of every image by its name."""
        names = list(self._images.numbers)
        return {names[number]: key for key, number in reversed(self._images.by_id.items())}

    def category_ids(self) -> Mapping[str, _Id]:
        """The first id of every label."""
        return {label: key for key, label in reversed(self._labels.items())}

    def __iter__(self) -> Iterator[AnnotatedImage]:
        columns, images = self._annotations, self._images
        number_of = np.array([images.by_id.get(key, _UNKNOWN) for key in columns.image_ids], np.int32)
        label_of = [self._labels.get(key, "") for key in columns.category_ids]
        numbers = self._usable(number_of[np.asarray(columns.image_keys)], label_of)
        hidden: defaultdict[int, set[str]] = defaultdict(set)
        for image_key, category_key in columns.hidden:
            hidden[int(number_of[image_key])].add(label_of[category_key])
        order = np.argsort(numbers, kind="stable")
        ends = np.cumsum(np.bincount(numbers + 1, minlength=len(images.numbers) + 1)).tolist()
        boxes = np.asarray(columns.boxes).reshape(-1, 4)
        for number, name in enumerate(images.numbers):
            if number in images.ambiguous:
                continue
            mine = order[ends[number] : ends[number + 1]]
            yield AnnotatedImage(
                name=name,
                objects=[
                    *zip(
                        [label_of[columns.category_keys[each]] for each in mine.tolist()],
                        map(_corners, boxes[mine].tolist()),
                        strict=True,
                    ),
                    *((label, None) for label in hidden.get(number, ())),
                ],
                size=images.sizes[number],
            )

    def _usable(self, numbers: NDArray[np.int32], label_of: Sequence[str]) -> NDArray[np.int32]:
        """The image of each annotation; ``_UNKNOWN`` for those that no image, no class or only a repetition has."""
        columns = self._annotations
        has_label = np.array([bool(label) for label in label_of], bool)[np.asarray(columns.category_keys)]
        for oddity, name, lost, keys, known in (
            (Oddity.NO_IMAGE, "image_id", numbers == _UNKNOWN, columns.image_keys, columns.image_ids),
            (Oddity.NO_CATEGORY, "category_id", ~has_label, columns.category_keys, columns.category_ids),
        ):
            if lost.any():
                first = list(known)[keys[int(lost.argmax())]]
                self._tally.tell(oddity, f"{name} {first}", int(lost.sum()))
        return np.where(has_label & ~columns.repeated(), numbers, np.int32(_UNKNOWN))


def _corners(box: Sequence[float]) -> Quad:
    x, y, width, height = map(exact, box)
    return x, y, added(x, width), added(y, height)


def _members(element: Any, name: str, key: str, *, what: str) -> tuple[Any, Any]:
    """Two members that every element of its kind has.

    Raises:
        DatasetError: one is missing.
    """
    found = (element.get(name), element.get(key)) if isinstance(element, Mapping) else (None, None)
    if not isinstance(found[0], _IDS) or not isinstance(found[1], _IDS) or "" in found:
        raise DatasetError(
            f"every {what} needs {name} and {key}, got {str(element)[:80]!r}; mend it, or name COCO's JSON"
        )
    return found


def _box_of_mask(mask: Any) -> list[float] | None:
    """x, y, width and height around polygons or a run-length mask; None of one that cannot be read."""
    if isinstance(mask, Mapping):
        from hotcoco.mask import to_bbox

        try:
            box = to_bbox({"size": mask["size"], "counts": mask["counts"]}).tolist()
        except (KeyError, TypeError, ValueError, OverflowError):
            return None
        return box if box[2] > 0 and box[3] > 0 else None
    if not isinstance(mask, Sequence) or isinstance(mask, str) or not mask:
        return None
    if any(
        not isinstance(part, list) or len(part) % 2 or not are_coordinates(part, len(part)) for part in mask
    ):
        return None
    xs, ys = ([value for part in mask for value in part[start::2]] for start in (0, 1))
    if not xs:
        return None
    width, height = (float(added(exact(max(axis)), -exact(min(axis)))) for axis in (xs, ys))
    return [float(min(xs)), float(min(ys)), width, height]
