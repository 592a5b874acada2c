"""Whether one server may be asked for rollouts: proven by a round, suspect, or busy with an abandoned POST.

Invariant: a suspect server stays unproven until ``prove``. Written by the server's lane and by the
learner after a round, read by both, so every access holds one lock.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from swift_stage2.servers.protocol import Completion


class ServerTrust:
    """What this rank knows of one server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._proven = False
        self._incarnation: str | None = None
        self._suspicion: str | None = None
        self._is_news = False
        self._settle_by: float | None = None
        self._has_agreed = False

    @property
    def has_agreed(self) -> bool:
        """True once its prompt was the learner's for any sample; forgotten when it was not proven meanwhile."""
        with self._lock:
            return self._has_agreed

    def agree(self) -> None:
        """Its prompt for a sample is the learner's."""
        with self._lock:
            self._has_agreed = True

    @property
    def is_proven(self) -> bool:
        """Whether a round proved its weights and nothing has spoken against it since."""
        with self._lock:
            return self._proven

    @property
    def suspicion(self) -> str | None:
        """Why the server is suspect; None if it is not."""
        with self._lock:
            return self._suspicion

    @property
    def settle_by(self) -> float | None:
        """Moment by which an abandoned POST has to be settled; None if the server is not busy with one."""
        with self._lock:
            return self._settle_by

    def prove(self, incarnation: str | None) -> None:
        """A round proved the server. Without an ``incarnation`` the first reply's stamp names it."""
        with self._lock:
            self._has_agreed &= self._proven  # one that returns may be another process
            self._proven = True
            self._incarnation = incarnation
            self._suspicion = None
            self._is_news = False
            self._settle_by = None  # the round's ordered calls came after it

    def withdraw(self) -> None:
        """A round did not prove the server; nothing is inferred from it."""
        with self._lock:
            self._proven = False

    def suspect(self, reason: str) -> None:
        """Nothing is inferred from the server before a later ``prove``; it delays no round."""
        with self._lock:
            self._proven = False
            self._suspicion = reason
            self._is_news = True
            self._settle_by = None

    def abandon(self, settle_by: float) -> None:
        """A deadline ended a POST that the server may still be computing."""
        with self._lock:
            self._settle_by = settle_by

    def settle(self) -> None:
        """The server answered a later ordered call: the abandoned POST is over."""
        with self._lock:
            self._settle_by = None

    def take_news(self) -> str | None:
        """The suspicion, the first time it is asked for after it arose."""
        with self._lock:
            reason = self._suspicion if self._is_news else None
            self._is_news = False
            return reason

    def objection(self, completions: Sequence[Completion], *, version: int, run_id: str | None) -> str | None:
        """Why these completions cannot be of weights ``version`` of this run; None if nothing says so.

        Only our server stamps its completions, and it stamps all of them in full: what a round proved as ours never
        answers without a stamp. A stock server's are taken as they are.
        """
        with self._lock:
            for completion in completions:
                if self._incarnation is None:
                    self._incarnation = completion.incarnation
                if completion.incarnation != self._incarnation:
                    return (
                        "the server must be the process that the last round proved, got "
                        f"incarnation={completion.incarnation!r} instead of {self._incarnation!r}"
                    )
                must_stamp = self._incarnation is not None
                if completion.weight_version != version and (
                    must_stamp or completion.weight_version is not None
                ):
                    return (
                        "completions must be of the version that the ticket names, got "
                        f"weight_version={completion.weight_version} version={version}"
                    )
                if run_id not in (None, completion.run_id) and (must_stamp or completion.run_id is not None):
                    return f"completions must be of this run's weights, got run_id={completion.run_id!r}"
        return None
