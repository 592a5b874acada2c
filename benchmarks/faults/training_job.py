"""The learner of one row: two torchrun ranks on the tiny model, followed through their audits while they train.

The job has no last step of its own: the row stops it, as SIGTERM stops any run, at a step on which all ranks
agree, with a checkpoint. Called by the rows.
"""

from __future__ import annotations

import contextlib
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
from benchmarks.faults.commit import COURIER, VARIABLE, Switches
from benchmarks.faults.server import Held, Leftovers, command_line, kill_all, tree_of
from benchmarks.servers import BenchServers, Found, write_job
from swift_stage2.config import Fenced, Proof, load_config
from swift_stage2.demo.demo_config import CHILD_ENVIRONMENT, DemoJob
from swift_stage2.errors import ChildFailed
from swift_stage2.launch.plan import plan_launch
from swift_stage2.telemetry.audit import Record, audit_path
from swift_stage2.telemetry.ledger_account import RunAccount, account_of
from swift_stage2.telemetry.reading import AuditTail, read_ledgers

NUM_RANKS = 2
_STEPS_THAT_NO_ROW_REACHES = 5000
_STOP_DEADLINE_S = 120.0
_WATCH_EVERY_S = 2.0
Ports = Sequence[tuple[int, int]]
"""Those that the learner is told, by server: of HTTP and of the weight group."""
_TORCHRUN = "swift_stage2.process.loopback_torchrun"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    num_ranks: int = NUM_RANKS
    request_timeout_s: float = 60.0
    b_ratio: float = 0.5
    proof: Proof = Proof.AUTO
    fenced: Fenced = Fenced.WHEN_NEEDED
    prefetch: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of ``prefetch``."""
    sync: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of ``rollout.sync``."""
    swift: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments for ms-swift."""


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
        bench: BenchServers,
        directory: Path,
        rows: Path,
        ports: Ports,
        switches: Switches,
        settings: JobSettings,
    ) -> None:
        self.run_dir = directory / "run"
        self.records: list[list[Record]] = [[] for _ in range(settings.num_ranks)]
        self.watch: Callable[[], None] = lambda: None
        """Called at every step(), once what was written is taken in."""
        self._bench = bench
        self._group_ports = [group for _, group in ports]
        self._config_path = _write_config(directory, rows, ports, settings)
        environment = {**os.environ, **CHILD_ENVIRONMENT, VARIABLE: str(switches.directory)}
        learner = plan_launch(load_config(self._config_path), self._config_path, environment).learner
        assert learner is not None
        self._tails = [AuditTail(audit_path(self.run_dir, rank)) for rank in range(settings.num_ranks)]
        self._tree = bench.job.start(replace(learner, name=name))
        self._held = Held()
        self._watched_at = 0.0

    def __enter__(self) -> TrainingJob:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

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
        self._bench.moment()
        for tail, records in zip(self._tails, self.records, strict=True):
            records.extend(tail.read())
        if time.monotonic() - self._watched_at >= _WATCH_EVERY_S:
            self._watched_at = time.monotonic()
            self._held.look(tree_of(self._tree.pid)[1:])
        self.watch()

    def wait_for(self, holds: Callable[[], Found], what: str, timeout_s: float) -> Found:
        """Trains on until something holds. Raises ChildFailed: the learner ended first, or it took too long."""
        self.step()
        return self._bench.wait_for(holds, what, timeout_s, tree=self._tree, step=self.step)

    def wait_for_steps(self, count: int, timeout_s: float = 180.0) -> None:
        goal = self.num_steps + count
        self.wait_for(lambda: self.num_steps >= goal, f"{count} more steps", timeout_s)

    def wait_s(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.step()

    def kill(self, victim: Victim, deadline_s: float) -> float | None:
        """SIGKILL; returns after how many seconds nothing of the job was left, None if that took too long."""
        started = time.monotonic()
        # Before torchrun has started it, there is no rank to kill.
        for process in self.processes_of(victim) or self.processes_of(Victim.JOB):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        try:
            self.wait_until_it_ends(deadline_s)
        except ChildFailed:
            return None
        return time.monotonic() - started

    def stop(self) -> int:
        """SIGTERM to one rank, as a scheduler would; returns the exit status of the whole job."""
        for process in self.processes_of(Victim.RANK_0):
            process.send_signal(signal.SIGTERM)
        return self.wait_until_it_ends(_STOP_DEADLINE_S)

    def wait_until_it_ends(self, timeout_s: float) -> int:
        """Waits for the whole job; returns its exit status. Raises ChildFailed when it took too long."""
        what = f"the learner ends ({self._tree.log_path})"
        self._bench.wait_for(lambda: self.exit_status is not None, what, timeout_s, step=self.step)
        self.step()
        return self.exit_status or 0

    def end(self) -> None:
        """Ends the job by whatever it takes."""
        if self.exit_status is None:
            kill_all(lambda: tree_of(self._tree.pid)[1:], _STOP_DEADLINE_S)
            self._tree.ask_to_end()
            self._bench.wait_for(lambda: self.exit_status is not None, "the learner ends", _STOP_DEADLINE_S)

    def processes_of(self, victim: Victim) -> list[psutil.Process]:
        """Those that run now; ranks in order."""
        below = tree_of(self._tree.pid)[1:]  # the first is the warden, which is the bench's own
        if victim is Victim.JOB:
            return below
        config = str(self._config_path.absolute())
        commands = {process: command_line(process) for process in below}
        ranks = [p for p, words in commands.items() if config in words and _TORCHRUN not in words]
        ranks = [process for process in ranks if not _is_forked(process, ranks)]
        ranks.sort(key=lambda process: process.create_time())
        return ranks[{Victim.RANK_0: slice(1), Victim.RANK_1: slice(1, 2)}.get(victim, slice(None))]

    @property
    def courier(self) -> list[psutil.Process]:
        """The process that carries weights; empty while there is none."""
        return [process for process in tree_of(self._tree.pid) if COURIER in command_line(process)]

    def what_is_left(self) -> Leftovers:
        return self._held.left(self._group_ports)

    def account(self) -> RunAccount:
        """The account of all ranks' ledgers. Raises ChildFailed when the learner left no checkpoint."""
        if not list(self.run_dir.glob("checkpoint-*")):
            raise ChildFailed(
                f"the learner must save a checkpoint when it is stopped; see {self._tree.log_path}"
            )
        return account_of(read_ledgers([self.run_dir]))


