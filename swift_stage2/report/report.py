"""Puts a run's sections in order: the whole report, before it takes any form. Pure, but for the files it opens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from swift_stage2.pages.content import GALLERY_KEY, Section, Sentence, number
from swift_stage2.pages.page import PageContent
from swift_stage2.report.evaluations import detection_section, evaluations_of
from swift_stage2.report.gallery import DEFAULT_SIZE, gallery_of, gallery_section
from swift_stage2.report.matches import matches_of, quality_section
from swift_stage2.report.run_data import RunData
from swift_stage2.report.samples import account_section, fates_of
from swift_stage2.report.speed import Speed, slowest, works_of
from swift_stage2.report.steps import queue_section, rounds_section, steps_section, time_section
from swift_stage2.report.suspects import Suspect, suspects_of, suspects_section
from swift_stage2.report.verdict import knobs_of, post_steps_of, verdict_section
from swift_stage2.run_directory.next_commands import next_commands
from swift_stage2.telemetry.account import RunAccount, account_of
from swift_stage2.telemetry.summary import summary_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport(PageContent):
    account: RunAccount | None
    """None without channel B."""
    speed: Speed | None
    suspects: Sequence[Suspect] | None
    """None where too few versions were evaluated."""
    is_balanced: bool
    """Whether it is proven that no sample was lost; nothing can be lost without channel B."""


def report_of(run: RunData, gallery_size: int = DEFAULT_SIZE) -> RunReport:
    """Computes the whole report; opens at most ``gallery_size`` images."""
    account = None if run.had_no_b else account_of(run.logs, run.doubts)
    matches = matches_of(run.ranks)
    summary, works, knobs = summary_of(run.ranks), works_of(run), knobs_of(run)
    found = slowest(works)
    fates = {rank.rank: fates_of(rank) for rank in run.ranks}
    gallery = gallery_of(matches, fates, gallery_size)
    evaluations = evaluations_of(run)
    suspects = suspects_of(evaluations)
    sections = (
        verdict_section(works, summary, knobs, post_steps_of(run)),
        steps_section(run, summary),
        time_section(run, summary),
        queue_section(run, knobs.version_window, summary),
        rounds_section(run, summary),
        quality_section(run, matches),
        detection_section(evaluations),
        suspects_section(suspects),
        account_section(account, run.ranks),
        gallery_section(gallery),
        *_next_section(run),
    )
    return RunReport(
        heading="Run report",
        places=tuple(map(str, run.run_dirs)),
        state=state_of(run),
        sections=sections,
        galleries={GALLERY_KEY: gallery},
        suspects=suspects,
        account=account,
        speed=found if isinstance(found, Speed) else None,
        is_balanced=account.is_balanced if account else True,
    )


def _next_section(run: RunData) -> Iterator[Section]:
    """The last checkpoint, if there is one, and the commands that merge and evaluate it."""
    swift = run.setting("swift")
    if lines := [*next_commands(run.run_dirs[-1], swift if isinstance(swift, Mapping) else {})]:
        yield Section("next", "Next", tuple(map(Sentence, lines)))


def state_of(run: RunData) -> str:
    end = "ended in order" if all(rank.has_ended for rank in run.ranks) else "running, or was killed"
    steps = [step.time for step in run.first.steps.values()]
    lasted = f", {max(steps) - min(steps):,.0f} s from first to last step" if steps else ""
    ranks = f"{len(run.ranks)} rank{'s' if len(run.ranks) > 1 else ''}"
    return f"{ranks}, {number(len(steps))} steps{lasted}; {end}"
