"""One HTTP call to the server behind the merger at a time, with one deadline, and how it failed.

Foreign errors become ``UpstreamLost`` or ``UpstreamTimeout`` here and nowhere else. Every call opens a connection
of its own, so that an idle one that the server closed cannot be mistaken for a server that was lost. Called by the
dispatcher's thread; ``end`` may come from any.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import httpx

from swift_stage2.cuttable_call import CuttableCall
from swift_stage2.errors import UpstreamLost, UpstreamTimeout

_CONNECT_TIMEOUT_S = 10.0
_JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer as it goes back to a caller."""

    status: int
    body: bytes
    content_type: str = _JSON


class Upstream:
    """The stock server. Proxies from the environment are ignored; the key is never shown."""

    def __init__(self, base_url: str, *, api_key: str | None, timeout_s: float) -> None:
        self.base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._ended = False
        self._call: CuttableCall[str] | None = None
        headers = {"Content-Type": _JSON}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(base_url=self.base_url, headers=headers, trust_env=False, limits=limits)

    def call(self, method: str, path: str, body: bytes) -> Reply:
        """Whatever the server answers, also an error status.

        Raises:
            UpstreamLost: no connection, one that broke, a reply that was cut, or the merger ends.
            UpstreamTimeout: no whole reply in time.
        """
        where = f"{self.base_url}{path}"
        call: CuttableCall[str] = CuttableCall()
        with self._lock:
            if self._ended:
                raise UpstreamLost("the merger ends")
            self._call = call
        # httpx limits each read; the timer limits the call, also against a server that trickles.
        timer = threading.Timer(self._timeout_s, call.cut, ("its deadline",))
        timer.daemon = True
        timer.start()
        timeout = httpx.Timeout(self._timeout_s, connect=min(self._timeout_s, _CONNECT_TIMEOUT_S))
        try:
            response = self._http.request(
                method, path, content=body, timeout=timeout, extensions={"trace": call.trace}
            )
        except httpx.HTTPError as error:
            is_late = isinstance(error, httpx.TimeoutException) and not isinstance(
                error, httpx.ConnectTimeout
            )
            if not is_late and call.finish() is None:
                raise UpstreamLost(f"{where}: {type(error).__name__}: {error}") from error
            raise self._cut(where, call) from error
        finally:
            timer.cancel()
            with self._lock:
                self._call = None
        if call.finish() is not None:  # a reply without a length ends with its connection
            raise self._cut(where, call)
        return Reply(response.status_code, response.content, response.headers.get("Content-Type", _JSON))

    def end(self) -> None:
        """Cuts the call in progress and refuses later ones. Idempotent."""
        with self._lock:
            self._ended = True
            if self._call is not None:
                self._call.cut("the merger ends")

    def close(self) -> None:
        """Frees the HTTP client; after the last call has ended."""
        self._http.close()

    def _cut(self, where: str, call: CuttableCall[str]) -> UpstreamLost | UpstreamTimeout:
        with self._lock:
            if self._ended:
                return UpstreamLost("the merger ends")
        return UpstreamTimeout(f"{where} did not answer in time, got upstream_timeout_s={self._timeout_s:g}")
