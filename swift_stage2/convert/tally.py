"""Every oddity of a source data set: what it is, what becomes of it, how often it was met and where first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_MOST_SHOWN = 120


class Oddity(Enum):
    """In the order in which they are told: what was found, and what is done."""

    ABSENT = ("image file is not there", "left out")
    UNREADABLE = ("image file is no whole picture", "left out")
    NOT_UTF8 = ("image name is not UTF-8, which JSON needs", "left out; rename the file")
    TWO_FILES = ("image id of two images", "both left out")
    SECOND = ("image or annotation file of a name that was there before", "left out")
    LISTED_TWICE = ("image listed twice", "its objects joined")
    BROKEN_FILE = ("annotation file cannot be read", "left out")
    NO_LABEL_FILE = ("image without a label file", "kept, without objects")
    BROKEN_PAGE = ("page that the browser does not show", "left out")
    FRAMED = ("page that shows frames or embedded documents", "left out")
    EMPTY = ("image without objects", "kept, with empty lists")
    TOO_MANY = ("image with more objects than --max-objects", "left out")
    UNASKED = ("image that no question is asked about", "left out; --negatives asks")
    ROTATED = ("EXIF rotation", "kept; see below")
    UPRIGHT = (
        "annotated with the size of the upright picture, not of the stored one",
        "kept; see --boxes-on",
    )
    SIZE = ("annotated with another size than the picture's", "kept; boxes are taken as its pixels")
    CROWD = ("crowd (iscrowd)", "dropped")
    DIFFICULT = ("difficult object", "kept; --skip-difficult drops it")
    SKIPPED = ("difficult object (--skip-difficult)", "dropped")
    MASK = ("mask without a box", "box drawn around the mask")
    NO_BOX = ("object without a box or mask that can be read", "dropped")
    NO_LABEL = ("object without a name of its class", "dropped")
    NO_CATEGORY = ("object of an unknown class", "dropped")
    NO_IMAGE = ("object of an image that is not listed", "dropped")
    ID_TWICE = ("annotation id used twice", "both kept")
    REPEATED = ("annotation written twice", "kept once")
    UNSEEN = ("element that is covered, cut short or blank", "dropped")
    CLIPPED = ("box reaches over the image's edge", "clipped")
    OUTSIDE = ("box outside of the image", "dropped")
    FLAT = ("box without an area", "dropped")
    FROM_ZERO = ("coordinate 0 where the first pixel is 1", "clipped; say --first-pixel 0")
    RESPELT = ("label with what an answer cannot hold (double quote, backslash, mark)", "respelt, as shown")

    def __init__(self, found: str, done: str) -> None:
        self.found, self.done = found, done


@dataclass(slots=True)
class Tally:
    """Counts of one import."""

    counts: Counter[Oddity] = field(default_factory=Counter)
    first: dict[Oddity, str] = field(default_factory=dict)
    num_annotations: int = 0
    """Objects that the source lists."""

    def tell(self, oddity: Oddity, where: object, count: int = 1) -> None:
        """``where`` is shown for the first one."""
        if count:
            self.counts[oddity] += count
            self.first.setdefault(oddity, str(where))

    def summary(self, written: dict[str, str]) -> RenderableType:
        """One table; ``written`` are its first lines: each file with its content."""
        table = Table(box=box.SQUARE)
        table.add_column("found")
        table.add_column("times", justify="right")
        table.add_column("handled")
        table.add_column("first", overflow="fold")
        for oddity in Oddity:
            if count := self.counts[oddity]:
                table.add_row(oddity.found, f"{count:,}", oddity.done, Text(_shown(self.first[oddity])))
        lines = [Text(f"{name}: {content}") for name, content in written.items()]
        return Group(*([table] if table.row_count else []), *lines)

    def words(self) -> Iterator[str]:
        """The same in words, for an error."""
        for oddity in Oddity:
            if count := self.counts[oddity]:
                yield f"{oddity.found}: {count:,} (first {_shown(self.first[oddity])})"


def _shown(text: str) -> str:
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
