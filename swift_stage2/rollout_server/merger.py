"""The merger: the ``/infer/`` calls that wait leave as one POST, every other call alone, all in the order of arrival.

Lives on one event loop; only what takes long is done on threads. The server is asked one thing at a time, for a caller
alone: nothing of the merger's own can meet a push of weights. What may not reach a server that opens what it is told to
is refused: 413 too large, 422 no JSON, 500 naming the requests at fault. 502 says that the server is lost, 504 that it
did not answer in time. Bodies may share a POST when everything but their requests and seeds is equal; it carries the
seed of its first part, with which every output is stamped.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from swift_stage2 import wire
from swift_stage2.errors import FaultKind, ProtocolError, ServerFault, UpstreamLost, UpstreamTimeout
from swift_stage2.servers.http_app import BodyLimit, attend, failed_requests, make_app
from swift_stage2.servers.infer_wire import InferCall, most_infer_bytes
from swift_stage2.servers.request_checks import RequestLimits, check_conversations
from swift_stage2.servers.session import Answer, ServerHttp

_log = logging.getLogger(__name__)
_MOST_TOKENS = 1 << 16
_UPLOAD_TIMEOUT_S = 60.0

_GET_PATHS = (wire.WORLD_SIZE, wire.STATE_KEYS, wire.WEIGHT_SUMS)
_POST_PATHS = (
    *(wire.WEIGHT_SUMS, wire.ENGINE_TYPE, wire.INIT_COMMUNICATOR, wire.UPDATE_FLATTENED_PARAMS),
    *(wire.PROCESS_WEIGHTS, wire.CLOSE_COMMUNICATOR),
    *(wire.RESET_PREFIX_CACHE, wire.RESET_ENCODER_CACHE, wire.RESET_MM_CACHE),
)


@dataclass(frozen=True, slots=True)
class InferBody:
    """One ``/infer/`` call's body, ready to be joined with others of the same ``key``."""

    requests: list[Any]
    rest: dict[str, Any]  # the body, emptied of requests and seed
    seed: int | None

    @classmethod
    def from_json(cls, record: Any) -> InferBody:
        """Raises ProtocolError: no call of rollouts, or one that names an adapter and not the server's own weights."""
        call = InferCall.from_json(record)
        config = dict(record.get("request_config") or {})
        seed = config.pop("seed", None)
        return cls(call.infer_requests, record | {"infer_requests": [], "request_config": config}, seed)

    @property
    def key(self) -> str:
        """Requests without a seed share POSTs only among themselves."""
        return json.dumps([self.rest, self.seed is None], sort_keys=True)

    @property
    def max_tokens(self) -> int:
        """Of each answer; a caller that names none gets what a server may give."""
        return min(self.rest["request_config"].get("max_tokens") or _MOST_TOKENS, _MOST_TOKENS)


@dataclass(eq=False, slots=True)
class WaitingCall:
    """One caller's call. One with a ``body`` may share a POST; any other is passed on as it came."""

    method: str
    path: str
    raw: bytes = b""
    body: InferBody | None = None
    answer: asyncio.Future[Answer] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def num_requests(self) -> int:
        return len(self.body.requests) if self.body is not None else 0


