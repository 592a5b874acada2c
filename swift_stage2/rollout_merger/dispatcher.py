"""One thread that talks to the server, because the server does one thing at a time: merged POSTs and control calls.

Everything leaves in the order of arrival: a control call after all that was queued before it, a part together with
later ones of its kind but never past a control call. Requests for which nobody waits any more are never posted.
The merger calls the server only for a caller: nothing of its own can meet a sync round.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from swift_stage2.errors import (
    EngineUnavailable,
    FaultKind,
    ProtocolError,
    ServerFault,
    UpstreamLost,
    UpstreamTimeout,
)
from swift_stage2.rollout_merger.merged_post import InferBody, SeedLayout, merge, split
from swift_stage2.servers import protocol
from swift_stage2.servers.batching import BatchQueue, ExclusiveTask
from swift_stage2.servers.call import Answer, ServerCaller

_log = logging.getLogger(__name__)
_OK = 200
_POSTS_REMEMBERED = 8


@dataclass(eq=False, slots=True)
class InferPart:
    """One caller's ``/infer/`` call."""

    body: InferBody
    future: Future[Answer] = field(default_factory=Future)
    is_forgotten: bool = False

    @property
    def key(self) -> str:
        return self.body.key


class _NoWeights(UpstreamLost):
    """The merger's own refusal, told to callers as the loss that it comes from."""


