"""The ground that formats share: what an import tells, text and numbers as tools write them, pictures and classes."""

from __future__ import annotations

import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from swift_stage2.errors import DatasetError
from swift_stage2.records import Box
from swift_stage2.whole_file import open_regular

_MOST_SHOWN = 160
_READ = "avif bmp dib gif j2k jfif jp2 jpe jpeg jpg pbm pgm png pnm ppm tif tiff webp"
_TOLD = (
    "arw cr2 dng exr hdr heic heif ico jxl nef psd svg tga"  # others that people have: looked at, and told
)
IMAGE_SUFFIXES = tuple(f".{each}" for each in f"{_READ} {_TOLD}".split())
MOST = 1e9
"""Pixels; a coordinate beyond is no coordinate."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_FLAGS = {
    **dict.fromkeys(("", "0", "false", "no", "none", "unspecified"), False),
    **dict.fromkeys(("1", "true", "yes"), True),
}


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
    SHARES = (
        "picture whose boxes all end within its first pixel, as shares would",
        "left out; multiply by width and height",
    )
    EMPTY = ("picture without objects", "kept, with empty lists")
    ROTATED = ("EXIF rotation", "kept; boxes are taken on the stored pixels")
    SIZE = ("annotated with another size than the picture's", "kept; boxes are taken as its pixels")
    CROWD = ("crowd (iscrowd)", "left out")
    DIFFICULT = ("difficult object (--skip-difficult)", "left out")
    BAD_FLAG = ("object with a flag that is neither 0 nor 1", "left out")
    NO_BOX = ("object whose box cannot be read", "left out")
    NOT_SHARES = (
        "line that is no box or mask in shares from 0 to 1",
        "left out; kpt_shape in data.yaml tells of key points",
    )
    NO_CLASS = ("object of an unknown class", "left out")
    NO_IMAGE = ("object of an image that is not listed", "left out")
    OUTSIDE = ("box outside of the picture", "left out")
    FLAT = ("box without an area, or with swapped corners", "left out")
    REPEATED = ("object written twice", "kept once")
    ID_TWICE = ("annotation id used twice", "both kept")
    ID_FORM = ("id written as text here and as a number there", "taken as the same id")
    MASK = ("mask", "box drawn around it")
    BAD_MASK = ("mask that cannot be read or is empty", "the box's centre taken")
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


class AnnotatedObject(NamedTuple):
    """``box`` is x1, y1, x2, y2."""

    label: str
    box: Box
    where: str
    """File and line."""
    segmentation: Any = None
    """Its mask as the source has it, if it has one and somebody wants it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotatedImage:
    """``name`` is relative to the folder of images, and of a file there if any fits what the source says."""

    name: str
    objects: Sequence[AnnotatedObject]
    is_share: bool = False
    """True if the source gives boxes as shares of the image's width and height, False if in pixels."""
    size: tuple[int, int] | None = None
    """Width and height, where the source says them."""


@dataclass(frozen=True, slots=True)
class AnnotatedSet:
    """All of a source. ``labels`` of its classes, in its order."""

    images: Sequence[AnnotatedImage]
    labels: Sequence[str]
    class_file: Path | None = None
    """That names the classes, where a file of its own does."""


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
            if label != name.strip():
                self._report.add(ImportIssue.RESPELT, f"{name} → {label}")
            other = self._class_of.setdefault(label, shown)
            if label and other != shown:
                self._report.add(ImportIssue.MERGED, f"{other} and {shown} → {label}")
        return self._labels[shown]


def short(value: float) -> float:
    """To a millionth of a pixel, without the last bits of a sum or a difference: 0.1 + 0.2 is 0.3."""
    rounded = round(value, 6)
    return int(rounded) if rounded == int(rounded) else rounded


def files_below(folder: Path, suffixes: tuple[str, ...], option: str) -> list[str]:
    """Names relative to ``folder`` of all files in and below it that end so, whatever their case.

    Raises:
        DatasetError: it is no folder that can be read, or holds no such file; ``option`` is told to have named it.
    """

    def refuse(error: OSError) -> None:
        raise DatasetError(
            f"{option} must be a folder that can be read",
            got=f"{error.filename}: {error.strerror}",
            remedy="check the path",
        ) from error

    found = sorted(
        os.path.relpath(os.path.join(parent, name), folder)
        for parent, _, names in os.walk(folder, onerror=refuse)
        for name in names
        if name.lower().endswith(suffixes) and not name.startswith(".")
    )
    if not found:
        shown = suffixes[0] if len(suffixes) == 1 else "picture"
        raise DatasetError(
            f"{option} must be a folder that holds {shown} files",
            got=f"none below {folder}",
            remedy="name another",
        )
    return found


