"""The only server is away for many steps; what do channel A's steps cost meanwhile?

Learner and server run on disjoint cores where there are two, as they run on disjoint devices in earnest: else the
steps would get faster while nobody generates beside them. Each cycle is: steps with the server, kill -9, steps without
it, a new server, a proven round, steps with it. Only steps without a round in them are compared: there is none while
no server answers. Steps of one phase are not quite independent, so that the intervals are somewhat too narrow.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.estimates import ratio_of_medians
from benchmarks.faults.accounting import Gap, account_sentence, gaps, longest_wait
from benchmarks.faults.scene import Scene
from benchmarks.faults.training_job import JobSettings, TrainingJob
from benchmarks.processes import split_cores, started_on
from benchmarks.results import ResultTable, say

if TYPE_CHECKING:
    from benchmarks.faults.bench import FaultBench

_SETTLING_STEPS = 10  # after the start, a kill or a proof, before steps are compared
_SLOWEST_STEP_S = 10.0
_LONGEST_WAIT_S = 1.0
_COLUMNS = (
    *("outage", "A-steps before, during, after", "median before, s", "during / before", "after / before"),
    "longest wait, s",
)

Phase = tuple[float, float]
"""From when to when, by the events' clock: steps that begin and end inside belong to it."""


def run_outage(bench: FaultBench, num_steps: int, num_cycles: int) -> tuple[list[ResultTable | str], bool]:
    """The table, and whether no step waited for the dead server and the account balances.

    How much slower a step was is left to who reads it. Raises ChildFailed: B did not come back.
    """
    learner_cores, server_cores = split_cores()
    with started_on(server_cores):
        server = bench.ready_server()
        with started_on(learner_cores):
            learner = bench.start_job("outage", bench.directory / "job", JobSettings(b_ratio=0.25))
        with learner as job:
            Scene(server, job).warm_up()
            phases = [_train(job, num_steps)]
            for cycle in range(num_cycles):
                scene = Scene(server, job)
                server.kill()
                scene.wait_until_noticed()
                phases.append(_train(job, num_steps))
                scene.start_server()
                scene.wait_until_healed()
                phases.append(_train(job, num_steps))
                say(f"outage {cycle + 1} of {num_cycles} is over")
            status = job.stop()
    every, account = gaps(job.of_kind("step")), job.account()
    rows, waits = [], []
    for cycle in range(num_cycles):
        before, during, after = phases[2 * cycle : 2 * cycle + 3]
        waits.append(longest_wait([gap for gap in every if gap.start >= before[0]], *during))
        rows.append((str(cycle + 1), *compared(every, before, during, after), f"{waits[-1]:.3f}"))
    note = f"{account_sentence(account)}; the learner ended with status {status}."
    is_sound = account.is_balanced and status == 0 and max(waits) <= _LONGEST_WAIT_S
    return [ResultTable("", _COLUMNS, rows), note], is_sound


def _train(job: TrainingJob, num_a_steps: int) -> Phase:
    """Some steps to settle, then as many of channel A as asked for."""
    job.wait_for_steps(_SETTLING_STEPS)
    start, first = time.time(), job.num_steps

    def num_run() -> int:
        return sum(step["channel"] == "A" for step in job.of_kind("step")[first:])

    what = f"{num_a_steps} steps of channel A"
    job.wait_for(lambda: num_run() >= num_a_steps, what, num_a_steps * _SLOWEST_STEP_S)
    return start, time.time()


def a_seconds(every: Sequence[Gap], phase: Phase) -> list[float]:
    """Seconds of a phase's channel-A steps without a round."""
    start, end = phase
    return [
        gap.seconds
        for gap in every
        if gap.channel == "A" and gap.syncing_s == 0 and start <= gap.start and gap.start + gap.seconds <= end
    ]


def compared(every: Sequence[Gap], *phases: Phase) -> tuple[str, ...]:
    before, during, after = (a_seconds(every, phase) for phase in phases)
    ratios = (ratio_of_medians(each, before).words() for each in (during, after))
    numbers = ", ".join(str(len(each)) for each in (before, during, after))
    return numbers, f"{statistics.median(before):.4f}", *ratios
