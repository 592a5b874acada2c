"""A row's answer as ms-swift will write it: its placeholders are filled from ``objects``, in their order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

IntegerBox = tuple[int, int, int, int]
LABEL_MARK, BOX_MARK = "<ref-object>", "<bbox>"
_MARKS = re.compile(f"{LABEL_MARK}|{BOX_MARK}")


@dataclass(frozen=True, slots=True)
class AnswerText:
    """An answer with its placeholders filled; ms-swift leaves those that find no object as they are."""

    text: str
    num_label_marks: int
    num_box_marks: int


def fill_answer(answer: str, labels: Sequence[str], boxes: Sequence[IntegerBox]) -> AnswerText:
    """``labels`` are taken as the row has them; ms-swift escapes nothing in them."""
    values: dict[str, Iterator[str]] = {LABEL_MARK: iter(labels), BOX_MARK: (str(list(box)) for box in boxes)}
    marks: list[str] = []

    def fill(match: re.Match[str]) -> str:
        marks.append(match[0])
        return next(values[match[0]], match[0])

    text = _MARKS.sub(fill, answer)
    return AnswerText(text, marks.count(LABEL_MARK), marks.count(BOX_MARK))
