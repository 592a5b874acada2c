"""The ``report`` command: what a run left behind in; tables, a page and the account of samples out.

Exit status: 0 every sample has one end or is in hand, 1 not so or not provable, 2 there is no such run, directories are
not of one run, or the report cannot be written.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from swift_stage2.errors import UserError
from swift_stage2.pages.page import page_of, write_page
from swift_stage2.pages.terminal import terminal_report
from swift_stage2.report.gallery import DEFAULT_SIZE
from swift_stage2.report.report import RunReport, report_of
from swift_stage2.report.run_data import read_run
from swift_stage2.report.suspects import suspect_lines
from swift_stage2.runtime.output import SafeConsole, say
from swift_stage2.runtime.parser import CommandParser
from swift_stage2.telemetry.trace import merge_traces

EXIT_BALANCED = 0
EXIT_NOT_BALANCED = 1
_PAGE = "report.html"
_SUSPECTS = "label_suspects.jsonl"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report, writes its page, and returns the exit status.

    Raises:
        UserError: there is no such run, or the report cannot be written.
    """
    options = _parser().parse_args(argv)
    report = report_of(read_run(options.run_dir), options.gallery)
    _tell(report, options)
    return EXIT_BALANCED if report.is_balanced else EXIT_NOT_BALANCED


def _tell(report: RunReport, options: argparse.Namespace) -> None:
    if options.json:
        say(*json.dumps(_facts(report), indent=2).splitlines())
        if options.output is not None:
            _write(options.output, report)
        return
    SafeConsole().print(terminal_report(report.sections))
    output = options.output or options.run_dir[-1] / _PAGE
    _write(output, report)
    say(f"page: {output}")
    if report.suspects:
        say(f"suspected label errors: {output.parent / _SUSPECTS}")
    try:
        trace = merge_traces(options.run_dir[-1])
    except (UserError, OSError) as error:
        say(f"no trace of all ranks: {error}")  # the report stands without it
    else:
        if trace is not None:
            say(f"trace: {trace}, for ui.perfetto.dev")


def _write(output: Path, report: RunReport) -> None:
    write_page(output, page_of(report))
    if report.suspects is not None:
        write_page(output.parent / _SUSPECTS, suspect_lines(report.suspects))


def _facts(report: RunReport) -> dict[str, object]:
    """The account first; the rest by section, as the terminal tells it."""
    account = report.account
    return (asdict(account) if account else {}) | {
        "balanced": report.is_balanced,
        "provable": account.is_provable if account else report.is_balanced,
        "speed": report.speed.facts if report.speed else None,
        "sections": {section.key: [asdict(part) for part in section.parts] for section in report.sections},
    }


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="swift-stage2 report",
        exit_statuses="0 every sample has one end or is in hand; 1 not so, or not provable",
        description="Tells how a run went, on one HTML page and here: how fast and why, what was skipped and dropped, "
        "how good its rollouts were, and whether every sample drawn was trained once, quarantined, or is in hand.",
    )
    parser.add_argument(
        "run_dir",
        metavar="RUN_DIR",
        type=Path,
        nargs="+",
        help="a run's output directory; if it was resumed into others, all of them, oldest first",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help=f"where the page goes (default: {_PAGE} in the last RUN_DIR)",
    )
    parser.add_argument(
        "--gallery",
        metavar="N",
        type=_at_least_zero,
        default=DEFAULT_SIZE,
        help=f"how many pictures the page shows (default {DEFAULT_SIZE})",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print everything as JSON; a page is then written only with --output",
    )
    return parser


def _at_least_zero(text: str) -> int:
    number = int(text) if text.isdecimal() else -1
    if number < 0:
        raise argparse.ArgumentTypeError(f"a number of matches is 0 or more, got {text}")
    return number
