"""Reads the arrays of a JSON object element by element, in a window of about a megabyte.

A file of annotations is far larger than what is kept of it. The window grows only for an element that is larger.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

from swift_stage2.errors import DatasetError
from swift_stage2.whole_file import MOST_BYTES, open_regular

_WINDOW = 1 << 20  # characters
_SPACE = " \t\r\n"
_decode = json.JSONDecoder().raw_decode


def read_arrays(
    path: Path,
    on_progress: Callable[[int], None],
    what: str = "SOURCE",
    on_array: Callable[[str], None] = lambda key: None,
) -> Iterator[tuple[str, Any]]:
    """Yields (key, element) of every array right below the top, in the file's order; other values are left out.

    Bytes that are no UTF-8 become lone surrogates. ``on_progress`` is told characters so far, ``on_array`` the key of
    every array, also of one without elements.

    Raises:
        DatasetError: the file cannot be read, or is no JSON object.
    """
    try:
        with TextIOWrapper(open_regular(path), encoding="utf-8-sig", errors="surrogateescape") as file:
            yield from _Window(file, on_progress, on_array).arrays()
    except OSError as error:
        raise DatasetError(f"{what} must be a readable file, got {path}: {error}; check the path") from error
    except (ValueError, RecursionError) as error:
        raise DatasetError(
            f"{what} must be COCO's JSON, an object with images, annotations and categories, got {path}: {error}; "
            "name the annotations' file, not one of results"
        ) from error


class _Window:
    """The part of a file that is being read."""

    def __init__(
        self, file: TextIO, on_progress: Callable[[int], None], on_array: Callable[[str], None]
    ) -> None:
        self._file = file
        self._on_progress = on_progress
        self._on_array = on_array
        self._text = ""
        self._at = 0
        self._num_before = 0

    def arrays(self) -> Iterator[tuple[str, Any]]:
        for _ in self._places("{", "}"):
            key = self._value()
            if not isinstance(key, str):
                raise self._error("a key must be text")
            self._take(":")
            if self._peek() != "[":
                self._value()
                continue
            self._on_array(key)
            for _ in self._places("[", "]"):
                yield key, self._value()
        if self._peek():
            raise self._error("expected nothing behind the object")

    def _places(self, opener: str, closer: str) -> Iterator[None]:
        """Yields once before each member or element; the caller reads it before it goes on."""
        self._take(opener)
        if self._peek() == closer:
            self._take(closer)
            return
        while True:
            yield
            if self._take(f",{closer}") == closer:
                return

    def _value(self) -> Any:
        self._peek()
        while True:
            try:
                value, end = _decode(self._text, self._at)
            except json.JSONDecodeError as error:
                told = self._error(error.msg.removesuffix(" starting at"), error.pos)
                if not self._fill():
                    raise told from None
                continue
            # A number at the window's end may go on behind it.
            if end < len(self._text) or not self._fill():
                self._at = end
                return value

    def _take(self, allowed: str) -> str:
        found = self._peek()
        if not found or found not in allowed:
            raise self._error(f"expected {' or '.join(allowed)}")
        self._at += 1
        return found

    def _peek(self) -> str:
        """The next character that is no space; empty at the end."""
        while True:
            while self._at < len(self._text):
                if (found := self._text[self._at]) not in _SPACE:
                    return found
                self._at += 1
            if not self._fill():
                return ""

    def _fill(self) -> bool:
        """Reads on, at least as much as is still unread, so that a long element is not tried too often."""
        rest = self._text[self._at :]
        if len(rest) > MOST_BYTES:
            raise self._error(f"a value must have at most {MOST_BYTES >> 20} million characters")
        more = self._file.read(max(_WINDOW, len(rest)))
        self._num_before += self._at
        self._text, self._at = rest + more, 0
        self._on_progress(self._num_before + len(self._text))
        return bool(more)

    def _error(self, found: str, position: int | None = None) -> ValueError:
        place = self._num_before + (self._at if position is None else position)
        return ValueError(f"{found} at character {place + 1:,}")
