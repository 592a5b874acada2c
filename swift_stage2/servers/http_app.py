"""The HTTP side that rollout server and merger share: application, bodies, callers that leave, socket and process.

A body is bounded before it is held and again before it is decoded; what is wrong with it is a ProtocolError in one
line, whatever was sent. The port is bound exactly, and work ends before connections are waited for.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import re
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

from swift_stage2.errors import EngineUnavailable, ProtocolError, RequestTooLarge, UserError
from swift_stage2.runtime.network import is_loopback
from swift_stage2.servers import protocol
from swift_stage2.servers.wire_record import LARGEST_INTEGER

_log = logging.getLogger(__name__)
_LISTEN_BACKLOG = 128
_KEEP_ALIVE_S = 120
SHUTDOWN_GRACE_S = 5
"""For open calls, once the server was asked to end."""
_LONGEST_DETAIL = 1000  # a message may quote what was sent
_MAX_VALUES = (
    1_000_000  # of one body; each costs a decoder about 100 bytes and 100 ns that nothing can interrupt
)
_DRAINED_IN_LIMITS = 8
_LONG_INTEGER = re.compile(rb"\d{19}")

ResultT = TypeVar("ResultT")


def make_app(
    routes: Mapping[tuple[str, str], Callable[..., Any]],
    health: Callable[[], Awaitable[Response]],
    api_key: str | None,
    statuses: Mapping[type[Exception], int],
) -> FastAPI:
    """An application of ``routes``, by method and path, and ``/health/``, which alone wants no ``api_key``.

    An error of ``statuses`` is answered with its message; so are bodies that are none (422) or too large (413).
    """
    # A redirect to the path with its slash would name the host that the caller gave.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    router = APIRouter(dependencies=[Depends(bearer_check(api_key))] if api_key else [])
    for (method, path), handler in routes.items():
        router.add_api_route(path, handler, methods=[method], response_model=None)
    app.include_router(router)
    for path in (protocol.HEALTH, protocol.HEALTH.rstrip("/")):
        app.add_api_route(path, health, methods=["GET"], response_model=None)
    of_bodies: dict[type[Exception], int] = {ProtocolError: 422, RequestTooLarge: 413}
    for kind, status in {**of_bodies, **statuses}.items():
        app.add_exception_handler(kind, _answer(status))
    app.add_exception_handler(ClientDisconnect, lambda *_: Response(status_code=408))  # nobody reads it
    return app


def _answer(status: int) -> Callable[[Request, Exception], JSONResponse]:
    def answer(_: Request, error: Exception) -> JSONResponse:
        body = {"detail": " ".join(str(error)[:_LONGEST_DETAIL].splitlines())}
        if reason := getattr(error, "reason", None):
            body["reason"] = reason
        return JSONResponse(body, status)

    return answer


def failed_requests(causes: Mapping[int, BaseException], num_requests: int) -> JSONResponse:
    """The answer to an ``/infer/`` call that names the requests at fault by their places."""
    failures = [{"index": place, "cause": _cause(error)} for place, error in sorted(causes.items())]
    first = failures[0]
    detail = f"request {first['index']} of {num_requests} cannot be answered: {first['cause']}"
    return JSONResponse({"detail": detail, "failures": failures}, 500)


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


async def until_gone(request: Request) -> None:
    """Returns when the caller has closed its connection; its body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        continue  # a body that nobody asked for


def retrieve(work: asyncio.Future[Any]) -> None:
    """Looks at the end of work that nobody waits for any more: asyncio logs a traceback otherwise."""
    if not work.cancelled():
        work.exception()


