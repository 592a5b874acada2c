"""HTTP calls to one server: an answer or a ``ServerFault``, whatever the server does.

The only place that talks to rollout servers: ``ServerHttp`` on the caller's event loop, ``ServerSession`` for callers
that wait (weight sync and checks, never rollouts). One deadline holds for the whole call, and a call that is cancelled
closes its connection; every call has one of its own, so that an idle one that the server closed cannot be mistaken for
a server that was lost. No cookie is kept, no redirect followed, no proxy of the environment used, and the key is never
shown. Whatever a server says is data: the size limit holds for what arrives, no encoding is unfolded, and the charset
that it claims is ignored.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from swift_stage2 import wire
from swift_stage2.errors import ConfigError, FaultKind, ProtocolError, ServerFault
from swift_stage2.runtime.network import http_remedy
from swift_stage2.servers import vllm_serve
from swift_stage2.servers.batching import ExclusiveTask

_KEY_HINT = "; set the variable that rollout.api_key_env names to the server's key"
_REFUSED_KEYS = (401, 403)
_NOT_FOUND = 404
# States of our server's engine; others are its weights'
_OUT_OF_SERVICE = frozenset({"loading", "broken", "closed"})
_QUOTED_CHARACTERS = 500
_QUOTED_OF_STRANGERS = 120  # of what is no JSON: the page of another program
_CONNECT_TIMEOUT_S = 10.0
_STATUSES = range(200, 600)
_OK = 200
_JSON = "application/json"
_SHORTEST_TIMEOUT_S = 0.05

ReplyT = TypeVar("ReplyT")


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer of any status. ``body`` is as long as the caller's limit at most."""

    status: int
    body: bytes
    content_type: str = _JSON

    @property
    def is_good(self) -> bool:
        """Whether the server says that it did what was asked."""
        return self.status == _OK

    def quote(self, num_characters: int) -> str:
        """The body's beginning as one line that any log can hold."""
        text = " ".join(self.body[: 4 * num_characters].decode("utf-8", errors="replace").split())
        shown = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
        return shown if len(shown) <= num_characters else f"{shown[:num_characters]}…"


class CallLoop(asyncio.SelectorEventLoop):
    """An event loop that resolves each name on a thread of its own, so that nothing waits for a resolver that hangs."""

    async def getaddrinfo(self, host: Any, port: Any, **options: int) -> Any:
        """As asyncio's. Raises OSError or UnicodeError: there is no such name."""
        task = ExclusiveTask(partial(socket.getaddrinfo, host, port, **options))
        threading.Thread(target=task.run, name=f"resolves {host}", daemon=True).start()
        return await asyncio.wrap_future(task.future, loop=self)  # deadline: the call's


def run(work: Coroutine[Any, Any, ReplyT]) -> ReplyT:
    """The result of ``work``, for a caller without an event loop."""
    with asyncio.Runner(loop_factory=CallLoop) as runner:
        return runner.run(work)


