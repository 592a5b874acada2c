"""``swift-stage2 bench attacks``: hostile answers, requests and group members against the real parts, and a table."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

from benchmarks.attacks import answers, requests, rounds
from benchmarks.attacks.result import AttackResult
from benchmarks.results import ResultTable, publish, say

_MODULES: Mapping[str, ModuleType] = {"answers": answers, "requests": requests, "rounds": rounds}
_FAILED = 1


def run(options: argparse.Namespace, directory: Path) -> int:
    """Runs the groups; 0 when all was withstood."""
    results: dict[str, list[AttackResult]] = {}
    for group in options.groups:
        say(group)
        results[group] = _MODULES[group].attacks()
    facts = {group: [asdict(result) for result in found] for group, found in results.items()}
    publish(directory, "attacks", facts, table(results), *notes(results))
    return _FAILED if any(result.forbidden for found in results.values() for result in found) else 0


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
    """Counts and names the tries that ended as none may."""
    tries = sum(result.attempts for found in results.values() for result in found)
    bad = [
        f"{group}: {result.name}: {', '.join(f'{word} {number:,}' for word, number in result.forbidden.items())}"
        for group, found in results.items()
        for result in found
        if result.forbidden
    ]
    return [f"{tries:,} tries, {len(bad)} attack(s) not withstood.", *bad]