class ImageFolder:
    """``folder`` and all folders in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def names(self) -> list[str]:
        """All pictures. Raises DatasetError: there is none."""
        return files_below(self.folder, IMAGE_SUFFIXES, "--images")

    @cached_property
    def by_stem(self) -> Mapping[str, list[str]]:
        """Pictures by their name without its suffix, composed (NFC)."""
        found: defaultdict[str, list[str]] = defaultdict(list)
        for name in self.names:
            found[stem_of(name)].append(name)
        return found

    def find(self, written: str, where: str, report: ImportReport) -> str | None:
        """The picture that a source calls ``written``; None if there is none or more than one, which is told.

        A name may have its suffix in other capitals or none, backslashes, and %20 for a space.
        """
        slashed = written.replace("\\", "/")
        spellings = list(dict.fromkeys((written, slashed, unquote(written), unquote(slashed))))
        for name in spellings:
            if os.path.isfile(os.path.join(self.folder, name)):
                return os.path.normpath(name)
        for name in spellings:
            suffix = os.path.splitext(name)[1].lower()
            wanted = suffix if suffix in IMAGE_SUFFIXES else ""
            fitting = [each for each in self.by_stem.get(stem_of(name), ()) if each.lower().endswith(wanted)]
            if len(fitting) == 1:
                return fitting[0]
            if fitting:
                report.add(ImportIssue.SEVERAL_PICTURES, f"{where}: {', '.join(fitting)}")
                return None
        report.add(ImportIssue.NO_PICTURE, f"{where}: {written}")
        return None


def stem_of(name: str) -> str:
    """A picture's name without the suffix of one, by which label files are called, too."""
    stem, suffix = os.path.splitext(os.path.normpath(name))
    known = suffix.lower() in (*IMAGE_SUFFIXES, ".txt", ".xml")
    return unicodedata.normalize("NFC", stem if known else stem + suffix)


def read_text(path: Path) -> str:
    """A whole file of UTF-8. Raises OSError: it cannot be read, ValueError: it is other text, or none."""
    with open_regular(path) as file:
        content = file.read()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is no UTF-8 text, at byte {error.start + 1}; save it as UTF-8") from error


def number(value: Any) -> float | None:
    """A number, or text that is one; None of anything else, and of what is no coordinate."""
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip(" \t")):
        value = float(value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if abs(value) <= MOST else None  # which is true of no NaN


def numbers(values: Any, count: int | None = None) -> list[float] | None:
    """A list of numbers, ``count`` of them if that is given; None of anything else."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        return None
    found = [each for each in map(number, values) if each is not None]
    return found if len(found) == len(values) == (len(found) if count is None else count) else None


def whole(value: Any) -> int | None:
    """A whole number, as 1, "1", 1.0 or "1.000e+00"; None of anything else."""
    found = number(value)
    return int(found) if found is not None and found == int(found) else None


def flag(value: Any) -> bool | None:
    """0 or 1, True or False, ``Unspecified``, or the text of one; None of anything else."""
    if value is None or isinstance(value, bool):
        return bool(value)
    found = number(value)
    if found is not None:
        return {0.0: False, 1.0: True}.get(found)
    return _FLAGS.get(value.strip().lower()) if isinstance(value, str) else None


def size_of(width: Any, height: Any) -> tuple[int, int] | None:
    """Width and height; None where they are no such numbers."""
    sides = whole(width) or 0, whole(height) or 0
    return sides if min(sides) > 0 else None


_MARK = re.compile(
    r"</?\|?([^<>|]*)\|?>"
)  # `<|im_end|>`, `<bbox>`, `</s>`: a tokenizer or ms-swift may take it
_SPECIAL = re.compile(r"<\|[^<>]*\|>|</?s>|<(image|video|audio|bbox|ref-object)>")
_ESCAPED = str.maketrans('"\\', "'/")


@lru_cache(4096)
def spell_label(text: str) -> str:
    """``text`` composed (NFC), without special tokens, invisible characters and what JSON escapes; it may be empty."""
    text = unicodedata.normalize("NFC", text).translate(_ESCAPED)
    text = "".join(_visible(each) for each in text)
    while _MARK.search(text):
        text = _MARK.sub(r"\1", text)
    return " ".join(text.split())


def _visible(character: str) -> str:
    kind = unicodedata.category(character)
    if kind[0] == "Z" or character.isspace():
        return " "
    return "?" if kind == "Cs" else "" if kind in ("Cc", "Cf") else character


def has_special_token(label: str) -> bool:
    """True if ``label`` holds a special token of a tokenizer or a placeholder of ms-swift."""
    return _SPECIAL.search(label) is not None
