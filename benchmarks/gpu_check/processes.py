"""Processes that a stage starts: rollout servers and learners under wardens, waited for and ended together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from swift_stage2.demo.demo_config import CHILD_ENVIRONMENT
from swift_stage2.errors import CheckFailed, ChildFailed
from swift_stage2.launch.job import Job, last_cause
from swift_stage2.launch.process_tree import Command, ProcessTree, adopt_orphans
from swift_stage2.launch.readiness import ReadinessProbe
from swift_stage2.launch.stop_signals import StopSignals

_GRACE_S = 30.0
_START_S = 300.0


@dataclass(frozen=True, slots=True)
class Server:
    """One rollout server that answers."""

    base_url: str
    group_port: int
    tree: ProcessTree


class StageProcesses:
    """Owns them. SIGINT, SIGTERM and SIGHUP end every wait with ``KeyboardInterrupt``, and leaving ends them all."""

    def __init__(self, log_dir: Path) -> None:
        self._signals = StopSignals()
        self._stack = ExitStack()
        self._job = Job(log_dir, self._signals, lambda line: None)

    def __enter__(self) -> StageProcesses:
        adopt_orphans()
        self._stack.enter_context(self._signals)
        self._stack.enter_context(self._job)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def start(self, name: str, argv: tuple[str, ...], environment: Mapping[str, str]) -> ProcessTree:
        """Starts a command, with ``environment`` on top of this process's, and returns at once."""
        whole = {**os.environ, **CHILD_ENVIRONMENT, **environment}
        return self._job.start(Command(name=name, argv=argv, environment=whole, grace_s=_GRACE_S))

    def await_answer(self, base_url: str, tree: ProcessTree) -> None:
        """Waits until ``/infer/`` answers there. Raises ``ChildFailed`` when it ended or did not answer in time."""
        with closing(ReadinessProbe(tree.command.name, base_url, None, _START_S)) as probe:
            while not probe.answered:
                self._step()
                if tree.poll() is not None or probe.expired:
                    raise ChildFailed(
                        f"{tree.command.name} must answer before anything is measured, it did not "
                        f"({probe.last_error}); see {tree.log_path}"
                    )

    def await_end(
        self, tree: ProcessTree, end: float, each_moment: Callable[[], object] = lambda: None
    ) -> None:
        """Until it has ended well.

        Raises:
            CheckFailed: it has not, or still runs at ``end`` (monotonic seconds).
        """
        while (status := tree.poll()) is None:
            each_moment()
            if time.monotonic() >= end:
                raise CheckFailed(f"{tree.command.name} must end within the stage's time, it did not")
            self._step()
        if status != 0:
            cause = last_cause(tree.log_path, tree.log_offset)
            raise CheckFailed(f"{tree.command.name} ended with status {status}: {cause}")

    def end(self, tree: ProcessTree) -> None:
        """Ends one process before the others."""
        tree.ask_to_end()
        end = time.monotonic() + _GRACE_S
        while tree.poll() is None and time.monotonic() < end:
            self._step()

    def _step(self) -> None:
        self._job.step()
        if self._signals.received is not None:
            raise KeyboardInterrupt
