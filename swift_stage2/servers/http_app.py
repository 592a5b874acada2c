"""The HTTP side that rollout server and merger share: application, bodies, callers that leave, socket and process.

A body is bounded before it is held; what is wrong with a call is one line, whatever was sent. The port is bound
exactly, and work ends before connections are waited for.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from swift_stage2 import wire
from swift_stage2.errors import (
    EngineUnavailable,
    InstallFailed,
    ProtocolError,
    RequestTooLarge,
    Stage2Error,
    UpstreamLost,
    UpstreamTimeout,
    UserError,
    WeightsRefused,
)
from swift_stage2.runtime.network import is_loopback
from swift_stage2.servers.infer_wire import FailedRequest, FailedRequests

_log = logging.getLogger(__name__)
_LISTEN_BACKLOG = 128
_KEEP_ALIVE_S = 120
SHUTDOWN_GRACE_S = 5
"""For open calls, once the server was asked to end."""
_LONGEST_DETAIL = 1000  # a message may quote what was sent
_UPLOAD_TIMEOUT_S = 300.0
_HELD_BODIES = 4  # of the largest size
_DRAINED_BODIES = 8
_NO_ROOM = "the bodies of other calls fill the room for them; ask again later"
_STATUSES: Mapping[type[Exception], int] = {
    RequestTooLarge: 413,
    ProtocolError: 422,
    WeightsRefused: 409,
    InstallFailed: 500,
    UpstreamLost: 502,
    EngineUnavailable: 503,
    UpstreamTimeout: 504,
}

ResultT = TypeVar("ResultT")


def make_app(
    routes: Mapping[tuple[str, str], Callable[..., Any]],
    health: Callable[[], Awaitable[Response]],
    api_key: str | None,
) -> FastAPI:
    """An application of ``routes``, by method and path, and ``/health/``, which alone wants no ``api_key``."""
    # A redirect to the path with its slash would name the host that the caller gave.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    router = APIRouter(dependencies=[Depends(bearer_check(api_key))] if api_key else [])
    for (method, path), handler in routes.items():
        router.add_api_route(path, handler, methods=[method], response_model=None)
    app.include_router(router)
    for path in (wire.HEALTH, wire.HEALTH.rstrip("/")):
        app.add_api_route(path, health, methods=["GET"], response_model=None)
    app.add_exception_handler(Stage2Error, _one_line)
    app.add_exception_handler(ClientDisconnect, lambda *_: Response(status_code=408))  # nobody reads it
    return app


def _one_line(_: Request, error: Exception) -> JSONResponse:
    status = next((status for kind, status in _STATUSES.items() if isinstance(error, kind)), 500)
    reason = {"reason": error.reason} if isinstance(error, WeightsRefused) else {}
    return JSONResponse({"detail": " ".join(str(error)[:_LONGEST_DETAIL].splitlines()), **reason}, status)


def failed_requests(causes: Mapping[int, BaseException], num_requests: int) -> JSONResponse:
    """The answer to an ``/infer/`` call that names the requests at fault by their places."""
    failures = tuple(FailedRequest(place, _cause(error)) for place, error in sorted(causes.items()))
    detail = f"request {failures[0].index} of {num_requests} cannot be answered: {failures[0].cause}"
    return JSONResponse(FailedRequests(failures, detail).to_json(), 500)


def _cause(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    cause = f"{type(error).__name__}: {lines[0] if lines else ''}".removeprefix("SampleError: ")
    return cause[:_LONGEST_DETAIL]


def bearer_check(api_key: str) -> Callable[[Request], Awaitable[None]]:
    """A dependency for routes that answers 401 unless the key comes as a bearer token."""
    expected = f"Bearer {api_key}".encode()

    # On the event loop: in a thread of the pool, a call could overtake the one that was read just before it.
    async def check(request: Request) -> None:
        given = request.headers.get("Authorization", "").encode()
        if not secrets.compare_digest(given, expected):
            raise HTTPException(401, "send the server's key as a bearer token")

    return check


async def attend(request: Request, work: asyncio.Future[Any]) -> None:
    """Returns once ``work`` has ended; a call's body must have been read.

    Raises:
        ClientDisconnect: the caller who asked for it has gone before that.
    """
    gone = asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)  # deadline: the work's own
        if gone.done() and not work.done():
            raise ClientDisconnect
    finally:
        gone.cancel()


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue  # a body that nobody asked for


def retrieve(work: asyncio.Future[Any]) -> None:
    """Looks at the end of work that nobody waits for any more: asyncio logs a traceback otherwise."""
    if not work.cancelled():
        work.exception()


async def run_attended(
    request: Request, pool: Executor, call: Callable[[threading.Event], ResultT]
) -> ResultT:
    """The result of ``call``, on a thread of ``pool``, for as long as the caller who asked for it is there.

    A call that waits for its turn when its caller goes is never begun; one that has begun is told by the event that it
    gets, and ends its waits. Raises ClientDisconnect as ``attend`` does.
    """
    if await request.is_disconnected():  # while its body was read, or while it waited
        raise ClientDisconnect
    given_up = threading.Event()
    work = asyncio.ensure_future(asyncio.get_running_loop().run_in_executor(pool, call, given_up))
    work.add_done_callback(retrieve)
    try:
        await attend(request, work)
        return work.result()  # deadline: it has ended
    finally:
        given_up.set()
        work.cancel()  # the pool leaves out what has not begun


class BodyLimit:
    """How long a body may be, and how many bytes of bodies are held at once. Of the event loop alone."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._free_bytes = _HELD_BODIES * max_bytes

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytearray]:
        """The whole body, which takes room until the end of the context.

        The rest of a refused body is read and forgotten, so that the caller hears of the refusal; it takes no room.

        Raises:
            RequestTooLarge: it is too long.
            HTTPException: 429, other bodies fill the room, which says nothing of this one; 408, it came too late.
            ClientDisconnect: the caller has gone.
        """
        held = bytearray()
        try:
            await self._fill(held, request)
            yield held
        finally:
            self._free_bytes += len(held)

    async def _fill(self, held: bytearray, request: Request) -> None:
        num_bytes = 0
        refusal: Exception | None = None
        try:
            async with asyncio.timeout(_UPLOAD_TIMEOUT_S):
                async for chunk in request.stream():
                    num_bytes += len(chunk)
                    if num_bytes > self._max_bytes:
                        refusal = RequestTooLarge(
                            f"a body may have {self._max_bytes:,} bytes, got more; send fewer requests at once, or "
                            "start the server with a higher --max-body-mib"
                        )
                    elif len(chunk) > self._free_bytes:
                        refusal = HTTPException(429, _NO_ROOM, {"Retry-After": "1"})
                    if refusal is None:
                        self._free_bytes -= len(chunk)
                        held += chunk
                        continue
                    self._free_bytes += len(held)
                    held.clear()
                    if num_bytes > _DRAINED_BODIES * self._max_bytes:
                        break
        except TimeoutError as error:
            raise HTTPException(408, f"a body must arrive within {_UPLOAD_TIMEOUT_S:g} s") from error
        if refusal is not None:
            raise refusal


