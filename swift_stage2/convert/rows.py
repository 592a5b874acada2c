"""A picture's rows: its boxes, put on the picture that is there, and the question and answer about them.

Every box lies inside its picture, as large as that is, and has an area. A row asks about all classes, or about one.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from swift_stage2.channel_b.answer_format import standard_format
from swift_stage2.channel_b.dialects import Dialect
from swift_stage2.channel_b.image_files import UPRIGHT
from swift_stage2.convert.import_report import ImportIssue, ImportReport
from swift_stage2.convert.sources import AnnotatedImage, AnnotatedObject, short
from swift_stage2.dataset.picture import PLAIN_MODES, UNREADABLE, StoredPicture, look_at
from swift_stage2.dataset.row_check import BOX_MARK, LABEL_MARK
from swift_stage2.errors import UserError
from swift_stage2.records import Box

_IMAGE_MARK = "<image>"
LABEL, LABELS = "{label}", "{labels}"
_PLACEHOLDER = re.compile(r"\{\s*labels?\s*\}", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """A picture that a row can name, and its boxes in pixels; ``hidden``: labels of objects that were left out."""

    path: str
    name: str
    objects: list[tuple[str, Box]]
    hidden: set[str]


@dataclass(frozen=True, slots=True)
class ImagePlacer:
    """The folder where pictures lie; boxes are taken on their pixels as they are stored."""

    folder: Path
    report: ImportReport

    def place(self, image: AnnotatedImage) -> PlacedImage | None:
        """None for an image that cannot be read, or of which no row can be made; all is told to the report."""
        path = os.path.join(self.folder, image.name)
        picture = self._look_at(path)
        if picture is None:
            return None
        boxes = [each.box for each in image.objects if each.box is not None]
        if not image.is_share and boxes and all(max(box) <= 1 for box in boxes):
            first = next(each.where for each in image.objects if each.box is not None)
            self.report.add(ImportIssue.SHARES, f"{first}: {path}")
            return None
        size = picture.width, picture.height
        self._compare_sizes(image, picture, size)
        placed: list[tuple[str, Box]] = []
        hidden = {each.label for each in image.objects if each.box is None}
        for label, written, where in self._once(image.objects):
            box = self._inside(_pixels(written, size) if image.is_share else written, size, where)
            if box is None:
                hidden.add(label)
            else:
                placed.append((label, box))
        if not placed:
            self.report.add(ImportIssue.EMPTY, path)
        return PlacedImage(path, image.name, placed, hidden)

    def _once(self, objects: Sequence[AnnotatedObject]) -> list[tuple[str, Box, str]]:
        """Those with a box, each once."""
        found: dict[tuple[str, Box], str] = {}
        for label, box, where in objects:
            if box is not None and found.setdefault((label, box), where) is not where:
                self.report.add(ImportIssue.REPEATED, f"{where} as {found[label, box]}")
        return [(label, box, where) for (label, box), where in found.items()]

    def _look_at(self, path: str) -> StoredPicture | None:
        try:
            path.encode()
            picture = look_at(path)
        except UnicodeEncodeError:
            self.report.add(ImportIssue.NOT_UTF8, path)
        except FileNotFoundError:
            self.report.add(ImportIssue.NO_PICTURE, path)
        except UNREADABLE as error:
            self.report.add(ImportIssue.UNREADABLE, f"{path}: {error}")
        else:
            if picture.orientation != UPRIGHT:
                self.report.add(ImportIssue.ROTATED, path)
            if picture.mode not in PLAIN_MODES:
                self.report.add(ImportIssue.COLOURS, f"{path}: {picture.mode}")
            return picture
        return None

    def _compare_sizes(self, image: AnnotatedImage, picture: StoredPicture, size: tuple[int, int]) -> None:
        if image.size is None or image.size == size:
            return
        is_turned = picture.orientation != UPRIGHT and image.size == picture.upright_size
        written, real = ("x".join(map(str, each)) for each in (image.size, size))
        shown = f"{image.name}: {written}, the picture has {real}"
        self.report.add(ImportIssue.UPRIGHT if is_turned else ImportIssue.SIZE, shown)

    def _inside(self, box: Box, size: tuple[int, int], where: str) -> Box | None:
        """The part of a box that lies on the picture, as whole numbers where it has them; None if it has no area."""
        x1, y1, x2, y2 = box = tuple(map(short, box))  # type: ignore[assignment]
        inside = max(x1, 0), max(y1, 0), min(x2, size[0]), min(y2, size[1])
        if x1 >= x2 or y1 >= y2:
            self.report.add(ImportIssue.FLAT, where)
        elif inside[0] >= inside[2] or inside[1] >= inside[3]:
            self.report.add(ImportIssue.OUTSIDE, where)
        else:
            if inside != box:
                self.report.add(ImportIssue.CLIPPED, where)
            return inside
        return None


def _pixels(shares: Box, size: tuple[int, int]) -> Box:
    x1, y1, x2, y2 = shares
    return x1 * size[0], y1 * size[1], x2 * size[0], y2 * size[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStyle:
    """``prompt`` may hold ``{labels}``, all classes, and with ``per_class`` holds ``{label}``.

    Raises:
        UserError: a prompt that no row can have, or that does not ask what it should.
    """

    prompt: str
    dialect: Dialect
    seed: int = 0
    per_class: bool = False
    negatives: int = 0
    """Questions per picture for classes that it does not show; with ``per_class``."""
    max_objects: int | None = None
    labels: Sequence[str] = ()
    """All classes, for ``{labels}`` and negatives."""

    def __post_init__(self) -> None:
        if (LABEL in self.prompt) != self.per_class:
            raise UserError(
                f"--per-class and {LABEL} in --prompt go together, got prompt={self.prompt!r}; "
                + (
                    f"write --prompt 'Detect every {LABEL}.'"
                    if self.per_class
                    else "add --per-class, or take it out"
                )
            )
        if LABEL_MARK in self.prompt or BOX_MARK in self.prompt or self.prompt.count(_IMAGE_MARK) > 1:
            raise UserError(
                f"--prompt may hold {_IMAGE_MARK} once, and neither {LABEL_MARK} nor {BOX_MARK}, got "
                f"prompt={self.prompt!r}; take them out"
            )
        if near := set(_PLACEHOLDER.findall(self.prompt)) - {LABEL, LABELS}:
            raise UserError(f"--prompt knows {LABELS} and {LABEL}, got {min(near)}; correct it")

    def rows(self, image: PlacedImage, report: ImportReport) -> Iterator[str]:
        """One line for each question about a picture, with its line break."""
        objects = image.objects
        if self.max_objects is not None and len(objects) > self.max_objects:
            # Objects that a row leaves out are objects that the model is taught to leave out.
            report.add(ImportIssue.TOO_MANY, image.name)
            return
        if not self.per_class:
            yield self._row(image.path, self.prompt, objects)
            return
        shown = dict.fromkeys(label for label, _ in objects)
        absent = [label for label in self.labels if label not in shown and label not in image.hidden]
        chance = random.Random(f"{self.seed}:{image.name}")
        asked = [*shown, *chance.sample(absent, min(self.negatives, len(absent)))]
        if not asked:
            report.add(ImportIssue.UNASKED, image.name)
        for label in asked:
            of_class = [each for each in objects if each[0] == label]
            yield self._row(image.path, self.prompt.replace(LABEL, label), of_class)

    def _row(self, path: str, prompt: str, objects: Sequence[tuple[str, Box]]) -> str:
        prompt = prompt.replace(LABELS, ", ".join(self.labels))
        messages = [
            {"role": "user", "content": prompt if _IMAGE_MARK in prompt else _IMAGE_MARK + prompt},
            {"role": "assistant", "content": _answer(self.dialect, len(objects))},
        ]
        labels, boxes = [label for label, _ in objects], [box for _, box in objects]
        row = {"messages": messages, "images": [path], "objects": {"ref": labels, "bbox": boxes}}
        return json.dumps(row, ensure_ascii=False) + "\n"


@lru_cache(1024)
def _answer(dialect: Dialect, num_objects: int) -> str:
    """With a mark for each label and box, which ms-swift fills."""
    answer = standard_format(dialect).write([(LABEL_MARK, (0, 0, 0, 0))] * num_objects)
    return answer.replace("[0, 0, 0, 0]", BOX_MARK)
