"""A picture's row: its boxes, put on the picture that is there, and the question and answer about them.

Every box lies inside its picture, as large as that is, and has an area.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from swift_stage2.channel_b.answer_templates import standard_template
from swift_stage2.channel_b.dialects import Dialect
from swift_stage2.data.picture import UNREADABLE, StoredPicture, look_at
from swift_stage2.data.row_check import BOX_MARK, LABEL_MARK
from swift_stage2.data.sources import AnnotatedImage, AnnotatedObject, ImportIssue, ImportReport, short
from swift_stage2.errors import UserError
from swift_stage2.records import Box
from swift_stage2.servers.image_opening import UPRIGHT

_IMAGE_MARK = "<image>"
LABELS = "{labels}"
_PLACEHOLDER = re.compile(r"\{\s*labels?\s*\}", re.IGNORECASE)
Objects = Sequence[tuple[str, Box]]
"""Labels and boxes in pixels."""


def place_objects(image: AnnotatedImage, folder: Path, report: ImportReport) -> Objects | None:
    """Boxes on the stored pixels of a picture in ``folder``; None if no row can be made of it. The report tells all."""
    path = os.path.join(folder, image.name)
    if (picture := _look_at(path, report)) is None:
        return None
    size, objects = (picture.width, picture.height), image.objects
    if not image.is_share and objects and all(max(each.box) <= 1 for each in objects):
        report.add(ImportIssue.SHARES, f"{objects[0].where}: {path}")
        return None
    if image.size not in (None, size):
        written, real = ("x".join(map(str, each)) for each in (image.size or (), size))
        report.add(ImportIssue.SIZE, f"{image.name}: {written}, the picture has {real}")
    scale = size if image.is_share else (1, 1)
    placed = [
        (label, inside)
        for label, (x1, y1, x2, y2), where in _once(objects, report)
        if (
            inside := _inside(
                (x1 * scale[0], y1 * scale[1], x2 * scale[0], y2 * scale[1]), size, where, report
            )
        )
    ]
    if not placed:
        report.add(ImportIssue.EMPTY, path)
    return placed


def _once(objects: Sequence[AnnotatedObject], report: ImportReport) -> Iterator[AnnotatedObject]:
    first: dict[tuple[str, Box], AnnotatedObject] = {}
    for each in objects:
        if (other := first.setdefault((each.label, each.box), each)) is each:
            yield each
        else:
            report.add(ImportIssue.REPEATED, f"{each.where} as {other.where}")


def _look_at(path: str, report: ImportReport) -> StoredPicture | None:
    try:
        path.encode()  # JSON takes no other name
        picture = look_at(path)
    except FileNotFoundError:
        report.add(ImportIssue.NO_PICTURE, path)
    except UNREADABLE as error:
        report.add(ImportIssue.UNREADABLE, f"{path}: {error}")
    else:
        if picture.orientation != UPRIGHT:
            report.add(ImportIssue.ROTATED, path)
        return picture
    return None


def _inside(box: Box, size: tuple[int, int], where: str, report: ImportReport) -> Box | None:
    """The part of a box that lies on the picture, as whole numbers where it has them; None if it has no area."""
    x1, y1, x2, y2 = box = tuple(map(short, box))  # type: ignore[assignment]
    inside = max(x1, 0), max(y1, 0), min(x2, size[0]), min(y2, size[1])
    if x1 >= x2 or y1 >= y2:
        report.add(ImportIssue.FLAT, where)
    elif inside[0] >= inside[2] or inside[1] >= inside[3]:
        report.add(ImportIssue.OUTSIDE, where)
    else:
        if inside != box:
            report.add(ImportIssue.CLIPPED, where)
        return inside
    return None


def check_prompt(prompt: str) -> None:
    """Raises UserError: no row can have such a ``--prompt``, which may hold ``{labels}`` for all labels."""
    if LABEL_MARK in prompt or BOX_MARK in prompt or prompt.count(_IMAGE_MARK) > 1:
        raise UserError(
            f"--prompt may hold {_IMAGE_MARK} once, and neither {LABEL_MARK} nor {BOX_MARK}",
            got=f"prompt={prompt!r}",
            remedy="take them out",
        )
    if near := set(_PLACEHOLDER.findall(prompt)) - {LABELS}:
        raise UserError(f"--prompt knows {LABELS}", got=min(near), remedy="correct it")


def row_of(path: str, objects: Objects, prompt: str, dialect: Dialect) -> str:
    """The line of the picture at ``path``, with its line break."""
    messages = [
        {"role": "user", "content": prompt if _IMAGE_MARK in prompt else _IMAGE_MARK + prompt},
        {"role": "assistant", "content": _answer(dialect, len(objects))},
    ]
    labels, boxes = [label for label, _ in objects], [box for _, box in objects]
    row = {"messages": messages, "images": [path], "objects": {"ref": labels, "bbox": boxes}}
    return json.dumps(row, ensure_ascii=False) + "\n"


@lru_cache(1024)
def _answer(dialect: Dialect, num_objects: int) -> str:
    """With a mark for each label and box, which ms-swift fills."""
    answer = standard_template(dialect).write([(LABEL_MARK, (0, 0, 0, 0))] * num_objects)
    return answer.replace("[0, 0, 0, 0]", BOX_MARK)
