"""A picture as its source describes it, before anybody has looked at its file; and the names of a source's classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from swift_stage2.convert.import_report import ImportIssue, ImportReport
from swift_stage2.dataset.labels import spell_label
from swift_stage2.records import Box


class AnnotatedObject(NamedTuple):
    """``box`` is x1, y1, x2, y2; None of one that was left out: nobody may say that the picture shows none of it."""

    label: str
    box: Box | None
    where: str
    """File and line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotatedImage:
    """``name`` is relative to the folder of images, and of a file there if any fits what the source says."""

    name: str
    objects: Sequence[AnnotatedObject]
    is_share: bool = False
    """True if the source gives boxes as shares of the image's width and height, False if in pixels."""
    size: tuple[int, int] | None = None
    """Width and height, where the source says them."""


class Source(Protocol):
    """A data set of another program."""

    def labels(self) -> Sequence[str]:
        """All classes, in the source's order."""

    def __len__(self) -> int:
        """The source yields at most this many images."""

    def __iter__(self) -> Iterator[AnnotatedImage]: ...


class LabelSpelling:
    """Labels of classes as rows spell them. Two classes that get one label are told."""

    def __init__(self, report: ImportReport) -> None:
        self._report = report
        self._labels: dict[str, str] = {}
        self._class_of: dict[str, str] = {}

    def spell(self, name: str, of: str = "") -> str:
        """The label of the class ``name``, whose id is ``of`` if it has one. It may be empty."""
        shown = f"{of} {name!r}".strip()
        if shown not in self._labels:
            label = self._labels[shown] = spell_label(name)
            if label != name.strip(" "):
                self._report.add(ImportIssue.RESPELT, f"{name} → {label}")
            other = self._class_of.setdefault(label, shown)
            if label and other != shown:
                self._report.add(ImportIssue.MERGED, f"{other} and {shown} → {label}")
        return self._labels[shown]


def in_order(box: Sequence[float], where: str, report: ImportReport) -> Box:
    """``box`` with its smaller edges first; told if they were not."""
    x1, y1, x2, y2 = box
    if x1 > x2 or y1 > y2:
        report.add(ImportIssue.SWAPPED, where)
    return min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)
