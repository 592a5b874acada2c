"""HTTP calls to one server: an answer or a ``ServerFault``, whatever the server does.

The only place that talks to rollout servers. One deadline holds for the whole call; every call has a connection of
its own, so that an idle one that the server closed cannot be mistaken for a server that was lost. No cookie is kept,
no redirect followed, no proxy of the environment used, and the key is never shown. Whatever a server says is data:
the size limit holds for what arrives, no encoding is unfolded, and the charset that it claims is ignored. Used by
the rollout client, the control session and the merger.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from swift_stage2 import wire
from swift_stage2.errors import ConfigError, FaultKind, ProtocolError, ServerFault
from swift_stage2.runtime.network import http_remedy

_KEY_HINT = "; set the variable that rollout.api_key_env names to the server's key"
_REFUSED_KEYS = (401, 403)
_QUOTED_CHARACTERS = 500
_QUOTED_OF_STRANGERS = 120  # of what is no JSON: the page of another program
_CONNECT_TIMEOUT_S = 10.0
# httpx raises these, and the resolver the last for a host name that is none.
FOREIGN_ERRORS = (httpx.HTTPError, httpx.InvalidURL, UnicodeError)
_STATUSES = range(200, 600)
_OK = 200
NOT_WAITED_FOR = "the answer is not waited for any more"
_JSON = "application/json"

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

    def record(self) -> Any:
        """The body as JSON. Raises ProtocolError: it is none."""
        return wire.parse_json(self.body)

    def quote(self, num_characters: int) -> str:
        """The body's beginning as one line that any log can hold."""
        text = " ".join(self.body[: 4 * num_characters].decode("utf-8", errors="replace").split())
        shown = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
        return shown if len(shown) <= num_characters else f"{shown[:num_characters]}…"


class CuttableCall:
    """A call that another thread can end: httpx limits each read, this the whole call.

    Learns the call's socket from httpx's ``trace`` extension and shuts it down, whatever the reading thread waits for.
    The first cause is kept; a finished call is left alone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._cause: FaultKind | None = None
        self._finished = False

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """For httpx's ``extensions={"trace": ...}``."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            with self._lock:
                self._socket = info["return_value"].get_extra_info("socket")
                self._shut_if_cut()

    def cut(self, cause: FaultKind) -> None:
        """Ends the call; may come from any thread."""
        with self._lock:
            if not self._finished and self._cause is None:
                self._cause = cause
                self._shut_if_cut()

    def finish(self) -> FaultKind | None:
        """Marks the call as over and says what it was cut for, if it was."""
        with self._lock:
            self._finished = True
            return self._cause

    def _shut_if_cut(self) -> None:
        if self._cause is not None and self._socket is not None:
            with suppress(OSError):  # the peer may have closed it already
                self._socket.shutdown(socket.SHUT_RDWR)


