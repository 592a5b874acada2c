"""A rank's fence in front of one server: a ticket per POST, and a drain before weights move.

While it is closed nobody enters, and once it is drained nothing runs inside, so weights can change without a rollout
that mixes two versions. A ticket's version is read under the lock that admits it. Nothing in it waits: the rollout
client takes tickets and is told when to ask again; the learner closes and reopens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from swift_stage2.errors import FenceShutDown


@dataclass(frozen=True, slots=True)
class InferTicket:
    """Leave to have one ``/infer/`` call in flight; ``version`` names the weights that answer, unless a stamp does."""

    version: int


class InferFence:
    """Admission and drain under one lock."""

    def __init__(self) -> None:
        """Closed: the first proof that all ranks have agreed on opens it."""
        self._lock = threading.Lock()
        self._version = 0
        self._open = False
        self._shut_down = False
        self._num_tickets = 0
        self.on_change: Callable[[], None] = lambda: None
        """Called after the fence has reopened or was shut down, on the thread that did it."""

    @property
    def version(self) -> int:
        return self._version

    @property
    def is_open(self) -> bool:
        """Whether a ticket asked for now would be given."""
        with self._lock:
            return self._open and not self._shut_down

    @property
    def in_flight(self) -> int:
        with self._lock:
            return self._num_tickets

    def enter(self) -> InferTicket | None:
        """A ticket for one call, to be given back by ``leave``; None while the fence is closed.

        Raises:
            FenceShutDown: no ticket will be given any more.
        """
        with self._lock:
            if self._shut_down:
                raise FenceShutDown("no ticket is given after the fence was shut down; end the pipeline")
            if not self._open:
                return None
            self._num_tickets += 1
            return InferTicket(self._version)

    def leave(self) -> None:
        """The call of a ticket is over."""
        with self._lock:
            self._num_tickets -= 1

    def close(self) -> bool:
        """Admits nobody from now on and says whether the fence is drained. May be called again."""
        with self._lock:
            self._open = False
            return self._num_tickets == 0

    def reopen(self, version: int) -> None:
        """Sets the version of all tickets to come.

        Raises:
            ValueError: ``version`` is lower than before; versions only grow.
            FenceShutDown: after `shutdown`.
        """
        with self._lock:
            if self._shut_down:
                raise FenceShutDown(f"a fence that was shut down stays closed, got reopen(version={version})")
            if version < self._version:
                raise ValueError(f"versions only grow, got version={version} after {self._version}")
            self._version = version
            self._open = True
        self.on_change()

    def shutdown(self) -> None:
        """Closes for good; idempotent. Held tickets stay valid."""
        with self._lock:
            self._open = False
            self._shut_down = True
        self.on_change()
