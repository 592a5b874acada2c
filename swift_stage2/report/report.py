"""Puts a run's sections in order: the whole report, before it takes any form. Pure, but for the images it opens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from swift_stage2.pages.content import Section, Sentence, number
from swift_stage2.pages.page import PageContent
from swift_stage2.pages.pictures import GALLERY_KEY
from swift_stage2.report.drift import drift_section
from swift_stage2.report.evaluations import detection_section, evaluations_of
from swift_stage2.report.gallery import DEFAULT_SIZE, Grouping, gallery_of, gallery_section
from swift_stage2.report.matches import matches_of, quality_section
from swift_stage2.report.rewards import rewards_section
from swift_stage2.report.run_data import RunData
from swift_stage2.report.samples import Comparison, account_section, compare, draws_of, selection_section
from swift_stage2.report.speed import Speed, slowest, works_of
from swift_stage2.report.steps import (
    drops_section,
    fill_section,
    queue_section,
    rounds_section,
    steps_section,
    time_section,
)
from swift_stage2.report.suspects import (
    SUSPECTS_KEY,
    Suspect,
    suspects_gallery,
    suspects_of,
    suspects_section,
)
from swift_stage2.report.verdict import knobs_of, post_steps_of, verdict_section
from swift_stage2.run_directory.next_commands import next_commands
from swift_stage2.telemetry.ledger_account import RunAccount, account_of
from swift_stage2.telemetry.summary import summary_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport(PageContent):
    account: RunAccount | None
    """None without channel B."""
    comparisons: tuple[Comparison, ...]
    speed: Speed | None
    suspects: Sequence[Suspect] | None
    """None where too few versions were evaluated."""
    is_balanced: bool
    """Whether it is proven that no sample was lost; nothing can be lost without channel B."""


def report_of(run: RunData, gallery_size: int = DEFAULT_SIZE) -> RunReport:
    """Computes the whole report; opens at most ``gallery_size`` images."""
    account, is_balanced = account_of_run(run)
    matches, num_odd = matches_of(chain.from_iterable(records.matches for records in run.ranks))
    summary, works, knobs = summary_of(run.ranks), works_of(run), knobs_of(run)
    found = slowest(works)
    speed = found if isinstance(found, Speed) else None
    draws = {rank: draws_of(chain.from_iterable(parts)) for rank, parts in run.histories.items()}
    comparisons = compare(list(chain.from_iterable(draws.values())))
    fates = {rank: {draw.key: draw.fate for draw in of_rank if draw.key} for rank, of_rank in draws.items()}
    gallery = gallery_of(matches, fates, gallery_size, Grouping(run.num_generations, run.advantages))
    evaluations = evaluations_of(run, matches)
    suspects = suspects_of(evaluations)
    suspected = suspects_gallery(suspects or (), evaluations, gallery_size)
    sections = (
        verdict_section(works, summary, knobs, post_steps_of(run)),
        steps_section(run, summary),
        time_section(run, summary, speed.rank if speed else 0),
        queue_section(run, knobs.version_window, summary),
        drops_section(summary),
        rounds_section(run, summary),
        quality_section(run, matches),
        *rewards_section(run),
        detection_section(evaluations),
        suspects_section(suspects, suspected),
        drift_section(run, matches),
        selection_section(comparisons),
        fill_section(run),
        account_section(account, run.ranks, had_no_b=run.had_no_b),
        gallery_section(gallery, num_odd + sum(rank.num_odd_matches for rank in run.ranks)),
        *_next_section(run),
    )
    return RunReport(
        heading="Run report",
        places=tuple(map(str, run.run_dirs)),
        state=state_of(run),
        sections=sections,
        galleries={SUSPECTS_KEY: suspected, GALLERY_KEY: gallery},
        suspects=suspects,
        account=account,
        comparisons=comparisons,
        speed=speed,
        is_balanced=is_balanced,
    )


def _next_section(run: RunData) -> Iterator[Section]:
    """The last checkpoint, if there is one, and the commands that merge and evaluate it."""
    swift = run.setting("swift")
    if lines := [*next_commands(run.run_dirs[-1], swift if isinstance(swift, Mapping) else {})]:
        yield Section("next", "Next", tuple(map(Sentence, lines)))


def account_of_run(run: RunData) -> tuple[RunAccount | None, bool]:
    """Its account, None without a ledger, and whether it is proven that no sample was lost."""
    account = account_of(run.ledgers, run.doubts) if run.ledgers else None
    return account, account.is_balanced if account else run.had_no_b


def state_of(run: RunData) -> str:
    if not run.ranks:
        return "no audit"
    end = "ended in order" if all(records.has_ended for records in run.ranks) else "running, or was killed"
    steps = [step["time"] for step in run.first.steps.values()]
    lasted = f", {max(steps) - min(steps):,.0f} s from first to last step" if steps else ""
    ranks = f"{len(run.ranks)} rank{'s' if len(run.ranks) > 1 else ''}"
    return f"{ranks}, {number(len(steps))} steps{lasted}; {end}"
