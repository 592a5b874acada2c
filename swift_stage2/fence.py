"""This process's door in front of ``/infer/``: a ticket per POST, and a drain before weights move.

While it is closed nobody enters, and once it is drained nothing runs inside, so weights can change
without a rollout that mixes two versions. A ticket's version is read under the lock that admits it.
Pipelines hold tickets; the learner closes (without waiting) and reopens; the sync round's canary
enters a closed and drained fence through `round_ticket`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from swift_stage2.errors import FenceShutDown, TicketTimeout


@dataclass(frozen=True, slots=True)
class InferTicket:
    """Leave to have one ``/infer/`` call in flight."""

    version: int
    """The weights that answer this call."""


class InferFence:
    """Admission and drain, on one Condition whose predicates are checked again after every wake-up."""

    def __init__(self, version: int = 0, *, start_closed: bool = False) -> None:
        """Make a fence in front of servers that hold weights ``version``.

        With ``start_closed`` the first `reopen` comes from the first sync round.
        """
        self._condition = threading.Condition()
        self._version = version
        self._open = not start_closed
        self._shut_down = False
        self._num_tickets = 0
        self._num_round_tickets = 0

    @property
    def version(self) -> int:
        """The version that the next ticket will carry."""
        return self._version

    @property
    def is_open(self) -> bool:
        """Whether a ticket asked for now would be given."""
        with self._condition:
            return self._open and not self._shut_down

    @property
    def in_flight(self) -> int:
        """How many tickets are held, round tickets included."""
        with self._condition:
            return self._num_tickets + self._num_round_tickets

    def ticket(self, timeout_s: float) -> TicketHolder:
        """Return a context manager that waits for the fence to be open and then holds one ticket.

        Raises:
            ValueError: ``timeout_s`` is None, negative or not finite.
            TicketTimeout: on entering, when the fence stayed closed for ``timeout_s``.
            FenceShutDown: on entering, when the fence is or gets shut down.
        """
        _require_deadline(timeout_s)
        return TicketHolder(lambda: self._enter(timeout_s), self._leave)

    def round_ticket(self, timeout_s: float = 0.0) -> TicketHolder:
        """Like `ticket`, for calls of the sync round itself: admitted only while closed and drained."""
        _require_deadline(timeout_s)
        return TicketHolder(lambda: self._enter_round(timeout_s), self._leave_round)

    def close(self, timeout_s: float) -> bool:
        """Admit nobody from now on, wait for what is in flight, and say whether the fence is drained.

        False after ``timeout_s`` leaves the fence closed; 0 does not wait; it may be called again. A
        `reopen` or `shutdown` by another thread ends the wait.

        Raises:
            ValueError: ``timeout_s`` is None, negative or not finite.
        """
        _require_deadline(timeout_s)
        with self._condition:
            self._open = False
            self._wait_until(lambda: self._is_drained() or self._open or self._shut_down, timeout_s)
            return self._is_drained() and not self._open

    def close_now(self) -> bool:
        """Close without waiting and say whether the fence is drained."""
        return self.close(timeout_s=0)

    def reopen(self, version: int) -> None:
        """Set the version of all tickets to come, and admit every waiter.

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
        """Close for good and wake every waiter at once; idempotent. Held tickets stay valid."""
        with self._condition:
            self._open = False
            self._shut_down = True
            self._condition.notify_all()

    def _enter(self, timeout_s: float) -> InferTicket:
        with self._condition:
            self._admit(lambda: self._open, timeout_s, "the fence stayed closed")
            self._num_tickets += 1
            return InferTicket(self._version)

    def _enter_round(self, timeout_s: float) -> InferTicket:
        with self._condition:
            self._admit(
                lambda: not self._open and not self._num_tickets,
                timeout_s,
                "the fence was not closed and drained",
            )
            self._num_round_tickets += 1
            return InferTicket(self._version)

    def _admit(self, admits: Callable[[], bool], timeout_s: float, otherwise: str) -> None:
        self._wait_until(lambda: admits() or self._shut_down, timeout_s)
        if self._shut_down:
            raise FenceShutDown("no ticket is given after the fence was shut down; end the pipeline")
        if not admits():
            raise TicketTimeout(
                f"{otherwise} for the whole wait, got timeout_s={timeout_s}; ask again, or allow a sync round more time"
            )

    def _leave(self) -> None:
        with self._condition:
            self._num_tickets -= 1
            self._condition.notify_all()

    def _leave_round(self) -> None:
        with self._condition:
            self._num_round_tickets -= 1
            self._condition.notify_all()

    def _is_drained(self) -> bool:
        return self._num_tickets == 0 and self._num_round_tickets == 0

    def _wait_until(self, holds: Callable[[], bool], timeout_s: float) -> None:
        """Wait, under the lock, until ``holds()`` or the deadline; the caller checks which."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return
            self._condition.wait(min(remaining_s, threading.TIMEOUT_MAX))


class TicketHolder:
    """Holds one ticket from ``__enter__`` to ``__exit__``; used once."""

    __slots__ = ("_enter", "_leave", "_used")

    def __init__(self, enter: Callable[[], InferTicket], leave: Callable[[], None]) -> None:
        self._enter = enter
        self._leave = leave
        self._used = False

    def __enter__(self) -> InferTicket:
        if self._used:
            raise RuntimeError("one ticket covers one call; ask the fence for another")
        ticket = self._enter()
        self._used = True
        return ticket

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()


def _require_deadline(timeout_s: float) -> None:
    if timeout_s is None or not math.isfinite(timeout_s) or timeout_s < 0:
        raise ValueError(
            f"every wait on the fence has a finite deadline, got timeout_s={timeout_s}; pass seconds >= 0"
        )
