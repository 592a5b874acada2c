"""The push: brings one server to one version. Asks who it is, connects, carries, installs, proves.

Each push is a daemon thread, because a transfer that hangs cannot be joined, and reads the snapshot at its own pace. It
ends in a report or, when the learner's weights cannot be pushed, without one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass

from swift_stage2 import wire as protocol
from swift_stage2.errors import ServerFault, WeightSyncError
from swift_stage2.records import ServerReport
from swift_stage2.servers.session import Deadline, ServerSession, reset_cache
from swift_stage2.servers.stock import ask_sums_incarnation
from swift_stage2.telemetry.timing import EnterSpan, untraced
from swift_stage2.weights.proof import UpdateSpec, prove_server
from swift_stage2.weights.snapshot import SnapshotFile
from swift_stage2.weights.transport import ServerEndpoint, WeightTransport

logger = logging.getLogger(__name__)

_SHARE_FOR_TURN = 0.5  # of what is left of the calls' time

MakeTransport = Callable[[protocol.ServerInfo], WeightTransport]


class InstallTurns:
    """Lets servers that are asked install one after another, so that the others answer meanwhile.

    That is worth no server: who holds the turn may hang, or wait for long answers.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def take(self, timeout_s: float) -> Iterator[None]:
        """Waits for a turn and holds it; goes without one after ``timeout_s``."""
        has_turn = self._lock.acquire(timeout=timeout_s)
        try:
            yield
        finally:
            if has_turn:
                self._lock.release()


@dataclass(eq=False, repr=False)
class ServerPush(threading.Thread):
    """Brings one server to one version. At its end ``report`` or ``learner_fault`` is there.

    ``transports`` keeps, by server, what outlives a push; a ``distrusted`` one is replaced. ``ours`` are base URLs of
    servers that must not answer as stock ones do. Once ``given_up`` is set nothing more is sent. ``span`` is entered
    with the name of every phase. ``on_end`` is called last, on this thread.
    """

    server: int
    endpoint: ServerEndpoint
    spec: UpdateSpec
    snapshot: SnapshotFile
    transports: MutableMapping[int, WeightTransport]
    make_transport: MakeTransport
    _: KW_ONLY
    turns: InstallTurns
    api_key: str | None
    given_up: threading.Event
    distrusted: bool
    ours: set[str]
    span: EnterSpan = untraced
    on_end: Callable[[ServerPush], None] = lambda push: None

    def __post_init__(self) -> None:
        super().__init__(name=f"push to {self.endpoint.base_url}", daemon=True)
        self._transport = self.transports.get(self.server)
        self._seconds: dict[str, float] = {}
        self._num_bytes = 0
        self._proof = self._carried_by = ""
        self.report: ServerReport | None = None
        self.learner_fault: str | None = None

    def run(self) -> None:
        try:
            base_url = self.endpoint.base_url
            with ServerSession(base_url, self.api_key, must_be_ours=base_url in self.ours) as session:
                self._update(session)
            self.report = self._make_report(None)
        except ServerFault as error:
            self._drop_transport()
            self.report = self._make_report(str(error))
        except Exception as error:  # top of a thread: anything else is the learner's own fault
            self._drop_transport()
            self.learner_fault = describe_fault("the push of the learner's weights", error)
        finally:
            self.on_end(self)

    def _update(self, session: ServerSession) -> None:
        spec = self.spec
        if self.distrusted:
            self._drop_transport()
        with self._phase("begin"):
            info = session.info(spec.deadline)
            sums_of = None
            if not info.stock:
                self.ours.add(session.base_url)
            elif info.is_swift_rollout:
                # Ordered: it answers once nothing runs any more that a lost caller has asked.
                self._reset_cache(session, protocol.RESET_PREFIX_CACHE)
                sums_of = ask_sums_incarnation(session, spec.deadline)
                if self.server not in self.transports:
                    shown = "can show every tensor's checksum" if sums_of else "shows no checksums"
                    logger.info("%s is a stock server and %s", session.base_url, shown)
        with self._phase("pack"):
            sent = self.snapshot.describe(spec.identity)
        with self._phase("connect"):
            if self.server not in self.transports:
                self.transports[self.server] = self.make_transport(info)
            transport = self._transport = self.transports[self.server]
            self._carried_by = transport.open(session, self.endpoint, self.snapshot, spec)
        with self._phase("push"):
            transport.carry(session, self.snapshot, spec.deadline, self._require_wanted)
        self._num_bytes = self.snapshot.num_bytes
        with ExitStack() as turn:
            if spec.turn_s:
                with self._phase("turn"):
                    # The install needs time as well, also behind a long transfer.
                    turn_s = min(spec.turn_s, spec.deadline.remaining_s() * _SHARE_FOR_TURN)
                    turn.enter_context(self.turns.take(turn_s))
            with self._phase("acknowledge"):
                transport.install(session, spec, sent)
                if info.is_swift_rollout:
                    self._reset_caches(session)
                if not info.stock:
                    self._drop_transport()
            with self._phase("prove"):
                self._proof = prove_server(session, spec, info, sent, sums_of=sums_of)

    def _reset_caches(self, session: ServerSession) -> None:
        # The prefix cache last: vLLM's engine returns nothing from the other two, so that a stock server
        # reports False for them also when they worked; they are ordered before the one that can tell.
        for path in (protocol.RESET_ENCODER_CACHE, protocol.RESET_MM_CACHE):
            self._reset_cache(session, path, must_succeed=False)
        self._reset_cache(session, protocol.RESET_PREFIX_CACHE)

    def _reset_cache(self, session: ServerSession, path: str, *, must_succeed: bool = True) -> None:
        if not reset_cache(session, path, self.spec.deadline) and must_succeed:
            raise ServerFault(
                f"{session.base_url}{path} reports status: False: an earlier command failed; read its log"
            )

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Adds the seconds spent inside to one phase. Raises ServerFault: the push was given up."""
        self._require_wanted()
        started = time.perf_counter()
        try:
            with self.span(name):
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def _require_wanted(self) -> None:
        if self.given_up.is_set():
            raise ServerFault(
                f"{self.endpoint.base_url}: the push was given up before the weights were proven"
            )

    def _drop_transport(self) -> None:
        """Not that of a later push, which is in its place if this one was given up."""
        transport = self._transport
        if transport is not None and self.transports.get(self.server) is transport:
            del self.transports[self.server]
            close_quietly(transport, self.spec.deadline)

    def _make_report(self, error: str | None) -> ServerReport:
        return ServerReport(
            proven=error is None,
            error=error,
            proof=self._proof,
            num_bytes=self._num_bytes,
            seconds=self._seconds,
            transport=self._carried_by,
        )


def close_quietly(transport: WeightTransport, deadline: Deadline) -> None:
    """Closes a transport whose peer may be gone."""
    try:
        transport.close(deadline)
    except (ServerFault, RuntimeError):
        return  # there is nothing left to close


def describe_fault(what: str, error: Exception) -> str:
    """The learner's fault in one line; ours says it by itself."""
    text = str(error) or type(error).__name__
    return text if isinstance(error, WeightSyncError) else f"{what} failed: {type(error).__name__}: {text}"
