"""``swift-stage2 bench attacks``: hostile answers, requests and group members against the real parts, and a table."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

from benchmarks.attacks import answers, requests, rounds
from benchmarks.attacks.result import AttackResult
from benchmarks.results import ResultTable, publish
from swift_stage2.command_parser import CommandParser
from swift_stage2.errors import UserError
from swift_stage2.output_directory import claim_directory

GROUPS: Mapping[str, ModuleType] = {"answers": answers, "requests": requests, "rounds": rounds}
_FAILED = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the groups, prints the table, writes ``attacks.json`` and ``attacks.md``; 0 when all was withstood.

    Raises:
        UserError: an option is out of range, or the output directory cannot be used.
    """
    options = _parse(argv)
    directory = claim_directory(options.output, keep=options.keep)
    results: dict[str, list[AttackResult]] = {}
    for group in options.groups:
        print(f"[bench] {group}", flush=True)
        results[group] = GROUPS[group].attacks()
    facts = {group: [asdict(result) for result in found] for group, found in results.items()}
    publish(directory, "attacks", facts, [table(results)], notes(results))
    return _FAILED if any(result.forbidden for found in results.values() for result in found) else 0


def table(results: dict[str, list[AttackResult]]) -> ResultTable:
    """One row per attack."""
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
        tuple(rows),
    )


def notes(results: dict[str, list[AttackResult]]) -> list[str]:
    """Counts and names the tries that ended as none may."""
    tries = sum(result.attempts for found in results.values() for result in found)
    bad = [
        f"{group}: {result.name}: {', '.join(f'{word} {number:,}' for word, number in result.forbidden.items())}"
        for group, found in results.items()
        for result in found
        if result.forbidden
    ]
    return [f"{tries:,} tries, {len(bad)} attack(s) not withstood.", *bad]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        exit_statuses="0 every attack was withstood; 1 one was not",
        prog="swift-stage2 bench attacks",
        description="Send what a hostile or broken peer may send to the real parts over real sockets, and count how "
        "each try ends. Takes some minutes. An attack is not withstood when a try ends in a hang, a traceback, or an "
        "answer believed that must not be.",
    )
    parser.add_argument(
        "--groups",
        type=_names,
        default=tuple(GROUPS),
        metavar="NAME,…",
        help=f"of {', '.join(GROUPS)} (default all)",
    )
    parser.add_argument("--output", type=Path, default=Path("runs/bench-attacks"), metavar="DIR")
    parser.add_argument("--keep", action="store_true", help="keep earlier results; take DIR-2, … instead")
    return parser.parse_args(argv)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in GROUPS]:
        raise UserError(
            f"--groups must name groups, got {', '.join(map(repr, unknown))}; choose among {', '.join(GROUPS)}"
        )
    return names
