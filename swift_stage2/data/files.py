"""Which local files the ``swift`` section's data sets are, their lines, and what is wrong with one of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from swift_stage2.config.swift_arguments import named_places
from swift_stage2.errors import DatasetError
from swift_stage2.whole_file import regular_lines

_SUFFIX = ".jsonl"
_FILE_SUFFIXES = (_SUFFIX, ".json", ".csv", ".txt", ".parquet")


def local_files(swift_arguments: Mapping[str, Any]) -> dict[str, list[Path]]:
    """The JSONL files of each argument, each once.

    Of a file in another format only that it is there: ms-swift would look for it on a hub. Hub ids are its business.
    Of a folder ms-swift would take what looks like a train split, or end in a traceback.

    Raises:
        DatasetError: a file is missing, or a folder.
        ConfigError: an argument is neither a path nor a list of paths.
    """
    found: dict[str, list[Path]] = {}
    for argument in ("dataset", "val_dataset"):
        files = found[argument] = []
        for name in named_places(swift_arguments, argument):
            path = Path(split_rows(name)[0])
            is_local = path.suffix in _FILE_SUFFIXES or name.startswith(("/", "./", "../"))
            if is_local and not path.exists():
                raise DatasetError(
                    f"swift.{argument} must name files that exist",
                    got=f"{argument}={name!r}",
                    remedy=f"correct the path (relative ones are read from the working directory, {Path.cwd()})",
                )
            if path.exists() and not path.is_file():  # ms-swift would wait for a pipe
                kind = "a folder; name the files in it" if path.is_dir() else "no regular file; name one"
                raise DatasetError(f"swift.{argument} must name files", got=f"{argument}={name!r}, {kind}")
            if path.suffix == _SUFFIX and path not in files:
                files.append(path)
    for argument in ("cached_dataset", "cached_val_dataset"):
        for name in named_places(swift_arguments, argument):
            if not Path(split_rows(name)[0]).is_dir():
                raise DatasetError(
                    f"swift.{argument} must name folders that exist",
                    got=f"{argument}={name!r}",
                    remedy="correct the path, or write them with swift export --to_cached_dataset true",
                )
    return found


def split_rows(name: str) -> tuple[str, str]:
    """The path that a name of ms-swift's is, and its `#N`, which asks for N rows. A path may hold a # itself."""
    path, mark, rows = name.rpartition("#")
    return (name, "") if not mark or Path(name).expanduser().exists() else (path, mark + rows)


def read_lines(file: Path, what: str = "a data set") -> Iterator[bytes]:
    """All lines. Raises DatasetError: ``what`` is no file that can be read."""
    try:
        yield from regular_lines(file)
    except OSError as error:
        raise DatasetError(
            f"{what} must be a readable UTF-8 file", got=f"{file}: {error}", remedy="check the path"
        ) from error


def coordinates_in(files: Iterable[Path]) -> int:
    """2 if the first object of these rows is a point, else 4 (boxes); 4 also where no row has an object.

    Raises:
        DatasetError: a file cannot be read.
    """
    for line in (line for file in files for line in read_lines(file)):
        with suppress(ValueError, TypeError, LookupError, RecursionError):  # whoever checks the row tells
            count = len(json.loads(line)["objects"]["bbox"][0])
            if count in (2, 4):
                return count
    return 4


def require_boxes(file: Path, command: str) -> None:
    """Raises DatasetError: the file's first object is a point, or it cannot be read."""
    if coordinates_in([file]) == 2:
        raise DatasetError(
            f"{command} is of boxes", got=f"{file}, which has points", remedy="give a file of boxes"
        )


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
        """True if a row with this fault still trains, perhaps on something else than was meant."""
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
