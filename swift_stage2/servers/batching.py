"""Turns requests that arrive one by one, from many callers, into batches for one engine thread.

Jobs with equal keys leave together, oldest first; a task (anything that needs the engine to itself) leaves alone, in
its turn: no job overtakes it. The only wait is ``take``'s, and it ends when the queue is closed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Generic, Protocol, TypeVar

from swift_stage2.errors import EngineUnavailable

_IDLE_WAIT_S = 1.0
_GATHER_S = 0.004  # that a batch waits for jobs of other callers after the latest arrival
_MOST_GATHER_S = 1.0  # of both waits


class Batchable(Protocol):
    """Something that may share a batch with jobs of the same key."""

    @property
    def key(self) -> Hashable: ...


JobT = TypeVar("JobT", bound=Batchable)


@dataclass(eq=False, frozen=True, slots=True)
class ExclusiveTask:
    """A call that another thread makes; ``future`` is its end."""

    call: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)

    def run(self) -> None:
        """Makes the call, unless whoever waited for it has cancelled the future."""
        if self.future.set_running_or_notify_cancel():
            try:
                self.future.set_result(self.call())
            except Exception as error:  # handed to whoever waits for the task
                self.future.set_exception(error)


class BatchQueue(Generic[JobT]):
    """Waiting jobs and tasks. ``expect`` announces jobs that are being prepared, so that a batch waits for them."""

    def __init__(self, *, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size
        self._changed = threading.Condition()
        self._waiting: list[JobT | ExclusiveTask] = []
        self._num_expected = 0
        self._closed = False

    def expect(self, num_jobs: int) -> None:
        """Announces jobs; each must end in ``put(job, expected=True)`` or ``withdraw()``.

        Raises:
            EngineUnavailable: the queue is closed.
        """
        with self._changed:
            self._refuse_if_closed()
            self._num_expected += num_jobs

    def withdraw(self) -> None:
        """An announced job will not come."""
        with self._changed:
            self._num_expected -= 1
            self._changed.notify_all()

    def put(self, job: JobT | ExclusiveTask, *, expected: bool = False) -> None:
        """Appends a job or a task. Raises EngineUnavailable once the queue is closed."""
        with self._changed:
            self._num_expected -= expected
            self._refuse_if_closed()
            self._waiting.append(job)
            self._changed.notify_all()

    def put_task(self, call: Callable[[], Any]) -> ExclusiveTask:
        """Appends a task. Raises EngineUnavailable once the queue is closed."""
        task = ExclusiveTask(call)
        self.put(task)
        return task

    def remove(self, job: JobT) -> bool:
        """Takes a waiting job out; False when it is not waiting any more."""
        with self._changed:
            if job not in self._waiting:
                return False
            self._waiting.remove(job)
            return True

    def take(self) -> list[JobT] | ExclusiveTask | None:
        """The next batch or task; None once the queue is closed."""
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait(_IDLE_WAIT_S)
            self._gather()
            if self._closed:
                return None
            if self._waiting and isinstance(self._waiting[0], ExclusiveTask):
                return self._waiting.pop(0)  # type: ignore[return-value]
            jobs = self._jobs_in_front()
            batch = [job for job in jobs if job.key == jobs[0].key][: self._max_batch_size]
            self._waiting = [item for item in self._waiting if item not in batch]
            return batch  # empty if all that was gathered has been removed again

    def close(self) -> list[JobT | ExclusiveTask]:
        """Ends ``take`` and returns what nobody will run. Later puts raise."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            left, self._waiting = self._waiting, []
            return left

    def _gather(self) -> None:
        """Waits for jobs that could join those that wait: not behind a task, nor beyond the limit."""
        end = time.monotonic() + _MOST_GATHER_S
        while (
            not self._closed and 0 < len(self._waiting) == len(self._jobs_in_front()) < self._max_batch_size
        ):
            remaining_s, num_before = end - time.monotonic(), len(self._waiting)
            if remaining_s <= 0:
                return
            self._changed.wait(remaining_s if self._num_expected else min(_GATHER_S, remaining_s))
            if len(self._waiting) == num_before and not self._num_expected:
                return

    def _jobs_in_front(self) -> list[JobT]:
        """Those that no task is before."""
        return list(takewhile(lambda item: not isinstance(item, ExclusiveTask), self._waiting))  # type: ignore[arg-type]

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise EngineUnavailable("the engine takes no more work; restart the server")
