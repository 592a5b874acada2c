"""``swift-stage2 bench attacks``: hostile answers, requests and group members against the real parts, and a table.

Also how tries are counted: one kind of attack, how often it was tried, how each try ended, what it cost. Every group is
a module with a function ``attacks() -> list[AttackResult]``.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.results import ResultTable, publish, say
from benchmarks.servers import BenchServer

_MIB = 1 << 20
FORBIDDEN = frozenset({"hang", "traceback", "accepted", "lost"})
"""Outcomes that no try may have: no end in time, an exception that is not ours, an answer believed that must not be,
a sample or a process that is gone."""


def run(options: argparse.Namespace, directory: Path) -> int:
    """Runs the groups; 0 when all was withstood."""
    results: dict[str, list[AttackResult]] = {}
    for group in options.groups:
        say(group)
        results[group] = importlib.import_module(f"benchmarks.attacks.{group}").attacks()
    facts = {group: [asdict(result) for result in found] for group, found in results.items()}
    publish(directory, "attacks", facts, table(results), *notes(results))
    return 1 if any(result.forbidden for found in results.values() for result in found) else 0


def table(results: Mapping[str, Sequence[AttackResult]]) -> ResultTable:
    rows = [
        (
            f"{group}: {result.name}",
            f"{result.attempts:,}",
            ", ".join(f"{word} {number:,}" for word, number in sorted(result.outcomes.items())),
            "" if result.peak_mib is None else f"{result.peak_mib:,.0f}",
            "" if result.seconds is None else f"{result.seconds:.2f}",
        )
        for group, found in results.items()
        for result in found
    ]
    return ResultTable(
        "Attacks: what was sent, how every try ended, memory beyond the start, seconds of the longest try",
        ("attack", "tries", "outcomes", "peak, MiB", "longest, s"),
        rows,
    )


def notes(results: Mapping[str, Sequence[AttackResult]]) -> list[str]:
    tries = sum(result.attempts for found in results.values() for result in found)
    bad = [
        f"{group}: {result.name}: {', '.join(f'{word} {number:,}' for word, number in result.forbidden.items())}"
        for group, found in results.items()
        for result in found
        if result.forbidden
    ]
    return [f"{tries:,} tries, {len(bad)} attack(s) not withstood.", *bad]


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


class Tries:
    """Counts how tries end and notes the longest, and the server's memory beside them."""

    def __init__(self, name: str, server: BenchServer | None = None) -> None:
        self._name = name
        self._outcomes: Counter[str] = Counter()
        self._process = None if server is None else server_process(server)
        self._start = self._peak = 0 if self._process is None else self._process.memory_info().rss
        self._longest_s = 0.0

    @contextmanager
    def one(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._longest_s = max(self._longest_s, time.perf_counter() - started)
        self.look()

    def look(self) -> None:
        if self._process is not None:
            self._peak = max(self._peak, self._process.memory_info().rss)

    def count(self, outcome: str) -> None:
        self._outcomes[outcome] += 1

    def counted(self) -> AttackResult:
        grown = None if self._process is None else (self._peak - self._start) / _MIB
        attempts = sum(self._outcomes.values())
        return AttackResult(self._name, attempts, dict(self._outcomes), grown, self._longest_s)


def server_process(server: BenchServer) -> psutil.Process:
    """The server itself, below the process that watches over it."""
    below = psutil.Process(server.tree.pid).children(recursive=True)
    return next(each for each in below if "rollout" in each.cmdline())
