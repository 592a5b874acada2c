"""One server's part of one sync round: begin, connect, push, acknowledge, prove; and how it gets its buckets.

The round's main thread hands every bucket to all pushes (``BucketHandover``). Each push is a daemon thread, because a
transfer that hangs cannot be joined, and ends in a report or, when the learner cannot give its weights, without one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Generic, TypeVar

from swift_stage2.errors import ServerFault, WeightSyncError
from swift_stage2.records import ServerReport
from swift_stage2.servers import protocol
from swift_stage2.servers.session import Deadline, ServerSession, reset_cache
from swift_stage2.servers.stock import ask_state_keys, ask_sums_incarnation, differing_names, is_foreign
from swift_stage2.telemetry.trace import EnterSpan, untraced
from swift_stage2.weights.proof import RoundOrder, give_up, prove_server
from swift_stage2.weights.tensors import WeightBucket, agreed_manifest
from swift_stage2.weights.transport import ServerEndpoint, WeightTransport

ItemT = TypeVar("ItemT")


class BucketHandover(Generic[ItemT]):
    """One producer calls ``offer`` and at last ``finish`` or ``fail``; each consumer calls ``take`` until None.

    ``patience_s`` is for a whole round and counts only while another consumer waits for its next item.
    """

    def __init__(
        self,
        consumers: Iterable[int],
        deadline: Deadline,
        *,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._deadline = deadline
        self._patience_s = patience_s
        self._clock = clock
        self._changed = threading.Condition()
        self._live = set(consumers)
        self._held: dict[int, ItemT] = {}  # handed over, not yet taken
        self._idle: set[int] = set()  # in ``take``, with nothing to take
        self._held_up_s = dict.fromkeys(self._live, 0.0)  # for how long each has kept others waiting
        self._left_behind: dict[int, str] = {}
        self._finished = False
        self._failure: str | None = None

    def offer(self, item: ItemT) -> bool:
        """Hands ``item`` to every consumer that is still there, each as soon as it has room.

        Returns when all of them hold it; False when no consumer is left, so that nothing more need be made.
        """
        with self._changed:
            waiting = set(self._live)
            while True:
                waiting &= self._live
                for consumer in sorted(waiting - self._held.keys()):
                    self._held[consumer] = item
                    waiting.discard(consumer)
                    self._changed.notify_all()
                if not waiting:
                    return bool(self._live)
                self._wait_for(waiting)

    def finish(self) -> None:
        """Nothing more comes; consumers still take what they hold."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """The producer cannot go on; every consumer's next ``take`` raises."""
        with self._changed:
            self._failure = reason
            self._held.clear()
            self._changed.notify_all()

    def take(self, consumer: int) -> ItemT | None:
        """The next item, or None after the last.

        Raises:
            WeightSyncError: the producer failed.
            ServerFault: this consumer was left behind, or nothing came by the deadline.
        """
        with self._changed:
            self._idle.add(consumer)
            self._changed.notify_all()
            try:
                while self._has_nothing_for(consumer):
                    if self._deadline.expired:
                        raise ServerFault(
                            "the deadline of the round's calls passed before the last bucket came"
                        )
                    self._changed.wait(self._deadline.remaining_s())
            finally:
                self._idle.discard(consumer)
            if self._failure is not None:
                raise WeightSyncError(self._failure)
            if consumer not in self._live:
                raise ServerFault(self._left_behind.get(consumer, "this push has ended"))
            item = self._held.pop(consumer, None)
            self._changed.notify_all()
            return item

    def leave(self, consumer: int) -> None:
        """This consumer takes nothing more, for whatever reason; the producer no longer waits for it."""
        with self._changed:
            self._remove(consumer)

    def _has_nothing_for(self, consumer: int) -> bool:
        ended = self._finished or self._failure is not None or consumer not in self._live
        return not ended and consumer not in self._held

    def _wait_for(self, late: set[int]) -> None:
        """One wait for the consumers that have no room; removes those whose time is up."""
        others_wait = bool((self._idle - self._held.keys()) & self._live)
        limit_s = self._deadline.remaining_s()
        if others_wait:
            limit_s = min(limit_s, *(self._patience_s - self._held_up_s[consumer] for consumer in late))
        started = self._clock()
        self._changed.wait(max(0.0, limit_s))
        waited_s = self._clock() - started
        for consumer in sorted(late & self._live):
            if others_wait:
                self._held_up_s[consumer] += waited_s
            if self._deadline.expired:
                self._remove(consumer, "it had not taken every bucket by the deadline of the round's calls")
            elif others_wait and self._held_up_s[consumer] >= self._patience_s:
                self._remove(
                    consumer,
                    f"it kept faster servers waiting for {self._patience_s:.1f} s and was left behind",
                )

    def _remove(self, consumer: int, reason: str | None = None) -> None:
        self._live.discard(consumer)
        self._held.pop(consumer, None)
        if reason is not None:
            self._left_behind[consumer] = reason
        self._changed.notify_all()