@dataclass(eq=False, kw_only=True)
class Merger:
    """The queue in front of one server, and its routes.

    A server that was lost after it had answered may have been started again with other weights, which a stock server
    does not tell. So all that waits fails, and ``/infer/`` is refused until a caller has loaded weights.

    A POST waits ``return_share`` of the last one's duration, ``longest_gather_s`` at most, for as many callers as there
    were then. Without that a caller that comes back a moment late is a POST behind for ever: small POSTs alternate with
    large ones.
    """

    upstream: ServerHttp
    timeout_s: float  # of one call to it
    max_batch_size: int
    limits: RequestLimits = field(default_factory=RequestLimits)
    needs_weights: bool = False  # true of a server that has just been started again
    longest_gather_s: float = 0.25
    return_share: float = 0.1

    def __post_init__(self) -> None:
        self._patience_s, self._num_callers = 0.0, 0
        self._waiting: list[WaitingCall] = []
        self._uploads: set[asyncio.Event] = set()  # of /infer/ bodies: set once they are queued, or refused
        self._changed = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self._is_closed = self._has_answered = False
        self._status = "untried"  # or "ok" or "lost": how the latest call to the server ended
        self._running: str | None = None  # its path
        self._num_posts = 0
        # Apart: the calls that settle and load weights must not wait for rollouts.
        self._bodies, self._control_bodies = (BodyLimit(self.limits.body_bytes) for _ in range(2))

    def app(self, api_key: str | None) -> FastAPI:
        """Stock's paths. With an ``api_key`` every route but ``/health/`` wants it as a bearer token."""
        table: dict[tuple[str, str], Callable[..., Any]] = {("POST", wire.INFER): self._infer}
        for method, paths in (("GET", _GET_PATHS), ("POST", _POST_PATHS)):
            table |= {(method, path): self._control for path in paths}
        return make_app(table, self._health, api_key)

    def health(self) -> dict[str, Any]:
        """The end of the last call to the upstream server, and the number of waiting requests; does not wait."""
        num_parts = sum(call.body is not None for call in self._waiting)
        return {
            "status": "needs_weights" if self.needs_weights and self._status != "lost" else self._status,
            "running": self._running,
            "num_waiting": num_parts,
            "num_waiting_control": len(self._waiting) - num_parts,
            "num_posts": self._num_posts,
        }

    def close(self) -> None:
        """Fails what waits and cuts what runs, so that callers hear at once."""
        self._is_closed = True
        if self._worker is not None:
            self._worker.cancel()
        self._fail(self._waiting, UpstreamLost("the merger ends"))

    # --- routes ---------------------------------------------------------------------------------
    async def _health(self) -> JSONResponse:
        body = self.health()
        return JSONResponse(body, 200 if body["status"] in ("ok", "untried") else 503)

    async def _infer(self, request: Request) -> Response:
        arrived = asyncio.Event()
        self._uploads.add(arrived)
        try:
            async with self._bodies.body(request) as raw:  # until it is answered: what is queued is as large
                body = await asyncio.to_thread(self._read, raw)
                if isinstance(body, Response):
                    return body
                call = self._put(WaitingCall("POST", wire.INFER, body=body))
                arrived.set()
                return await self._answer(call, request)
        finally:
            arrived.set()
            self._uploads.discard(arrived)

    async def _control(self, request: Request) -> Response:
        # A request that began to arrive before this call is queued before it: its caller may have given up meanwhile,
        # and counts on this call to come back only when nothing of it can start any more.
        earlier = tuple(self._uploads)
        async with self._control_bodies.body(request) as raw:
            with suppress(TimeoutError):
                async with asyncio.timeout(_UPLOAD_TIMEOUT_S):
                    for upload in earlier:
                        await upload.wait()  # deadline: the time-out around it
            call = self._put(WaitingCall(request.method, request.url.path, bytes(raw)))
            return await self._answer(call, request)

    def _read(self, raw: bytearray) -> InferBody | Response:
        """The body, or the answer to one that a server which opens what it is told to must not see."""
        body = InferBody.from_json(wire.parse_call(raw))
        if faults := check_conversations(body.requests, self.limits):
            return failed_requests(faults, len(body.requests))
        return body

    async def _answer(self, call: WaitingCall, request: Request) -> Response:
        try:
            await attend(request, call.answer)
        except ClientDisconnect:
            # A caller that ends may not wait for what it closes; it is closed all the same.
            if call in self._waiting and call.path != wire.CLOSE_COMMUNICATOR:
                self._waiting.remove(call)
            call.answer.cancel()
            raise
        reply = call.answer.result()  # deadline: it has ended
        return Response(reply.body, reply.status, media_type=reply.content_type)

    # --- the queue ------------------------------------------------------------------------------
    def _put(self, call: WaitingCall) -> WaitingCall:
        if self._is_closed:
            raise UpstreamLost("the merger ends")
        self._waiting.append(call)
        self._changed.set()
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return call

    async def _work(self) -> None:
        """One at a time, until nothing waits."""
        while self._waiting:
            await self._gather()
            if not self._waiting:  # all callers have gone meanwhile
                return
            calls = self._take()
            started = time.monotonic()
            try:
                await self._serve(calls)
            except Exception as error:  # top of the task: its end would leave every caller waiting
                if not isinstance(error, UpstreamLost | UpstreamTimeout):
                    _log.exception("a call failed in the merger itself")
                self._fail(calls, error)
            finally:
                self._fail(
                    calls, UpstreamLost("the merger ends")
                )  # those that are answered by now hear nothing
            if calls[0].body is not None:
                lasted_s = time.monotonic() - started
                self._patience_s = min(self.longest_gather_s, self.return_share * lasted_s)
                self._num_callers = len(calls) + sum(call.body is not None for call in self._waiting)

    async def _gather(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s):
                while self._may_grow():
                    self._changed.clear()
                    await self._changed.wait()  # deadline: the time-out around it

    def _may_grow(self) -> bool:
        """Whether what is still to come could join the calls that wait: not behind another, nor past the limit."""
        is_open = bool(self._waiting) and all(call.body is not None for call in self._waiting)
        num_requests = sum(call.num_requests for call in self._waiting)
        return is_open and len(self._waiting) < self._num_callers and num_requests < self.max_batch_size

    def _take(self) -> list[WaitingCall]:
        """The oldest call, with later ones of its kind; none passes a call that leaves alone."""
        oldest, *later = self._waiting
        taken, num_requests = [oldest], oldest.num_requests
        for call in later:
            if oldest.body is None or call.body is None:
                break
            fits = num_requests + call.num_requests <= self.max_batch_size
            if fits and call.body.key == oldest.body.key:
                taken.append(call)
                num_requests += call.num_requests
        self._waiting = [call for call in self._waiting if call not in taken]
        return taken

    @staticmethod
    def _fail(calls: Sequence[WaitingCall], error: Exception) -> None:
        for call in calls:
            if not call.answer.done():
                call.answer.set_exception(error)

    # --- the server -----------------------------------------------------------------------------
    async def _serve(self, calls: Sequence[WaitingCall]) -> None:
        """One POST for all; after an error answer one for each, so that only the one at fault sees the error.

        Raises:
            UpstreamLost, UpstreamTimeout: there is no answer for any of them.
        """
        if self.needs_weights and calls[0].path == wire.INFER:
            raise UpstreamLost(
                "the server was lost and may hold other weights since; it is asked again after a round"
            )
        bodies = [call.body for call in calls if call.body is not None]
        if not bodies:
            (call,) = calls
            answers = [await self._forward(call.method, call.path, call.raw, wire.MOST_CONTROL_BYTES)]
        else:
            num_requests = sum(call.num_requests for call in calls)
            most_bytes = most_infer_bytes(num_requests, bodies[0].max_tokens)
            raw = await asyncio.to_thread(merge, bodies)
            self._num_posts += 1
            answers = [await self._forward("POST", wire.INFER, raw, most_bytes)]
            if answers[0].is_good:
                try:
                    parts = await asyncio.to_thread(split, answers[0].body, bodies)
                    answers = [Answer(answers[0].status, part) for part in parts]
                except ProtocolError as error:
                    answers = [_error_answer(error)]
        if len(answers) < len(calls):
            _log.info("%d calls are asked one by one", len(calls))
            for call in calls:
                if not call.answer.done():
                    await self._serve([call])
            return
        for call, answer in zip(calls, answers, strict=True):
            if not call.answer.done():
                call.answer.set_result(answer)
        self.needs_weights &= not (calls[0].path == wire.PROCESS_WEIGHTS and answers[0].is_good)

    async def _forward(self, method: str, path: str, raw: bytes, most_bytes: int) -> Answer:
        """Whatever the server answers, also an error status. Raises UpstreamLost or UpstreamTimeout."""
        self._running = path
        before, now = self._status, "lost"
        try:
            reply = await self.upstream.call(
                method, path, raw, timeout_s=self.timeout_s, most_bytes=most_bytes + len(raw)
            )
            now = "ok"
            return reply
        except ServerFault as fault:
            if fault.kind is FaultKind.LATE:
                _log.warning("%s", fault)
                raise UpstreamTimeout(f"{fault}; upstream_timeout_s={self.timeout_s:g}") from fault
            if fault.kind is not FaultKind.UNUSABLE:  # else the server is there
                if before != "lost":
                    _log.warning("the server is lost, or not there yet: %s", fault)
                self.needs_weights |= self._has_answered
                waiting, self._waiting = self._waiting, []
                lost = UpstreamLost(str(fault))
                self._fail(waiting, lost)
                raise lost from fault
            now = "ok"
            return _error_answer(fault)
        finally:
            self._status, self._running = now, None
            self._has_answered |= now == "ok"


