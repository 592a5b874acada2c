"""Turns requests that arrive one by one, from many callers, into batches for one engine thread.

Jobs with equal keys leave together, oldest first. A task, which is anything that needs the engine to itself, runs on
the engine's thread before the next batch, or when it asks. The only wait is ``take``'s, and it ends when the queue is
closed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
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
        self._waiting: list[JobT] = []
        self._tasks: deque[ExclusiveTask] = deque()
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

    def put(self, job: JobT, *, expected: bool = False) -> None:
        """Appends a job. Raises EngineUnavailable once the queue is closed."""
        with self._changed:
            self._num_expected -= expected
            self._refuse_if_closed()
            self._waiting.append(job)
            self._changed.notify_all()

    def put_task(self, call: Callable[[], Any]) -> ExclusiveTask:
        """Has the engine's thread make a call. Raises EngineUnavailable once the queue is closed."""
        task = ExclusiveTask(call)
        with self._changed:
            self._refuse_if_closed()
            self._tasks.append(task)
            self._changed.notify_all()
        return task

    def run_tasks(self) -> None:
        """Makes all calls that wait. On the engine's thread."""
        while True:
            with self._changed:
                if not self._tasks:
                    return
                task = self._tasks.popleft()
            task.run()
            del task  # else a learner's weights until another one comes

    def take(self) -> list[JobT] | None:
        """Runs the tasks that wait, and returns the next batch, which may be empty; None once the queue is closed."""
        with self._changed:
            while not (self._waiting or self._tasks or self._closed):
                self._changed.wait(_IDLE_WAIT_S)
            self._gather()
            if self._closed:
                return None
            batch = [job for job in self._waiting if job.key == self._waiting[0].key][: self._max_batch_size]
            self._waiting = [job for job in self._waiting if job not in batch]
        self.run_tasks()
        return batch

    def close(self) -> None:
        """Ends ``take``, drops the jobs that wait and cancels the tasks. Later puts raise."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._waiting.clear()
            while self._tasks:
                self._tasks.popleft().future.cancel()

    def _gather(self) -> None:
        """Waits for jobs that could join those that wait: not while a task does, nor beyond the limit."""
        end = time.monotonic() + _MOST_GATHER_S
        while not (self._closed or self._tasks) and 0 < len(self._waiting) < self._max_batch_size:
            remaining_s, num_before = end - time.monotonic(), len(self._waiting)
            if remaining_s <= 0:
                return
            self._changed.wait(remaining_s if self._num_expected else min(_GATHER_S, remaining_s))
            if len(self._waiting) == num_before and not self._num_expected:
                return

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise EngineUnavailable("the engine takes no more work; restart the server")
