"""The audits, ledgers and samples of a soak, turned into what its tables say: pure.

What becomes of one fault is looked for between it and the next. Called by the soak.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from benchmarks.estimates import FEWEST_STEPS, Tolerance, Trend, Verdict, trend
from benchmarks.faults.accounting import Moments, SampleCount, gaps, num_disagreements, of_kind, pause, report
from benchmarks.faults.soak_plan import FaultKind
from benchmarks.results import ResultTable, grouped
from swift_stage2.telemetry.audit import Record
from swift_stage2.telemetry.ledger import Entry
from swift_stage2.telemetry.ledger_account import RunAccount


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedFault:
    """One fault as it was committed. ``hung``: the learner ran, but what a wait waited for did not come in time."""

    kind: FaultKind
    step: int
    moments: Moments
    hung: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSample:
    """One process at one step, or a server's together; memory in bytes."""

    process: str
    pid: int
    """Tells it from others that a fault has put in its place; of a server, of its first process."""
    step: int
    rss: int
    uss: int
    num_threads: int
    num_fds: int


class Quantity(StrEnum):
    """Each of these must stay flat."""

    RSS = "RSS, MiB"
    USS = "USS, MiB"
    THREADS = "threads"
    FDS = "file descriptors"
    A_STEP = "A step, s"
    B_STEP = "B step, s"


TOLERANCES = {
    Quantity.RSS: Tolerance(share=0.02),
    Quantity.USS: Tolerance(share=0.02),
    Quantity.THREADS: Tolerance(amount=1),
    Quantity.FDS: Tolerance(amount=1),
    Quantity.A_STEP: Tolerance(share=0.03),
    Quantity.B_STEP: Tolerance(share=0.03),
}
_MIB = 1 << 20
_SAMPLED = {
    Quantity.RSS: ("rss", _MIB),
    Quantity.USS: ("uss", _MIB),
    Quantity.THREADS: ("num_threads", 1),
    Quantity.FDS: ("num_fds", 1),
}
"""Fields of ``ProcessSample``, and what they are divided by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindReport:
    kind: FaultKind
    times: int
    hangs: int
    longest_wait_s: float
    """In one A step of any rank: main thread neither computing nor in a round, beyond what is usual."""
    longest_step_s: float
    """On either channel, rounds apart: what a rank waits for in the gradients' exchange counts as computing."""
    failed_posts: Mapping[str, int]
    """By how they ended."""
    steps_to_proof: tuple[int, ...]
    unproven_rollouts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakReport:
    num_planned: int
    num_steps: int
    exit_status: int | None
    left: int
    kinds: tuple[KindReport, ...]
    trends: Mapping[str, Mapping[Quantity, Trend | None]]
    """By process."""
    account: RunAccount | None
    """None where no ledger was begun."""
    lost: int
    trained_twice: int
    num_disagreements: int
    broke: str = ""
    """The reason why the soak ended early."""

    def problems(self, wanted_steps: int) -> list[str]:
        """Names all that must not be; empty for a soak that went as it should."""
        found = [self.broke] if self.broke else []
        if self.account is None or not self.account.is_balanced:
            found.append("the ledger does not balance")
        committed = sum(kind.times for kind in self.kinds)
        for what, number, right in (
            ("the learner's exit status", self.exit_status, 0),
            ("steps trained", self.num_steps, wanted_steps),
            ("faults committed", committed, self.num_planned),
            ("samples lost", self.lost, 0),
            ("samples trained twice", self.trained_twice, 0),
            ("steps on which ranks disagree", self.num_disagreements, 0),
            ("rollouts taken of an unproven server", sum(kind.unproven_rollouts for kind in self.kinds), 0),
            ("things left", self.left, 0),
        ):
            if number != right:
                found.append(f"{what}: {number} instead of {right}")
        judged = wanted_steps >= 2 * FEWEST_STEPS
        for process, trends in self.trends.items():
            for quantity, each in trends.items():
                if each is None and judged:
                    found.append(f"{quantity} of {process}: too few values")
                elif each and each.verdict is Verdict.RISING:
                    found.append(f"{quantity} of {process} rises")
        return found


def kind_reports(
    records: Sequence[Sequence[Record]], faults: Sequence[CommittedFault], account: RunAccount
) -> tuple[tuple[KindReport, ...], int]:
    """By kind what became of the faults, and the number of steps on which ranks disagree."""
    ends = [*(fault.moments.fault for fault in faults[1:]), float("inf")]
    spans = grouped(zip(faults, ends, strict=True), lambda span: span[0].kind)
    found = tuple(_kind_report(records, kind, spans[kind], account) for kind in FaultKind if kind in spans)
    return found, num_disagreements(records)


