"""How findings are shown: lines for people, one object for scripts. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from swift_stage2.dataset.fault import Rule
from swift_stage2.dataset.survey import Findings

MOST_SHOWN = 20
"""Faults of one rule that are shown unless all are asked for."""


def lines_of(findings: Findings, most_shown: int = MOST_SHOWN) -> Iterator[str]:
    """Every rule that was broken with its places, then the verdict."""
    for rule, count in findings.counts.items():
        kind = "advice" if rule.is_advice else "fault"
        yield f"{kind}: {rule}: {count:,} of {findings.num_rows:,} rows" + (
            "" if rule not in (Rule.BOUNDS, Rule.IMAGE) else " or objects in them"
        )
        shown = findings.of(rule)[:most_shown]
        yield from (f"  {fault}" for fault in shown)
        if count > len(shown):
            yield f"  … and {count - len(shown):,} more"
    yield from facts_of(findings)
    yield verdict_of(findings)


def facts_of(findings: Findings) -> Iterator[str]:
    """What is no fault, but worth knowing."""
    if (shown := findings.answer_format) is not None:
        yield f"answers: dialect {shown.dialect}, written {shown.write([('label', (1, 2, 3, 4))])!r}"
    if (longest := findings.longest) is not None and longest.num_objects:
        yield f"longest answer: {longest.num_objects} objects, at {longest.place}"


def verdict_of(findings: Findings) -> str:
    """One line: how many rows were looked at, how fast, and how many have faults."""
    checked = (
        f"{findings.num_rows:,} rows of {len(findings.files)} file(s), every one checked, in "
        f"{findings.seconds:.1f} s ({findings.rows_per_second:,.0f} rows/s)"
    )
    advised = sum(count for rule, count in findings.counts.items() if rule.is_advice)
    beside = f"; {advised:,} times advice" if advised else ""
    if findings.num_bad_rows:
        return f"{checked}: {findings.num_bad_rows:,} have faults{beside}"
    return f"{checked}: no fault{beside}"


def to_json(findings: Findings, **facts: Any) -> dict[str, Any]:
    """``facts`` are put beside what was found."""
    shown, longest = findings.answer_format, findings.longest
    return {
        **facts,
        "files": [str(file) for file in findings.files],
        "num_rows": findings.num_rows,
        "num_bad_rows": findings.num_bad_rows,
        "counts": {str(rule): count for rule, count in findings.counts.items()},
        "faults": [fault.to_json() for fault in findings.faults],
        "answer_format": asdict(shown) | {"dialect": str(shown.dialect), "seen": sorted(shown.seen)}
        if shown
        else None,
        "longest_answer": {
            "file": str(longest.place.file),
            "line": longest.place.line,
            "num_characters": longest.num_characters,
            "num_objects": longest.num_objects,
        }
        if longest
        else None,
        "seconds": findings.seconds,
        "rows_per_second": findings.rows_per_second,
    }
