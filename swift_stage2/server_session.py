"""One rollout server's control calls over HTTP: JSON in, checked JSON out, a deadline on every call.

Used by rank 0's weight sync and by start-up checks, never for rollouts. Foreign errors become
``ServerFault`` here and nowhere else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import httpx

from swift_stage2 import rollout_protocol as protocol
from swift_stage2.cuttable_call import CuttableCall
from swift_stage2.errors import ConfigError, ProtocolError, ServerFault

_SHORTEST_TIMEOUT_S = 0.05
_NOT_FOUND = 404
_UNAUTHORIZED = 401
_KEY_HINT = "; set the variable that rollout.api_key_env names to the server's key"
_OUT_OF_SERVICE = frozenset(
    {"loading", "broken", "closed"}
)  # states of our server's engine; others are a round's


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
        """Whether the moment has passed."""
        return self._clock() >= self._end


class ServerSession:
    """Control connection to one server. Proxies from the environment are ignored; the key is never shown."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        if api_key and not (api_key.isascii() and api_key.isprintable() and " " not in api_key):
            raise ConfigError("the API key must be printable ASCII without spaces; check rollout.api_key_env")
        self._api_key = api_key
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # A fresh connection per call: an idle one that a restarted server closed would look like a loss.
        limits = httpx.Limits(max_keepalive_connections=0)
        # Every round has a session of its own, and loading certificates that plain HTTP never uses takes 40 ms each.
        is_encrypted = urlsplit(self.base_url).scheme == "https"
        self._http = httpx.Client(
            base_url=self.base_url, headers=headers, trust_env=False, limits=limits, verify=is_encrypted
        )

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
            ServerFault: unreachable, an error status, a reply that is not what the wire allows, or an engine
                that cannot be asked: still loading, broken or closed.
        """
        try:
            response = self._request("GET", protocol.SERVER_INFO, deadline)
            if response.status_code == _NOT_FOUND:
                return protocol.ServerInfo(stock=True)
            info = protocol.ServerInfo.from_json(self._body(response))
            if info.state in _OUT_OF_SERVICE:
                raise ProtocolError(f"the server's engine must be ready, got state={info.state}")
            return info
        except (httpx.HTTPError, ProtocolError) as error:
            raise self._fault(protocol.SERVER_INFO, error) from error

    def get(self, path: str, deadline: Deadline) -> Any:
        """Body of a GET. Raises ServerFault as ``info`` does."""
        try:
            return self._body(self._request("GET", path, deadline))
        except (httpx.HTTPError, ProtocolError) as error:
            raise self._fault(path, error) from error

    def post(self, path: str, body: Any, deadline: Deadline, *, round_id: str | None = None) -> Any:
        """Body of a POST's reply. Raises ServerFault as ``info`` does."""
        headers = {protocol.ROUND_HEADER: round_id} if round_id else {}
        try:
            return self._body(self._request("POST", path, deadline, json=body, headers=headers))
        except (httpx.HTTPError, ProtocolError) as error:
            raise self._fault(path, error) from error

    def close(self) -> None:
        """Closes the connection. May be called again."""
        self._http.close()

    def _request(self, method: str, path: str, deadline: Deadline, **content: Any) -> httpx.Response:
        timeout_s = deadline.remaining_s()
        call: CuttableCall[str] = CuttableCall()
        timer = threading.Timer(timeout_s, call.cut, ("its deadline",))
        timer.daemon = True
        timer.start()
        late = httpx.ReadTimeout(f"the reply had not ended after {timeout_s:.1f} s")
        try:
            extensions = {"trace": call.trace}
            response = self._http.request(method, path, timeout=timeout_s, extensions=extensions, **content)
        except httpx.HTTPError as error:
            if call.finish() is None:
                raise
            raise late from error  # the cut shows as a lost connection
        finally:
            timer.cancel()
        if call.finish() is not None:  # or as the end of a reply without a length
            raise late
        return response

    def _body(self, response: httpx.Response) -> Any:
        if response.status_code != httpx.codes.OK:
            hint = _KEY_HINT if response.status_code == _UNAUTHORIZED else ""
            raise _Refused(
                f"status {response.status_code}: {response.text[:500]}{hint}",
                _reason_of(response),
                status=response.status_code,
                refuses_key=response.status_code == _UNAUTHORIZED,
            )
        try:
            return response.json()
        except ValueError as error:
            raise ProtocolError(f"the reply is not JSON: {response.text[:200]!r}") from error

    def _fault(self, path: str, error: Exception) -> ServerFault:
        kind = "" if isinstance(error, _Refused) else f"{type(error).__name__}: "
        text = f"{self.base_url}{path}: {kind}{error}"
        reason = error.reason if isinstance(error, _Refused) else None
        return ServerFault(
            text.replace(self._api_key, "***") if self._api_key else text,
            reason=reason,
            status=error.status if isinstance(error, _Refused) else None,
            refuses_key=isinstance(error, _Refused) and error.refuses_key,
        )


class _Refused(ProtocolError):
    """An error status; ``reason`` is what our server's body says besides its text."""

    def __init__(
        self, message: str, reason: str | None, *, refuses_key: bool = False, status: int | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.refuses_key = refuses_key
        self.status = status


def _reason_of(response: httpx.Response) -> str | None:
    try:
        body = response.json()
    except ValueError:
        return None
    reason = body.get("reason") if isinstance(body, Mapping) else None
    return reason if isinstance(reason, str) else None


def _late(timeout_s: float) -> httpx.ReadTimeout:
    return httpx.ReadTimeout(f"the reply had not ended after {timeout_s:.1f} s")
