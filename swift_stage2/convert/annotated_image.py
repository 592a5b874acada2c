"""A picture as its source describes it, before anybody has looked at its file; and how a label is spelt in a row."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from swift_stage2.convert.exact_numbers import Quad

# ms-swift or its template would take it
_MARK = re.compile(r"<(image|video|audio|bbox|ref-object|\|im_end\|)>")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotatedImage:
    """``name`` is relative to the folder of images."""

    name: str
    objects: Sequence[tuple[str, Quad | None]]
    """Label and x1, y1, x2, y2; None of one that was dropped: nobody may say that the image shows none of its label."""
    is_share: bool = False
    """True if the source gives boxes as shares of the image's width and height, False if in pixels."""
    size: tuple[int, int] | None = None
    """Width and height, where the source says them."""
    group: str = ""
    """Images of one group stay on one side of a split; without one an image is alone."""


class Source(Protocol):
    """A data set of another program."""

    def labels(self) -> Sequence[str]:
        """All classes, in the source's order."""

    def __len__(self) -> int:
        """The source yields at most this many images."""

    def __iter__(self) -> Iterator[AnnotatedImage]: ...


def spell_label(text: str) -> str:
    """``text`` without what an answer would have to escape, marks of ms-swift's and outer space; it may be empty.

    Bytes that were no UTF-8 are taken for Latin-1.
    """
    text = "".join(chr(ord(each) - 0xDC00) if 0xDC80 <= ord(each) <= 0xDCFF else each for each in text)
    text = "".join("?" if 0xD800 <= ord(each) <= 0xDFFF else each for each in text)
    text = text.replace('"', "'").replace("\\", "/")
    text = "".join(each if each >= " " else " " for each in text)
    while _MARK.search(text):
        text = _MARK.sub(r"\1", text)
    return text.strip()