def _is_forked(process: psutil.Process, ranks: Sequence[psutil.Process]) -> bool:
    """True for a data-loader worker: a forked process has the command line of its rank."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.ppid() in {rank.pid for rank in ranks}
    return False


def _write_config(directory: Path, rows: Path, ports: Ports, settings: JobSettings) -> Path:
    swift = {
        "per_device_train_batch_size": 2,
        "dataset_shuffle": False,  # the poisonous row must stay where it was put; the streams shuffle anyway
        "learning_rate": 3e-4,
        "lr_scheduler_type": "constant",
        "warmup_ratio": 0.0,
        "report_to": ["none"],
        **settings.swift,
    }
    job = DemoJob(
        directory=directory,
        rows=rows,
        num_steps=_STEPS_THAT_NO_ROW_REACHES,
        b_ratio=settings.b_ratio,
        num_ranks=settings.num_ranks,
        plugins=(PLUGINS / "faults.py",),
        temperature=0.01,
        max_new_tokens=100,
        swift=swift,
    )
    channel_b = {
        "max_truncated_ratio": 1.0,
        "packing": {"packing_length": 256, "packing_min_fill_ratio": 0.5},
        "prefetch": {"queue_limit": 6, "version_window": 3, **settings.prefetch},
    }
    rollout = {
        "servers": [{"base_url": f"http://127.0.0.1:{http}", "group_port": group} for http, group in ports],
        "decoding": {"top_p": 1.0},
        "max_inflight_per_server": 16,
        "request_timeout_s": settings.request_timeout_s,
        "sync": {
            "timeout_s": 60.0,
            "bucket_mib": 1,
            "proof": settings.proof.value,
            "canary_every_rounds": 1,
            "fenced": settings.fenced.value,
            **settings.sync,
        },
    }
    changes = {"stage2_ab": {"channel_b": channel_b}, "rollout": rollout}
    return write_job(job, ports[0], changes | {"control_timeout_s": 240.0 + settings.request_timeout_s})
