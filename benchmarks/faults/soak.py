"""One long two-rank run, faults at random steps, and what it came to.

The run ends by itself after its last step. Faults come one after another, each once the one before has healed; memory,
threads and file descriptors of ranks, publisher and server are looked at every few steps.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil

from benchmarks.estimates import FEWEST_STEPS, Trend, trend
from benchmarks.faults.accounting import FaultReport, Moments, Record, account_sentence, report
from benchmarks.faults.scene import START_S, Scene
from benchmarks.faults.table import FAULTS, problems_of
from benchmarks.faults.training_job import JobSettings, TrainingJob, Victim
from benchmarks.results import ResultTable, grouped, say

if TYPE_CHECKING:
    from benchmarks.faults.bench import FaultBench

_SAMPLE_EVERY_STEPS = 10
_LONGEST_STEP_S = 10.0  # on average, while the soak waits for a step
_END_DEADLINE_S = 180.0  # of the last save and the shutdown
_NUM_SAVES = 4
_NUM_WARM_STEPS = 16
_ROOM_STEPS = 100
"""From one fault to the next, and behind the last: in which a server is started again and proven."""
_TOLERATED = {"RSS, MiB": {"share": 0.02}, "threads": {"amount": 1.0}, "file descriptors": {"amount": 1.0}}
_MIB = 1 << 20

Samples = Mapping[tuple[str, int, str], Sequence[tuple[int, float]]]
"""Steps and values, by process, its id and what was measured."""


def run_soak(bench: FaultBench, num_steps: int, seed: int) -> tuple[list[ResultTable | str], bool]:
    """The tables, and whether nothing was lost and nothing rises. Raises ChildFailed when the run did not go on."""
    server = bench.ready_server()
    save = max(1, num_steps // _NUM_SAVES)
    settings = JobSettings(num_steps=num_steps, swift={"save_steps": save, "save_total_limit": 2})
    names = [name for name, each in FAULTS.items() if bench.kind not in each.why_not]
    faults, moments = plan_faults(seed, num_steps, names), []
    samples: dict[tuple[str, int, str], list[tuple[int, float]]] = defaultdict(list)
    with bench.start_job("soak", bench.directory / "job", settings) as job:
        job.watch = lambda: _look(job, server.processes, samples)
        for step, name in faults:
            scene = Scene(server, job)
            num_left = max(1, step + 1 - job.num_steps)
            job.wait_for_steps(num_left, START_S + num_left * _LONGEST_STEP_S)
            FAULTS[name].commit(scene)
            scene.wait_until_healed()
            moments.append(scene.moments)
            say(f"{name} at step {step}, healed at step {job.num_steps}")
        status = job.wait_until_it_ends((num_steps - job.num_steps) * _LONGEST_STEP_S + _END_DEADLINE_S)
    reports = reports_of(job.records, moments)
    trends = trends_of(samples)
    problems = [problem for each in reports for problem in each.problems] + problems_of(job, status)
    problems += [f"{' '.join(name)} rises" for name, each in trends.items() if each.verdict == "rising"]
    names = [name for _, name in faults]
    notes = [account_sentence(job.account()), f"Problems: {'; '.join(problems) or 'none'}."]
    return [fault_table(names, reports), trend_table(trends), *notes], not problems


def plan_faults(seed: int, num_steps: int, names: Sequence[str]) -> list[tuple[int, str]]:
    """Steps and names: every name equally often, in random order, each with room to heal before the next."""
    rng = random.Random(seed)
    usable = num_steps - _NUM_WARM_STEPS - _ROOM_STEPS
    count = max(1, usable // (2 * _ROOM_STEPS))
    drawn = [name for _ in range(count // len(names) + 1) for name in rng.sample(names, len(names))][:count]
    slack = max(0, usable - count * _ROOM_STEPS)
    offsets = sorted(rng.randint(0, slack) for _ in drawn)
    return [
        (_NUM_WARM_STEPS + number * _ROOM_STEPS + offset, name)
        for number, (name, offset) in enumerate(zip(drawn, offsets, strict=True))
    ]


def reports_of(records: Sequence[Sequence[Record]], moments: Sequence[Moments]) -> list[FaultReport]:
    """Reports of faults, each from it to the next."""
    ends = [*(each.fault for each in moments[1:]), float("inf")]
    return [
        report([[record for record in part if record["time"] < end] for part in records], each)
        for each, end in zip(moments, ends, strict=True)
    ]


def _look(
    job: TrainingJob,
    server: Sequence[psutil.Process],
    samples: dict[tuple[str, int, str], list[tuple[int, float]]],
) -> None:
    step = job.num_steps
    if step % _SAMPLE_EVERY_STEPS:
        return
    ranks = {f"rank {rank}": [each] for rank, each in enumerate(job.processes_of(Victim.BOTH))}
    for name, processes in (ranks | {"publisher": job.publisher, "server": server}).items():
        with suppress(psutil.NoSuchProcess, IndexError):  # it is ending, or not there
            values = (
                sum(process.memory_info().rss for process in processes) / _MIB,
                sum(process.num_threads() for process in processes),
                sum(process.num_fds() for process in processes),
            )
            for quantity, value in zip(_TOLERATED, values, strict=True):
                samples[name, processes[0].pid, quantity].append((step, value))


def trends_of(samples: Samples) -> dict[tuple[str, str], Trend]:
    """By process and quantity; of publishers and servers, which faults replace, that of the one seen for longest."""
    found = {}
    for (process, quantity), lives in grouped(samples, lambda key: (key[0], key[2])).items():
        series = max((samples[life] for life in lives), key=len)
        steps, values = zip(*series, strict=True)
        if (each := trend(steps, values, **_TOLERATED[quantity])) is not None:
            found[process, quantity] = each
    return found


def fault_table(names: Sequence[str], reports: Sequence[FaultReport]) -> ResultTable:
    columns = ("fault", "noticed as", "longest wait in an A step, s", "steps to proof", "unproven rollouts")
    rows = [
        (
            name,
            each.noticed_as,
            f"{each.longest_wait_s:.2f}",
            str(each.steps_until_proof),
            str(each.unproven_rollouts),
        )
        for name, each in zip(names, reports, strict=True)
    ]
    return ResultTable("", columns, rows)


def trend_table(trends: Mapping[tuple[str, str], Trend]) -> ResultTable:
    columns = ("process, quantity", "median", "drift over 2,000 steps (95 %)", "tolerated", "verdict")
    rows = [
        (
            ", ".join(name),
            f"{each.median:.4g}",
            f"{each.drift:+.3g} ({each.low:+.3g}..{each.high:+.3g})",
            f"{each.tolerated:.3g}",
            each.verdict,
        )
        for name, each in trends.items()
    ]
    return ResultTable(f"Fewer than {FEWEST_STEPS} steps behind the first fifth show no trend", columns, rows)
