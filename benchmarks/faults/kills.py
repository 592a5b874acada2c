"""kill -9 at random points of a two-rank run, resumed each time; what the ledgers prove.

Every process of the run goes on in one directory, from the newest whole checkpoint; the first is killed behind one.
After every kill, and once the last process has stopped by itself, the ledgers of both ranks are replayed.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.faults.accounting import account_sentence
from benchmarks.faults.training_job import JobSettings, TrainingJob, Victim
from benchmarks.results import ResultTable, say

if TYPE_CHECKING:
    from benchmarks.faults.bench import FaultBench

_SAVE_STEPS = 5
_MOST_STEPS = 8  # between a process's first step and its end
_LONGEST_START_S = 12.0  # of a kill before the first step
_LONGEST_MOMENT_S = 1.5  # of a kill in the middle of a step, a save or a round
_END_DEADLINE_S = 120.0
_START_DEADLINE_S = 240.0
_SHARE_AT_START = 0.15


def run_kills(bench: FaultBench, num_kills: int, seed: int) -> tuple[list[ResultTable | str], bool]:
    """The table, and whether every account balanced. Raises ChildFailed: a killed job hung, or did not go on."""
    rng, rows, is_sound = random.Random(seed), [], True
    place = bench.directory / "job"
    for number in range(num_kills):
        victim = rng.choice(list(Victim))
        checkpoint = newest_whole_checkpoint(place / "run")
        with _start(bench, f"kill{number}", place, checkpoint) as job:
            begun = job.num_steps
            is_early = rng.random() < _SHARE_AT_START
            if checkpoint is None:
                job.wait_for(
                    lambda: newest_whole_checkpoint(place / "run"), "a first checkpoint", _START_DEADLINE_S
                )
            if is_early and checkpoint is not None:
                job.wait_s(rng.uniform(0, _LONGEST_START_S))
            else:
                job.wait_for_steps(rng.randint(1, _MOST_STEPS), _START_DEADLINE_S)
                job.wait_s(rng.uniform(0, _LONGEST_MOMENT_S))
            seconds = job.kill(victim, _END_DEADLINE_S)
        account = job.account()
        is_sound &= account.is_balanced
        come_from = checkpoint.name if checkpoint else "the start"
        steps = str(job.num_steps - begun)
        rows.append((str(number), victim, come_from, steps, f"{seconds:.1f}", account_sentence(account)))
        say(", ".join(rows[-1]))
    with _start(bench, "last", place, newest_whole_checkpoint(place / "run")) as job:
        before = len(job.of_kind("step"))
        job.wait_for(
            lambda: any(step["channel"] == "B" for step in job.of_kind("step")[before:]),
            "a step of channel B after the last kill",
            _START_DEADLINE_S,
        )
        status = job.stop()
    last = job.account()
    columns = ("kill -9", "of", "resumed from", "steps begun", "until gone, s", "samples so far")
    note = f"At the end, with status {status}: {account_sentence(last)}."
    return [ResultTable("", columns, rows), note], is_sound and last.is_balanced and status == 0


def _start(bench: FaultBench, name: str, place: Path, checkpoint: Path | None) -> TrainingJob:
    swift = {"save_strategy": "steps", "save_steps": _SAVE_STEPS, "save_total_limit": 3}
    if checkpoint is not None:
        swift["resume_from_checkpoint"] = str(checkpoint)
    bench.ready_server()
    job = bench.start_job(name, place, JobSettings(swift=swift))
    job.step()  # takes in what earlier processes wrote
    return job


def newest_whole_checkpoint(run_dir: Path) -> Path | None:
    """The last one that Hugging Face can resume from: it writes ``trainer_state.json`` last."""
    whole = [path.parent for path in run_dir.glob("checkpoint-*/trainer_state.json")]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
