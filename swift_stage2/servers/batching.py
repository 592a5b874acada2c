"""Turns requests that arrive one by one, from many callers, into batches for one engine thread.

Jobs with equal keys leave together, oldest first; a task (anything that needs the engine to itself) leaves
alone, in its turn: no job overtakes it. The only wait is ``take``'s, and it ends when the queue is closed.
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
    ``max_gather_s`` bounds both waits."""

    def __init__(self, *, max_batch_size: int, gather_s: float = 0.004, max_gather_s: float = 1.0) -> None:
        self._max_batch_size = max_batch_size
        self._gather_s = gather_s
        self._max_gather_s = max_gather_s
        self._changed = threading.Condition()
        self._waiting: deque[JobT | ExclusiveTask] = deque()
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

    def close(self) -> list[JobT | ExclusiveTask]:
        """Ends ``take`` and returns what nobody will run. Later puts raise."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            left = list(self._waiting)
            self._waiting.clear()
            return left

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
        is_behind_task = any(isinstance(item, ExclusiveTask) for item in self._waiting)
        return not is_behind_task and 0 < len(self._waiting) < self._max_batch_size

    def _pop_batch(self, key: Hashable) -> list[JobT]:
        batch: list[JobT] = []
        left: deque[JobT | ExclusiveTask] = deque()
        is_behind_task = False
        for item in self._waiting:
            if isinstance(item, ExclusiveTask):
                is_behind_task = True
                left.append(item)
            elif item.key == key and len(batch) < self._max_batch_size and not is_behind_task:
                batch.append(item)
            else:
                left.append(item)
        self._waiting = left
        return batch

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise EngineUnavailable("the engine takes no more work; restart the server")
