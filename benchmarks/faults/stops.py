"""``swift-stage2 bench stops``: a two-rank run is asked to end in every way at every moment, and then goes on.

Three ways, seven moments and four kinds of data-loader workers, in an order whose first 28 cells have every pair of
them. Rounds and second signals are tried with channel B beside a real server, where the ledger must balance and a
replay says whether the losses are right; all else on channel A, against the losses of a run that nobody stopped.
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
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
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
_NUM_STEPS, _SAVE_STEPS, _EVAL_STEPS = 12, 5, 6
_DEADLINE_S, _LEFT_DEADLINE_S = 400.0, 90.0
_BY_TORCHRUN, _BY_CTRL_C = "SIGTERM to torchrun", "Ctrl-C to launch"
WAYS = {_BY_CTRL_C: 130, "SIGTERM to launch": 143, _BY_TORCHRUN: 1}
"""The exit status that each must have."""
_LOADING, _SAVE, _EVALUATION, _ROUND, _AGAIN = (
    "loading",
    "a save",
    "an evaluation",
    "a round",
    "a step, and again",
)
MOMENTS = {
    _LOADING: -1,
    "the first step": 0,
    "a step": 7,
    _SAVE: -1,
    _EVALUATION: _EVAL_STEPS - 1,
    _ROUND: 8,
    _AGAIN: 7,
}
"""The step in which each is looked for, where a step tells."""
WORKERS: dict[str, dict[str, Any]] = {
    "1 (default)": {},
    "0": {"dataloader_num_workers": 0},
    "4": {"dataloader_num_workers": 4},
    "4, persistent": {"dataloader_num_workers": 4, "dataloader_persistent_workers": True},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """One cell: how the job ended, what it left, and how the run went on by ``--resume``."""

    way: str
    moment: str
    workers: str
    status: int
    checkpoint: str
    """The last one's name and, if it is not whole, why."""
    seconds: float
    """From the signal to the end."""
    left_running: int
    """Processes, when what ends by itself had its time."""
    resumed_status: int
    difference: str
    """Of the resumed run from what it should be; empty if there is none."""

    @property
    def is_sound(self) -> bool:
        is_right = (
            self.checkpoint == "" if self.moment == _LOADING else self.checkpoint.startswith("checkpoint")
        )
        ends = (self.status, self.left_running, self.resumed_status, self.difference)
        # A second signal waits for nothing, so it may leave no checkpoint, or half of one.
        return (is_right or self.moment == _AGAIN) and ends == (WAYS[self.way], 0, 0, "")


def run(options: argparse.Namespace, directory: Path) -> int:
    """Writes ``stops.md`` and ``.json`` after every cell; 0 when all were sound. Raises ChildFailed: a job hung."""
    found: list[Stop] = []
    with FaultBench(ServerKind(options.server), directory) as bench:
        rows = write_rows(directory)
        for number in range(options.points):
            cell = (list(kind)[number % len(kind)] for kind in (WAYS, MOMENTS, WORKERS))
            found.append(stop_and_resume(bench, rows, *cell))
            say(f"{'sound' if found[-1].is_sound else 'NOT SOUND'}: {found[-1]}")
            names = [field.name for field in fields(Stop)]
            cells = [(*(str(asdict(stop)[name]) for name in names), str(stop.is_sound)) for stop in found]
            table = ResultTable("", (*(name.replace("_", " ") for name in names), "is sound"), cells)
            publish(directory, "stops", [asdict(stop) for stop in found], table)
        left = bench.end_server()
    return 1 if left or not all(stop.is_sound for stop in found) else 0


def stop_and_resume(bench: FaultBench, rows: Path, way: str, moment: str, workers: str) -> Stop:
    """Raises ChildFailed: the moment did not come, or a job hung."""
    b_ratio = 0.5 if moment in (_ROUND, _AGAIN) else 0.0
    directory = rows.parents[1]
    reference = _Job(bench, directory / "never_stopped", rows, 0.0, {})
    if not b_ratio and not reference.run_dir.exists() and reference.run():
        raise ChildFailed(f"the run that nobody stops must end well; see {reference.log}")
    job = _Job(
        bench, directory / f"{way}, {moment}, {workers}".replace(" ", "_"), rows, b_ratio, WORKERS[workers]
    )
    status = job.run(way, meanwhile=lambda: job.stop(way, moment))
    seconds, left = time.time() - job.stopped_at, job.left_running()
    last = max(checkpoints_in(job.run_dir).items(), default=(0, None))[1]
    why_not = why_not_whole(last, needs_stage2=bool(b_ratio)) if last else ""
    return Stop(
        way=way,
        moment=moment,
        workers=workers,
        status=status,
        checkpoint=(f"damaged {last.name}: {why_not}" if why_not else last.name) if last else "",
        seconds=round(seconds, 1),
        left_running=left,
        resumed_status=job.run(way, "--resume"),
        difference=job.broken_replay() if b_ratio else job.other_losses(reference),
    )


