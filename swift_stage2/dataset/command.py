"""``swift-stage2 data check FILE…``: checks every row without a model, and prints all faults at once.

Exit status: 0 no fault (advice is none), 1 faults found, 2 the call cannot be used (no such file, a wrong option).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from swift_stage2.channel_b.dialects import DIALECTS
from swift_stage2.dataset.orientation import DrawnOn, apply_orientation
from swift_stage2.dataset.summary import MOST_SHOWN, lines_of, to_json
from swift_stage2.dataset.survey import MOST_KEPT, Findings, OnProgress, survey
from swift_stage2.errors import UserError
from swift_stage2.terminal.parser import CommandParser

EXIT_FAULTS = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    Raises:
        UserError: a file is missing, or one cannot be written.
    """
    options = _parse(argv)
    files = [Path(name) for name in options.files]
    if options.apply_exif is not None:
        files = [_rewrite(files, options)]
    findings = _survey(files, options)
    status = EXIT_FAULTS if findings.num_faults else 0
    if options.json:
        print(json.dumps(to_json(findings, exit_status=status), indent=1))
    else:
        print(*lines_of(findings, MOST_KEPT if options.all else MOST_SHOWN), sep="\n")
    return status


def _survey(files: Sequence[Path], options: argparse.Namespace) -> Findings:
    dialect = DIALECTS[options.dialect] if options.dialect else None
    with ExitStack() as stack:
        told = _progress(files, stack)
        return survey(
            files,
            dialect=dialect,
            decode=options.decode,
            needs_objects=not options.rows_without_objects,
            on_progress=told,
        )


def _progress(files: Sequence[Path], stack: ExitStack) -> OnProgress:
    """A bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        return lambda num_rows, num_bytes: None
    from rich.console import Console
    from rich.progress import Progress

    total = sum(file.stat().st_size for file in files if file.is_file())
    bar = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
    task = bar.add_task("rows", total=total)
    before = last = 0

    def told(num_rows: int, num_bytes: int) -> None:
        nonlocal before, last
        if num_bytes < last:  # the next file
            before += last
        last = num_bytes
        bar.update(task, completed=before + num_bytes, description=f"{num_rows:,} rows")

    return told


def _rewrite(files: Sequence[Path], options: argparse.Namespace) -> Path:
    output = Path(options.output)
    done = apply_orientation(files[0], output, DrawnOn(options.apply_exif))
    print(
        f"{output}: all rows; {done.num_rows} of them name upright images now, {len(done.images)} images were written",
        file=sys.stderr,
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
        parser.error("--apply-exif and --output go together")
    if options.apply_exif is not None and len(options.files) != 1:
        raise UserError(f"--apply-exif takes one file, got {len(options.files)}; rewrite them one by one")
    return options
