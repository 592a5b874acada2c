"""``swift-stage2 bench kills``: kill -9 at random points of a two-rank run, resumed each time; what the ledgers prove.

Every process of the run goes on in one directory, from the newest whole checkpoint; the first is killed behind one.
After every kill, and once the last process has stopped by itself, the ledgers of both ranks are replayed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.faults.accounting import SampleCount
from benchmarks.faults.bench import FaultBench, check, write_rows
from benchmarks.faults.training_job import JobSettings, TrainingJob, Victim
from benchmarks.results import ResultTable, grouped, publish, say
from benchmarks.servers import ServerKind
from swift_stage2.errors import ChildFailed
from swift_stage2.telemetry.ledger_account import RunAccount, account_of
from swift_stage2.telemetry.reading import read_ledgers

__all__ = ["check", "run"]
_SAVE_STEPS = 5
_MOST_STEPS = 8  # between a process's first step and its end
_LONGEST_START_S = 12.0  # of a kill before the first step
_LONGEST_MOMENT_S = 1.5  # of a kill in the middle of a step, a save or a round
_END_DEADLINE_S = 120.0
_START_DEADLINE_S = 240.0
_SHARE_AT_START = 0.15
_LAST_B_DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One process of the run and how it ended."""

    number: int
    victim: str
    resumed_from: str | None
    """The checkpoint's name."""
    num_steps: int
    """Begun by this process."""
    seconds_to_end: float | None
    """From the kill until nothing of the job was left; None if it hung."""
    num_void: int
    """Samples trained so far in steps that did not survive."""
    broken_rules: tuple[str, ...]
    records_lost: int


def run(options: argparse.Namespace, directory: Path) -> int:
    """Kills and resumes; 0 when every account balanced. Raises ChildFailed when the run did not go on after a kill."""
    started, kills = time.monotonic(), []
    with FaultBench(ServerKind(options.server), directory) as bench:
        killed = _Run(bench, directory, random.Random(options.seed))
        for number in range(options.points):
            kills.append(killed.kill(number))
            say(line_of(kills[-1]))
        last = killed.finish()
        left = bench.end_server()
    facts = {
        "server": options.server,
        "seed": options.seed,
        "seconds": time.monotonic() - started,
        "left_at_the_end": left,
        "kills": [asdict(kill) for kill in kills],
        "account": asdict(last),
    }
    publish(directory, "kills", facts, kill_table(kills), *rank_notes(last))
    is_sound = last.is_balanced and not left and not any(is_bad(kill) for kill in kills)
    say(f"took {facts['seconds']:.0f} s; {left} things left")
    return 0 if is_sound else 1


