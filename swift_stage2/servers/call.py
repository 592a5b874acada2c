"""HTTP calls to one server, one at a time: an answer or a ``ServerFault``, whatever the server does.

The only place that talks to rollout servers. One deadline holds for the whole call; every call has a connection of
its own, so that an idle one that the server closed cannot be mistaken for a server that was lost. No cookie is kept,
no redirect followed, no proxy of the environment used, and the key is never shown. Used by the rollout client, the
control session and the merger; ``end`` may come from any thread.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from swift_stage2.errors import ConfigError, FaultKind, ProtocolError, ServerFault
from swift_stage2.process.route import http_remedy
from swift_stage2.servers.answer import Answer, read_answer
from swift_stage2.servers.cuttable_call import CuttableCall

_KEY_HINT = "; set the variable that rollout.api_key_env names to the server's key"
_REFUSED_KEYS = (401, 403)
_QUOTED_CHARACTERS = 500
_CONNECT_TIMEOUT_S = 10.0
# What httpx raises, and what the resolver does for a host name that is none.
_FOREIGN = (httpx.HTTPError, httpx.InvalidURL, UnicodeError)


class ServerCaller:
    """The way to one server."""

    def __init__(
        self, base_url: str, *, api_key: str | None, connect_timeout_s: float = _CONNECT_TIMEOUT_S
    ) -> None:
        if api_key and not (api_key.isascii() and api_key.isprintable() and " " not in api_key):
            raise ConfigError("the API key must be printable ASCII without spaces; check rollout.api_key_env")
        self.base_url = base_url.rstrip("/")
        self._api_key = api_key
        self._connect_timeout_s = connect_timeout_s
        self._lock = threading.Lock()
        self._ended = False
        self._call: CuttableCall[FaultKind] | None = None
        self._headers = {
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
            "User-Agent": "swift-stage2",
        }
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        # A transport and not a client: that one keeps cookies. Loading certificates that plain HTTP never uses
        # takes 40 ms, and every round has callers of its own.
        self._transport = httpx.HTTPTransport(
            verify=urlsplit(self.base_url).scheme == "https",
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),
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
    ) -> Any:
        """The JSON of a good answer, which may have ``most_bytes`` beyond those that were sent: servers echo.

        Raises:
            ServerFault: there is none. Of an answer with another status it carries status and record.
        """
        content = b"" if body is None else json.dumps(body).encode()
        most_bytes += len(content)
        answer = self.call(
            method, path, content, timeout_s=timeout_s, most_bytes=most_bytes, headers=headers or {}
        )
        try:
            record = answer.record()
        except ProtocolError as error:
            if answer.is_good:
                text = f"the reply is not JSON: {answer.quote(200)!r} ({error})"
                raise self._fault(path, text, FaultKind.UNUSABLE) from error
            record = None
        if answer.is_good:
            return record
        refuses_key = answer.status in _REFUSED_KEYS
        text = f"status {answer.status}: {answer.quote(_QUOTED_CHARACTERS)}{_KEY_HINT if refuses_key else ''}"
        raise self._fault(
            path, text, FaultKind.STATUS, status=answer.status, record=record, refuses_key=refuses_key
        )

    def call(
        self,
        method: str,
        path: str,
        content: bytes,
        *,
        timeout_s: float,
        most_bytes: int,
        headers: Mapping[str, str],
    ) -> Answer:
        """A whole answer of any status.

        Raises:
            ServerFault: no answer by the deadline, or none that HTTP or ``most_bytes`` allows.
        """
        call: CuttableCall[FaultKind] = CuttableCall()
        with self._lock:
            if self._ended:
                raise self._fault(path, "this process is shutting down", FaultKind.ENDED)
            self._call = call
        # httpx limits each read; the timer limits the call, also against a server that trickles.
        timer = threading.Timer(timeout_s, call.cut, (FaultKind.LATE,))
        timer.daemon = True
        timer.start()
        cause: Exception | None = None
        try:
            answer = self._exchange(method, path, content, timeout_s, most_bytes, headers, call)
        except (*_FOREIGN, ProtocolError) as error:
            cause = error
        finally:
            timer.cancel()
            with self._lock:
                self._call = None
        cut = call.finish()
        if cause is None and cut is None:  # a cut also shows as the end of a reply without a length
            return answer
        raise self._why_not(path, cause, cut, timeout_s) from cause

    def end(self) -> None:
        """Ends the call in progress and refuses later ones. Idempotent."""
        with self._lock:
            self._ended = True
            if self._call is not None:
                self._call.cut(FaultKind.ENDED)

    def close(self) -> None:
        """Frees what the last call used. Idempotent."""
        self._transport.close()

    def without_key(self, text: str) -> str:
        """``text`` as it may be shown: a server may quote the header that it refuses."""
        return text.replace(self._api_key, "***") if self._api_key else text

    def _exchange(
        self,
        method: str,
        path: str,
        content: bytes,
        timeout_s: float,
        most_bytes: int,
        headers: Mapping[str, str],
        call: CuttableCall[FaultKind],
    ) -> Answer:
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, self._connect_timeout_s))
        request = httpx.Request(
            method,
            f"{self.base_url}{path}",
            headers={**self._headers, **headers},
            content=content,
            extensions={"timeout": timeout.as_dict(), "trace": call.trace},
        )
        response = self._transport.handle_request(request)
        stream = response.stream
        assert isinstance(stream, httpx.SyncByteStream)
        try:
            chunks: Iterable[bytes] = stream
            content_type = response.headers.get("Content-Type", "")
            encoding = response.headers.get("Content-Encoding", "")
            return read_answer(response.status_code, content_type, encoding, chunks, most_bytes)
        finally:
            stream.close()

    def _why_not(
        self, path: str, cause: Exception | None, cut: FaultKind | None, timeout_s: float
    ) -> ServerFault:
        if cut is FaultKind.ENDED:
            return self._fault(path, "this process is shutting down", cut)
        told = f"{type(cause).__name__}: {cause}"
        match cause:
            case httpx.ConnectError() | httpx.ConnectTimeout() | httpx.InvalidURL() | UnicodeError():
                system = _system_error(cause)
                remedy = f"; {http_remedy(system)}" if system is not None else ""
                return self._fault(path, told + remedy, FaultKind.UNREACHABLE)
            case _ if cut is FaultKind.LATE or isinstance(cause, httpx.TimeoutException):
                return self._fault(
                    path, f"no whole answer in time, got timeout_s={timeout_s:.3f}", FaultKind.LATE
                )
            case ProtocolError():
                return self._fault(path, str(cause), FaultKind.UNUSABLE)
            case _:
                return self._fault(path, told, FaultKind.LOST)

    def _fault(self, path: str, text: str, kind: FaultKind, **facts: Any) -> ServerFault:
        return ServerFault(self.without_key(f"{self.base_url}{path}: {text}"), kind=kind, **facts)


def _system_error(error: BaseException | None) -> OSError | None:
    """What the operating system said below httpx and what it is built on; each keeps the one before."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
