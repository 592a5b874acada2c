"""The two ways in which an answer lists its objects, and the words each of them uses.

One table serves the parser, which reads a dialect, and the renderer, which writes it, so that what is
written is always what is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Never

END_OF_TURN = "<|im_end|>"


class Dialect(StrEnum):
    """How an answer lists objects. An unknown name raises a ``ValueError`` that gives the valid ones."""

    OBJECT_LIST = "object_list"  # [{"bbox_2d": [1, 2, 3, 4], "label": "a"}]
    OBJECT_MAP = "object_map"  # {"object_1": {"desc": "a", "bbox_2d": [1, 2, 3, 4]}}

    @classmethod
    def _missing_(cls, value: object) -> Never:
        names = ", ".join(cls)
        raise ValueError(f"a dialect must be known, got dialect={value!r}; use one of {names}")


@dataclass(frozen=True, slots=True)
class Syntax:
    """The brackets of a dialect's container and the only keys that its objects may have."""

    opener: str
    closer: str
    label_key: str
    box_key: str
    named: bool  # every object stands under a key ``object_<digits>``


SYNTAX: Mapping[Dialect, Syntax] = MappingProxyType(
    {
        Dialect.OBJECT_LIST: Syntax("[", "]", label_key="label", box_key="bbox_2d", named=False),
        Dialect.OBJECT_MAP: Syntax("{", "}", label_key="desc", box_key="bbox_2d", named=True),
    }
)
