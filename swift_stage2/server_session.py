"""One rollout server's control calls over HTTP: JSON in, checked JSON out, a deadline on every call.

Used by rank 0's weight sync and by start-up checks, never for rollouts. Foreign errors become
``ServerFault`` here and nowhere else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import httpx

from swift_stage2 import rollout_protocol as protocol
from swift_stage2.errors import ProtocolError, ServerFault

_SHORTEST_TIMEOUT_S = 0.05
_NOT_FOUND = 404


class Deadline:
    """A moment by which everything given it has to end."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def remaining_s(self) -> float:
        """Seconds left, never less than a small positive number, so that it is always a valid timeout."""
        return max(_SHORTEST_TIMEOUT_S, self._end - self._clock())


class ServerSession:
    """Control connection to one server. Proxies from the environment are ignored; the key is never shown."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # A fresh connection per call: an idle one that a restarted server closed would look like a loss.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(base_url=self.base_url, headers=headers, trust_env=False, limits=limits)

    def __enter__(self) -> ServerSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def host(self) -> str:
        """Host name or address of the server, without brackets."""
        return urlsplit(self.base_url).hostname or ""

    def info(self, deadline: Deadline) -> protocol.ServerInfo:
        """What the server is. A server that knows no ``/stage2/`` path is a stock one.

        Raises:
            ServerFault: unreachable, an error status, or a reply that is not what the wire allows.
        """
        try:
            response = self._http.get(protocol.SERVER_INFO, timeout=deadline.remaining_s())
            if response.status_code == _NOT_FOUND:
                return protocol.ServerInfo(stock=True)
            return protocol.ServerInfo.from_json(self._body(response))
        except (httpx.HTTPError, ProtocolError) as error:
            raise self._fault(protocol.SERVER_INFO, error) from error

    def get(self, path: str, deadline: Deadline) -> Any:
        """Body of a GET. Raises ServerFault as ``info`` does."""
        try:
            return self._body(self._http.get(path, timeout=deadline.remaining_s()))
        except (httpx.HTTPError, ProtocolError) as error:
            raise self._fault(path, error) from error

    def post(self, path: str, body: Any, deadline: Deadline, *, round_id: str | None = None) -> Any:
        """Body of a POST's reply. Raises ServerFault as ``info`` does."""
        headers = {protocol.ROUND_HEADER: round_id} if round_id else {}
        try:
            return self._body(
                self._http.post(path, json=body, headers=headers, timeout=deadline.remaining_s())
            )
        except (httpx.HTTPError, ProtocolError) as error:
            raise self._fault(path, error) from error

    def close(self) -> None:
        """Closes the connection. May be called again."""
        self._http.close()

    def _body(self, response: httpx.Response) -> Any:
        if response.status_code != httpx.codes.OK:
            raise ProtocolError(f"status {response.status_code}: {response.text[:500]}")
        try:
            return response.json()
        except ValueError as error:
            raise ProtocolError(f"the reply is not JSON: {response.text[:200]!r}") from error

    def _fault(self, path: str, error: Exception) -> ServerFault:
        return ServerFault(f"{self.base_url}{path}: {type(error).__name__}: {error}")