class Dispatcher:
    """The queue in front of one server, and the thread that empties it.

    A server that was lost after it had answered may have been started again with other weights, which a stock
    server does not tell. So all that was queued fails, and ``/infer/`` is refused until a caller has loaded weights.
    """

    def __init__(
        self,
        upstream: Upstream,
        *,
        max_batch_size: int,
        layout: SeedLayout,
        needs_weights: bool = False,
        gather_s: float = 0.004,
        longest_gather_s: float = 0.25,
        return_share: float = 0.1,
    ) -> None:
        """A POST waits ``return_share`` of the last one's duration, within the two bounds, for its callers to return.

        Without that a caller that comes back a moment late is a POST behind for ever: small POSTs alternate with
        large ones. Once as many callers are there as at most during the last POSTs, nothing is waited for.
        ``needs_weights``: the server has just been started again; nobody has loaded weights into it yet.
        """
        self._num_callers: deque[int] = deque(maxlen=_POSTS_REMEMBERED)
        self._gather_bounds_s = (gather_s, max(gather_s, longest_gather_s))
        self._return_share = return_share
        self._upstream = upstream
        self._layout = layout
        self._queue: BatchQueue[InferPart] = BatchQueue(
            max_batch_size=max_batch_size, gather_s=gather_s, size_of=lambda part: part.body.num_requests
        )
        self._lock = threading.Lock()
        self._last: dict[str, Any] | None = None  # how the latest call to the server ended
        self._last_ended = 0.0  # monotonic seconds
        self._running: tuple[str, int] | None = None
        self._has_answered = False
        self._needs_weights = needs_weights
        self._is_lost = False  # since the latest answer
        self._num_posts = 0
        self._num_requests = 0
        self._thread = threading.Thread(target=self._run, name="dispatcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def infer(self, body: InferBody) -> InferPart:
        """Queues a part. Its future holds the reply, or raises UpstreamLost or UpstreamTimeout.

        Raises:
            UpstreamLost: the server has had no weights since it was lost, or the merger ends.
        """
        part = InferPart(body)
        self._refuse_without_weights()
        try:
            self._queue.put(part)
        except EngineUnavailable as error:
            raise UpstreamLost("the merger ends") from error
        return part

    def control(self, method: str, path: str, body: bytes) -> ExclusiveTask:
        """Queues any other call, passed on as it came; its future is as a part's.

        Raises:
            UpstreamLost: the merger ends.
        """
        try:
            return self._queue.put_task(lambda: self._control(method, path, body))
        except EngineUnavailable as error:
            raise UpstreamLost("the merger ends") from error

    def forget(self, item: InferPart | ExclusiveTask, path: str) -> None:
        """Nobody waits for this call of ``path`` any more: it is not posted unless it has been already.

        A caller that ends may not wait for what it closes; it is closed all the same.
        """
        if path != protocol.CLOSE_COMMUNICATOR:
            item.future.cancel()
        if isinstance(item, InferPart):
            item.is_forgotten = True
            self._queue.remove(item)

    def health(self) -> dict[str, Any]:
        """The server's last call, and how much waits; never waits for the server."""
        with self._lock:
            last, running = self._last, self._running
            return {
                "status": self._status(),
                "upstream": self._upstream.base_url,
                "last_call": last and {**last, "seconds_ago": round(time.monotonic() - self._last_ended, 3)},
                "running": running and {"path": running[0], "num_requests": running[1]},
                "num_waiting": len(self._queue),
                "num_waiting_control": self._queue.num_tasks,
                "num_posts": self._num_posts,
                "num_requests": self._num_requests,
            }

    def close(self, timeout_s: float) -> bool:
        """Fails what waits, cuts what runs, ends the thread; False if it is still there after ``timeout_s``."""
        left = self._queue.close()
        self._upstream.end()
        self._fail(left, UpstreamLost("the merger ends"))
        if self._thread.ident is not None:
            self._thread.join(timeout=timeout_s)
        if self._thread.is_alive():
            return False
        self._upstream.close()
        return True

    def _run(self) -> None:
        try:
            self._work()
        finally:  # however this thread ends, nobody waits for it for ever
            self._fail(self._queue.close(), UpstreamLost("the merger ends"))

    def _work(self) -> None:
        while (taken := self._queue.take()) is not None:
            if isinstance(taken, ExclusiveTask):
                taken.run()
                continue
            parts = [part for part in taken if part.future.set_running_or_notify_cancel()]
            if not parts:
                continue
            started = time.monotonic()
            try:
                self._infer(parts)
            except Exception as error:  # top of the thread: its end would leave every caller waiting
                _log.exception("a merged POST failed in the merger itself")
                for part in parts:
                    if not part.future.done():
                        part.future.set_exception(error)
            self._expect_return(len(parts), time.monotonic() - started)

    def _expect_return(self, num_parts: int, seconds: float) -> None:
        shortest_s, longest_s = self._gather_bounds_s
        gather_s = min(longest_s, max(shortest_s, self._return_share * seconds))
        self._num_callers.append(num_parts + len(self._queue))
        self._queue.set_patience(gather_s, max(self._num_callers))

    def _infer(self, parts: Sequence[InferPart]) -> None:
        """One POST for all; after an error answer one for each, so that only the one at fault sees an error."""
        try:
            self._refuse_without_weights()
            replies = self._post(parts)
        except (UpstreamLost, UpstreamTimeout) as error:
            self._break(parts, error)
            return
        if replies is not None:
            for part, reply in zip(parts, replies, strict=True):
                part.future.set_result(reply)
            return
        for number, part in enumerate(parts):
            if part.is_forgotten:
                part.future.set_exception(UpstreamLost("the caller has gone"))
                continue
            try:
                alone = self._post([part])
                assert alone is not None  # a single part gets whatever the server says
                part.future.set_result(alone[0])
            except (UpstreamLost, UpstreamTimeout) as error:
                self._break(parts[number:], error)
                return

    def _post(self, parts: Sequence[InferPart]) -> list[Answer] | None:
        """A reply for each part; None when the server has no good answer to all of them together."""
        bodies = [part.body for part in parts]
        num_requests = sum(body.num_requests for body in bodies)
        most_bytes = protocol.most_infer_bytes(num_requests, bodies[0].max_tokens)
        reply = self._call("POST", protocol.INFER, merge(bodies), num_requests, most_bytes)
        if reply.status == _OK:
            try:
                return [Answer(_OK, body) for body in split(reply.body, bodies, self._layout)]
            except ProtocolError as error:
                reply = _error_answer(error)
        if len(parts) == 1:
            return [reply]
        _log.info("%d parts are asked one by one: status %d for all together", len(parts), reply.status)
        return None

    def _control(self, method: str, path: str, body: bytes) -> Answer:
        try:
            if path == protocol.INFER:  # one that cannot be merged
                self._refuse_without_weights()
            reply = self._call(method, path, body, 0, protocol.MOST_CONTROL_BYTES)
        except (UpstreamLost, UpstreamTimeout) as error:
            self._break([], error)
            raise
        except Exception:  # perhaps nobody waits for this call any more
            _log.exception("%s failed in the merger itself", path)
            raise
        if path == protocol.PROCESS_WEIGHTS and reply.status == _OK:
            with self._lock:
                self._needs_weights = False
        return reply

    def _call(self, method: str, path: str, body: bytes, num_requests: int, most_bytes: int) -> Answer:
        with self._lock:
            self._running = (path, num_requests)
            self._num_posts += num_requests > 0
            self._num_requests += num_requests
        answered, detail = False, ""
        try:
            reply = self._upstream.forward(method, path, body, most_bytes)
            answered, detail = True, f"status {reply.status}"
            return reply
        except (UpstreamLost, UpstreamTimeout) as error:
            detail = str(error)
            raise
        finally:
            with self._lock:
                self._running = None
                self._last = {"path": path, "answered": answered, "detail": detail}
                self._last_ended = time.monotonic()
                self._has_answered |= answered
                self._is_lost &= not answered

    def _break(self, parts: Sequence[InferPart], error: UpstreamLost | UpstreamTimeout) -> None:
        """A lost server is lost for all that was meant for it, not only for what it was doing."""
        if isinstance(error, _NoWeights):
            pass  # refused here: the server itself is there, and a round's own calls may wait behind this one
        elif isinstance(error, UpstreamLost):
            with self._lock:
                is_news, self._is_lost = not self._is_lost, True
                self._needs_weights |= self._has_answered
            if is_news:
                _log.warning("the server is lost, or not there yet: %s", error)
            self._fail(self._queue.clear(), error)
        else:
            _log.warning("%s", error)
        for part in parts:
            part.future.set_exception(error)

    def _fail(self, left: Sequence[InferPart | ExclusiveTask], error: Exception) -> None:
        for item in left:
            if item.future.set_running_or_notify_cancel():
                item.future.set_exception(error)

    def _refuse_without_weights(self) -> None:
        with self._lock:
            if self._needs_weights:
                raise _NoWeights(
                    "the server was lost and may hold other weights since; it is asked again after a sync round"
                )

    def _status(self) -> str:
        if self._thread.ident is not None and not self._thread.is_alive():
            return "ended"
        if self._last is None:
            return "needs_weights" if self._needs_weights else "untried"
        if not self._last["answered"]:
            return "lost"
        return "needs_weights" if self._needs_weights else "ok"


class Upstream(ServerCaller):
    """Calls to the stock server.

    A ``ServerFault`` becomes ``UpstreamLost`` or ``UpstreamTimeout`` here alone; an answer that HTTP or its limit does
    not allow becomes an error answer, because the server is there.
    """

    def __init__(self, base_url: str, *, api_key: str | None, timeout_s: float) -> None:
        super().__init__(base_url, api_key=api_key)
        self._timeout_s = timeout_s

    def forward(self, method: str, path: str, body: bytes, most_bytes: int) -> Answer:
        """Whatever the server answers, also an error status, with ``most_bytes`` beyond those sent.

        Raises:
            UpstreamLost: no connection, one that broke, a reply that was cut, or the merger ends.
            UpstreamTimeout: no whole reply in time.
        """
        try:
            return self.call(
                method, path, body, timeout_s=self._timeout_s, most_bytes=most_bytes + len(body), headers={}
            )
        except ServerFault as fault:
            match fault.kind:
                case FaultKind.LATE:
                    where = f"{self.base_url}{path}"
                    raise UpstreamTimeout(
                        f"{where} did not answer in time, got upstream_timeout_s={self._timeout_s:g}"
                    ) from fault
                case FaultKind.UNUSABLE:
                    return _error_answer(fault)
                case FaultKind.ENDED:
                    raise UpstreamLost("the merger ends") from fault
                case _:
                    raise UpstreamLost(str(fault)) from fault


def _error_answer(error: Exception) -> Answer:
    """Status 500 and not 502, which says that the server is lost."""
    return Answer(500, json.dumps({"detail": str(error)}).encode())
