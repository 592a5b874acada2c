"""``swift-stage2 bench outage``: the only server is away for 200 steps; what do channel A's steps cost meanwhile?

Learner and server run on disjoint cores where there are two, as they run on disjoint devices in earnest: else the
steps would get faster while nobody generates beside them. With a stand-in that computes nothing the learner has all
cores, and with fewer ranks than cores its pipelines have one of their own. Each cycle is: steps with the server,
kill -9, steps without it, a new server, a proven round, steps with it. Only steps without a sync round in them are
compared: there is none while no server answers. Steps of one phase are not quite independent of each other, so that the
intervals are somewhat too narrow.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmarks.cores import split_cores, started_on
from benchmarks.estimates import Ratio, ratio_of_medians
from benchmarks.faults import bench as fault_bench
from benchmarks.faults.accounting import Gap, SampleCount, gaps
from benchmarks.faults.bench import FaultBench, write_rows
from benchmarks.faults.scene import Scene
from benchmarks.faults.training_job import JobSettings, TrainingJob
from benchmarks.results import ResultTable, publish, say
from benchmarks.servers import ServerKind, stand_in_arguments
from swift_stage2.config import Proof
from swift_stage2.telemetry.ledger_account import RunAccount

_SETTLING_STEPS = 10  # after the start, a kill or a proof, before steps are compared
_SLOWEST_STEP_S = 10.0
_LONGEST_WAIT_S = 1.0
_NUM_PHASES = 3
_FEWEST_STEPS = 2  # of a phase, to be compared


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a run by the audit's clock, Unix seconds: steps that begin and end inside it belong to it."""

    start: float
    end: float

    def a_seconds(self, gaps: Sequence[Gap]) -> list[float]:
        """Seconds of its channel-A steps without a round."""
        return [
            gap.seconds
            for gap in gaps
            if gap.channel == "A"
            and gap.syncing_s == 0
            and self.start <= gap.start
            and gap.start + gap.seconds <= self.end
        ]

    def b_steps(self, gaps: Sequence[Gap]) -> int:
        return sum(gap.channel == "B" and self.start <= gap.start < self.end for gap in gaps)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutageReport:
    num_before: int
    num_during: int
    num_after: int
    median_before_s: float
    during: Ratio
    """Median A-step while no server answers, over the one before."""
    after: Ratio
    """Median A-step once B runs again, over the one before."""
    during_to_both: Ratio
    """Over the one before and after together: a machine that drifts slowly drops out."""
    longest_wait_s: float
    """Of the main thread in one step of the outage, rounds apart, beyond the median before."""
    b_steps: tuple[int, int, int]
    """Before, during, after."""


def check(options: argparse.Namespace) -> None:
    """Raises UserError when what the server needs is not installed."""
    if options.stand_in_latency_s is None:
        fault_bench.check(options)


def run(options: argparse.Namespace, directory: Path) -> int:
    """Runs the cycles.

    Returns 0 when the account balances, nothing is left, no step of an outage waited a second longer than before it,
    and channel B ran again after every outage. How much slower a step was is printed and left to who reads it.

    Raises:
        ChildFailed: the run did not go on, or B did not come back.
    """
    stand_in = options.stand_in_latency_s is not None
    started = time.monotonic()
    rows = write_rows(directory)
    program = partial(stand_in_arguments, rows, options.stand_in_latency_s) if stand_in else None
    # A stand-in needs no core to itself, and a pipeline one beside its rank's.
    every_core = set(os.sched_getaffinity(0))
    learner_cores, server_cores = (every_core, every_core) if stand_in else split_cores()
    kind = ServerKind(options.server)
    with FaultBench(kind, directory, program) as bench, started_on(server_cores):
        reports, account, exit_status = _run(bench, directory, rows, learner_cores, options)
        left = bench.end_server()
    samples = SampleCount.of(account.ranks, account.violations)
    facts = {
        "server": "stand-in" if stand_in else options.server,
        **{name: getattr(options, name) for name in ("stand_in_latency_s", "steps", "ranks", "b_ratio")},
        "learner_cores": sorted(learner_cores),
        "server_cores": sorted(server_cores),
        "seconds": time.monotonic() - started,
        "exit_status": exit_status,
        "left_at_the_end": left,
        "samples": asdict(samples),
        "outages": [asdict(report) for report in reports],
    }
    publish(directory, "outage", facts, outage_table(reports))
    say(
        f"{samples.sentence}; {len(samples.broken_rules)} rules broken; {left} things left; "
        f"took {facts['seconds']:.0f} s"
    )
    is_sound = account.is_balanced and not left and exit_status == 0 and not any(map(is_bad, reports))
    return 0 if is_sound else 1