class ServerAddress:
    """One server's address with its key: what every call to it has in common."""

    def __init__(
        self, base_url: str, *, api_key: str | None, connect_timeout_s: float = _CONNECT_TIMEOUT_S
    ) -> None:
        if api_key and not (api_key.isascii() and api_key.isprintable() and " " not in api_key):
            raise ConfigError(
                "the API key must be printable ASCII without spaces", remedy="check rollout.api_key_env"
            )
        self.base_url = base_url.rstrip("/")
        self._api_key = api_key
        self._connect_timeout_s = connect_timeout_s
        self._headers = {
            "Content-Type": _JSON,
            "Accept-Encoding": "identity",
            "User-Agent": "swift-stage2",
        }
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    @property
    def is_https(self) -> bool:
        """Loading certificates that plain HTTP never uses takes 40 ms."""
        return urlsplit(self.base_url).scheme == "https"

    def request(
        self,
        method: str,
        path: str,
        content: bytes,
        timeout_s: float,
        *,
        headers: Mapping[str, str],
        extensions: Mapping[str, Any],
    ) -> httpx.Request:
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, self._connect_timeout_s))
        return httpx.Request(
            method,
            f"{self.base_url}{path}",
            headers={**self._headers, **headers},
            content=content,
            extensions={"timeout": timeout.as_dict(), **extensions},
        )

    def record_of(self, path: str, answer: Answer) -> Any:
        """The JSON of a good answer. Raises ServerFault: it is no good one; with its status and record."""
        try:
            record = answer.record()
        except ProtocolError as error:
            if answer.is_good:
                text = f"the reply is not JSON: {answer.quote(_QUOTED_OF_STRANGERS)!r} ({error})"
                raise self.fault(path, text, FaultKind.UNUSABLE) from error
            record = None
        if answer.is_good:
            return record
        refuses_key = answer.status in _REFUSED_KEYS
        quoted = answer.quote(_QUOTED_OF_STRANGERS if record is None else _QUOTED_CHARACTERS)
        text = f"status {answer.status}: {quoted}{_KEY_HINT if refuses_key else ''}"
        raise self.fault(
            path, text, FaultKind.STATUS, status=answer.status, record=record, refuses_key=refuses_key
        )

    def without_key(self, text: str) -> str:
        """``text`` as it may be shown: a server may quote the header that it refuses."""
        return text.replace(self._api_key, "***") if self._api_key else text

    def why_not(
        self, path: str, cause: Exception | None, cut: FaultKind | None, timeout_s: float
    ) -> ServerFault:
        """Why there is no answer: ``cause`` was raised, or the call was ``cut``."""
        if cut is FaultKind.ENDED:
            return self.fault(path, "this process is shutting down", cut)
        if cut is FaultKind.LOST:
            return self.fault(path, NOT_WAITED_FOR, cut)
        told = f"{type(cause).__name__}: {cause}"
        match cause:
            case httpx.ConnectError() | httpx.ConnectTimeout() | httpx.InvalidURL() | UnicodeError():
                system = _system_error(cause)
                remedy = f"; {http_remedy(system)}" if system is not None else ""
                return self.fault(path, told + remedy, FaultKind.UNREACHABLE)
            case _ if cut is FaultKind.LATE or isinstance(cause, httpx.TimeoutException):
                return self.fault(
                    path, f"no whole answer in time, got timeout_s={timeout_s:.3f}", FaultKind.LATE
                )
            case ProtocolError():
                return self.fault(path, str(cause), FaultKind.UNUSABLE)
            case _:
                return self.fault(path, told, FaultKind.LOST)

    def fault(self, path: str, text: str, kind: FaultKind, **facts: Any) -> ServerFault:
        return ServerFault(self.without_key(f"{self.base_url}{path}: {text}"), kind=kind, **facts)


