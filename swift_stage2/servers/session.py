"""One rollout server's control calls over HTTP: JSON in, checked JSON out, a deadline on every call.

Used by rank 0's weight sync and by start-up checks, never for rollouts. Whatever is wrong with an answer is a
``ServerFault``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from swift_stage2 import wire
from swift_stage2.errors import FaultKind, ServerFault
from swift_stage2.servers import vllm_serve
from swift_stage2.servers.call import ServerHttp, run

_SHORTEST_TIMEOUT_S = 0.05
_NOT_FOUND = 404
# States of our server's engine; others are its weights'
_OUT_OF_SERVICE = frozenset({"loading", "broken", "closed"})


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
    """Control calls to one server, each waited for; a context manager that holds nothing between them."""

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
            return self._info_of_another(deadline)
        info = self.read(wire.SERVER_INFO, wire.ServerInfo.from_json, reply)
        if info.state in _OUT_OF_SERVICE:
            raise ServerFault(
                f"{self.base_url}{wire.SERVER_INFO}: the server's engine must be ready, got state={info.state}"
            )
        return info

    def _info_of_another(self, deadline: Deadline) -> wire.ServerInfo:
        model = vllm_serve.find_model(self, deadline)
        if model is None:
            return wire.ServerInfo(stock=True)
        return wire.ServerInfo(stock=True, model=model.root, chat_model=model.name)

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
