"""The report of an import: each issue of its source, how often it was met, what became of it and where first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_MOST_SHOWN = 160


class ImportIssue(Enum):
    """In the order in which they are told: what was found, and what is done."""

    BROKEN_FILE = ("annotation file that cannot be read", "left out")
    BROKEN_ENTRY = ("entry without its id, name, image or class", "left out")
    NO_LABEL_FILE = ("picture without a label file", "kept, without objects")
    NO_PICTURE = ("picture that is not there", "left out")
    UNREADABLE = ("picture that cannot be read", "left out")
    SEVERAL_PICTURES = ("name that several pictures have", "all left out")
    TWO_CLAIMS = ("picture that several annotation files claim", "left out")
    ID_OF_TWO = ("image id of two pictures", "both left out")
    NOT_UTF8 = ("picture's name that is not UTF-8, which JSON needs", "left out; rename the file")
    SHARES = (
        "picture whose boxes all end within its first pixel, as shares would",
        "left out; multiply by width and height",
    )
    LISTED_TWICE = ("picture that is listed twice", "its objects joined")
    OTHER_NAME = ("picture that its annotation file names otherwise", "taken by the file's own name")
    EMPTY = ("picture without objects", "kept, with empty lists")
    COLOURS = ("picture that is neither RGB nor grey", "kept; read as RGB, transparency left out")
    ROTATED = ("EXIF rotation", "kept; boxes are taken on the stored pixels")
    UPRIGHT = ("annotated with the size of the upright picture", "kept; see --boxes-on")
    SIZE = ("annotated with another size than the picture's", "kept; boxes are taken as its pixels")
    CROWD = ("crowd (iscrowd)", "left out")
    DIFFICULT = ("difficult object", "kept; --skip-difficult leaves it out")
    SKIPPED = ("difficult object (--skip-difficult)", "left out")
    BAD_FLAG = ("object with a flag that is neither 0 nor 1", "left out")
    NO_BOX = ("object whose box or mask cannot be read", "left out")
    NOT_SHARES = ("line whose values are no shares from 0 to 1", "left out")
    UNCLEAR = (
        "line that may be a mask, or a box with more behind it",
        "left out; kpt_shape in data.yaml says",
    )
    NO_LABEL = ("object without a name of its class", "left out")
    NO_CLASS = ("object of an unknown class", "left out")
    NO_IMAGE = ("object of an image that is not listed", "left out")
    OUTSIDE = ("box outside of the picture", "left out")
    FLAT = ("box without an area", "left out")
    REPEATED = ("object written twice", "kept once")
    ID_TWICE = ("annotation id used twice", "both kept")
    ID_FORM = ("id written as text here and as a number there", "taken as the same id")
    MASK = ("mask without a box", "box drawn around the mask")
    BEHIND_BOX = ("line with a track id or key points behind its box", "these left out")
    SWAPPED = ("box with swapped corners or a size below 0", "put in order")
    FROM_ZERO = ("coordinate 0 where the first pixel is 1", "clipped; say --first-pixel 0")
    CLIPPED = ("box that reaches over the picture's edge", "clipped")
    RESPELT = ("label that an answer or a tokenizer cannot hold as it stands", "respelt, as shown")
    MERGED = ("two classes that get one label", "joined, as shown")

    def __init__(self, found: str, done: str) -> None:
        self.found, self.done = found, done


@dataclass(slots=True)
class ImportReport:
    """Counts of one import."""

    counts: Counter[ImportIssue] = field(default_factory=Counter)
    first: dict[ImportIssue, str] = field(default_factory=dict)
    num_annotations: int = 0
    """Objects that the source lists."""

    def add(self, issue: ImportIssue, where: object) -> None:
        """``where``: file and line, shown for the first one."""
        self.counts[issue] += 1
        self.first.setdefault(issue, str(where))

    def table(self) -> RenderableType:
        """One line per issue; nothing where there was none."""
        table = Table(box=box.SQUARE)
        table.add_column("found")
        table.add_column("times", justify="right")
        table.add_column("handled")
        table.add_column("first", overflow="fold")
        for issue in ImportIssue:
            if count := self.counts[issue]:
                table.add_row(issue.found, f"{count:,}", issue.done, Text(_shown(self.first[issue])))
        return table if table.row_count else Group()

    def words(self) -> Iterator[str]:
        """The same in words, for an error."""
        for issue in ImportIssue:
            if count := self.counts[issue]:
                yield f"{issue.found}: {count:,} (first {_shown(self.first[issue])})"


def _shown(text: str) -> str:
    text = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