def _kind_report(
    records: Sequence[Sequence[Record]],
    kind: FaultKind,
    spans: Sequence[tuple[CommittedFault, float]],
    account: RunAccount,
) -> KindReport:
    """``spans`` are all faults of the kind, each with the moment at which the next of any kind began."""
    reports, waits, steps = [], [0.0], [0.0]
    for fault, end in spans:
        seen = [[record for record in part if record["time"] < end] for part in records]
        reports.append(report(seen, account, fault.moments))
        began = fault.moments.fault
        for part in seen:
            every = gaps(of_kind(part, "step"))
            waits.append(pause(every, [], began, end).longest_wait_s)
            steps += [gap.seconds - gap.syncing_s for gap in every if gap.start + gap.seconds > began]
    return KindReport(
        kind=kind,
        times=len(spans),
        hangs=sum(fault.hung for fault, _ in spans),
        longest_wait_s=max(waits),
        longest_step_s=max(steps),
        failed_posts=dict(sum((Counter(each.failed_posts) for each in reports), Counter())),
        steps_to_proof=tuple(
            each.steps_until_proof for each in reports if each.steps_until_proof is not None
        ),
        unproven_rollouts=sum(each.unproven_rollouts for each in reports),
    )


def trends_of(
    records: Sequence[Sequence[Record]], samples: Sequence[ProcessSample]
) -> dict[str, dict[Quantity, Trend | None]]:
    """By process; of couriers and servers, which faults replace, that of the one that was seen for longest."""
    found: dict[str, dict[Quantity, Trend | None]] = {f"rank {rank}": {} for rank in range(len(records))}
    of_process = grouped(samples, lambda sample: sample.process)
    for process in (*found, *(name for name in of_process if name not in found)):
        lives = grouped(of_process.get(process, ()), lambda sample: sample.pid)
        mine = max(lives.values(), key=len, default=[])
        found[process] = {
            quantity: trend(
                [sample.step for sample in mine],
                [getattr(sample, name) / scale for sample in mine],
                TOLERANCES[quantity],
            )
            for quantity, (name, scale) in _SAMPLED.items()
        }
    for rank, part in enumerate(records):
        quiet = [gap for gap in gaps(of_kind(part, "step")) if gap.syncing_s == 0]
        for quantity, channel in ((Quantity.A_STEP, "A"), (Quantity.B_STEP, "B")):
            steps = [gap for gap in quiet if gap.channel == channel]
            found[f"rank {rank}"][quantity] = trend(
                [gap.step for gap in steps], [gap.seconds for gap in steps], TOLERANCES[quantity]
            )
    return found


def num_trained_twice(ledgers: Mapping[int, Sequence[Record]]) -> int:
    """Counted from the lines of a run without a resume, apart from the account."""
    times = Counter(
        (rank, sample[0], sample[1])
        for rank, records in ledgers.items()
        for record in records
        if record["kind"] == Entry.TRAINED
        for sample in record["samples"]
    )
    return sum(count - 1 for count in times.values())


def parts_of(soak: SoakReport) -> list[ResultTable | str]:
    """Both tables, and between them what the ledgers come to."""
    ranks = soak.account.ranks if soak.account else ()
    kinds = ResultTable.of("", soak.kinds, _KIND_COLUMNS)
    trends = ResultTable(
        "",
        ("process", "quantity", "values", "median", "drift over 2,000 steps (95 %)", "tolerated", "verdict"),
        [
            (process, quantity, *_trend_cells(each))
            for process, of in soak.trends.items()
            for quantity, each in of.items()
        ],
    )
    notes = [
        f"Rank {rank.rank}: {SampleCount.of([rank]).sentence}; {len(rank.violations)} rules broken, "
        f"{rank.num_records_lost} records lost."
        for rank in ranks
    ]
    ends = (
        f"Samples lost: {soak.lost}. Samples trained twice: {soak.trained_twice}. Things left: {soak.left}."
    )
    return [kinds, *notes, ends, trends]


def _failed(kind: KindReport) -> str:
    return ", ".join(f"{number} {end}" for end, number in kind.failed_posts.items()) or "0"


def _to_proof(kind: KindReport) -> str:
    steps = kind.steps_to_proof
    return f"{statistics.median(steps):g} ({max(steps)})" if steps else "–"


_KIND_COLUMNS: Mapping[str, Callable[[KindReport], str]] = {
    "fault": lambda kind: kind.kind,
    "times": lambda kind: str(kind.times),
    "hangs": lambda kind: str(kind.hangs),
    "longest pause of channel A, s": lambda kind: f"{kind.longest_wait_s:.2f}",
    "longest step of A or B, s": lambda kind: f"{kind.longest_step_s:.2f}",
    "POSTs that failed": _failed,
    "steps to proof: median (max)": _to_proof,
    "rollouts of an unproven server": lambda kind: str(kind.unproven_rollouts),
}


def _trend_cells(each: Trend | None) -> tuple[str, ...]:
    if each is None:
        return ("too few", *[""] * 4)
    drift = f"{each.drift:+.3g} ({each.low:+.3g}..{each.high:+.3g})"
    return str(each.num_values), f"{each.median:.4g}", drift, f"{each.tolerated:.3g}", each.verdict