def _run(
    bench: FaultBench, directory: Path, rows: Path, learner_cores: set[int], options: argparse.Namespace
) -> tuple[list[OutageReport], RunAccount, int]:
    server = bench.ready_server()
    # The stand-in answers no canary as a model does; what it holds is proven tensor by tensor.
    proof = Proof.AUTO if options.stand_in_latency_s is None else Proof.CHECKSUM
    with started_on(learner_cores):
        settings = JobSettings(num_ranks=options.ranks, b_ratio=options.b_ratio, proof=proof)
        learner = bench.start_job("outage", directory / "job", rows, settings)
    with learner as job:
        Scene(server, job).warm_up()
        phases = [_train(job, options.steps)]
        for cycle in range(options.cycles):
            scene = Scene(server, job)
            server.kill()
            scene.wait_until_noticed()
            phases.append(_train(job, options.steps))
            scene.start_server()
            scene.wait_until_healed()
            phases.append(_train(job, options.steps))
            say(f"outage {cycle} of {options.cycles} is over")
        status = job.stop()
    every = gaps(job.of_kind("step"))
    reports = [compare_phases(every, *phases[2 * n : 2 * n + _NUM_PHASES]) for n in range(options.cycles)]
    return reports, job.account(), status


def _train(job: TrainingJob, num_a_steps: int) -> Phase:
    """Some steps to settle, then as many of channel A as asked for."""
    job.wait_for_steps(_SETTLING_STEPS)
    start, first = time.time(), job.num_steps

    def num_run() -> int:
        return sum(step["channel"] == "A" for step in job.of_kind("step")[first:])

    job.wait_for(
        lambda: num_run() >= num_a_steps, f"{num_a_steps} steps of channel A", num_a_steps * _SLOWEST_STEP_S
    )
    return Phase(start, time.time())


def is_bad(report: OutageReport) -> bool:
    """Whether somebody waited for the dead server, or channel B did not come back."""
    return report.longest_wait_s > _LONGEST_WAIT_S or report.b_steps[-1] == 0


def compare_phases(gaps: Sequence[Gap], before: Phase, during: Phase, after: Phase) -> OutageReport:
    """``gaps`` are one rank's. Raises ValueError: a phase has fewer than two steps to compare."""
    seconds = [phase.a_seconds(gaps) for phase in (before, during, after)]
    if min(map(len, seconds)) < _FEWEST_STEPS:
        raise ValueError(
            f"every phase needs at least {_FEWEST_STEPS} channel-A steps, got {[len(each) for each in seconds]}"
        )
    first, second, third = seconds
    usual_wait_s = statistics.median(
        gap.waiting_s for gap in gaps if before.start <= gap.start < before.end and gap.channel == "A"
    )
    waits = [gap.waiting_s - usual_wait_s for gap in gaps if during.start <= gap.start < during.end]
    return OutageReport(
        num_before=len(first),
        num_during=len(second),
        num_after=len(third),
        median_before_s=statistics.median(first),
        during=ratio_of_medians(second, first),
        after=ratio_of_medians(third, first),
        during_to_both=ratio_of_medians(second, [*first, *third]),
        longest_wait_s=max(waits),
        b_steps=(before.b_steps(gaps), during.b_steps(gaps), after.b_steps(gaps)),
    )


def outage_table(reports: Sequence[OutageReport]) -> ResultTable:
    rows = [
        (
            str(number),
            f"{report.num_before}, {report.num_during}, {report.num_after}",
            f"{report.median_before_s:.4f}",
            *(ratio.words() for ratio in (report.during, report.after, report.during_to_both)),
            f"{report.longest_wait_s:.3f}",
            ", ".join(map(str, report.b_steps)),
        )
        for number, report in enumerate(reports)
    ]
    medians = (
        f"{statistics.median(ratio.value for ratio in ratios):.3f}"
        for ratios in zip(*((r.during, r.after, r.during_to_both) for r in reports), strict=True)
    )
    columns = ("during / before", "after / before", "during / both", "longest wait, s")
    return ResultTable(
        "",
        (
            "outage",
            "A-steps before, during, after",
            "median before, s",
            *columns,
            "B steps before, during, after",
        ),
        [*rows, ("median", "", "", *medians, "", "")],
    )