logger = logging.getLogger(__name__)

_SHARE_FOR_PATIENCE = 0.25  # of the calls' time, with a server that is still busy
_BUSY_POLL_S = 0.05

MakeTransport = Callable[[protocol.ServerInfo], WeightTransport]


class ServerPush(threading.Thread):
    """Brings one server to one version. ``finished`` is set last; then ``report`` or ``learner_fault`` is there.

    ``transports`` keeps, by server, what outlives a round; a ``distrusted`` one is replaced. ``ours``
    are base URLs of servers that must not answer as stock ones do. ``span`` is entered
    with the name of every phase.
    """

    def __init__(
        self,
        server: int,
        endpoint: ServerEndpoint,
        order: RoundOrder,
        handover: BucketHandover[WeightBucket],
        transports: MutableMapping[int, WeightTransport],
        make_transport: MakeTransport,
        *,
        distrusted: bool,
        ours: set[str],
        span: EnterSpan = untraced,
    ) -> None:
        super().__init__(name=f"push to {endpoint.base_url}", daemon=True)
        self.server = server
        self._endpoint = endpoint
        self._order = order
        self._handover = handover
        self._transports = transports
        self._make_transport = make_transport
        self._distrusted = distrusted
        self._ours = ours
        self._span = span
        self._seconds: dict[str, float] = {}
        self._num_bytes = 0
        self._proof = ""
        self._incarnation: str | None = None
        self.report: ServerReport | None = None
        self.learner_fault: str | None = None
        self.finished = threading.Event()

    def run(self) -> None:
        try:
            base_url, key = self._endpoint.base_url.rstrip("/"), self._order.api_key
            with ServerSession(base_url, key, must_be_ours=base_url in self._ours) as session:
                self._transfer(session)
            self.report = self._make_report(None)
        except ServerFault as error:
            self._drop_transport()
            self.report = self._make_report(str(error))
        except Exception as error:  # top of a thread: anything else is the learner's own fault
            self._drop_transport()
            self.learner_fault = describe_fault("the push of the learner's weights", error)
        finally:
            self._handover.leave(self.server)
            self.finished.set()

    def _transfer(self, session: ServerSession) -> None:
        order = self._order
        if self._distrusted:
            self._drop_transport()
        with self._phase("begin"):
            info = session.info(order.deadline)
            self._incarnation = info.incarnation
            if not info.stock:
                self._ours.add(session.base_url)
            dtypes = {spec.name: spec.dtype for spec in info.manifest}
            sums_of = None
            if not info.stock:
                self._begin(session, agreed_manifest(order.manifest, info.manifest))
            else:  # ordered: it answers once nothing runs any more that a lost caller has asked
                self._reset_cache(session, protocol.RESET_PREFIX_CACHE)
                sums_of = ask_sums_incarnation(session, order.deadline)
                if self.server not in self._transports:
                    self._compare_names(session)
                    shown = "can show every tensor's checksum" if sums_of else "shows no checksums"
                    logger.info("%s is a stock server and %s", session.base_url, shown)
        with self._phase("connect"):
            transport = self._transports.setdefault(self.server, self._make_transport(info))
            try:
                transport.open(session, self._endpoint, order.deadline)
            except ServerFault:
                if not info.stock:
                    give_up(session, order)
                raise
        sent = self._send_buckets(session, transport, dtypes)
        with self._phase("acknowledge"):
            session.post(protocol.PROCESS_WEIGHTS, {}, order.deadline)
            # The prefix cache last: vLLM's engine returns nothing from the other two, so that a stock server
            # reports False for them also when they worked; they are ordered before the one that can tell.
            for path in (protocol.RESET_ENCODER_CACHE, protocol.RESET_MM_CACHE):
                self._reset_cache(session, path, must_succeed=not info.stock)
            self._reset_cache(session, protocol.RESET_PREFIX_CACHE)
            if not info.stock:
                self._drop_transport()
        with self._phase("prove"):
            same_dtypes = info.stock or order.manifest == info.manifest
            self._proof = prove_server(session, order, info, sent, same_dtypes=same_dtypes, sums_of=sums_of)

    def _begin(self, session: ServerSession, manifest: tuple[protocol.TensorSpec, ...]) -> None:
        """Opens the round; a server that still ends what an abandoned caller asked is asked again."""
        order = self._order
        timeout_s = order.deadline.remaining_s()
        request = protocol.RoundRequest(order.round_id, order.run_id, order.version, manifest, timeout_s)
        patience = Deadline(timeout_s * _SHARE_FOR_PATIENCE)
        while True:
            try:
                session.post(protocol.BEGIN_ROUND, request.to_json(), order.deadline)
                return
            except ServerFault as fault:
                if fault.reason != protocol.RefusalReason.BUSY or patience.expired:
                    raise
            time.sleep(_BUSY_POLL_S)

    def _compare_names(self, session: ServerSession) -> None:
        """Once per connection. Decides nothing: the fusing known here is not that of every model."""
        try:
            keys = ask_state_keys(session, self._order.deadline)
        except ServerFault as fault:
            if is_foreign(fault):  # it does not tell; the canary still shows what it took
                return
            raise
        if keys is None:
            logger.warning(
                "%s%s: no such route, as in an older ms-swift, so that its canary alone shows which model it holds; "
                "serve with the learner's version of ms-swift",
                session.base_url,
                protocol.STATE_KEYS,
            )
            return
        names = differing_names((spec.name for spec in self._order.manifest), keys)
        if keys and names:
            logger.warning(
                "%s must hold the learner's parameters, got %d names of %d that differ, %s for one; if its canary "
                "fails, vLLM cannot load this model by the names that transformers gives it, or it is another: serve "
                "the learner's with swift-stage2 rollout",
                session.base_url,
                len(names),
                len(keys),
                names[0],
            )

    def _send_buckets(
        self, session: ServerSession, transport: WeightTransport, dtypes: dict[str, str]
    ) -> dict[str, str]:
        """Sends what the round hands over, in the server's dtypes; returns the checksums of all tensors."""
        sent: dict[str, str] = {}
        while True:
            with self._phase("wait"):
                bucket = self._next_bucket(session)
            if bucket is None:
                return sent
            with self._phase("pack"):
                packed = bucket.pack(dtypes)
            with self._phase("push"):
                body = {"metadatas": packed.metadata}
                session.post(protocol.UPDATE_FLATTENED_PARAMS, body, self._order.deadline)
                transport.send(packed.flat, self._order.deadline)
            sent.update(packed.checksums)
            self._num_bytes += packed.flat.numel()

    def _next_bucket(self, session: ServerSession) -> WeightBucket | None:
        try:
            return self._handover.take(self.server)
        except ServerFault as fault:
            raise ServerFault(f"{session.base_url}: {fault}") from fault

    def _reset_cache(self, session: ServerSession, path: str, *, must_succeed: bool = True) -> None:
        if not reset_cache(session, path, self._order.deadline) and must_succeed:
            raise ServerFault(f"{session.base_url}{path} reports status: False; earlier commands failed")

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Adds the seconds spent inside to one phase."""
        started = time.perf_counter()
        try:
            with self._span(name):
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def _drop_transport(self) -> None:
        transport = self._transports.pop(self.server, None)
        if transport is not None:
            close_quietly(transport, self._order.deadline)

    def _make_report(self, error: str | None) -> ServerReport:
        return ServerReport(
            proven=error is None,
            error=error,
            proof=self._proof,
            num_bytes=self._num_bytes,
            seconds=self._seconds,
            incarnation=self._incarnation,
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
