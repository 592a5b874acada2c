"""One thing to show on a GPU: its record, what it is given, and the figures that it leaves as they come."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from swift_stage2.whole_file import write_whole

Figure = str | int | float | bool


class Status(StrEnum):
    """The end of a stage."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """``module`` has ``run(context)``, which raises ``CheckFailed`` or ``CheckSkipped``, or returns when all held."""

    name: str
    proves: str
    module: str
    weight: int
    """Its share of the time that is left, against the weights of the stages after it."""
    needs: tuple[str, ...] = ()
    """Packages by the names under which they are imported."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Further keyword arguments of ``run``."""


class FigureLog:
    """Named figures, written to a file with each new one: a process that dies leaves those it had."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._figures: dict[str, Figure] = {}

    def note(self, name: str, value: Figure) -> None:
        """Adds a figure. Names end in their unit, as ``_s`` or ``_gib``."""
        self._figures[name] = round(value, 4) if isinstance(value, float) else value
        write_whole(self._path, json.dumps(self._figures))

    @staticmethod
    def read(path: Path) -> dict[str, Figure]:
        """Reads the notes of a file; empty if there are none."""
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The place and the time that a stage has to run."""

    rehearsal: bool
    """On the CPU, with tiny shapes."""
    scratch: Path
    """Shared by all stages of a check; removed at its end."""
    logs: Path
    """For the logs of processes that a stage starts."""
    deadline_s: float
    figures: FigureLog

    @property
    def device(self) -> str:
        """In torch's words."""
        return "cpu" if self.rehearsal else "cuda:0"

    @property
    def dtype(self) -> str:
        """Of weights, in torch's words. Half precision is what a GPU trains in and too slow to rehearse."""
        return "float32" if self.rehearsal else "bfloat16"


def one_line(text: str, limit: int = 300) -> str:
    """Text without breaks, and not longer than a row of a table bears."""
    whole = " ".join(text.split())
    return whole if len(whole) <= limit else f"{whole[: limit - 1]}…"