class _Run:
    """One run directory, and the processes that take turns in it."""

    def __init__(self, bench: FaultBench, directory: Path, rng: random.Random) -> None:
        self._bench = bench
        self._directory = directory / "job"
        self._rows = write_rows(directory)
        self._rng = rng
        bench.ready_server()

    @property
    def _run_dir(self) -> Path:
        return self._directory / "run"

    def kill(self, number: int) -> Kill:
        """Starts a process of the run, kills it at a random point, and replays the ledgers."""
        victim = self._rng.choice(list(Victim))
        checkpoint = newest_whole_checkpoint(self._run_dir)
        with self._start(f"kill{number}", checkpoint) as job:
            begun = job.num_steps
            is_early = self._rng.random() < _SHARE_AT_START
            if checkpoint is None:
                job.wait_for(
                    lambda: newest_whole_checkpoint(self._run_dir), "a first checkpoint", _START_DEADLINE_S
                )
            if is_early and checkpoint is not None:
                job.wait_s(self._rng.uniform(0, _LONGEST_START_S))
            else:
                job.wait_for_steps(self._rng.randint(1, _MOST_STEPS), _START_DEADLINE_S)
                job.wait_s(self._rng.uniform(0, _LONGEST_MOMENT_S))
            seconds = job.kill(victim, _END_DEADLINE_S)
        account = self._account()
        counted = SampleCount.of(account.ranks, account.violations)
        return Kill(
            number=number,
            victim=str(victim),
            resumed_from=checkpoint.name if checkpoint else None,
            num_steps=job.num_steps - begun,
            seconds_to_end=seconds,
            num_void=sum(rank.num_void for rank in account.ranks),
            broken_rules=counted.broken_rules,
            records_lost=counted.records_lost,
        )

    def finish(self) -> RunAccount:
        """One more process, which trains channel B and stops as SIGTERM stops any run."""
        with self._start("last", newest_whole_checkpoint(self._run_dir)) as job:
            before = len(job.of_kind("step"))
            job.wait_for(
                lambda: any(step["channel"] == "B" for step in job.of_kind("step")[before:]),
                "a step of channel B after the last kill",
                _LAST_B_DEADLINE_S,
            )
            if status := job.stop():
                raise ChildFailed(f"the run must end well after the last kill, got status {status}")
        return job.account()

    def _start(self, name: str, checkpoint: Path | None) -> TrainingJob:
        swift = {"save_strategy": "steps", "save_steps": _SAVE_STEPS, "save_total_limit": 3}
        if checkpoint is not None:
            swift["resume_from_checkpoint"] = str(checkpoint)
        self._bench.ready_server()
        job = self._bench.start_job(name, self._directory, self._rows, JobSettings(swift=swift))
        job.step()  # takes in what earlier processes wrote
        return job

    def _account(self) -> RunAccount:
        """Empty while no process has come as far as a ledger."""
        if not list((self._run_dir / "ledger").glob("rank*.jsonl")):
            return RunAccount(ranks=(), violations=())
        return account_of(read_ledgers([self._run_dir]))


def newest_whole_checkpoint(run_dir: Path) -> Path | None:
    """The last one that Hugging Face can resume from: it writes ``trainer_state.json`` last."""
    whole = [path.parent for path in run_dir.glob("checkpoint-*/trainer_state.json")]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def is_bad(kill: Kill) -> bool:
    return kill.seconds_to_end is None or bool(kill.broken_rules) or bool(kill.records_lost)


def line_of(kill: Kill) -> str:
    came_from = kill.resumed_from or "the start"
    end = "hung" if kill.seconds_to_end is None else f"gone after {kill.seconds_to_end:.1f} s"
    lost = (f"{kill.records_lost} records lost",) if kill.records_lost else ()
    found = "; ".join((*kill.broken_rules, *lost)) or "balanced"
    return f"kill {kill.number}: {kill.victim}, {kill.num_steps} steps after {came_from}, {end}; {found}"


def kill_table(kills: Sequence[Kill]) -> ResultTable:
    groups = grouped(sorted(kills, key=lambda kill: kill.victim), lambda kill: kill.victim)
    return ResultTable.of(
        "",
        groups.values(),
        {
            "kill -9 of": lambda group: group[0].victim,
            "times": lambda group: str(len(group)),
            "in the start": lambda group: str(sum(kill.num_steps == 0 for kill in group)),
            "hangs": lambda group: str(sum(kill.seconds_to_end is None for kill in group)),
            "rules broken": lambda group: str(sum(len(kill.broken_rules) for kill in group)),
            "records lost": lambda group: str(sum(kill.records_lost for kill in group)),
            "until gone, s: median (max)": _seconds_to_end,
        },
    )


def _seconds_to_end(kills: Sequence[Kill]) -> str:
    ends = [kill.seconds_to_end for kill in kills if kill.seconds_to_end is not None] or [0.0]
    return f"{statistics.median(ends):.1f} ({max(ends):.1f})"


def rank_notes(last: RunAccount) -> list[str]:
    return [
        f"Rank {rank.rank} at the end: {SampleCount.of([rank]).sentence}; "
        f"{rank.num_resumes} resumes in the effective history, {rank.num_void} samples trained in steps that did not "
        f"survive; {len(rank.violations)} rules broken."
        for rank in last.ranks
    ]
