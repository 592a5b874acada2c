"""The client of all rollout servers of a rank: asks proven ones, and says what became of every sample.

Every sample submitted comes out exactly once: as a rollout, as poisonous, or to be asked again. Servers' faults cost a
server its trust, never a sample an attempt. What is submitted goes to the server that has the least in hand; what ended
waits in one outbox. ``submit`` and ``next_finished`` belong to one thread (the pipeline's); what the learner tells of
versions, ``wake``, ``request_stop`` and the properties may be used from any. Calls run on one event loop, on a thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from typing import Any

from swift_stage2.channel_b.rollouts.batch import Ask
from swift_stage2.channel_b.rollouts.requests import RequestObserver, RequestSettings, SeedLedger
from swift_stage2.channel_b.rollouts.server_client import ServerClient, backlog
from swift_stage2.columns import Column
from swift_stage2.config import DecodingConfig
from swift_stage2.fence import InferFence
from swift_stage2.records import BatchOutcome, Rollout, Sample
from swift_stage2.scheduling.horizon import max_prompts_in_flight
from swift_stage2.servers.health_check import ServerKind
from swift_stage2.servers.session import CallLoop

logger = logging.getLogger(__name__)

_CLOSING_S = 5.0


@dataclass(eq=False, repr=False)
class RolloutClient:
    """A context manager; it owns one thread, with an event loop, once anything is submitted. No server is proven at
    first."""

    make_fence = InferFence

    servers: Sequence[str]
    """Base URLs."""
    _: KW_ONLY
    decoding: DecodingConfig
    request_timeout_s: float
    run_seed: InitVar[int]
    rank: int
    world_size: int
    api_key: str | None = None
    run_id: str | None = None
    """What our server stamps."""
    max_inflight_per_server: int = 1
    """Prompts of all ranks that fill a server."""
    is_lost: Callable[[str, int], bool] = lambda url, version: False
    """Says of a base URL whether what was proven there for a version is known to have ended: a stock server's answers
    do not tell who gives them."""
    observer: RequestObserver | None = None
    """Is told of every POST that brings no settings of its own, on the loop's thread."""
    watch_post: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered on the loop's thread for the time that any POST is out."""
    kinds: Mapping[str, ServerKind] = field(default_factory=dict)
    """By base URL what servers are; any other is a stock ``swift rollout``."""
    columns: tuple[Column, ...] = ()
    """Asked for with whatever brings no settings of its own."""

    def __post_init__(self, run_seed: int) -> None:
        self._num_submissions = 0
        self._changed = threading.Condition()
        self._finished: deque[BatchOutcome] = deque()
        self._failure: Exception | None = None
        self._is_woken = False
        self.stopping = threading.Event()
        self.seeds = SeedLedger(run_seed=run_seed, rank=self.rank, world_size=self.world_size)
        self._default = RequestSettings(self.decoding, self.observer, self.columns)
        self.loop, self._stopped = CallLoop(), asyncio.Event()
        self._kinds = dict(self.kinds)
        self._servers = {url: self._new_server(url, number) for number, url in enumerate(self.servers)}
        self._thread = threading.Thread(target=self._run_loop, name="rollouts", daemon=True)

    def _new_server(self, base_url: str, number: int) -> ServerClient:
        # Where the places do not divide by the ranks, which ranks get one more rotates from server to server.
        share = (self.max_inflight_per_server + (self.rank + number) % self.world_size) // self.world_size
        fence = self.make_fence()
        fence.on_change = self._tell_servers
        kind = self._kinds.get(base_url, ServerKind())
        return ServerClient(self, base_url, fence=fence, num_places=max(1, share), kind=kind)

    def learn_kind(self, base_url: str, kind: ServerKind) -> None:
        """What a server is that nobody has asked yet; called on the thread that tells of versions."""
        self._kinds[base_url] = kind
        server = self._new_server(base_url, list(self._servers).index(base_url))
        self._servers = {**self._servers, base_url: server}  # in one move: other threads go through them

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def proven(self) -> tuple[str, ...]:
        """Base URLs that are asked."""
        return tuple(server.base_url for server in self._proven_servers())

    @property
    def is_open(self) -> bool:
        """True if a request would leave at once for some server."""
        return any(server.is_open for server in tuple(self._servers.values()))

    @property
    def in_flight(self) -> int:
        """POSTs that are out."""
        return sum(server.fence.in_flight for server in tuple(self._servers.values()))

    @property
    def suspects(self) -> dict[str, str]:
        """Base URL → why that server gets no request before it has proven weights anew."""
        doubts = {url: server.state.suspicion for url, server in self._servers.items()}
        return {url: reason for url, reason in doubts.items() if reason is not None}

    def stages(self, base_url: str) -> bool:
        """Whether that server takes new weights beside the old ones."""
        return self._kinds.get(base_url, ServerKind()).is_ours

    # --- what the learner tells at every step ---------------------------------------------------
    def busy(self) -> frozenset[str]:
        """Servers that this rank may ask, or where something of it may be in flight."""
        return frozenset(url for url, server in self._servers.items() if server.is_busy)

    def take_suspicions(self) -> frozenset[str]:
        """Servers that became suspect since the last call; all ranks are told, and agree, before any is asked again."""
        return frozenset(url for url, server in self._servers.items() if server.state.take_suspicion())

    def update(self, server: str, version: int, *, closed: bool) -> None:
        """All ranks agree that ``server`` has proven ``version``, 0 if nobody may ask it. ``closed``: nothing new is
        asked, because other weights come."""
        self._servers[server].update(version, is_closed=closed)

    def expect(self, version: int) -> None:
        """The next version: a server may answer with it before the learner hears of its proof."""
        for server in self._servers.values():
            server.state.expect(version)

    def confirms(self, rollout: Rollout) -> bool | None:
        """True if its server has proven the weights of ``rollout``; False if it never will; None until then."""
        return self._servers[rollout.server].state.confirms(rollout.newest_version)

    def mark_suspect(self, server: str, reason: str) -> None:
        """``server`` is suspect: what it answered showed so later than the client could see."""
        self._servers[server].mark_suspect(reason)

    def note_agreement(self, servers: Collection[str]) -> frozenset[str]:
        """Prompts of ``servers`` were the learner's. All servers of which this was ever noted since they came back."""
        for url in servers:
            self._servers[url].state.agree()
        return frozenset(url for url, server in self._servers.items() if server.state.has_agreed)

    @property
    def free_places(self) -> int:
        """Prompts that may be submitted now: by the servers' room and by this rank's share of all that may be asked."""
        servers = [
            server for server in self._proven_servers() if server.fence.is_open and not server.is_settling
        ]
        if not servers or self.stopping.is_set():
            return 0
        most = max_prompts_in_flight(self.max_inflight_per_server, len(servers), self.world_size)
        if any(server.state.streams for server in servers):
            most += backlog(most)
        in_hand = sum(server.in_hand for server in servers)
        return max(0, min(most - in_hand, sum(max(0, server.room) for server in servers)))

    def submit(
        self,
        samples: Sequence[Sample],
        requests: Sequence[Mapping[str, Any]],
        settings: RequestSettings | None = None,
    ) -> None:
        """Asks for one rollout per sample; ``requests[i]`` is the infer request of ``samples[i]``. Does not wait.

        Without ``settings`` with the decoding and the observer that the client was made with. Every sample comes out
        of ``next_finished`` once. A request waits for a ticket as long as it takes, and apart from that at most 3 ×
        ``request_timeout_s`` once a place works on it. More than ``free_places`` wait for longer.
        """
        with self._changed:
            if self._thread.ident is None and not self.stopping.is_set():
                self._thread.start()
        settings = settings or self._default
        asks = deque(Ask(*pair, settings) for pair in zip(samples, requests, strict=True))
        while asks:
            server = None if self.stopping.is_set() else self._choose_server()
            if server is None:
                self.put(BatchOutcome(returned=tuple(ask.sample for ask in asks), settings=settings))
                return
            server.submit([asks.popleft() for _ in range(min(len(asks), server.post_size))])

    def next_finished(self, timeout_s: float) -> BatchOutcome | None:
        """The ends of some samples, in the order in which they come; None after ``timeout_s``, or when woken.

        Raises:
            Exception: that the client failed with, once nothing else is left.
        """
        ends = time.monotonic() + timeout_s
        with self._changed:
            while not (self._finished or self._failure or self._is_woken):
                if (left_s := ends - time.monotonic()) <= 0:
                    break
                self._changed.wait(left_s)
            self._is_woken = False
            if self._finished:
                return self._finished.popleft()
            if self._failure is not None:
                raise self._failure
            return None

    def wake(self) -> None:
        """Makes ``next_finished`` return at once, this time or the next; from any thread."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def request_stop(self) -> None:
        """Ends everything that is asked soon, now and for ever; POSTs in flight are cut. Does not wait."""
        self.stopping.set()
        for server in tuple(self._servers.values()):
            server.fence.shutdown()
        self._tell_servers()

    def close(self) -> None:
        """Stops and frees thread and connections, within seconds."""
        self.request_stop()
        with self._changed:  # from now on no thread starts
            has_started = self._thread.ident is not None
        if not has_started:
            self.loop.close()
            return
        self._thread.join(_CLOSING_S)
        if self._thread.is_alive():
            logger.warning("calls to rollout servers did not end in time; they are left behind")

    def _run_loop(self) -> None:
        try:
            self.loop.run_until_complete(self._serve())
        except Exception as error:  # top of the thread: the client's next call raises it
            self.fail(error)
        finally:
            self.stopping.set()
            self.loop.close()
            for server in self._servers.values():
                server.fill()  # what was submitted at the last moment comes back

    async def _serve(self) -> None:
        await self._stopped.wait()  # deadline: the client's life
        closing = (server.close() for server in self._servers.values())
        await asyncio.gather(*closing, return_exceptions=True)

    def _tell_servers(self) -> None:
        """A fence has changed, or the client stops; from any thread."""
        with suppress(RuntimeError):  # the loop is closed already
            self.loop.call_soon_threadsafe(self._look_again)

    def _look_again(self) -> None:
        for server in self._servers.values():
            server.cut_calls()
            if self.stopping.is_set():
                server.fill()
        if self.stopping.is_set():
            self._stopped.set()

    def _proven_servers(self) -> list[ServerClient]:
        return [server for server in tuple(self._servers.values()) if server.state.is_proven]

    def _choose_server(self) -> ServerClient | None:
        """The one with the least in hand for its places: what is slow or far frees few."""
        servers = self._proven_servers()
        servers = [server for server in servers if server.fence.is_open] or servers
        servers = [server for server in servers if not server.is_settling] or servers
        servers = [server for server in servers if server.room > 0] or servers
        if not servers:
            return None
        # The few requests of many ranks shall not all meet on the first server.
        turn = (self.rank + self._num_submissions) % len(servers)
        self._num_submissions += 1
        return min((*servers[turn:], *servers[:turn]), key=lambda server: server.in_hand / server.num_places)

    def put(self, outcome: BatchOutcome) -> None:
        """Some samples have ended; called by their server."""
        if outcome.settings is self._default:
            outcome = replace(outcome, settings=None)
        with self._changed:
            self._finished.append(outcome)
            self._changed.notify_all()

    def fail(self, failure: Exception) -> None:
        """The client's next call raises it."""
        with self._changed:
            self._failure = failure
            self._changed.notify_all()
