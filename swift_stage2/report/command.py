"""The ``report`` command: what a run left behind in; tables, a page and the account of its samples out.

Exit status: 0 every sample has one end or is in hand, 1 not so or not provable, 2 there is no such run, its directories
are of several, or the report cannot be written.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from swift_stage2.errors import UserError
from swift_stage2.report.gallery import DEFAULT_SIZE
from swift_stage2.report.page import page, write_page
from swift_stage2.report.report import RunReport, report_of
from swift_stage2.report.run_data import read_run
from swift_stage2.report.terminal import terminal_report
from swift_stage2.telemetry.trace import merge_traces
from swift_stage2.terminal.output import throw_away
from swift_stage2.terminal.parser import CommandParser

EXIT_BALANCED = 0
EXIT_NOT_BALANCED = 1
_PAGE = "report.html"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report, writes its page, and returns the exit status.

    Raises:
        UserError: there is no such run, or the report cannot be written.
    """
    options = _parser().parse_args(argv)
    report = report_of(read_run(options.run_dir), options.gallery)
    try:
        _tell(report, options)
        sys.stdout.flush()
    except BrokenPipeError:
        raise  # who reads it has seen enough
    except OSError as error:
        throw_away()
        raise UserError(
            f"a report needs an output that takes it, got {error}; send it elsewhere, or make room"
        ) from error
    return EXIT_BALANCED if report.is_balanced else EXIT_NOT_BALANCED


def _tell(report: RunReport, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(_facts(report), indent=2))
        if options.output is not None:
            write_page(options.output, page(report))
        return
    Console().print(terminal_report(report.sections))
    output = options.output or options.run_dir[-1] / _PAGE
    write_page(output, page(report))
    print(f"page: {output}")
    try:
        trace = merge_traces(options.run_dir[-1])
    except (UserError, OSError) as error:
        print(f"no trace of all ranks: {error}")  # the report stands without it
    else:
        if trace is not None:
            print(f"trace: {trace}, for ui.perfetto.dev")


def _facts(report: RunReport) -> dict[str, Any]:
    """The account as it always was; the rest by section, as the terminal tells it."""
    account = report.account
    return (asdict(account) if account else {}) | {
        "balanced": report.is_balanced,
        "provable": account.is_provable if account else report.is_balanced,
        "selection": [asdict(found) for found in report.comparisons],
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
        help=f"how many matches the page shows, the newest (default {DEFAULT_SIZE})",
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