def _error_answer(error: Exception) -> Answer:
    """Status 500 and not 502, which says that the server is lost."""
    return Answer(500, json.dumps({"detail": str(error)}).encode())


# --- several bodies into one POST, and its reply into one for each caller --------------------------
def merge(bodies: Sequence[InferBody]) -> bytes:
    """The body of one POST for all of them, in order; it carries the first one's seed."""
    first = bodies[0]
    seed = {} if first.seed is None else {"seed": first.seed}
    config = {**first.rest["request_config"], **seed}
    requests = [request for body in bodies for request in body.requests]
    return json.dumps({**first.rest, "infer_requests": requests, "request_config": config}).encode()


def split(reply: bytes, bodies: Sequence[InferBody]) -> list[bytes]:
    """One reply per body, its outputs unchanged but for the POST's seed in ``rollout_infos``.

    Raises:
        ProtocolError: the reply is not a list with one object per request.
    """
    what = "an /infer/ reply"
    outputs = wire.read(list[dict[str, Any]], wire.parse_json(reply, what), what)
    num_requests = sum(len(body.requests) for body in bodies)
    if len(outputs) != num_requests:
        raise ProtocolError(f"{what} must hold {num_requests} outputs, got num_outputs={len(outputs)}")
    if (seed := bodies[0].seed) is not None:
        for output in outputs:
            infos = output.get("rollout_infos")
            output["rollout_infos"] = (infos if isinstance(infos, dict) else {}) | {"stage2": {"seed": seed}}
    rest = iter(outputs)
    return [json.dumps(list(islice(rest, len(body.requests)))).encode() for body in bodies]
