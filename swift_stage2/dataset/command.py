"""``swift-stage2 data check FILE…``: checks every row without a model, and prints all faults at once.

Exit status: 0 no fault (advice is none), 1 faults found, 2 the call cannot be used (no such file, a wrong option).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from swift_stage2.channel_b.dialects import DIALECTS, coordinates_of
from swift_stage2.config.stage2_ab import DEFAULT_TASK, SHIPPED_TASKS
from swift_stage2.dataset.fault import Rule
from swift_stage2.dataset.picture import DrawnOn, apply_orientation
from swift_stage2.dataset.survey import MOST_KEPT, Findings, OnProgress, survey
from swift_stage2.errors import UserError, closest
from swift_stage2.terminal.output import say
from swift_stage2.terminal.parser import CommandParser
from swift_stage2.terminal.progress import progress_bar

EXIT_FAULTS = 1
MOST_SHOWN = 20
"""Faults of one rule that are shown unless all are asked for."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Raises UserError: a file is missing, or one cannot be written."""
    options = _parse(argv)
    files = [Path(name) for name in options.files]
    for line in () if options.dialect else lines_of_task(options.task):
        say(line, is_error=True)  # beside the findings, which --json prints for a program
    num_coordinates = coordinates_of(options.task, options.dialect)
    if coordinates_of(options.task) not in (None, num_coordinates):
        raise UserError(
            f"--dialect must be one of task {options.task}, got dialect={options.dialect}; name its task with --task, "
            f"or leave it out for {SHIPPED_TASKS[options.task]}"
        )
    if options.apply_exif is not None:
        files = [_rewrite(files, options)]
    with ExitStack() as stack:
        findings = survey(
            files,
            dialect=DIALECTS[options.dialect] if options.dialect else None,
            decode=options.decode,
            needs_objects=not options.rows_without_objects,
            num_coordinates=num_coordinates,
            on_progress=_progress(files, stack),
        )
    status = EXIT_FAULTS if findings.num_faults else 0
    most_shown = MOST_KEPT if options.all else MOST_SHOWN
    unchecked = "" if num_coordinates else f"objects and answers of task {options.task}"
    if options.json:
        say(*json.dumps(to_json(findings, exit_status=status, unchecked=unchecked), indent=1).splitlines())
    else:
        say(*lines_of(findings, most_shown, unchecked))
    return status


def _progress(files: Sequence[Path], stack: ExitStack) -> OnProgress:
    total = sum(file.stat().st_size for file in files if file.is_file())
    move_to = stack.enter_context(progress_bar(total, "rows"))
    before = last = 0

    def told(num_rows: int, num_bytes: int) -> None:
        nonlocal before, last
        if num_bytes < last:  # the next file
            before += last
        last = num_bytes
        move_to(before + num_bytes, f"{num_rows:,} rows")

    return told


def _rewrite(files: Sequence[Path], options: argparse.Namespace) -> Path:
    output = Path(options.output)
    done = apply_orientation(files[0], output, DrawnOn(options.apply_exif))
    say(
        f"{output}: all rows; {done.num_rows} of them name upright images now, {len(done.images)} images were written",
        is_error=True,
    )
    return output


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
    check.add_argument("files", nargs="+", metavar="FILE.jsonl")
    check.add_argument(
        "--task",
        default=DEFAULT_TASK,
        metavar="NAME",
        help="stage2_ab.task (default %(default)s); of your own task's rows form and images are checked, "
        "and objects and answers where --dialect says what they are in",
    )
    check.add_argument("--dialect", choices=list(DIALECTS), help="the dialect that answers must be in")
    check.add_argument(
        "--decode",
        action="store_true",
        help="decode every image to its last pixel (slow), not only its header",
    )
    check.add_argument(
        "--rows-without-objects",
        action="store_true",
        help="allow rows without objects, as rows_without_objects: channel_a_only does",
    )
    check.add_argument("--all", action="store_true", help=f"show up to {MOST_KEPT} faults per rule")
    check.add_argument("--json", action="store_true", help="print one JSON object")
    check.add_argument(
        "--apply-exif",
        choices=[str(drawn_on) for drawn_on in DrawnOn],
        help="write the data set anew with upright images; say on which picture the boxes were drawn: upright, as "
        "viewers show it, or stored, as the pixels lie in the file",
    )
    check.add_argument("--output", metavar="NEW.jsonl", help="with --apply-exif: the file to write")
    options = parser.parse_args(argv)
    if (options.apply_exif is None) != (options.output is None):
        check.error("--apply-exif and --output go together")
    if options.apply_exif is not None and len(options.files) != 1:
        raise UserError(f"--apply-exif takes one file, got {len(options.files)}; rewrite them one by one")
    return options


def lines_of_task(task: str) -> Iterator[str]:
    """A line where the name of the task may be misspelt: which others exist is known once plugins are loaded."""
    if task not in SHIPPED_TASKS:
        near = closest(task, tuple(SHIPPED_TASKS))
        hint = f" (did you mean {near}?)" if near else ""
        yield f"task {task}{hint} is not looked at here; doctor does"


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
    if (written := findings.answer_format) is not None:
        coordinates = (1, 2, 3, 4)[: written.dialect.num_coordinates]
        yield f"answers: dialect {written.dialect}, written {written.write([('label', coordinates)])!r}"
    if (longest := findings.longest) is not None and longest.num_objects:
        yield f"longest answer: {longest.num_objects} objects, at {longest.place}"
    checked = (
        f"{findings.num_rows:,} rows of {len(findings.files)} file(s), every one checked, in "
        f"{findings.seconds:.1f} s ({findings.rows_per_second:,.0f} rows/s)"
    )
    advised = sum(count for rule, count in findings.counts.items() if rule.is_advice)
    beside = f"; {advised:,} times advice" if advised else ""
    where = f" in form and images; {unchecked} were not checked" if unchecked else ""
    verdict = f"{findings.num_bad_rows:,} have faults" if findings.num_bad_rows else "no fault"
    yield f"{checked}: {verdict}{where}{beside}"


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
