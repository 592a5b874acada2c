"""How rows are written: the question, the answer's dialect, the order of objects; one row per picture or per class."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from swift_stage2.channel_b.answer_format import standard_format
from swift_stage2.channel_b.dialects import Dialect
from swift_stage2.convert.import_report import ImportIssue, ImportReport
from swift_stage2.convert.placement import PlacedImage
from swift_stage2.dataset.row_check import BOX_MARK, LABEL_MARK
from swift_stage2.errors import UserError
from swift_stage2.records import Box

_IMAGE_MARK = "<image>"
LABEL, LABELS = "{label}", "{labels}"
_PLACEHOLDER = re.compile(r"\{\s*labels?\s*\}", re.IGNORECASE)


class Order(StrEnum):
    """The order of a row's objects."""

    GIVEN = "given"
    """The source's."""
    READING = "reading"
    """By upper edge, then by left edge."""
    RANDOM = "random"
    """Shuffled anew for every picture, by the seed and the picture's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStyle:
    """``prompt`` may hold ``{labels}``, all classes, and with ``per_class`` holds ``{label}``.

    Raises:
        UserError: a prompt that no row can have, or that does not ask what it should.
    """

    prompt: str
    dialect: Dialect
    order: Order = Order.GIVEN
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
        if not self.prompt.strip():
            raise UserError("--prompt must ask something, got an empty one; write the question")
        if near := set(_PLACEHOLDER.findall(self.prompt)) - {LABEL, LABELS}:
            raise UserError(f"--prompt knows {LABELS} and {LABEL}, got {min(near)}; correct it")
        if self.prompt.encode("utf-8", "replace").decode() != self.prompt:
            raise UserError(f"--prompt must be UTF-8 text, got prompt={self.prompt!a}; write it so")

    def rows(self, image: PlacedImage, report: ImportReport) -> Iterator[str]:
        """One line for each question about a picture, with its line break."""
        objects = list(image.objects)
        if self.max_objects is not None and len(objects) > self.max_objects:
            # Objects that a row leaves out are objects that the model is taught to leave out.
            report.add(ImportIssue.TOO_MANY, image.name)
            return
        chance = random.Random(f"{self.seed}:{image.name}")
        if self.order is Order.READING:
            objects.sort(key=lambda each: (each[1][1], each[1][0]))
        elif self.order is Order.RANDOM:
            chance.shuffle(objects)
        if not self.per_class:
            yield self._row(image.path, self.prompt, objects)
            return
        shown = dict.fromkeys(label for label, _ in objects)
        absent = [label for label in self.labels if label not in shown and label not in image.hidden]
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
