"""Reads labels and boxes from a row in ms-swift's grounding format; what cannot be used is refused by name.

Used by the sample source while training and by the data set check before it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swift_stage2.errors import SampleError
from swift_stage2.records import Box


@dataclass(frozen=True, slots=True)
class TrueObjects:
    """What an image shows, as its row says it: boxes are x1, y1, x2, y2 in the row's own units."""

    labels: tuple[str, ...]
    boxes: tuple[Box, ...]

    def __len__(self) -> int:
        return len(self.boxes)


def lists_objects(row: Mapping[str, Any]) -> bool:
    """Whether a row says which objects its image shows, be it none; otherwise it is of no use to channel B."""
    objects = row.get("objects")
    return isinstance(objects, Mapping) and objects.get("bbox") is not None


def read_ground_truth(row: Mapping[str, Any]) -> TrueObjects:
    """A row's ``objects``, in their own order; there may be none.

    Raises:
        SampleError: no list of boxes, an object without box or label, a box that is not four ordered numbers.
    """
    objects = row.get("objects")
    if not lists_objects(row) or not isinstance(objects, Mapping):
        raise SampleError(
            f"a row needs objects={{'ref': [...], 'bbox': [...]}}, got {objects or 'none'}; write empty lists for an "
            "image without objects, or stage2_ab.channel_b.rows_without_objects: channel_a_only"
        )
    labels, boxes = objects.get("ref") or [], objects.get("bbox") or []
    if not (isinstance(labels, Sequence) and isinstance(boxes, Sequence)) or isinstance(labels, str):
        raise SampleError("objects.ref and objects.bbox must be lists, got another type")
    if len(labels) != len(boxes):
        raise SampleError(
            f"every object needs one label and one box, got num_ref={len(labels)} num_bbox={len(boxes)}"
        )
    if any(not isinstance(label, str) or not label.strip() for label in labels):
        raise SampleError("every label in objects.ref must be non-empty text")
    return TrueObjects(tuple(label.strip() for label in labels), tuple(_read_box(box) for box in boxes))


def _read_box(box: Any) -> Box:
    numbers = box if isinstance(box, Sequence) and not isinstance(box, str) else ()
    if len(numbers) != 4 or not all(_is_number(number) for number in numbers):
        raise SampleError(f"a box must be four numbers x1, y1, x2, y2, got bbox={box}")
    x1, y1, x2, y2 = (float(number) for number in numbers)
    if not (0 <= x1 <= x2 < math.inf and 0 <= y1 <= y2 < math.inf):
        raise SampleError(f"a box must have 0 <= x1 <= x2 and 0 <= y1 <= y2, got bbox={box}")
    return x1, y1, x2, y2


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