class ServerHttp:
    """One server's address with its key, and the calls to it, which may run at once."""

    def __init__(self, base_url: str, *, api_key: str | None) -> None:
        if api_key and not (api_key.isascii() and api_key.isprintable() and " " not in api_key):
            raise ConfigError(
                "the API key must be printable ASCII without spaces", remedy="check rollout.api_key_env"
            )
        self.base_url = base_url.rstrip("/")
        self._api_key = api_key
        self._headers = {
            "Content-Type": _JSON,
            "Accept-Encoding": "identity",
            "User-Agent": "swift-stage2",
        }
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        # Loading certificates that plain HTTP never uses takes 40 ms.
        is_https = urlsplit(self.base_url).scheme == "https"
        self._tls = httpx.create_ssl_context(verify=is_https, trust_env=False)

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        timeout_s: float,
        most_bytes: int,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """The JSON of a good answer, which may have ``most_bytes`` beyond those that were sent: servers echo.

        Raises:
            ServerFault: there is none. Of an answer with another status it carries status and record.
        """
        content = b"" if body is None else json.dumps(body).encode()
        answer = await self.call(
            method, path, content, timeout_s=timeout_s, most_bytes=most_bytes + len(content), headers=headers
        )
        try:
            record = wire.parse_json(answer.body)
        except ProtocolError as error:
            if answer.is_good:
                text = f"the reply is not JSON: {answer.quote(_QUOTED_OF_STRANGERS)!r} ({error})"
                raise self._fault(path, text, FaultKind.UNUSABLE) from error
            record = None
        if answer.is_good:
            return record
        refuses_key = answer.status in _REFUSED_KEYS
        quoted = answer.quote(_QUOTED_OF_STRANGERS if record is None else _QUOTED_CHARACTERS)
        text = f"status {answer.status}: {quoted}{_KEY_HINT if refuses_key else ''}"
        raise self._fault(
            path, text, FaultKind.STATUS, status=answer.status, record=record, refuses_key=refuses_key
        )

    async def call(
        self,
        method: str,
        path: str,
        content: bytes,
        *,
        timeout_s: float,
        most_bytes: int,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """A whole answer of any status.

        Raises:
            ServerFault: no answer by the deadline, or none that HTTP or ``most_bytes`` allows.
        """
        connected: list[socket.socket] = []

        async def trace(event: str, info: Mapping[str, Any]) -> None:
            if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
                connected.append(info["return_value"].get_extra_info("socket"))

        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_TIMEOUT_S))
        try:
            async with asyncio.timeout(timeout_s):  # httpx limits each read, this the whole call
                request = httpx.Request(
                    method,
                    f"{self.base_url}{path}",
                    headers={**self._headers, **(headers or {})},
                    content=content,
                    extensions={"timeout": timeout.as_dict(), "trace": trace},
                )
                answer = await self._answer(request, most_bytes)
                connected.clear()
                return answer
        except (TimeoutError, ProtocolError, httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            # The last is the resolver's word for a host name that is none.
            raise self._fault_of(path, error, timeout_s, is_connected=bool(connected)) from error
        finally:
            for each in connected:  # a process that was forked meanwhile holds it open as well
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def read(self, path: str, parse: Callable[[Any], ReplyT], reply: Any) -> ReplyT:
        """An answer of ``path`` as ``parse`` reads it. Raises ServerFault for what the wire has not."""
        try:
            return parse(reply)
        except ProtocolError as error:
            raise self._fault(path, str(error), FaultKind.UNUSABLE) from error

    def without_key(self, text: str) -> str:
        """``text`` as it may be shown: a server may quote the header that it refuses."""
        return text.replace(self._api_key, "***") if self._api_key else text

    async def _answer(self, request: httpx.Request, most_bytes: int) -> Answer:
        """Reads to the end, or to the first byte over ``most_bytes``.

        Raises:
            ProtocolError: a status that says nothing, an encoding not asked for, or an answer that is too long.
        """
        # A transport and not a client: that one keeps cookies.
        async with aclosing(httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False)) as transport:
            response = await transport.handle_async_request(request)
            assert isinstance(response.stream, httpx.AsyncByteStream)
            async with aclosing(response.stream) as stream:
                if response.status_code not in _STATUSES:
                    raise ProtocolError(
                        f"an answer must have a status from 200 to 599, got status={response.status_code}"
                    )
                encoding = response.headers.get("Content-Encoding", "")
                if encoding.strip().lower() not in ("", "identity"):  # few bytes can become many
                    raise ProtocolError(
                        f"an answer must be as it is, got content_encoding={encoding[:40]!r}; is a proxy in between?"
                    )
                body = bytearray()
                async for chunk in stream:
                    body += chunk
                    if len(body) > most_bytes:
                        raise ProtocolError(
                            f"an answer must have at most {most_bytes} bytes for what was asked, got more; its rest "
                            "was not read"
                        )
        is_json = response.headers.get("Content-Type", "").partition(";")[0].strip().lower() == _JSON
        return Answer(response.status_code, bytes(body), _JSON if is_json else "text/plain")

    def _fault_of(self, path: str, error: Exception, timeout_s: float, *, is_connected: bool) -> ServerFault:
        """Why there is no answer."""
        late = f"no whole answer in time, got timeout_s={timeout_s:.3f}"
        match error:
            case httpx.ConnectError() | httpx.ConnectTimeout() | httpx.InvalidURL() | UnicodeError():
                system, said = _system_error(error), str(error)
                if system is not None and not isinstance(system, socket.gaierror):
                    said = f"[Errno {system.errno}] {os.strerror(system.errno or 0)}"
                remedy = f"; {http_remedy(system)}" if system is not None else ""
                return self._fault(path, f"{type(error).__name__}: {said}{remedy}", FaultKind.UNREACHABLE)
            case TimeoutError() if not is_connected:
                return self._fault(path, late, FaultKind.UNREACHABLE)
            case TimeoutError() | httpx.TimeoutException():
                return self._fault(path, late, FaultKind.LATE)
            case ProtocolError():
                return self._fault(path, str(error), FaultKind.UNUSABLE)
            case _:
                return self._fault(path, f"{type(error).__name__}: {error}", FaultKind.LOST)

    def _fault(self, path: str, text: str, kind: FaultKind, **facts: Any) -> ServerFault:
        return ServerFault(self.without_key(f"{self.base_url}{path}: {text}"), kind=kind, **facts)


