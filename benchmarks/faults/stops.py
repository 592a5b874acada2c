"""``swift-stage2 bench stops``: a two-rank run is asked to end, in every way at every moment, and then goes on.

Three ways, seven moments and four kinds of data-loader workers, ms-swift's default among them: 84 cells, in an order
whose first 28 have every pair of them but two. Rounds and a second signal are tried with channel B beside a real
server, where a replay says whether the losses are right; all else on channel A, against a run that was never stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil

from benchmarks.child_runs import torchrun
from benchmarks.faults.bench import FaultBench, check, write_rows
from benchmarks.results import ResultTable, publish, say
from benchmarks.servers import ServerKind, write_job
from swift_stage2.demo.demo_config import CHILD_ENVIRONMENT, DemoJob
from swift_stage2.errors import ChildFailed
from swift_stage2.process.ports import free_ports
from swift_stage2.run_directory.checkpoints import checkpoints_in, why_not_whole
from swift_stage2.telemetry.audit import audit_path
from swift_stage2.telemetry.ledger_account import account_of
from swift_stage2.telemetry.reading import AuditTail, read_ledgers

__all__ = ["check", "run"]
_TAG = "SWIFT_STAGE2_BENCH_STOP"
_NUM_STEPS, _SAVE_STEPS, _EVAL_STEPS = 12, 5, 6
_DEADLINE_S, _LEFT_DEADLINE_S = 400.0, 90.0
_SECOND_AFTER_S = 0.5


class Way(StrEnum):
    CTRL_C = "Ctrl-C to launch"
    LAUNCH = "SIGTERM to launch"
    TORCHRUN = "SIGTERM to torchrun"


class Moment(StrEnum):
    LOADING = "loading"
    FIRST_STEP = "the first step"
    STEP = "a step"
    SAVE = "a save"
    EVALUATION = "an evaluation"
    ROUND = "a round"
    TWICE = "a step, and again"


_STATUS = {Way.CTRL_C: 128 + signal.SIGINT, Way.LAUNCH: 128 + signal.SIGTERM, Way.TORCHRUN: 1}
_AT_STEP = {
    Moment.FIRST_STEP: 0,
    Moment.STEP: 7,
    Moment.EVALUATION: _EVAL_STEPS - 1,
    Moment.ROUND: 8,
    Moment.TWICE: 7,
}
_WORKERS: dict[str, dict[str, Any]] = {
    "1 (default)": {},
    "0": {"dataloader_num_workers": 0},
    "4": {"dataloader_num_workers": 4},
    "4, persistent": {"dataloader_num_workers": 4, "dataloader_persistent_workers": True},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """One cell: how the job ended, what it left, and how the run went on by ``--resume``."""

    way: Way
    moment: Moment
    workers: str
    status: int
    checkpoint: str
    """The name of the last; empty without one, ``damaged …`` if it is not whole."""
    seconds: float
    """From the signal to the end."""
    num_left: int
    """Processes that still ran then, and did not end by themselves."""
    resumed_status: int
    difference: str
    """Of the resumed run from what it should be; empty if there is none."""

    @property
    def is_sound(self) -> bool:
        saved = (
            not self.checkpoint if self.moment is Moment.LOADING else self.checkpoint.startswith("checkpoint")
        )
        saves = saved or self.moment is Moment.TWICE  # which waits for nothing
        return saves and (self.status, self.num_left, self.resumed_status, self.difference) == (
            _STATUS[self.way], 0, 0, "",
        )  # fmt: skip


def run(options: argparse.Namespace, directory: Path) -> int:
    """Writes ``stops.md`` and ``.json`` after every cell; 0 when all were sound. Raises ChildFailed: a job hung."""
    found: list[Stop] = []
    with FaultBench(ServerKind(options.server), directory) as bench:
        server, rows = bench.ready_server(), write_rows(directory)

        def job(name: str, workers: str, b_ratio: float, way: Way = Way.LAUNCH) -> _Job:
            swift = {
                "per_device_train_batch_size": 2,
                "save_steps": _SAVE_STEPS,
                "eval_strategy": "steps",
                "eval_steps": _EVAL_STEPS,
                "val_dataset": [f"{rows}#64"],
                "report_to": ["none"],
                **_WORKERS[workers],
            }
            job = DemoJob(
                directory=directory / name,
                rows=rows,
                num_steps=_NUM_STEPS,
                b_ratio=b_ratio,
                record=True,
                swift=swift,
            )
            if b_ratio:
                prefetch = {"sync_every_steps": 2, "prefetch_target_packs": 2}
                packing = {"packing_length": 256, "packing_min_fill_ratio": 0.5}
                changes: Any = {"stage2_ab": {"channel_b": {"prefetch": prefetch, "packing": packing}}}
            return _Job(
                write_job(job, (server.port, *free_ports(1)), changes if b_ratio else {}), job.run_dir, way
            )

        reference = job("never_stopped", "1 (default)", 0.0)
        if reference.run():
            raise ChildFailed(f"the run that nobody stops must end well; see {reference.log}")
        for number in range(options.points):
            way, moment, workers = (list(kind)[number % len(kind)] for kind in (Way, Moment, _WORKERS))
            b_ratio = 0.5 if moment in (Moment.ROUND, Moment.TWICE) else 0.0
            stopped = job(f"stop{number}", workers, b_ratio, way)
            status, seconds = stopped.run(lambda: stopped.stop(moment)), time.time() - stopped.stopped_at
            last = max(checkpoints_in(stopped.run_dir).items(), default=(0, None))[1]
            why_not = why_not_whole(last, needs_stage2=bool(b_ratio)) if last else ""
            found.append(
                Stop(
                    way=way,
                    moment=moment,
                    workers=workers,
                    status=status,
                    checkpoint=(f"damaged {last.name}: {why_not}" if why_not else last.name) if last else "",
                    seconds=seconds,
                    num_left=stopped.num_left(),
                    resumed_status=stopped.run(resume=True),
                    difference=stopped.broken_replay() if b_ratio else stopped.other_losses(reference),
                )
            )
            say(f"{'sound' if found[-1].is_sound else 'NOT SOUND'}: {found[-1]}")
            publish(directory, "stops", [asdict(stop) for stop in found], _table(found))
        left = bench.end_server()
    return 1 if left or not all(stop.is_sound for stop in found) else 0


class _Job:
    """One run directory and the commands that run in it. Nothing stands above them that would end what they leave."""

    def __init__(self, config: Path, run_dir: Path, way: Way) -> None:
        self.run_dir, self.log, self.stopped_at = run_dir, config.with_suffix(".log"), 0.0
        self._config, self._way, self._process = config, way, None
        self._environment = {**os.environ, **CHILD_ENVIRONMENT, _TAG: str(config)}

    def run(self, meanwhile: Callable[[], object] = lambda: None, *, resume: bool = False) -> int:
        """Trains until it ends; returns the exit status. Raises ChildFailed: it takes too long."""
        words = ["swift_stage2", "launch", "--verbose", str(self._config)]
        if self._way is Way.TORCHRUN:
            words = ["swift_stage2", "train", str(self._config)]
        words += ["--resume"] * resume
        argv = torchrun(2, *words) if self._way is Way.TORCHRUN else (sys.executable, "-m", *words)
        return self._run(argv, meanwhile)

    def _run(self, argv: tuple[str, ...], meanwhile: Callable[[], object] = lambda: None) -> int:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                argv, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env=self._environment, start_new_session=True,
            )  # fmt: skip
        meanwhile()
        try:
            return self._process.wait(_DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise ChildFailed(f"{' '.join(argv[1:4])} must end in time; see {self.log}") from None

    def stop(self, moment: Moment) -> None:
        steps, tail = [-1], AuditTail(audit_path(self.run_dir, 0))

        def come() -> bool:
            steps.extend(record["step"] for record in tail.read() if record["kind"] == "step")
            if moment is Moment.LOADING:
                return (self.run_dir / "args.json").exists()  # ms-swift's, before it loads the model
            if moment is Moment.SAVE:
                return bool(checkpoints_in(self.run_dir))
            return steps[-1] >= _AT_STEP[moment]

        end = time.monotonic() + _DEADLINE_S
        while not come():
            if self._process.poll() is not None or time.monotonic() > end:
                raise ChildFailed(f"{moment} must come before the run ends; see {self.log}")
            time.sleep(0.01)
        if moment is Moment.EVALUATION:
            time.sleep(1.0)  # the step before it; the evaluation takes some seconds
        self.stopped_at = time.time()
        self._signal()
        if moment is Moment.TWICE:
            time.sleep(_SECOND_AFTER_S)
            self._signal()

    def _signal(self) -> None:
        if self._way is Way.CTRL_C:
            os.killpg(self._process.pid, signal.SIGINT)  # as a terminal does
        else:
            self._process.terminate()

    def num_left(self) -> int:
        end = time.monotonic() + _LEFT_DEADLINE_S
        while (left := sum(map(self._is_mine, psutil.process_iter()))) and time.monotonic() < end:
            time.sleep(0.2)
        return left

    def _is_mine(self, process: psutil.Process) -> bool:
        try:
            is_zombie = process.status() == psutil.STATUS_ZOMBIE
            return not is_zombie and process.environ().get(_TAG) == self._environment[_TAG]
        except psutil.Error:
            return False

    def losses(self) -> dict[tuple[int, int], list[str]]:
        """By rank and step, as the last process had them."""
        paths = {rank: self.run_dir / "record" / f"rank{rank}.jsonl" for rank in (0, 1)}
        lines = [
            (rank, json.loads(line)) for rank, path in paths.items() for line in path.open(encoding="utf-8")
        ]
        return {(rank, line["step"]): line["losses"] for rank, line in lines if line["kind"] == "losses"}

    def other_losses(self, reference: _Job) -> str:
        mine, right = self.losses(), reference.losses()
        wrong = sorted(key for key in mine.keys() | right.keys() if mine.get(key) != right.get(key))
        return f"losses of (rank, step) {wrong}" if wrong or len(right) != 2 * _NUM_STEPS else ""

    def broken_replay(self) -> str:
        output = str(self.run_dir.with_name("replay"))
        status = self._run(
            (sys.executable, "-m", "swift_stage2", "replay", str(self.run_dir), "--output", output)
        )
        account = account_of(read_ledgers([self.run_dir]))
        return ("" if account.is_balanced else "account ") + (f"replay {status}" if status else "")


def _table(found: list[Stop]) -> ResultTable:
    columns: dict[str, Callable[[Stop], str]] = {
        "asked to end by": lambda stop: stop.way,
        "in": lambda stop: stop.moment,
        "workers": lambda stop: stop.workers,
        "status": lambda stop: str(stop.status),
        "left": lambda stop: stop.checkpoint or "no checkpoint",
        "seconds": lambda stop: f"{stop.seconds:.1f}",
        "left running": lambda stop: str(stop.num_left),
        "--resume": lambda stop: str(stop.resumed_status),
        "losses, account": lambda stop: stop.difference or "equal",
        "sound": lambda stop: "yes" if stop.is_sound else "NO",
    }
    return ResultTable.of("", found, columns)
