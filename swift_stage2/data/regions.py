"""The region in which a point of an object is right: its mask, or its box. Pure.

A row's ``objects.region`` holds a text for each object, as JSON: COCO's ``segmentation`` (polygons or a run-length
mask), or a box x1, y1, x2, y2. They are texts because ``datasets`` takes the type of a column from a file's first rows.
ms-swift drops the key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from hotcoco import mask
from numpy.typing import ArrayLike, NDArray
from scipy.ndimage import distance_transform_edt

from swift_stage2.data.sources import numbers
from swift_stage2.errors import SampleError

_MOST_PIXELS = 178_956_970  # Pillow's own limit

Mask = NDArray[np.uint8]
"""Shape (height, width), 0 or 1."""


def regions_of(row: Mapping[str, Any]) -> list[str] | None:
    """The texts of a row's objects; None if it has none. Raises SampleError: not one text for each object."""
    objects = row["objects"]
    if (regions := objects.get("region")) is None:
        return None
    if (
        not isinstance(regions, list)
        or len(regions) != len(objects["bbox"])
        or not all(isinstance(each, str) for each in regions)
    ):
        raise SampleError("objects.region must hold one text for each object", got=f"{regions!r:.80}")
    return regions


def mask_of(segmentation: Any, size: tuple[int, int]) -> Mask:
    """``segmentation``, as COCO has it, on an image of ``size`` (width, height).

    Raises:
        SampleError: it is neither polygons nor a run-length mask of that size, or no pixel is in it.
    """
    width, height = size
    is_mask = isinstance(segmentation, Mapping) and segmentation.get("size") == [height, width]
    if isinstance(segmentation, list):
        sizes = [len(numbers(each) or ()) for each in segmentation]
        is_mask = all(each >= 6 and each % 2 == 0 for each in sizes)
    if is_mask and width * height <= _MOST_PIXELS:
        try:
            found = mask.frPyObjects(segmentation, height, width)
            decoded: Mask = mask.decode(mask.merge(found) if isinstance(found, list) else found)
            if decoded.any():
                return decoded
        except (TypeError, ValueError):
            pass
    raise SampleError(
        "a mask must be COCO's polygons or run lengths, on its image and not empty",
        got=f"{segmentation!r:.60} on {width} x {height} pixels",
    )


def point_in(found: Mask) -> tuple[float, float]:
    """Its centroid, if that lies in it; else the middle of the first pixel that is as far from its border as any."""
    rows, columns = np.nonzero(found)
    x, y = (round(float(each.mean()) + 0.5, 6) for each in (columns, rows))
    if found[int(y), int(x)]:
        return x, y
    depth = distance_transform_edt(np.pad(found, 1))[1:-1, 1:-1]
    row, column = divmod(int(depth.argmax()), found.shape[1])
    return column + 0.5, row + 0.5


def require_inside(row: Mapping[str, Any], size: tuple[int, int]) -> None:
    """Raises SampleError: a point of a row's image of ``size`` is not in its region, or that is none."""
    for point, region in zip(row["objects"]["bbox"], regions_of(row) or (), strict=False):
        if not are_inside([point], region, size)[0]:
            raise SampleError(
                "a point must lie in its objects.region", got=f"bbox={point} region={region:.60}"
            )


def are_inside(points: ArrayLike, region: str, size: tuple[int, int]) -> NDArray[np.bool_]:
    """Of each point of an image of ``size`` (width, height) whether it lies in ``region``, its border included.

    Raises:
        SampleError: ``region`` is no box and no mask on that image.
    """
    x, y = np.array(points, dtype=np.float64).reshape(-1, 2).T
    try:
        read = json.loads(region)
    except (ValueError, RecursionError) as error:
        raise SampleError("a region must be JSON", got=f"{region!r:.60}") from error
    box, found = numbers(read, 4), None
    if box is None:
        box, found = [0.0, 0.0, *map(float, size)], mask_of(read, size)
    inside: NDArray[np.bool_] = (box[0] <= x) & (x <= box[2]) & (box[1] <= y) & (y <= box[3])
    if found is not None:
        rows, columns = (
            np.minimum(each[inside].astype(np.int64), most - 1)
            for each, most in zip((y, x), found.shape, strict=True)
        )
        inside[inside] = found[rows, columns] > 0
    return inside
