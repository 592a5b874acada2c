"""Trains and scores in child processes, one command or several at once, and leaves none behind, whatever way it ends.

A thin use of the launcher's ``Job``: every command runs under a warden that also ends it when this process is
killed. Main thread only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cores import started_on
from benchmarks.results import say
from swift_stage2.demo.demo_config import CHILD_ENVIRONMENT, DemoJob, write_config
from swift_stage2.demo.scoring import DetectionScore
from swift_stage2.errors import ChildFailed
from swift_stage2.launch.job import Job, last_cause
from swift_stage2.launch.process_tree import Command, ProcessTree, StopSignals, adopt_orphans
from swift_stage2.process.ports import free_ports
from swift_stage2.terminal.progress import WaitNotice

START_DEADLINE_S = 600.0
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
DEADLINE_PER_STEP_S = 10.0

_EVALUATION_DEADLINE_S = 300.0
_GRACE_S = 90.0  # the launcher itself may need as long to end servers and ranks in order


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """One command of several that run at once."""

    name: str
    """Also of its log."""
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's and the demo's."""
    cores: frozenset[int]
    """On which it and all below it run."""


class ChildRuns:
    """Owns every process that a bench starts. SIGINT, SIGTERM and SIGHUP end them all."""

    def __init__(self) -> None:
        self._signals = StopSignals()

    def __enter__(self) -> ChildRuns:
        adopt_orphans()
        self._signals.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._signals.__exit__(None, None, None)

    def run(
        self,
        name: str,
        argv: tuple[str, ...],
        *,
        log_dir: Path,
        deadline_s: float,
        environment: Mapping[str, str] | None = None,
        each_moment: Callable[[], object] = lambda: None,
    ) -> None:
        """Waits for one command to end well, and ends what it leaves behind. The log is ``log_dir/name.log``.

        Raises:
            ChildFailed: it ended with another status than 0, or not by its deadline; names cause and log.
            KeyboardInterrupt: a signal asked for the end.
        """
        cores = frozenset(os.sched_getaffinity(0))
        child = Child(name=name, argv=argv, environment=environment or {}, cores=cores)
        self.run_together([child], log_dir=log_dir, deadline_s=deadline_s, each_moment=each_moment)

    def run_together(
        self,
        children: Sequence[Child],
        *,
        log_dir: Path,
        deadline_s: float,
        each_moment: Callable[[], object] = lambda: None,
    ) -> None:
        """As ``run``, for several at once: waits for all to end well; the first that does not ends the others."""
        log_dir.mkdir(parents=True, exist_ok=True)
        end = time.monotonic() + deadline_s
        trees: list[ProcessTree] = []
        with Job(log_dir, self._signals, lambda line: None) as job:
            for child in children:
                environment = {**os.environ, **CHILD_ENVIRONMENT, **child.environment}
                with started_on(set(child.cores)):
                    trees.append(job.start(Command(child.name, child.argv, environment, _GRACE_S)))
            running, failed = _look(trees)
            while running and failed is None:
                job.step()
                each_moment()
                if self._signals.received is not None:
                    raise KeyboardInterrupt
                if time.monotonic() >= end:
                    name, log = running[0].command.name, running[0].log_path
                    raise ChildFailed(f"{name} must end within {deadline_s:.0f} s, it did not; see {log}")
                running, failed = _look(trees)
        each_moment()
        if failed is not None:
            status, cause = failed.poll(), last_cause(failed.log_path, failed.log_offset)
            raise ChildFailed(
                f"{failed.command.name} ended with status {status}: {cause}; see {failed.log_path}"
            )


def _look(trees: Sequence[ProcessTree]) -> tuple[list[ProcessTree], ProcessTree | None]:
    """Those that run, and one that failed; asked once, or one that fails between two questions would be neither."""
    statuses = [(tree, tree.poll()) for tree in trees]
    running = [tree for tree, status in statuses if status is None]
    return running, next((tree for tree, status in statuses if status not in (None, 0)), None)


def torchrun(num_ranks: int, *words: str) -> tuple[str, ...]:
    """The command of so many ranks on this machine, each a ``python -m`` with these words."""
    return (*_TORCHRUN, f"--nproc-per-node={num_ranks}", "-m", *words)


def write_job_config(job: DemoJob) -> None:
    """The demo's YAML, on ports that are free now."""
    http, group = free_ports(2)
    write_config(job, (http, group))


def train(children: ChildRuns, job: DemoJob, *, environment: Mapping[str, str] | None = None) -> None:
    """Writes the job's YAML and runs it with ``swift-stage2 launch``.

    Raises ChildFailed: it did not end well.
    """
    write_job_config(job)
    notice = WaitNotice(say, every_s=60.0)
    children.run(
        "launch",
        (sys.executable, "-m", "swift_stage2", "launch", "--verbose", str(job.config_path)),
        log_dir=job.directory / "logs",
        deadline_s=START_DEADLINE_S + DEADLINE_PER_STEP_S * job.num_steps,
        environment=environment,
        each_moment=lambda: notice.remind("training goes on"),
    )


def score(
    children: ChildRuns, held_out: Path, out: Path, checkpoints: Sequence[Path]
) -> tuple[DetectionScore, ...]:
    """Scores checkpoints alike, in one process. Raises ChildFailed: it did not end well."""
    files = ("--rows", str(held_out), "--out", str(out), *map(str, checkpoints))
    children.run(
        "evaluation",
        (sys.executable, "-m", "swift_stage2.demo.scoring", *files),
        log_dir=out.parent / "logs",
        deadline_s=_EVALUATION_DEADLINE_S * len(checkpoints),
    )
    return tuple(DetectionScore(**found) for found in json.loads(out.read_text(encoding="utf-8")))
