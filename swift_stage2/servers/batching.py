"""Turns requests that arrive one by one, from many callers, into batches for one engine thread.

Jobs with equal keys leave together, oldest first; a task (anything that needs the engine to itself) leaves
alone, in its turn: no job overtakes it. The only wait is ``take``'s, and it ends when the queue is closed.
Used by our server's engines, whose jobs are single requests, and by the merger, whose jobs are whole POSTs.
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


class Batchable(Protocol):
    """Something that may share a batch with jobs of the same key."""

    @property
    def key(self) -> Hashable: ...


JobT = TypeVar("JobT", bound=Batchable)


@dataclass(eq=False, frozen=True, slots=True)
class ExclusiveTask:
    """A call that the engine thread makes between two batches; ``future`` is its end."""

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
    """Waiting jobs and tasks. ``expect`` announces jobs that are being prepared, so that a batch waits for
    them; ``gather_s`` is how long a batch waits for jobs of other callers after the latest arrival, and
    ``max_gather_s`` bounds both waits. ``size_of`` says how much of ``max_batch_size`` a job takes; a job
    that is larger than a whole batch leaves alone."""

    def __init__(
        self,
        *,
        max_batch_size: int,
        gather_s: float = 0.004,
        max_gather_s: float = 1.0,
        size_of: Callable[[JobT], int] = lambda job: 1,
    ) -> None:
        self._max_batch_size = max_batch_size
        self._size_of = size_of
        self._gather_s = gather_s
        self._enough_jobs: int | None = None
        self._max_gather_s = max_gather_s
        self._changed = threading.Condition()
        self._waiting: deque[JobT | ExclusiveTask] = deque()
        self._num_expected = 0
        self._closed = False

    def __len__(self) -> int:
        with self._changed:
            return self._num_expected + sum(not isinstance(item, ExclusiveTask) for item in self._waiting)

    @property
    def num_tasks(self) -> int:
        with self._changed:
            return sum(isinstance(item, ExclusiveTask) for item in self._waiting)

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
            if self._waiting and not isinstance(self._waiting[0], ExclusiveTask):
                self._gather()
            if self._closed:
                return None
            if not self._waiting:  # all that was gathered has been removed again
                return []
            head = self._waiting[0]
            if isinstance(head, ExclusiveTask):
                self._waiting.popleft()
                return head
            return self._pop_batch(head.key)

    def set_patience(self, gather_s: float, enough_jobs: int) -> None:
        """From the next batch on: how long it waits after an arrival, and how many jobs it does not wait beyond."""
        with self._changed:
            self._gather_s = gather_s
            self._enough_jobs = enough_jobs

    def clear(self) -> list[JobT | ExclusiveTask]:
        """Takes everything out that waits, and returns it; the queue goes on."""
        with self._changed:
            left = list(self._waiting)
            self._waiting.clear()
            return left

    def close(self) -> list[JobT | ExclusiveTask]:
        """Ends ``take`` and returns what nobody will run. Later puts raise."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            return self.clear()

    def _gather(self) -> None:
        end = time.monotonic() + self._max_gather_s
        while not self._closed and self._may_grow():
            remaining_s = end - time.monotonic()
            if remaining_s <= 0:
                return
            num_before = len(self._waiting)
            quiet_s = remaining_s if self._num_expected else min(self._gather_s, remaining_s)
            self._changed.wait(quiet_s)
            if len(self._waiting) == num_before and not self._num_expected:
                return

    def _may_grow(self) -> bool:
        """Whether what is still to come could join the jobs that wait: not behind a task, nor beyond the limit."""
        if not self._waiting or any(isinstance(item, ExclusiveTask) for item in self._waiting):
            return False
        if self._enough_jobs is not None and len(self._waiting) >= self._enough_jobs:
            return False
        size = sum(self._size_of(item) for item in self._waiting if not isinstance(item, ExclusiveTask))
        return size < self._max_batch_size

    def _pop_batch(self, key: Hashable) -> list[JobT]:
        batch: list[JobT] = []
        left: deque[JobT | ExclusiveTask] = deque()
        size = 0
        is_behind_task = False
        for item in self._waiting:
            if isinstance(item, ExclusiveTask):
                is_behind_task = True
                left.append(item)
                continue
            fits = not batch or size + self._size_of(item) <= self._max_batch_size
            if item.key == key and fits and not is_behind_task:
                batch.append(item)
                size += self._size_of(item)
            else:
                left.append(item)
        self._waiting = left
        return batch

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise EngineUnavailable("the engine takes no more work; restart the server")
