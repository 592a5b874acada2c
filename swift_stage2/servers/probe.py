"""Asks, in the background and only on rank 0, whether suspect servers answer again and trusted ones were lost.

An answer proves nothing; it only makes a catch-up or a sync round due, once all ranks have agreed on it in
the step's vector. A loss travels there too. A server that was absent at the start has to pass the checks of a start
first. Never asks while a round runs. Owned by the learner.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from swift_stage2 import wire
from swift_stage2.errors import ServerFault, UserError
from swift_stage2.runtime.background import BackgroundFailures
from swift_stage2.servers.session import Deadline, ServerSession
from swift_stage2.servers.stock import require_workers

_DEADLINE_S = 2.0
_STOP_TIMEOUT_S = 5.0
_LOCK_TIMEOUT_S = 2 * _DEADLINE_S


@dataclass(frozen=True, slots=True)
class JoiningServer:
    """A server that was absent at the start, as all ranks learn of it once it answers."""

    base_url: str
    stages: bool
    """Whether it takes new weights beside the old ones."""
    chat_model: str | None
    """The name that a plain ``vllm serve`` answers to."""


@dataclass(eq=False, kw_only=True)
class SuspectProbe:
    """Polls the watched servers every ``interval_s`` seconds. On other ranks than 0 it does nothing.

    ``find_lost`` names servers, by index, that what is kept of the last round has lost: a stock server that was
    restarted between two calls has no other sign. It must return within a few seconds. ``on_lost`` gets each of them,
    once between two rounds, on the probe's thread. ``ours`` are servers that must not answer as stock ones do.
    ``absent`` are servers that have not answered at the start: once one does, ``examine`` says who it is, or None if
    that cannot be told yet, and raises UserError for one that the run cannot have. What goes wrong on the thread is
    noted in ``failures``, and the next look is taken all the same.
    """

    rank: int
    api_key: str | None = field(repr=False)
    interval_s: float = 1.0
    find_lost: Callable[[], Sequence[int]] = tuple
    on_lost: Callable[[int], None] = lambda server: None
    ours: Container[str] = ()
    absent: Collection[str] = ()
    examine: Callable[[str], JoiningServer | None] = lambda base_url: None
    failures: BackgroundFailures = field(default_factory=BackgroundFailures)

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._watched: tuple[str, ...] = ()
        self._answering: frozenset[str] = frozenset()
        self._lost: frozenset[int] = frozenset()
        self._unknown = set(self.absent)
        self._joining: list[JoiningServer] = []
        self._asking = threading.Lock()
        self._is_paused = False
        self._num_cut = 0  # looks that a round did not wait for
        self._session: ServerSession | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="suspect-probe", daemon=True)

    def start(self) -> None:
        """Starts the thread on rank 0."""
        if self.rank == 0:
            self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def watch(self, base_urls: Sequence[str]) -> None:
        """Replaces the servers to ask; what was heard of servers that are no longer watched is forgotten."""
        with self._changed:
            self._watched = tuple(base_urls)
            self._answering = self._answering & frozenset(base_urls)
            self._changed.notify_all()

    def answering(self) -> frozenset[str]:
        """Watched servers that have answered since they were watched."""
        with self._changed:
            return self._answering

    def lost(self) -> frozenset[int]:
        """Servers, by index, found lost since the last round."""
        with self._changed:
            return self._lost

    @property
    def has_joining(self) -> bool:
        """True while ``take_joining`` would return a server."""
        return bool(self._joining)

    def take_joining(self) -> Sequence[JoiningServer]:
        """Servers that were absent at the start and may be brought weights now; each is returned once."""
        with self._changed:
            joining, self._joining = self._joining, []
            return joining

    def pause(self) -> None:
        """Keeps the probe from asking until ``go_on``.

        A question that does not end within a few seconds is cut, and an answer to it is not heard.
        """
        with self._changed:
            self._is_paused = True
        if self._asking.acquire(timeout=_LOCK_TIMEOUT_S):
            self._asking.release()
            return
        with self._changed:
            self._num_cut += 1
            if self._session is not None:
                self._session.end()

    def go_on(self) -> None:
        """Asks again; forgets what was heard before ``pause``."""
        with self._changed:
            self._answering = frozenset()
            self._lost = frozenset()
            self._is_paused = False
            self._changed.notify_all()

    def stop(self) -> None:
        """Ends the thread within a few seconds. May be called again."""
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
                waiting = [url for url in self._watched if url not in self._answering]
            looks: list[Callable[[], None]] = [partial(self._ask, url) for url in waiting]
            for look in (self._look_for_lost, *looks):  # whatever is believed wrongly is worse
                try:
                    look()
                except Exception as error:  # top of the thread: no other suspect is left out for it
                    self.failures.note(self._thread.name, error)

    @contextmanager
    def _turn(self) -> Iterator[int | None]:
        """None while a round runs; else what ``_num_cut`` must still be when something is heard."""
        if not self._asking.acquire(blocking=False):
            yield None
            return
        try:
            with self._changed:
                turn = None if self._is_paused else self._num_cut
            yield turn
        finally:
            self._asking.release()

    def _ask(self, url: str) -> None:
        with self._turn() as turn:
            if turn is None or not self._answers(url, turn) or not self._is_known(url):
                return
            with self._changed:  # before a round may begin, because the round forgets it
                if url in self._watched and turn == self._num_cut:
                    self._answering = self._answering | {url}

    def _is_known(self, url: str) -> bool:
        """False for a server that was absent at the start and has not passed the checks of a start."""
        if url not in self._unknown:
            return True
        try:
            server = self.examine(url)
        except UserError as refusal:
            self.failures.tell(f"{url} may not join the run: {refusal}")
            return False
        if server is None:
            return False
        with self._changed:
            self._unknown.remove(url)
            self._joining.append(server)
        return True

    def _look_for_lost(self) -> None:
        with self._turn() as turn:
            if turn is None:
                return
            found = frozenset(self.find_lost())
            with self._changed:
                news = found - self._lost if turn == self._num_cut else frozenset()
                self._lost = self._lost | news
            for server in sorted(news):
                if turn != self._num_cut:
                    return  # a round has begun meanwhile, which may prove it
                try:
                    self.on_lost(server)
                except RuntimeError as error:  # the others are told of all the same
                    self.failures.note(self._thread.name, error)

    def _answers(self, url: str, turn: int) -> bool:
        deadline = Deadline(_DEADLINE_S)
        try:
            with ServerSession(url, self.api_key, must_be_ours=url in self.ours) as session:
                with self._changed:
                    if turn != self._num_cut:
                        return False
                    self._session = session
                info = session.info(deadline)
                if info.is_swift_rollout:
                    require_workers(session, deadline)
                # A copy that hangs outlives its round; another round would bring its weights for nothing.
                return info.state != wire.INSTALLING_STATE
        except ServerFault as fault:
            if fault.refuses_key:  # no waiting mends it
                self.failures.tell(str(fault))
            return False