class _Job:
    """One run directory and the commands that run in it. Nothing stands above them that would end what they leave."""

    def __init__(
        self, bench: FaultBench, directory: Path, rows: Path, b_ratio: float, workers: dict[str, Any]
    ) -> None:
        saves = {"save_steps": _SAVE_STEPS, "eval_strategy": "steps", "eval_steps": _EVAL_STEPS}
        swift = {
            **saves,
            "val_dataset": [f"{rows}#64"],
            "per_device_train_batch_size": 2,
            "report_to": ["none"],
            **workers,
        }
        demo = DemoJob(
            directory=directory, rows=rows, num_steps=_NUM_STEPS, b_ratio=b_ratio, record=True, swift=swift
        )
        prefetch = {"sync_every_steps": 2, "prefetch_target_packs": 2}
        packing = {"packing_length": 256, "packing_min_fill_ratio": 0.5}
        b_settings = (
            {"stage2_ab": {"channel_b": {"prefetch": prefetch, "packing": packing}}} if b_ratio else {}
        )
        port = bench.ready_server().port if b_ratio else free_ports(1)[0]
        self._config = write_job(demo, (port, *free_ports(1)), b_settings)
        self.run_dir, self.log, self.stopped_at = demo.run_dir, directory / "output.log", 0.0

    def run(self, way: str = "", *words: str, meanwhile: Callable[[], object] = lambda: None) -> int:
        """Trains until it ends; returns the exit status. Raises ChildFailed: it takes too long."""
        words = (str(self._config), *words)
        launch = (sys.executable, "-m", "swift_stage2", "launch", "--verbose", *words)
        return self._run(
            torchrun(2, "swift_stage2", "train", *words) if way == _BY_TORCHRUN else launch, meanwhile
        )

    def _run(self, argv: tuple[str, ...], meanwhile: Callable[[], object] = lambda: None) -> int:
        environment = {**os.environ, **CHILD_ENVIRONMENT, "SWIFT_STAGE2_BENCH_STOP": str(self._config)}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                argv,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        meanwhile()
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(_DEADLINE_S)
        raise ChildFailed(f"{' '.join(argv[1:5])} must end in time; see {self.log}")

    def stop(self, way: str, moment: str) -> None:
        last, tail, end = -1, AuditTail(audit_path(self.run_dir, 0)), time.monotonic() + _DEADLINE_S
        has_come = False
        while not has_come:
            if self._process.poll() is not None or time.monotonic() > end:
                raise ChildFailed(f"{moment} must come before the run ends; see {self.log}")
            time.sleep(0.01)
            last = max([last, *(record["step"] for record in tail.read() if record["kind"] == "step")])
            has_come = last >= MOMENTS[moment] >= 0
            if moment == _LOADING:
                has_come = (self.run_dir / "args.json").exists()  # ms-swift's, before it loads the model
            elif moment == _SAVE:
                has_come = bool(checkpoints_in(self.run_dir))
        if moment == _EVALUATION:
            time.sleep(1.0)  # of the step before it; it takes some seconds
        self.stopped_at = time.time()
        for _ in range(2 if moment == _AGAIN else 1):
            if way == _BY_CTRL_C:
                os.killpg(self._process.pid, signal.SIGINT)  # as a terminal does
            else:
                self._process.terminate()
            time.sleep(0.5)

    def left_running(self) -> int:
        end = time.monotonic() + _LEFT_DEADLINE_S
        while (left := sum(map(self._is_mine, psutil.process_iter()))) and time.monotonic() < end:
            time.sleep(0.2)
        return left

    def _is_mine(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            mark = process.environ().get("SWIFT_STAGE2_BENCH_STOP")
            return mark == str(self._config) and process.status() != psutil.STATUS_ZOMBIE
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
        wrong = [key for key in sorted(mine.keys() | right.keys()) if mine.get(key) != right.get(key)]
        return f"losses of (rank, step) {wrong}" if wrong or len(right) != 2 * _NUM_STEPS else ""

    def broken_replay(self) -> str:
        output = str(self.run_dir.with_name("replay"))
        status = self._run(
            (sys.executable, "-m", "swift_stage2", "replay", str(self.run_dir), "--output", output)
        )
        is_balanced = account_of(read_ledgers([self.run_dir])).is_balanced
        return "" if is_balanced and not status else f"replay {status}, account balanced: {is_balanced}"
