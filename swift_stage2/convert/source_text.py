"""Text of other people's tools: its encoding, its lines, and the numbers and flags that stand in it."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swift_stage2.whole_file import open_regular

MOST = 1e9
"""Pixels; a coordinate beyond is no coordinate."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_FLAGS = {
    **dict.fromkeys(("", "0", "false", "no", "none", "unspecified"), False),
    **dict.fromkeys(("1", "true", "yes"), True),
}


def read_text(path: Path) -> str:
    """A whole file of UTF-8 or, with a byte order mark, UTF-16.

    Raises:
        OSError: it cannot be read.
        ValueError: it is other text, or none.
    """
    with open_regular(path) as file:
        content = file.read()
    is_utf_16 = content.startswith(_UTF_16)
    if b"\0" in content and not is_utf_16:
        raise ValueError("it holds zero bytes, as UTF-16 without its mark does; save it as UTF-8")
    try:
        return content.decode("utf-16" if is_utf_16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        kind = "UTF-16" if is_utf_16 else "UTF-8"
        raise ValueError(f"it is no {kind} text, at byte {error.start + 1}; save it as UTF-8") from error


def lines_of(text: str) -> list[str]:
    """Lines, which only LF and CR LF end.

    Raises:
        ValueError: a CR stands alone, as the end of a line or within one.
    """
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    if any("\r" in line for line in lines):
        raise ValueError("a CR ends no line here; save it with LF or CR LF")
    return lines


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
