"""The ways in which an answer lists its objects, and the words each of them uses.

One table serves the parser, which reads a dialect, and the renderer, which writes it, so that what is
written is always what is read. A user's file may add to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swift_stage2.config.rules import register
from swift_stage2.config.stage2_ab import SHIPPED_TASKS

END_OF_TURN = "<|im_end|>"


@dataclass(frozen=True, slots=True)
class Dialect:
    """The brackets of a dialect's container and the only keys that its objects may have."""

    name: str
    opener: str
    closer: str
    label_key: str
    box_key: str
    example: str
    """One object of label a whose coordinates are all 0: how answers are spelled where no row shows anything else."""
    named: bool = False
    """Whether every object stands under a key ``object_<digits>``."""
    num_coordinates: int = 4
    """Of each object: 4 of a box, x1, y1, x2, y2; 2 of a point, x, y. ``box_key`` holds them."""

    def __str__(self) -> str:
        return self.name


def is_in_order(coordinates: Sequence[float]) -> bool:
    """True if all coordinates are at least 0, and a box has x1 <= x2 and y1 <= y2."""
    x, y, *corner = coordinates
    x2, y2 = corner or (x, y)
    return 0 <= x <= x2 and 0 <= y <= y2


DIALECTS: dict[str, Dialect] = {}


def register_dialect(dialect: Dialect) -> Dialect:
    """Lets ``stage2_ab.channel_b.target.dialect`` name it. Raises ConfigError: the name is taken."""
    return register(DIALECTS, "dialect", dialect.name)(dialect)


OBJECT_LIST = register_dialect(
    Dialect("object_list", "[", "]", "label", "bbox_2d", '[{"bbox_2d": [0, 0, 0, 0], "label": "a"}]')
)
OBJECT_MAP = register_dialect(
    Dialect(
        "object_map",
        "{",
        "}",
        "desc",
        "bbox_2d",
        '{"object_1": {"desc": "a", "bbox_2d": [0, 0, 0, 0]}}',
        named=True,
    )
)
POINT_LIST = register_dialect(
    Dialect(
        "point_list",
        "[",
        "]",
        "label",
        "point_2d",
        '[{"point_2d": [0, 0], "label": "a"}]',
        num_coordinates=2,
    )
)


def coordinates_of(task: str, dialect: str | None = None) -> int | None:
    """Of each object in a task's rows: as ``dialect`` has it, else the task's own; None where neither is known yet."""
    known = DIALECTS.get(dialect or "") or DIALECTS.get(SHIPPED_TASKS.get(task, ""))
    return known.num_coordinates if known else None
