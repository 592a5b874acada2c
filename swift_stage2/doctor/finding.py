"""One row of the doctor's table, and what a check hands back to become one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

ValueT = TypeVar("ValueT")


class Verdict(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found. ``fix`` is one line, and there whenever the verdict is a warning or failed."""

    section: str
    check: str
    verdict: Verdict
    found: str
    fix: str = ""
    counts_as_failed: bool = False
    """Failed, or not checked because of something that failed."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Outcome(Generic[ValueT]):
    """What a check hands back; ``value`` is for the checks that build on it."""

    verdict: Verdict
    found: str
    fix: str = ""
    value: ValueT | None = None


def ok(found: str, value: ValueT | None = None) -> Outcome[ValueT]:
    """Nothing to do."""
    return Outcome(Verdict.OK, found, value=value)


def warning(found: str, fix: str, value: ValueT | None = None) -> Outcome[ValueT]:
    """It works, but wastes or risks something."""
    return Outcome(Verdict.WARNING, found, fix, value)


def failed(found: str, fix: str) -> Outcome[Any]:
    """Training would not start, or not do what was asked."""
    return Outcome(Verdict.FAILED, found, fix)


def left_out(why: str) -> Outcome[Any]:
    """Nothing failed, but there is no way or no wish to look."""
    return Outcome(Verdict.NOT_CHECKED, why)
