"""A fault of one row, and where it stands. Made by ``row_check`` and ``survey``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Rule(StrEnum):
    """The rules that a row can break, in the order in which they are told."""

    LINE = "line is a row"
    COLUMNS = "columns show at the top"
    OBJECTS = "objects"
    BOUNDS = "box inside image"
    IMAGE = "image readable"
    PROMPT = "prompt"
    ANSWER = "answer lists its objects"
    FORMAT = "answers written alike"
    ROTATED = "EXIF orientation"
    IMAGES = "one image per row"
    AREA = "box with an area"
    COLOURS = "picture is RGB or grey"
    LABEL = "label's spelling"

    @property
    def is_advice(self) -> bool:
        """Whether such a row trains, if perhaps not as it was meant."""
        return self in (Rule.ROTATED, Rule.IMAGES, Rule.AREA, Rule.COLOURS, Rule.LABEL)


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file; lines are counted from 1."""

    file: Path
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Fault:
    """``reason``: the rule, what was got, and the remedy. ``image``: as the row names it."""

    place: Place
    rule: Rule
    reason: str
    image: str | None = None

    def __str__(self) -> str:
        text = f"{self.place}: {self.reason}"
        if self.image is not None and self.image not in self.reason:
            text += f" (image {self.image})"
        return text.encode("utf-8", "backslashreplace").decode("utf-8")  # a lone surrogate cannot be printed
