"""The learner: two torchrun ranks on the tiny model, followed through their logs while they train.

The job has no last step of its own, unless it is told one: it is stopped as SIGTERM stops any run, at a step on which
all ranks agree, with a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil

from benchmarks.clocks import PLUGINS
from benchmarks.faults.accounting import Record
from benchmarks.faults.leftovers import Held, command_line, kill_all, tree_of
from benchmarks.processes import Found, Processes
from benchmarks.servers import write_job
from swift_stage2.config import load_config
from swift_stage2.demo.demo_config import CHILD_ENVIRONMENT, DemoJob
from swift_stage2.launch.plan import plan_launch
from swift_stage2.runtime.network import free_ports
from swift_stage2.telemetry.account import RunAccount, account_of
from swift_stage2.telemetry.event_log import EventTail, event_path, log_paths, read_logs

NUM_RANKS = 2
_STEPS_THAT_NO_FAULT_REACHES = 5000
_STOP_DEADLINE_S = 120.0
_WATCH_EVERY_S = 2.0
_TORCHRUN = "swift_stage2.collectives"
_PUBLISHER = "swift_stage2.weights.publisher_process"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    request_timeout_s: float = 60.0
    b_ratio: float = 0.5
    num_steps: int = _STEPS_THAT_NO_FAULT_REACHES
    swift: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments for ms-swift."""
    phases: bool = False
    """The server sleeps while the learner trains."""


class Victim(StrEnum):
    RANK_0 = "rank 0"
    RANK_1 = "rank 1"
    BOTH = "both ranks"
    JOB = "ranks and torchrun"


