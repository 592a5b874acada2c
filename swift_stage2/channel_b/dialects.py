"""The ways in which an answer lists its objects, and the words each of them uses.

One table serves the parser, which reads a dialect, and the renderer, which writes it, so that what is
written is always what is read. A user's file may add to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from swift_stage2.config.registry import register

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
    """One object of label a and box 0, 0, 0, 0: how answers are spelled where no row shows anything else."""
    named: bool = False
    """Whether every object stands under a key ``object_<digits>``."""

    def __str__(self) -> str:
        return self.name


DIALECTS: dict[str, Dialect] = {}


def register_dialect(dialect: Dialect) -> Dialect:
    """Lets ``stage2_ab.channel_b.target.dialect`` name it.

    Raises:
        ConfigError: the name is taken.
    """
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
