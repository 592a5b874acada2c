"""A two-rank run is asked to end in every way at every moment, and then resumed.

Three ways, seven moments, four kinds of data-loader workers.
Rounds and second signals are tried with channel B beside a real server: the ledger must balance, a replay says whether
the losses are right. All else is tried on channel A, against the losses of a run that nobody stopped.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.faults.bench import FaultBench
from benchmarks.processes import torchrun
from benchmarks.servers import ServerKind, write_job
from swift_stage2.demo.demo_config import CHILD_ENVIRONMENT, DemoJob
from swift_stage2.errors import ChildFailed
from swift_stage2.runtime.checkpoints import checkpoints_in, why_not_whole
from swift_stage2.runtime.network import free_ports
from swift_stage2.telemetry.account import account_of
from swift_stage2.telemetry.event_log import EventTail, event_path, read_logs
from swift_stage2.telemetry.events import Step
from swift_stage2.wire import INSTALLING_STATE

_NUM_STEPS, _SAVE_STEPS, _EVAL_STEPS = 12, 5, 6
_DEADLINE_S, _LEFT_DEADLINE_S, _MARK = 400.0, 90.0, "SWIFT_STAGE2_TEST_STOP"
_PR_SET_CHILD_SUBREAPER = 36
_CTRL_C, _TORCHRUN = "Ctrl-C to launch", "SIGTERM to torchrun"
_STATUS = {_CTRL_C: 130, "SIGTERM to launch": 143, _TORCHRUN: 1}
_LOADING, _SAVE, _EVALUATION, _ROUND, _AGAIN = "loading", "save", "evaluation", "round", "step, and again"
_STEP = {
    "first step": 0,
    _ROUND: 5,
    _SAVE: -1,
    "step": 7,
    _EVALUATION: _EVAL_STEPS - 1,
    _LOADING: -1,
    _AGAIN: 7,
}
_NUM_WORKERS: dict[str, dict[str, Any]] = {
    "1 (default)": {},
    "4": {"dataloader_num_workers": 4},
    "4, persistent": {"dataloader_num_workers": 4, "dataloader_persistent_workers": True},
    "0": {"dataloader_num_workers": 0},
}
_NUM_STOPS = int(os.environ.get("NUM_STOPS", "3"))
"""Of 84 cells; the first 28 have every pair of a way, a moment and a kind of workers."""


@pytest.mark.slow
@pytest.mark.timeout(1700)
@pytest.mark.parametrize("number", range(_NUM_STOPS))
def test_a_run_that_is_asked_to_end_is_saved_and_goes_on_as_if_it_had_not_been(
    bench: FaultBench, number: int
) -> None:
    _stop(bench, *(list(kind)[number % len(kind)] for kind in (_STATUS, _STEP, _NUM_WORKERS)))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultBench]:
    with FaultBench(ServerKind.TRANSFORMERS, tmp_path_factory.mktemp("stops")) as bench:
        yield bench
        assert bench.end_server() == ()
    libc = ctypes.CDLL(None, use_errno=True)  # of later tests' servers this process would reap none
    assert libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) == 0, ctypes.get_errno()


def _stop(bench: FaultBench, way: str, moment: str, workers: str) -> None:
    b_ratio, rows = 0.5 if moment in (_ROUND, _AGAIN) else 0.0, bench.rows
    reference = _Job(bench, bench.directory / "never_stopped", rows, 0.0, {})
    if not b_ratio and not reference.run_dir.exists() and reference.train(""):
        raise ChildFailed(f"the run that nobody stops must end well; see {reference.log}")
    place = bench.directory / "_".join((way, moment, workers)).replace(" ", "_")
    job = _Job(bench, place, rows, b_ratio, _NUM_WORKERS[workers])
    status = job.train(way, lambda: job.stop(way, moment))
    assert (status, job.num_left()) == (_STATUS[way], 0), job.log
    last = max(checkpoints_in(job.run_dir).items(), default=(0, None))[1]
    if moment == _LOADING:
        assert last is None
    elif moment != _AGAIN:  # a second signal waits for nothing, so it may leave no checkpoint, or half of one
        assert last is not None
        assert not why_not_whole(last, needs_stage2=bool(b_ratio))
    assert job.train(way, resume=True) == 0, job.log
    assert (job.replay_fault() if b_ratio else job.losses_fault(reference)) == ""


class _Job:
    """One run directory and the commands that run in it. Nothing stands above them that would end what they leave."""

    def __init__(
        self, bench: FaultBench, directory: Path, rows: Path, b_ratio: float, swift: dict[str, Any]
    ) -> None:
        swift = {"save_steps": _SAVE_STEPS, "eval_strategy": "steps", "eval_steps": _EVAL_STEPS, **swift}
        swift |= {"val_dataset": [f"{rows}#64"], "per_device_train_batch_size": 2, "report_to": ["none"]}
        demo = DemoJob(
            directory=directory, rows=rows, num_steps=_NUM_STEPS, b_ratio=b_ratio, record=True, swift=swift
        )
        prefetch = {"sync_every_steps": 2, "prefetch_target_packs": 2}
        packing = {"packing_length": 256, "packing_min_fill_ratio": 0.5}
        changes = {"stage2_ab": {"channel_b": {"prefetch": prefetch, "packing": packing}}} if b_ratio else {}
        port, group_port = free_ports(2)
        self._config = write_job(demo, (bench.ready_server().port if b_ratio else port, group_port), changes)
        self._bench = bench
        self.run_dir, self.log = demo.run_dir, directory / "output.log"

    def train(self, way: str, meanwhile: Callable[[], object] = lambda: None, *, resume: bool = False) -> int:
        words = (str(self._config), *["--resume"] * resume)
        launch = (sys.executable, "-m", "swift_stage2", "launch", "--verbose", *words)
        return self._run(
            torchrun(2, "swift_stage2", "train", *words) if way == _TORCHRUN else launch, meanwhile
        )

    def _run(self, argv: tuple[str, ...], meanwhile: Callable[[], object] = lambda: None) -> int:
        whole = {**os.environ, **CHILD_ENVIRONMENT, _MARK: str(self._config)}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(argv, stdout=log, stderr=log, env=whole, start_new_session=True)
        meanwhile()
        self._bench.wait_for(lambda: self._process.poll() is not None, f"the end of {self.log}", _DEADLINE_S)
        return self._process.returncode or 0

    def stop(self, way: str, moment: str) -> None:
        tail, step, end = EventTail(event_path(self.run_dir, 0)), -1, time.monotonic() + _DEADLINE_S
        signs: dict[str, Callable[[], bool]] = {
            _LOADING: lambda: (self.run_dir / "args.json").exists(),  # ms-swift's, before it loads the model
            _SAVE: lambda: bool(checkpoints_in(self.run_dir)),
        }
        come = signs.get(moment, lambda: step >= _STEP[moment] and (moment != _ROUND or self._is_in_round()))
        while not come():
            if self._process.poll() is not None or time.monotonic() > end:
                raise ChildFailed(f"{moment} must come before the run ends; see {self.log}")
            time.sleep(0.01)
            step = max([step, *(event.step for event in tail.read() if isinstance(event, Step))])
        if moment == _EVALUATION:
            time.sleep(1.0)  # of the step before it; it takes some seconds
        for _ in range(1 + (moment == _AGAIN)):
            if way == _CTRL_C:
                os.killpg(self._process.pid, signal.SIGINT)  # as a terminal does
            else:
                self._process.terminate()
            time.sleep(0.5)

    def _is_in_round(self) -> bool:
        url = f"http://127.0.0.1:{self._bench.ready_server().port}/health/"
        return bool(httpx.get(url, trust_env=False, timeout=10).json()["state"] == INSTALLING_STATE)

    def num_left(self) -> int:
        end = time.monotonic() + _LEFT_DEADLINE_S
        while (left := sum(map(self._is_mine, psutil.process_iter()))) and time.monotonic() < end:
            time.sleep(0.2)
        return left

    def _is_mine(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            is_mine = process.environ().get(_MARK) == str(self._config)
            return is_mine and bool(process.status() != psutil.STATUS_ZOMBIE)
        return False

    def losses(self) -> dict[tuple[int, int], list[str]]:
        """By rank and step, as the last process had them."""
        paths = {rank: self.run_dir / "events" / f"rank{rank}.jsonl" for rank in (0, 1)}
        lines = [
            (rank, json.loads(line)) for rank, path in paths.items() for line in path.open(encoding="utf-8")
        ]
        return {(rank, line["step"]): line["losses"] for rank, line in lines if line["kind"] == "losses"}

    def losses_fault(self, reference: _Job) -> str:
        mine, right = self.losses(), reference.losses()
        wrong = [key for key in sorted(mine.keys() | right.keys()) if mine.get(key) != right.get(key)]
        return f"other at (rank, step) {wrong}" if wrong or len(right) != 2 * _NUM_STEPS else ""

    def replay_fault(self) -> str:
        place = (str(self.run_dir), "--output", str(self.run_dir.with_name("replay")))
        status = self._run((sys.executable, "-m", "swift_stage2", "replay", *place))
        is_balanced = account_of(read_logs([self.run_dir])).is_balanced
        return "" if is_balanced and not status else f"replay {status}, account balanced: {is_balanced}"
