"""The processes of a bench: started, waited for, and ended with everything below them, whatever way the bench ends.

A thin use of the launcher's ``Job``: every command runs under a supervisor, which ends it when this process is killed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self, TypeVar

from swift_stage2.demo.demo_config import CHILD_ENVIRONMENT
from swift_stage2.errors import ChildFailed
from swift_stage2.launch.job import Job, last_cause
from swift_stage2.runtime.supervisor import Command, ProcessTree, StopSignals, adopt_orphans

START_DEADLINE_S = 600.0
DEADLINE_PER_STEP_S = 10.0
_GRACE_S = 90.0  # the launcher itself may need as long to end servers and ranks in order
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")

Found = TypeVar("Found")


class Processes:
    """Owns what one bench starts, from the main thread. SIGINT, SIGTERM and SIGHUP end all of it."""

    job: Job
    """Runs the processes, inside the context."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._stack = ExitStack()
        self._signals = StopSignals()

    def __enter__(self) -> Self:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        adopt_orphans()
        self._stack.enter_context(self._signals)
        self.job = self._stack.enter_context(Job(self._log_dir, self._signals, lambda line: None))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def start_process(
        self,
        name: str,
        argv: tuple[str, ...],
        environment: Mapping[str, str] | None = None,
        grace_s: float = _GRACE_S,
    ) -> ProcessTree:
        """Starts a command, with ``environment`` on top of this process's, and returns at once."""
        whole = {**os.environ, **CHILD_ENVIRONMENT, **(environment or {})}
        return self.job.start(Command(name=name, argv=argv, environment=whole, grace_s=grace_s))

    def run(
        self,
        name: str,
        argv: tuple[str, ...],
        *,
        deadline_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Waits for one command to end well. Its log is ``NAME.log``; raises as ``wait_for_all``."""
        self.wait_for_all([self.start_process(name, argv, environment)], deadline_s)

    def wait_for_all(self, trees: Sequence[ProcessTree], deadline_s: float) -> None:
        """Waits until all have ended.

        Raises:
            ChildFailed: one ended with another status than 0, or not by the deadline; names cause and log.
            KeyboardInterrupt: a signal asked for the end.
        """

        def have_ended() -> bool:
            statuses = [tree.poll() for tree in trees]
            for tree, status in zip(trees, statuses, strict=True):
                if status not in (None, 0):
                    name, cause = tree.command.name, last_cause(tree.log_path, tree.log_offset)
                    raise ChildFailed(f"{name} ended with status {status}: {cause}; see {tree.log_path}")
            return None not in statuses

        self.wait_for(have_ended, f"{trees[0].command.name} ends ({trees[0].log_path})", deadline_s)

    def wait_for(
        self,
        holds: Callable[[], Found],
        what: str,
        timeout_s: float,
        *,
        tree: ProcessTree | None = None,
        step: Callable[[], object] | None = None,
    ) -> Found:
        """Does ``step``, by default ``moment``, until something holds, and returns that.

        Raises ChildFailed: the process ``tree`` ended first, or it took too long.
        """
        end = time.monotonic() + timeout_s
        while not (found := holds()):
            log = f"; see {tree.log_path}" if tree else ""
            if tree is not None and (status := tree.poll()) is not None:
                name, cause = tree.command.name, last_cause(tree.log_path)
                raise ChildFailed(f"{what}: {name} ended first, with status {status}: {cause}{log}")
            if time.monotonic() >= end:
                raise ChildFailed(f"{what}: it did not happen within {timeout_s:.0f} s{log}")
            (step or self.moment)()
        return found

    def moment(self) -> None:
        """Waits a little. Raises KeyboardInterrupt when a signal asked for the end."""
        self.job.step()
        if self._signals.received is not None:
            raise KeyboardInterrupt


def torchrun(num_ranks: int, *words: str) -> tuple[str, ...]:
    """The command of so many ranks on this machine, each a ``python -m`` with these words."""
    return (*_TORCHRUN, f"--nproc-per-node={num_ranks}", "-m", *words)


def split_cores() -> tuple[set[int], set[int]]:
    """The learner's half of the cores and everybody else's; of one core both get that."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    return (set(cores[:half]), set(cores[half:])) if half else (set(cores), set(cores))


@contextmanager
def started_on(cores: set[int]) -> Iterator[None]:
    """Processes started inside run on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
