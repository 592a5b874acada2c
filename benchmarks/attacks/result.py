"""One kind of attack: how often it was tried, how each try ended, and what it cost. Made by groups, read by the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FORBIDDEN = frozenset({"hang", "traceback", "accepted", "lost"})
"""Outcomes that no try may have: no end in time, an exception that is not ours, an answer believed that must not be,
a sample or a process that is gone."""


@dataclass(frozen=True, slots=True)
class AttackResult:
    """``outcomes`` maps a word for how a try ended to how many ended so; ``peak_mib`` is of memory beyond the start."""

    name: str
    attempts: int
    outcomes: Mapping[str, int]
    peak_mib: float | None = None
    seconds: float | None = None
    """Of the longest try."""

    def __post_init__(self) -> None:
        if sum(self.outcomes.values()) != self.attempts:
            raise ValueError(
                f"every try has one outcome, got attempts={self.attempts} outcomes={dict(self.outcomes)}"
            )

    @property
    def forbidden(self) -> dict[str, int]:
        """Outcomes that must not be, with their numbers; empty when the attack was withstood."""
        return {word: number for word, number in self.outcomes.items() if word in FORBIDDEN and number}
