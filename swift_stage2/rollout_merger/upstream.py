"""One HTTP call to the server behind the merger at a time, and how it failed.

A ``ServerFault`` becomes ``UpstreamLost`` or ``UpstreamTimeout`` here and nowhere else; an answer that HTTP or its
limit does not allow becomes an error answer, because the server is there. Called by the dispatcher's thread; ``end``
may come from any.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from swift_stage2.errors import FaultKind, ServerFault, UpstreamLost, UpstreamTimeout
from swift_stage2.servers.call import ServerCaller

_JSON = "application/json"
_UNUSABLE = 500  # and not 502, which says that the server is lost


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer as it goes back to a caller."""

    status: int
    body: bytes
    content_type: str = _JSON


class Upstream:
    """The stock server."""

    def __init__(self, base_url: str, *, api_key: str | None, timeout_s: float) -> None:
        self._caller = ServerCaller(base_url, api_key=api_key)
        self.base_url = self._caller.base_url
        self._timeout_s = timeout_s

    def call(self, method: str, path: str, body: bytes, *, most_bytes: int) -> Reply:
        """Whatever the server answers, also an error status, with ``most_bytes`` beyond those sent.

        Raises:
            UpstreamLost: no connection, one that broke, a reply that was cut, or the merger ends.
            UpstreamTimeout: no whole reply in time.
        """
        try:
            answer = self._caller.call(
                method, path, body, timeout_s=self._timeout_s, most_bytes=most_bytes + len(body), headers={}
            )
        except ServerFault as fault:
            match fault.kind:
                case FaultKind.LATE:
                    where = f"{self.base_url}{path}"
                    raise UpstreamTimeout(
                        f"{where} did not answer in time, got upstream_timeout_s={self._timeout_s:g}"
                    ) from fault
                case FaultKind.UNUSABLE:
                    return Reply(_UNUSABLE, json.dumps({"detail": str(fault)}).encode())
                case FaultKind.ENDED:
                    raise UpstreamLost("the merger ends") from fault
                case _:
                    raise UpstreamLost(str(fault)) from fault
        return Reply(answer.status, answer.body, answer.content_type)

    def end(self) -> None:
        """Cuts the call in progress and refuses later ones. Idempotent."""
        self._caller.end()

    def close(self) -> None:
        """Frees the connection; after the last call has ended."""
        self._caller.close()