class Deadline:
    """A moment by which everything given it has to end."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def remaining_s(self) -> float:
        """Seconds left, never less than a small positive number, so that it is always a valid timeout."""
        return max(_SHORTEST_TIMEOUT_S, self._end - self._clock())

    @property
    def expired(self) -> bool:
        return self._clock() >= self._end


class ServerSession(ServerHttp):
    """Control calls to one server, JSON in and checked JSON out, each waited for; as a context it holds nothing."""

    def __init__(self, base_url: str, api_key: str | None = None, *, must_be_ours: bool = False) -> None:
        """``must_be_ours``: the server was ours before, so that an answer as a stock one gives it is a fault."""
        super().__init__(base_url, api_key=api_key)
        self._must_be_ours = must_be_ours

    def __enter__(self) -> ServerSession:
        return self

    def __exit__(self, *_: object) -> None: ...

    @property
    def host(self) -> str:
        """Host name or address of the server, without brackets."""
        return urlsplit(self.base_url).hostname or ""

    def info(self, deadline: Deadline) -> wire.ServerInfo:
        """The server's word of itself. A server that knows no ``/stage2/`` path is a plain vLLM or a stock one.

        Raises:
            ServerFault: unreachable, an error status, a reply that is not what the wire allows, an engine that cannot
                be asked (still loading, broken or closed), or a stock answer of a server that must be ours.
        """
        try:
            reply = self.get(wire.SERVER_INFO, deadline)
        except ServerFault as fault:
            if fault.status != _NOT_FOUND:
                raise
            if self._must_be_ours:
                raise ServerFault(
                    f"{fault}: a server that was ours in this run must stay ours; start swift-stage2 rollout there",
                    kind=FaultKind.STATUS,
                ) from fault
            return vllm_serve.find_info(self, deadline) or wire.ServerInfo(stock=True)
        info = self.read(wire.SERVER_INFO, wire.ServerInfo.from_json, reply)
        if info.state in _OUT_OF_SERVICE:
            raise ServerFault(
                f"{self.base_url}{wire.SERVER_INFO}: the server's engine must be ready, got state={info.state}"
            )
        return info

    def get(self, path: str, deadline: Deadline) -> Any:
        """Body of a GET. Raises ServerFault as ``info`` does."""
        return self._ask_now("GET", path, None, deadline)

    def post(
        self, path: str, body: Any, deadline: Deadline, *, headers: Mapping[str, str] | None = None
    ) -> Any:
        """Body of a POST's reply. Raises ServerFault as ``info`` does."""
        return self._ask_now("POST", path, body, deadline, headers)

    def _ask_now(
        self, method: str, path: str, body: Any, deadline: Deadline, headers: Mapping[str, str] | None = None
    ) -> Any:
        timeout_s, most_bytes = deadline.remaining_s(), wire.MOST_CONTROL_BYTES
        return run(self.ask(method, path, body, timeout_s=timeout_s, most_bytes=most_bytes, headers=headers))


def reset_cache(session: ServerSession, path: str, deadline: Deadline) -> bool:
    """Whether the server says that it emptied that cache. It answers once earlier commands have run."""
    return session.read(path, wire.parse_cache_reset, session.post(path, {}, deadline))


def _system_error(error: BaseException | None) -> OSError | None:
    """The operating system's word below httpx and below what that is built on; each keeps the one before.

    Of a name with several addresses the first one's counts.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error
        below = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else None
        error = below or error.__cause__ or error.__context__
    return None