class TrainingJob:
    """One real training run, which its context ends. ``records`` holds what its ranks have written so far."""

    def __init__(
        self,
        name: str,
        processes: Processes,
        directory: Path,
        rows: Path,
        port: int,
        settings: JobSettings,
    ) -> None:
        self.run_dir = directory / "run"
        self.records: list[list[Record]] = [[] for _ in range(NUM_RANKS)]
        self.watch: Callable[[], None] = lambda: None
        """Called at every step(), once what was written is taken in."""
        self._owner = processes
        (self._group_port,) = free_ports(1)
        self._config = _write_config(directory, rows, (port, self._group_port), settings)
        environment = {**os.environ, **CHILD_ENVIRONMENT}
        learner = plan_launch(load_config(self._config), self._config, environment).learner
        assert learner is not None
        self._tails = [EventTail(event_path(self.run_dir, rank)) for rank in range(NUM_RANKS)]
        self._tree = processes.job.start(replace(learner, name=f"learner-{name}"))
        self._held = Held()
        self._watched_at = 0.0

    def __enter__(self) -> TrainingJob:
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the job by whatever it takes."""
        if self.exit_status is None:
            kill_all(lambda: tree_of(self._tree.pid)[1:], _STOP_DEADLINE_S)
            self._tree.ask_to_end()
            self._owner.wait_for(lambda: self.exit_status is not None, "the learner ends", _STOP_DEADLINE_S)

    @property
    def exit_status(self) -> int | None:
        """None while it runs."""
        return self._tree.poll()

    @property
    def num_steps(self) -> int:
        return len(self.of_kind("step"))

    def of_kind(self, kind: str, since: float = 0.0) -> list[Record]:
        """Rank 0's records of one kind from a moment on, oldest first."""
        return [record for record in self.records[0] if record["kind"] == kind and record["time"] >= since]

    def step(self) -> None:
        """Waits a moment and takes in what was written."""
        self._owner.moment()
        for tail, records in zip(self._tails, self.records, strict=True):
            records.extend(map(json.loads, tail.lines()))
        if time.monotonic() - self._watched_at >= _WATCH_EVERY_S:
            self._watched_at = time.monotonic()
            self._held.look(tree_of(self._tree.pid)[1:])
        self.watch()

    def wait_for(self, holds: Callable[[], Found], what: str, timeout_s: float = 180.0) -> Found:
        """Trains on until something holds. Raises ChildFailed: the learner ended first, or it took too long."""
        self.step()
        return self._owner.wait_for(holds, what, timeout_s, tree=self._tree, step=self.step)

    def wait_for_steps(self, count: int, timeout_s: float = 180.0) -> None:
        goal = self.num_steps + count
        self.wait_for(lambda: self.num_steps >= goal, f"{count} more steps", timeout_s)

    def wait_s(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.step()

    def kill(self, victim: Victim, deadline_s: float) -> float:
        """SIGKILL; returns after how many seconds nothing of the job was left. Raises ChildFailed: it hung."""
        started = time.monotonic()
        # Before torchrun has started it, there is no rank to kill.
        for process in self.processes_of(victim) or self.processes_of(Victim.JOB):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.wait_until_it_ends(deadline_s)
        return time.monotonic() - started

    def stop(self) -> int:
        """SIGTERM to one rank, as a scheduler would; returns the exit status of the whole job."""
        for process in self.processes_of(Victim.RANK_0):
            process.send_signal(signal.SIGTERM)
        return self.wait_until_it_ends(_STOP_DEADLINE_S)

    def wait_until_it_ends(self, timeout_s: float) -> int:
        """Waits for the whole job; returns its exit status. Raises ChildFailed when it took too long."""
        what = f"the learner ends ({self._tree.log_path})"
        self._owner.wait_for(lambda: self.exit_status is not None, what, timeout_s, step=self.step)
        self.step()
        return self.exit_status or 0

    def processes_of(self, victim: Victim) -> list[psutil.Process]:
        """Those that run now; ranks in order."""
        below = tree_of(self._tree.pid)[1:]  # the first is the supervisor, which is the bench's own
        if victim is Victim.JOB:
            return below
        config = str(self._config.absolute())
        commands = {process: command_line(process) for process in below}
        ranks = [p for p, words in commands.items() if config in words and _TORCHRUN not in words]
        ranks = [process for process in ranks if not _is_forked(process, ranks)]
        ranks.sort(key=lambda process: process.create_time())
        return ranks[{Victim.RANK_0: slice(1), Victim.RANK_1: slice(1, 2)}.get(victim, slice(None))]

    @property
    def publisher(self) -> list[psutil.Process]:
        """The process that publishes weights; empty while there is none."""
        return [process for process in tree_of(self._tree.pid) if _PUBLISHER in command_line(process)]

    def what_is_left(self) -> tuple[str, ...]:
        return self._held.left([self._group_port])

    def account(self) -> RunAccount:
        """The account of all ranks' logs; empty while no process has begun one."""
        if not log_paths(self.run_dir):
            return RunAccount(ranks=(), violations=())
        return account_of(read_logs([self.run_dir]))


def _is_forked(process: psutil.Process, ranks: Sequence[psutil.Process]) -> bool:
    """True for a data-loader worker: a forked process has the command line of its rank."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.ppid() in {rank.pid for rank in ranks}
    return False


def _write_config(directory: Path, rows: Path, ports: tuple[int, int], settings: JobSettings) -> Path:
    swift = {
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "warmup_ratio": 0.0,
        "report_to": ["none"],
        **settings.swift,
    }
    job = DemoJob(
        directory=directory,
        rows=rows,
        num_steps=settings.num_steps,
        b_ratio=settings.b_ratio,
        num_ranks=NUM_RANKS,
        plugins=(PLUGINS / "faults.py",),
        temperature=0.01,
        max_new_tokens=100,
        swift=swift,
    )
    channel_b = {
        "max_truncated_ratio": 1.0,
        "packing": {"packing_length": 256, "packing_min_fill_ratio": 0.5},
        "prefetch": {"queue_limit": 6, "version_window": 3},
    }
    rollout = {
        "decoding": {"top_p": 1.0},
        "max_inflight_per_server": 16,
        "request_timeout_s": settings.request_timeout_s,
        "sync": {"timeout_s": 60.0, "bucket_mib": 1, "proof": "canary"},
    }
    changes: dict[str, Any] = {"stage2_ab": {"channel_b": channel_b}, "rollout": rollout}
    if settings.phases:
        changes["stage2_ab"] |= {"mode": "inline", "phase_steps": 2}
        changes["launch"] = {"share_devices": True}
    return write_job(job, ports, changes | {"control_timeout_s": 240.0 + settings.request_timeout_s})