class ServerCaller(ServerAddress):
    """The way to one server. ``call`` and ``ask`` may run on several threads at once."""

    def __init__(
        self, base_url: str, *, api_key: str | None, connect_timeout_s: float = _CONNECT_TIMEOUT_S
    ) -> None:
        super().__init__(base_url, api_key=api_key, connect_timeout_s=connect_timeout_s)
        self._lock = threading.Lock()
        self._ended = False
        self._calls: set[CuttableCall] = set()  # in progress
        # A transport and not a client: that one keeps cookies.
        self._transport = httpx.HTTPTransport(
            verify=self.is_https, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)
        )

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        timeout_s: float,
        most_bytes: int,
        headers: Mapping[str, str] | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Any:
        """The JSON of a good answer, which may have ``most_bytes`` beyond those that were sent: servers echo.

        ``is_wanted`` as in ``call``.

        Raises:
            ServerFault: there is none. Of an answer with another status it carries status and record.
        """
        content = b"" if body is None else json.dumps(body).encode()
        most_bytes += len(content)
        answer = self.call(
            method,
            path,
            content,
            timeout_s=timeout_s,
            most_bytes=most_bytes,
            headers=headers or {},
            is_wanted=is_wanted,
        )
        return self.record_of(path, answer)

    def call(
        self,
        method: str,
        path: str,
        content: bytes,
        *,
        timeout_s: float,
        most_bytes: int,
        headers: Mapping[str, str],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Answer:
        """A whole answer of any status.

        Whoever lets ``is_wanted`` say no before it calls ``give_up`` meets every call: one that is in progress is cut,
        one that was still to leave does not.

        Raises:
            ServerFault: no answer by the deadline, or none that HTTP or ``most_bytes`` allows.
        """
        call = CuttableCall()
        with self._lock:
            if self._ended:
                raise self.fault(path, "this process is shutting down", FaultKind.ENDED)
            if not is_wanted():  # asked under the lock: ``give_up`` has come, or will find the call
                raise self.fault(path, NOT_WAITED_FOR, FaultKind.LOST)
            self._calls.add(call)
        # httpx limits each read; the timer limits the call, also against a server that trickles.
        timer = threading.Timer(timeout_s, call.cut, (FaultKind.LATE,))
        timer.daemon = True
        timer.start()
        cause: Exception | None = None
        try:
            request = self.request(
                method, path, content, timeout_s, headers=headers, extensions={"trace": call.trace}
            )
            response = self._transport.handle_request(request)
            assert isinstance(response.stream, httpx.SyncByteStream)
            with closing(response.stream):
                answer = read_answer(response, response.stream, most_bytes)
        except (*FOREIGN_ERRORS, ProtocolError) as error:
            cause = error
        finally:
            timer.cancel()
            with self._lock:
                self._calls.discard(call)
        cut = call.finish()
        if cause is None and cut is None:  # a cut also shows as the end of a reply without a length
            return answer
        raise self.why_not(path, cause, cut, timeout_s) from cause

    def read(self, path: str, parse: Callable[[Any], ReplyT], reply: Any) -> ReplyT:
        """An answer of ``path`` as ``parse`` reads it. Raises ServerFault for what the wire has not."""
        try:
            return parse(reply)
        except ProtocolError as error:
            raise self.fault(path, str(error), FaultKind.UNUSABLE) from error

    def end(self) -> None:
        """Ends the calls in progress and refuses later ones. Idempotent."""
        with self._lock:
            self._ended = True
            for call in self._calls:
                call.cut(FaultKind.ENDED)

    def give_up(self) -> None:
        """Ends the calls in progress as lost; later ones go on."""
        with self._lock:
            for call in self._calls:
                call.cut(FaultKind.LOST)

    def close(self) -> None:
        """Frees what the last calls used. Idempotent."""
        self._transport.close()


def read_answer(response: httpx.Response, chunks: Iterable[bytes], most_bytes: int) -> Answer:
    """Reads ``chunks`` to their end, or to the first byte over ``most_bytes``.

    Raises:
        ProtocolError: a status that says nothing, an encoding that was not asked for, or an answer that is too long.
    """
    status = response.status_code
    if status not in _STATUSES:
        raise ProtocolError(f"an answer must have a status from 200 to 599, got status={status}")
    encoding = response.headers.get("Content-Encoding", "")
    if encoding.strip().lower() not in ("", "identity"):  # not asked for, and few bytes can become many
        raise ProtocolError(
            f"an answer must be as it is, got content_encoding={encoding[:40]!r}; is a proxy in between?"
        )
    body = bytearray()
    for chunk in chunks:
        body += chunk
        if len(body) > most_bytes:
            raise ProtocolError(
                f"an answer must have at most {most_bytes} bytes for what was asked, got more; its rest was not read"
            )
    is_json = response.headers.get("Content-Type", "").partition(";")[0].strip().lower() == _JSON
    return Answer(status, bytes(body), _JSON if is_json else "text/plain")


def _system_error(error: BaseException | None) -> OSError | None:
    """The operating system's word below httpx and below what that is built on; each keeps the one before."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