class HttpServer(uvicorn.Server):
    """uvicorn that ends the work behind ``app`` before it waits for open connections."""

    def __init__(self, app: FastAPI, end_work: Callable[[], object]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
                timeout_keep_alive=_KEEP_ALIVE_S,
            )
        )
        self._end_work = end_work

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._end_work()
        await super().shutdown(sockets)

    def serve_on(self, listener: socket.socket) -> None:
        """Returns after SIGTERM, Ctrl-C or ``should_exit``; on the process's main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            # uvicorn raises the signal again when it has shut down; the exit status stays ours.
            signal.signal(number, lambda *_: setattr(self, "should_exit", True))
        self.run(sockets=[listener])


def bind(host: str, port: int) -> socket.socket:
    """A listening socket on exactly that address; port 0 takes any. Raises UserError when it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only where a listener names its protocol; a kept connection's answers took 43 ms, not 3.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_LISTEN_BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise UserError(
            f"the server cannot listen on {host}:{port}: {error}",
            remedy="choose a free --port, and a --host that is this machine's: 127.0.0.1, or 0.0.0.0 for every network",
        ) from error
    return listener


def configure_logging() -> None:
    """Handlers of our own: ms-swift silences the root logger's."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("swift_stage2", "uvicorn"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        logger.propagate = False


def require_key(listener: socket.socket, api_key: str | None, *, is_insecure: bool) -> None:
    """Raises UserError, or warns of it if that is wanted: others reach ``listener``, and no key is wanted of them."""
    host = listener.getsockname()[0]
    if api_key is not None or is_loopback(host):
        return
    if not is_insecure:
        raise UserError(
            "whoever reaches a server without a key can replace its weights",
            got=f"one that listens on {host}",
            remedy="set the variable named by --api-key-env, listen on 127.0.0.1, or add --insecure",
        )
    _log.warning("listening on %s without a key: whoever reaches this port can replace the weights", host)
