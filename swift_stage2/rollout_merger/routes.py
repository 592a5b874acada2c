"""The paths of stock ``swift rollout``: each call is queued as it came, and its answer goes back as it came.

Decides who is still there, a caller that closes its connection is forgotten, and refuses what may not reach a server
that opens what it is told to: 413 too large, 422 no JSON, 500 naming the requests at fault. Other statuses of its own:
502 the server behind is lost, 504 it did not answer in time, 408 a body that did not arrive in time, 429 no room for
it now.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from swift_stage2.errors import ProtocolError, UpstreamLost, UpstreamTimeout
from swift_stage2.rollout_merger.dispatcher import Dispatcher, InferPart
from swift_stage2.rollout_merger.merged_post import InferBody, mergeable
from swift_stage2.servers import protocol
from swift_stage2.servers.batching import ExclusiveTask
from swift_stage2.servers.http_app import (
    BodyRoom,
    failed_requests,
    make_app,
    parse_json,
    retrieve,
    until_gone,
)
from swift_stage2.servers.request_checks import RequestLimits, check_conversations

_UPLOAD_TIMEOUT_S = 60.0
_DECODING_THREADS = 2
_HELD_IN_BODIES = 4  # bodies of the largest size that are not answered yet
_LOOK_S = 60.0  # how often a wait is taken up again; it ends with the call or with its caller

GET_PATHS = (protocol.WORLD_SIZE, protocol.STATE_KEYS, protocol.WEIGHT_SUMS)
POST_PATHS = (
    protocol.WEIGHT_SUMS,
    protocol.ENGINE_TYPE,
    protocol.INIT_COMMUNICATOR,
    protocol.UPDATE_FLATTENED_PARAMS,
    protocol.UPDATE_NAMED_PARAM,
    "/update_adapter_flattened_param/",
    "/update_adapter_param/",
    protocol.PROCESS_WEIGHTS,
    protocol.RESET_PREFIX_CACHE,
    protocol.RESET_ENCODER_CACHE,
    protocol.RESET_MM_CACHE,
    protocol.CLOSE_COMMUNICATOR,
)


def create_app(
    dispatcher: Dispatcher,
    api_key: str | None = None,
    *,
    limits: RequestLimits | None = None,
) -> FastAPI:
    """The application. With an ``api_key`` every route but ``/health/`` wants it as a bearer token."""
    routes = _MergerRoutes(dispatcher, limits or RequestLimits())
    table: dict[tuple[str, str], Callable[..., Any]] = {
        ("POST", protocol.INFER): routes.infer,
        **{("GET", path): routes.control for path in GET_PATHS},
        **{("POST", path): routes.control for path in POST_PATHS},
    }
    return make_app(table, routes.health, api_key, {UpstreamLost: 502, UpstreamTimeout: 504})


class _MergerRoutes:
    def __init__(self, dispatcher: Dispatcher, limits: RequestLimits) -> None:
        self._limits = limits
        self._decoders = ThreadPoolExecutor(_DECODING_THREADS, thread_name_prefix="decode")
        self._dispatcher = dispatcher
        self._uploads: set[asyncio.Future[None]] = set()
        # Apart: the calls that settle and end a round must not wait for rollouts.
        self._room, self._control_room = (BodyRoom(_HELD_IN_BODIES * limits.body_bytes) for _ in range(2))

    async def health(self) -> JSONResponse:
        body = self._dispatcher.health()
        return JSONResponse(body, 200 if body["status"] in ("ok", "untried") else 503)

    async def infer(self, request: Request) -> Response:
        arrival = asyncio.get_running_loop().create_future()
        self._uploads.add(arrival)
        async with contextlib.AsyncExitStack() as room:  # until it is answered: what is queued is as large
            try:
                call = await asyncio.get_running_loop().run_in_executor(
                    self._decoders,
                    self._read,
                    await room.enter_async_context(self._body(request, self._room)),
                )
                if isinstance(call, Response):
                    return call
                item = (
                    self._dispatcher.control("POST", protocol.INFER, call)
                    if isinstance(call, bytes)
                    else self._dispatcher.infer(call)
                )
            finally:
                self._uploads.discard(arrival)
                arrival.set_result(None)
            return await self._answer(item, request)

    async def control(self, request: Request) -> Response:
        # A request that began to arrive before this call is queued before it: its caller may have given up meanwhile,
        # and counts on this call to come back only when nothing of it can start any more.
        earlier = tuple(self._uploads)
        async with self._body(request, self._control_room) as raw:
            if earlier:
                await asyncio.wait(earlier, timeout=_UPLOAD_TIMEOUT_S)
            item = self._dispatcher.control(request.method, request.url.path, raw)
            return await self._answer(item, request)

    def _body(self, request: Request, room: BodyRoom) -> AbstractAsyncContextManager[bytes]:
        return room.body(request, self._limits.body_bytes, _UPLOAD_TIMEOUT_S)

    def _read(self, raw: bytes) -> InferBody | bytes | Response:
        """A part, the body of a call that goes alone, or the answer to one that a server which opens what it is told to
        must not see. In a thread: it may take seconds.

        Raises:
            ProtocolError: no JSON, or larger than allowed.
        """
        record = parse_json(raw)
        conversations = record.get("infer_requests") if isinstance(record, dict) else None
        if isinstance(record, dict) and record.get("adapter_request") is not None:
            raise ProtocolError("the server's own weights are asked only, got adapter_request; leave it out")
        if isinstance(conversations, list):
            if faults := check_conversations(conversations, self._limits):
                return failed_requests(faults, len(conversations))
            if body := mergeable(record):
                return body
        return json.dumps(record).encode()  # as it was read here, whatever else its bytes might mean

    async def _answer(self, item: InferPart | ExclusiveTask, request: Request) -> Response:
        answer = asyncio.wrap_future(item.future)
        answer.add_done_callback(retrieve)
        gone = asyncio.ensure_future(until_gone(request))
        try:
            waiting: set[asyncio.Future[object]] = {answer, gone}  # type: ignore[arg-type]
            while not answer.done() and not gone.done():
                await asyncio.wait(waiting, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                self._dispatcher.forget(item, request.url.path)
                return Response(status_code=408)  # nobody reads it
            reply = item.future.result(timeout=0)
        finally:
            gone.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await gone
        return Response(reply.body, reply.status, media_type=reply.content_type)
