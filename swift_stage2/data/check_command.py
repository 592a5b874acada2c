"""``swift-stage2 data check FILE…``: checks every row without a model, and prints all faults at once.

Exit status: 0 no fault (advice is none), 1 faults found, 2 the call cannot be used (no such file, a wrong option).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from swift_stage2.channel_b.dialects import DIALECTS, coordinates_of
from swift_stage2.config.stage2_ab import DEFAULT_TASK, SHIPPED_TASKS
from swift_stage2.data.fault import Rule
from swift_stage2.data.survey import MOST_KEPT, Findings, survey
from swift_stage2.errors import UserError
from swift_stage2.runtime.output import progress_bar, say
from swift_stage2.runtime.parser import CommandParser

EXIT_FAULTS = 1
MOST_SHOWN = 20
"""Faults of one rule that are shown unless all are asked for."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Raises UserError: a file is missing, or one cannot be written."""
    options = _parse(argv)
    files = [Path(name) for name in options.files]
    num_coordinates = coordinates_of(options.task, options.dialect)
    if coordinates_of(options.task) not in (None, num_coordinates):
        raise UserError(
            f"--dialect must be one of task {options.task}",
            got=f"dialect={options.dialect}",
            remedy=f"name its task with --task, or leave it out for {SHIPPED_TASKS[options.task]}",
        )
    total = sum(file.stat().st_size for file in files if file.is_file())
    with progress_bar(total, "rows") as move_to:
        findings = survey(
            files,
            dialect=DIALECTS[options.dialect] if options.dialect else None,
            decode=options.decode,
            needs_objects=not options.rows_without_objects,
            num_coordinates=num_coordinates,
            on_progress=lambda num_rows, num_bytes: move_to(num_bytes, f"{num_rows:,} rows"),
        )
    status = EXIT_FAULTS if findings.num_faults else 0
    most_shown = MOST_KEPT if options.all else MOST_SHOWN
    unchecked = "" if num_coordinates else f"objects and answers of task {options.task}"
    say(*lines_of(findings, most_shown, unchecked))
    return status


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    statuses = "0 no fault; 1 faults found"
    parser = CommandParser(
        exit_statuses=statuses, prog="swift-stage2 data", description="Checks training data without a model."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    check = commands.add_parser(
        "check",
        help="check every row of JSONL files",
        description="Checks every row of JSONL files and prints all faults, each with its file and line.",
        exit_statuses=statuses,
    )
    add = check.add_argument
    add("files", nargs="+", metavar="FILE.jsonl")
    task_help = (
        "stage2_ab.task (default %(default)s); of your own task's rows form and images are checked, and objects and "
        "answers where --dialect says what they are in"
    )
    add("--task", default=DEFAULT_TASK, metavar="NAME", help=task_help)
    add("--dialect", choices=list(DIALECTS), help="the dialect that answers must be in")
    add(
        "--decode",
        action="store_true",
        help="decode every image to its last pixel (slow), not only its header",
    )
    without_help = "allow rows without objects, as rows_without_objects: channel_a_only does"
    add("--rows-without-objects", action="store_true", help=without_help)
    add("--all", action="store_true", help=f"show up to {MOST_KEPT} faults per rule")
    return parser.parse_args(argv)


def lines_of(findings: Findings, most_shown: int = MOST_SHOWN, unchecked: str = "") -> Iterator[str]:
    """Every rule that was broken with its places, facts that are no fault, then the verdict.

    ``unchecked``: what nobody looked at.
    """
    for rule, count in findings.counts.items():
        kind = "advice" if rule.is_advice else "fault"
        yield f"{kind}: {rule}: {count:,} of {findings.num_rows:,} rows" + (
            "" if rule not in (Rule.BOUNDS, Rule.IMAGE) else " or objects in them"
        )
        shown = findings.of(rule)[:most_shown]
        yield from (f"  {fault}" for fault in shown)
        if count > len(shown):
            yield f"  … and {count - len(shown):,} more"
    if (written := findings.template) is not None:
        coordinates = (1, 2, 3, 4)[: written.dialect.num_coordinates]
        yield f"answers: dialect {written.dialect}, written {written.write([('label', coordinates)])!r}"
    checked = (
        f"{findings.num_rows:,} rows of {len(findings.files)} file(s), every one checked, in "
        f"{findings.seconds:.1f} s ({findings.num_rows / max(findings.seconds, 1e-9):,.0f} rows/s)"
    )
    advised = sum(count for rule, count in findings.counts.items() if rule.is_advice)
    beside = f"; {advised:,} times advice" if advised else ""
    where = f" in form and images; {unchecked} were not checked" if unchecked else ""
    verdict = f"{findings.num_bad_rows:,} have faults" if findings.num_bad_rows else "no fault"
    yield f"{checked}: {verdict}{where}{beside}"
