"""Rows that two runs answer most differently, as a gallery: both runs' answers in one picture.

Pure, but for the images that it opens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from swift_stage2.pages.pictures import Gallery, Picture, Thumbnails
from swift_stage2.report.evaluations import boxes_of
from swift_stage2.report.matches import LoggedMatch


def disagreements(
    names: tuple[str, str],
    matches: tuple[Sequence[LoggedMatch], Sequence[LoggedMatch]],
    f1: Sequence[NDArray[np.float64]],
    size: int,
) -> Gallery:
    """The ``size`` rows whose F1 differs most; all else is of the two runs, ``matches`` and ``f1`` of the same rows."""
    pictures: list[Picture] = []
    thumbnails = Thumbnails()
    gains = f1[1] - f1[0]
    order = [int(place) for place in np.argsort(-np.abs(gains), kind="stable") if gains[place]]
    for place in order[:size]:
        first, second = (each[place] for each in matches)
        values = float(f1[0][place]), float(f1[1][place])
        pictures.append(_picture(names, first, second, values, thumbnails))
    return Gallery(
        pictures=tuple(pictures),
        thumbnails=thumbnails.uris,
        num_matches=len(order),
        backward="Larger",
        forward="Smaller",
        texts=(f"Answer of {names[0]}", f"Answer of {names[1]}"),
        filters=_better(names),
        legend=(("truth", "ground truth"), ("first", names[0]), ("second", names[1])),
    )


def _better(names: tuple[str, str]) -> tuple[str, str]:
    return f"{names[0]} is better", f"{names[1]} is better"


def _picture(
    names: tuple[str, str],
    first: LoggedMatch,
    second: LoggedMatch,
    f1: tuple[float, float],
    thumbnails: Thumbnails,
) -> Picture:
    path = second.image
    image, trouble = thumbnails.add(path or None)
    if image is None and first.image not in ("", path):
        path = first.image
        image, trouble = thumbnails.add(path)
    across, down = (mine / other for mine, other in zip(second.space, first.space, strict=True))
    return Picture(
        image=image,
        trouble=trouble,
        name=Path(path).name or "an image without a path",
        facts=(
            f"row {second.row} of the validation set",
            path or "no path",
            f"{len(second.truth)} true, {len(first.predicted)} predicted by {names[0]}, {len(second.predicted)} by "
            f"{names[1]}",
        ),
        fate=f"F1 {f1[0]:.2f} in {names[0]}, {f1[1]:.2f} in {names[1]}",
        space=second.space,
        boxes=(
            *(("truth", *each.box, each.label) for each in second.truth),
            *(
                ("first", x1 * across, y1 * down, x2 * across, y2 * down, each.label)
                for each in first.predicted
                for x1, y1, x2, y2 in boxes_of([each])
            ),
            *(("second", *each.box, each.label) for each in second.predicted),
        ),
        outcomes=(_better(names)[f1[1] > f1[0]],),
        rollout=first.rollout,
        target=second.rollout,
    )
