"""The ``report`` command: what a run left behind in; tables, a page and the account of samples out.

Exit status: 0 every sample has one end or is in hand, 1 not so or not provable, 2 there is no such run, directories are
not of one run, or the report cannot be written.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from swift_stage2.data.prediction import write_file
from swift_stage2.report.content import (
    Gallery,
    PageContent,
    Section,
    filled,
    format_number,
    page_of,
    terminal_report,
)
from swift_stage2.report.quality import (
    detection_section,
    evaluations_of,
    gallery_of,
    matches_of,
    quality_section,
    suspects_of,
    suspects_section,
)
from swift_stage2.report.run_data import RunData, read_run
from swift_stage2.report.steps import (
    account_section,
    queue_section,
    rounds_section,
    steps_section,
    time_section,
)
from swift_stage2.report.verdict import Speed, slowest, speed_of, verdict_section
from swift_stage2.runtime.output import SafeConsole, say
from swift_stage2.runtime.parser import CommandParser
from swift_stage2.telemetry.account import RunAccount, account_of
from swift_stage2.telemetry.summary import summary_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport(PageContent):
    account: RunAccount | None
    """None without channel B."""
    speed: Speed | None
    is_balanced: bool
    """Whether it is proven that no sample was lost; nothing can be lost without channel B."""


def report_of(run: RunData) -> RunReport:
    """Computes the whole report; opens the images of its gallery."""
    has_b = not all(rank.start is not None and rank.start.queue_limit is None for rank in run.ranks)
    account = account_of(run.logs, run.doubts) if has_b else None
    summary, speed = summary_of(run.ranks), slowest([*map(speed_of, run.ranks)])
    evaluations = evaluations_of(run)
    sections = (
        verdict_section(speed, summary),
        steps_section(summary),
        time_section(run, summary),
        queue_section(run, summary),
        rounds_section(summary),
        quality_section(run, summary),
        detection_section(evaluations),
        suspects_section(suspects_of(evaluations)),
        account_section(account, run.ranks),
        Section("gallery", "Gallery", filled([gallery_of(matches_of(run.ranks))])),
    )
    return RunReport(
        heading="Run report",
        places=tuple(map(str, run.run_dirs)),
        state=state_of(run),
        sections=sections,
        account=account,
        speed=None if speed.lacks else speed,
        is_balanced=account.is_balanced if account else True,
    )


def state_of(run: RunData) -> str:
    has_ended = all(rank.has_ended for rank in run.ranks)
    end = "running" if run.is_running else "ended in order" if has_ended else "was killed"
    steps = [step.time for step in run.first.steps.values()]
    lasted = f", {max(steps) - min(steps):,.0f} s from first to last step" if steps else ""
    ranks = f"{len(run.ranks)} rank{'s' if len(run.ranks) > 1 else ''}"
    return f"{ranks}, {format_number(len(steps))} steps{lasted}; {end}"


_PAGE = "report.html"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report, writes its page, and returns the exit status.

    Raises:
        UserError: there is no such run, or the report cannot be written.
    """
    options = _parser().parse_args(argv)
    report = report_of(read_run(options.run_dir))
    _tell(report, options)
    return 0 if report.is_balanced else 1


def _tell(report: RunReport, options: argparse.Namespace) -> None:
    if options.json:
        say(*json.dumps(_facts(report), indent=2).splitlines())
        if options.output is not None:
            write_file(options.output, page_of(report))
        return
    SafeConsole().print(terminal_report(report.sections))
    output = options.output or options.run_dir[-1] / _PAGE
    write_file(output, page_of(report))
    say(f"page: {output}")


def _facts(report: RunReport) -> dict[str, object]:
    """The account first; the rest by section, as the terminal tells it."""
    account = report.account
    return (asdict(account) if account else {}) | {
        "balanced": report.is_balanced,
        "provable": account.is_provable if account else report.is_balanced,
        "speed": report.speed.facts if report.speed else None,
        "sections": {
            section.key: [asdict(part) for part in section.parts if not isinstance(part, Gallery)]
            for section in report.sections
        },
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
        "--json",
        action="store_true",
        help="print everything as JSON; a page is then written only with --output",
    )
    return parser
