"""This process's door in front of ``/infer/``: a ticket per POST, and a drain before weights move.

While it is closed nobody enters, and once it is drained nothing runs inside, so weights can change without a rollout
that mixes two versions. A ticket's version is read under the lock that admits it. Pipelines hold tickets; the learner
closes, which never waits, and reopens.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from swift_stage2.errors import FenceShutDown, TicketTimeout


@dataclass(frozen=True, slots=True)
class InferTicket:
    """Leave to have one ``/infer/`` call in flight; ``version`` names the weights that answer, unless a stamp does."""

    version: int


class InferFence:
    """Admission and drain, on one Condition whose predicates are checked again after every wake-up."""

    def __init__(self, version: int = 0, *, start_closed: bool = False) -> None:
        """In front of servers that hold ``version``; with ``start_closed`` the first sync round opens it."""
        self._condition = threading.Condition()
        self._version = version
        self._open = not start_closed
        self._shut_down = False
        self._num_tickets = 0

    @property
    def version(self) -> int:
        return self._version

    @property
    def is_open(self) -> bool:
        """Whether a ticket asked for now would be given."""
        with self._condition:
            return self._open and not self._shut_down

    @property
    def in_flight(self) -> int:
        with self._condition:
            return self._num_tickets

    @contextmanager
    def ticket(self, timeout_s: float) -> Iterator[InferTicket]:
        """Waits for the fence to be open and then holds one ticket, for one call.

        Raises:
            ValueError: ``timeout_s`` is None, negative or not finite.
            TicketTimeout: the fence stayed closed for ``timeout_s``.
            FenceShutDown: the fence is or gets shut down.
        """
        if timeout_s is None or not math.isfinite(timeout_s) or timeout_s < 0:
            raise ValueError(
                f"every wait on the fence has a finite deadline, got timeout_s={timeout_s}; pass seconds >= 0"
            )
        with self._condition:
            self._wait_for_admission(timeout_s)
            self._num_tickets += 1
            ticket = InferTicket(self._version)
        try:
            yield ticket
        finally:
            with self._condition:
                self._num_tickets -= 1

    def close(self) -> bool:
        """Admits nobody from now on and says whether the fence is drained. Never waits; may be called again."""
        with self._condition:
            self._open = False
            return self._num_tickets == 0

    def reopen(self, version: int) -> None:
        """Sets the version of all tickets to come, and admits every waiter.

        Raises:
            ValueError: ``version`` is lower than before; versions only grow.
            FenceShutDown: after `shutdown`.
        """
        with self._condition:
            if self._shut_down:
                raise FenceShutDown(f"a fence that was shut down stays closed, got reopen(version={version})")
            if version < self._version:
                raise ValueError(f"versions only grow, got version={version} after {self._version}")
            self._version = version
            self._open = True
            self._condition.notify_all()

    def shutdown(self) -> None:
        """Closes for good and wakes every waiter at once; idempotent. Held tickets stay valid."""
        with self._condition:
            self._open = False
            self._shut_down = True
            self._condition.notify_all()

    def _wait_for_admission(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._open and not self._shut_down and (left_s := deadline - time.monotonic()) > 0:
            self._condition.wait(min(left_s, threading.TIMEOUT_MAX))
        if self._shut_down:
            raise FenceShutDown("no ticket is given after the fence was shut down; end the pipeline")
        if not self._open:
            raise TicketTimeout(
                f"the fence stayed closed for the whole wait, got timeout_s={timeout_s}; ask again, or allow a sync "
                "round more time"
            )
