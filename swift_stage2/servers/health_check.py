"""Asks, in the background and only on rank 0, whether servers that nobody asks for rollouts answer.

An answer proves nothing; it only lets weights be pushed there. A server that was absent at the start has to pass the
checks of a start first. Owned by ``weights.updates``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, field

from swift_stage2 import wire
from swift_stage2.errors import ServerFault, UserError
from swift_stage2.runtime.background import BackgroundFailures
from swift_stage2.servers.session import Deadline, ServerSession
from swift_stage2.servers.stock import require_workers

_DEADLINE_S = 2.0
_STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class ServerKind:
    """What a server is, as far as it matters to who asks it."""

    is_ours: bool = False
    """Only then it takes new weights beside the old ones."""
    chat_model: str | None = None
    """The name that a plain ``vllm serve`` answers to."""

    @property
    def stamps(self) -> bool:
        """Whether its answers say which weights made them."""
        return self.is_ours or self.chat_model is not None


@dataclass(frozen=True, slots=True)
class JoiningServer:
    """A server that was absent at the start, as all ranks learn of it once it answers."""

    server: int
    kind: ServerKind


@dataclass(eq=False, kw_only=True)
class HealthCheck:
    """Polls the watched servers, given by number, every ``interval_s`` seconds.

    ``ours`` are base URLs of servers that must not answer as stock ones do. ``absent`` are numbers of servers that have
    not answered at the start: once one does, ``examine`` says who it is, or None if that cannot be told yet, and raises
    UserError for one that the run cannot have. What goes wrong on the thread is noted in ``failures``, and the next
    look is taken all the same.
    """

    base_urls: Sequence[str]
    api_key: str | None = field(repr=False)
    interval_s: float = 1.0
    ours: Container[str] = ()
    absent: Collection[int] = ()
    examine: Callable[[str], ServerKind | None] = lambda base_url: None
    failures: BackgroundFailures = field(default_factory=BackgroundFailures)

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._watched: frozenset[int] = frozenset()
        self._answering: set[int] = set()
        self._unknown = set(self.absent)
        self._joining: list[JoiningServer] = []
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="health-check", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def watch(self, servers: Collection[int]) -> None:
        """Replaces the servers to ask; what was heard of servers that are no longer watched is forgotten."""
        watched = frozenset(servers)
        if watched == self._watched:
            return
        with self._changed:
            self._watched = watched
            self._answering &= watched
            self._changed.notify_all()

    def take_answering(self) -> Collection[int]:
        """Watched servers that have answered since they were watched; each is returned once."""
        with self._changed:
            answering, self._answering = self._answering, set()
        return answering

    def take_joining(self) -> Sequence[JoiningServer]:
        """Servers that were absent at the start and answer now; each is returned once, and before it is answering."""
        with self._changed:
            joining, self._joining = self._joining, []
        return joining

    def stop(self) -> None:
        """Ends the thread within a few seconds. May be called again, and without ``start``."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(_STOP_TIMEOUT_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(self.interval_s)
                if self._stopped:
                    return
                waiting = sorted(self._watched - self._answering)
            for server in waiting:
                try:
                    self._ask(server)
                except Exception as error:  # top of the thread: no other server is left out for it
                    self.failures.note(self._thread.name, error)

    def _ask(self, server: int) -> None:
        url = self.base_urls[server]
        if not self._answers(url):
            return
        kind = None
        if server in self._unknown:
            try:
                kind = self.examine(url)
            except UserError as refusal:
                self.failures.tell(f"{url} may not join the run: {refusal}")
            if kind is None:
                return
        with self._changed:
            if kind is not None:
                self._unknown.remove(server)
                self._joining.append(JoiningServer(server, kind))
            if server in self._watched:
                self._answering.add(server)

    def _answers(self, url: str) -> bool:
        deadline = Deadline(_DEADLINE_S)
        try:
            with ServerSession(url, self.api_key, must_be_ours=url in self.ours) as session:
                info = session.info(deadline)
                if info.is_swift_rollout:
                    require_workers(session, deadline)
                # A copy that hangs outlives its push; another push would bring its weights for nothing.
                return info.state != wire.INSTALLING_STATE
        except ServerFault as fault:
            if fault.refuses_key:  # no waiting mends it
                self.failures.tell(str(fault))
            return False
