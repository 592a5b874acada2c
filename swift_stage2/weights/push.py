"""One server's part of one sync round: offer or connect, push, install or acknowledge, prove.

Each push is a daemon thread, because a transfer that hangs cannot be joined, and reads the round's snapshot at its own
pace. It ends in a report or, when the learner's weights cannot be pushed, without one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass

from swift_stage2 import wire as protocol
from swift_stage2.errors import ServerFault, WeightSyncError
from swift_stage2.records import ServerReport
from swift_stage2.servers.session import Deadline, ServerSession, reset_cache
from swift_stage2.servers.stock import ask_sums_incarnation
from swift_stage2.telemetry.timing import EnterSpan, untraced
from swift_stage2.weights.proof import InstallTurns, RoundOrder, prove_server
from swift_stage2.weights.snapshot import SnapshotFile
from swift_stage2.weights.transport import ServerEndpoint, WeightTransport

logger = logging.getLogger(__name__)

_SHARE_FOR_TURN = 0.5  # of what is left of the calls' time

MakeTransport = Callable[[protocol.ServerInfo], WeightTransport]


@dataclass(eq=False, repr=False)
class ServerPush(threading.Thread):
    """Brings one server to one version. Once ``finished`` is set ``report`` or ``learner_fault`` is there.

    ``transports`` keeps, by server, what outlives a round; a ``distrusted`` one is replaced. ``ours`` are base URLs of
    servers that must not answer as stock ones do. Once ``given_up`` is set nothing more is sent. ``span`` is entered
    with the name of every phase. ``on_end`` is called last, on this thread.
    """

    server: int
    endpoint: ServerEndpoint
    order: RoundOrder
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
        self._stamps = False
        self.report: ServerReport | None = None
        self.learner_fault: str | None = None
        self.finished = threading.Event()

    def run(self) -> None:
        try:
            base_url = self.endpoint.base_url
            with ServerSession(base_url, self.api_key, must_be_ours=base_url in self.ours) as session:
                self._transfer(session)
            self.report = self._make_report(None)
        except ServerFault as error:
            self._drop_transport()
            self.report = self._make_report(str(error))
        except Exception as error:  # top of a thread: anything else is the learner's own fault
            self._drop_transport()
            self.learner_fault = describe_fault("the push of the learner's weights", error)
        finally:
            self.finished.set()
            self.on_end(self)

    def _transfer(self, session: ServerSession) -> None:
        order = self.order
        if self.distrusted:
            self._drop_transport()
        with self._phase("begin"):
            info = session.info(order.deadline)
            self._stamps = not info.is_swift_rollout
            if not info.stock:
                self.ours.add(session.base_url)
            sums_of = None
            if info.is_swift_rollout:
                # Ordered: it answers once nothing runs any more that a lost caller has asked.
                self._reset_cache(session, protocol.RESET_PREFIX_CACHE)
                sums_of = ask_sums_incarnation(session, order.deadline)
                if self.server not in self.transports:
                    shown = "can show every tensor's checksum" if sums_of else "shows no checksums"
                    logger.info("%s is a stock server and %s", session.base_url, shown)
        with self._phase("pack"):
            sent = self.snapshot.describe(order.identity)
        with self._phase("connect"):
            if self.server not in self.transports:
                self.transports[self.server] = self.make_transport(info)
            transport = self._transport = self.transports[self.server]
            self._carried_by = transport.open(session, self.endpoint, self.snapshot, order)
        with self._phase("push"):
            transport.carry(session, self.snapshot, order.deadline, self._require_wanted)
        self._num_bytes = self.snapshot.num_bytes
        if order.hold is not None:
            with self._phase("hold"):
                self.turns.has_leave.wait(order.hold.remaining_s())
        with ExitStack() as turn:
            if order.turn_s:
                with self._phase("turn"):
                    # The install needs time as well, also behind a long transfer or hold.
                    turn_s = min(order.turn_s, order.deadline.remaining_s() * _SHARE_FOR_TURN)
                    turn.enter_context(self.turns.take(turn_s))
            self._install(session, info, transport, sent, sums_of)

    def _install(
        self,
        session: ServerSession,
        info: protocol.ServerInfo,
        transport: WeightTransport,
        sent: Mapping[str, str],
        sums_of: str | None,
    ) -> None:
        order, proof = self.order, None
        with self._phase("acknowledge"):
            transport.finish(session, order, sent)
            if not info.stock:
                proof = self._ask_to_install(session, sent)
                self._drop_transport()
            elif info.chat_model is None:
                self._acknowledge(session)
        with self._phase("prove"):
            same_dtypes = info.stock or order.manifest == info.manifest
            self._proof = prove_server(
                session, order, info, sent, same_dtypes=same_dtypes, sums_of=sums_of, proof=proof
            )

    def _ask_to_install(self, session: ServerSession, sent: Mapping[str, str]) -> protocol.WeightProof:
        order = self.order
        wanted = protocol.InstallRequest(
            order.run_id, order.version, sent, order.on_pending, order.deadline.remaining_s()
        )
        reply = session.post(protocol.INSTALL, wanted.to_json(), order.deadline)
        return session.read(protocol.INSTALL, protocol.WeightProof.from_json, reply)

    def _acknowledge(self, session: ServerSession) -> None:
        session.post(protocol.PROCESS_WEIGHTS, {}, self.order.deadline)
        # The prefix cache last: vLLM's engine returns nothing from the other two, so that a stock server
        # reports False for them also when they worked; they are ordered before the one that can tell.
        for path in (protocol.RESET_ENCODER_CACHE, protocol.RESET_MM_CACHE):
            reset_cache(session, path, self.order.deadline)
        self._reset_cache(session, protocol.RESET_PREFIX_CACHE)

    def _reset_cache(self, session: ServerSession, path: str) -> None:
        if not reset_cache(session, path, self.order.deadline):
            raise ServerFault(
                f"{session.base_url}{path} reports status: False: an earlier command failed; read its log"
            )

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Adds the seconds spent inside to one phase. Raises ServerFault: the round was given up."""
        self._require_wanted()
        started = time.perf_counter()
        try:
            with self.span(name):
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def _require_wanted(self) -> None:
        if self.given_up.is_set():
            raise ServerFault(f"{self.endpoint.base_url}: the round was given up before it was proven")

    def _drop_transport(self) -> None:
        """Not that of a later round, which is in its place if this push was given up."""
        transport = self._transport
        if transport is not None and self.transports.get(self.server) is transport:
            del self.transports[self.server]
            close_quietly(transport, self.order.deadline)

    def _make_report(self, error: str | None) -> ServerReport:
        return ServerReport(
            proven=error is None,
            error=error,
            proof=self._proof,
            num_bytes=self._num_bytes,
            seconds=self._seconds,
            stamps=self._stamps,
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