async def while_attended(
    request: Request, pool: Executor, call: Callable[[threading.Event], ResultT]
) -> ResultT:
    """The result of ``call``, on a thread of ``pool``, for as long as the caller who asked for it is there.

    A call that waits for its turn when its caller goes is never begun; one that has begun is told by the event that it
    gets, and ends its waits.

    Raises:
        EngineUnavailable: the caller has gone.
    """
    if await request.is_disconnected():  # while its body was read, or while it waited
        raise EngineUnavailable("the caller has gone; nothing is begun")
    given_up = threading.Event()
    waiting = [call]  # taken out when its turn comes, or when nobody waits for it: it may hold a body
    job = pool.submit(lambda: waiting.pop()(given_up))
    work: asyncio.Future[Any] = asyncio.wrap_future(job)
    work.add_done_callback(retrieve)
    gone: asyncio.Future[Any] = asyncio.create_task(until_gone(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise EngineUnavailable("the caller has gone; nothing is waited for")
        result: ResultT = work.result()  # deadline: it has ended
        return result
    finally:
        given_up.set()
        if job.cancel():  # it has not begun; the pool forgets it at its turn only
            waiting.clear()
        work.cancel()
        gone.cancel()


class BodyRoom:
    """How many bytes of bodies are held at once, until their contexts end. Of the event loop alone."""

    def __init__(self, max_bytes: int) -> None:
        self._free_bytes = max_bytes

    @asynccontextmanager
    async def body(self, request: Request, max_bytes: int, timeout_s: float) -> AsyncIterator[bytes]:
        """The whole body; its room is free again at the end of the context.

        The rest of a refused body is read and forgotten, so that the caller hears of the refusal; it takes no room.

        Raises:
            RequestTooLarge: more than ``max_bytes``.
            HTTPException: 429, other bodies fill the room, which says nothing of this one; 408, it did not arrive
                within ``timeout_s``.
            ClientDisconnect: the caller has gone.
        """
        held, num_bytes, num_taken, fits = bytearray(), 0, 0, True
        try:
            try:
                async with asyncio.timeout(timeout_s):
                    async for chunk in request.stream():
                        num_bytes += len(chunk)
                        if fits := fits and num_bytes <= max_bytes and len(chunk) <= self._free_bytes:
                            self._free_bytes -= len(chunk)
                            num_taken += len(chunk)
                            held += chunk
                        elif num_bytes > _DRAINED_IN_LIMITS * max_bytes:
                            break
                        else:
                            self._free_bytes += num_taken
                            num_taken = 0
                            held.clear()
            except TimeoutError as error:
                raise HTTPException(408, f"a body must arrive within {timeout_s:g} s") from error
            if num_bytes > max_bytes:
                raise RequestTooLarge(
                    f"a body may have {max_bytes:,} bytes, got {num_bytes:,} or more; send fewer requests at once, or "
                    "start the server with a higher --max-body-mib"
                )
            if not fits:
                raise HTTPException(
                    429,
                    "the bodies of other calls fill the room for them; ask again later",
                    {"Retry-After": "1"},
                )
            yield _moved(held)
        finally:
            self._free_bytes += num_taken


def _moved(held: bytearray) -> bytes:
    """The content, which nothing here holds any more."""
    raw = bytes(held)
    held.clear()
    return raw


def parse_json(raw: bytes) -> Any:
    """The value of a body.

    Raises:
        ProtocolError: as ``protocol.parse_json`` does, or an integer that no field takes.
        RequestTooLarge: more values than any call of the wire has.
    """
    if sum(raw.count(mark) for mark in (b",", b"[", b"{")) > _MAX_VALUES:
        raise RequestTooLarge(
            f"a body may hold {_MAX_VALUES:,} values, got more; send fewer requests at once"
        )
    value = protocol.parse_json(raw, "the body")
    if _LONG_INTEGER.search(raw):  # most often in a picture's text
        json.loads(raw, parse_int=_check_integer)
    return value


def _check_integer(text: str) -> None:
    if len(text) > 20 or abs(int(text)) > LARGEST_INTEGER:
        raise ProtocolError(f"a number of the body must be at most {LARGEST_INTEGER}, got {text[:40]}")


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
            f"the server cannot listen on {host}:{port}: {error}", remedy=_remedy(error)
        ) from error
    return listener


def _remedy(error: Exception) -> str:
    if isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
        return (
            "--host must be an address of this machine: 127.0.0.1 for itself alone, 0.0.0.0 for every network"
        )
    if getattr(error, "errno", None) == errno.EACCES:
        return "ports below 1024 belong to the system: write a --port of 1024 or more"
    if isinstance(error, OverflowError):
        return "--port must be in the range 0..65535"
    return "choose a free --port"


def configure_logging() -> None:
    """Handlers of our own: ms-swift silences the root logger's."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("swift_stage2", "uvicorn"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        logger.propagate = False


def refuse_open(listener: socket.socket, api_key: str | None) -> None:
    """Raises UserError: others than this machine can reach ``listener``, and no key is wanted."""
    if api_key is None and not is_loopback(host := listener.getsockname()[0]):
        raise UserError(
            "whoever reaches a server without a key can replace its weights",
            got=f"one that listens on {host}",
            remedy="set the variable named by --api-key-env, listen on 127.0.0.1, or add --insecure",
        )


def warn_when_open(host: str, api_key: str | None) -> None:
    """Logs a warning when others than this machine can reach ``host`` and no key is wanted."""
    if api_key is None and not is_loopback(host):
        _log.warning(
            "listening on %s without a key: whoever reaches this port can replace the weights; set the "
            "variable named by --api-key-env, or listen on 127.0.0.1",
            host,
        )
