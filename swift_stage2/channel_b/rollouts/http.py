"""HTTP calls to one server on an event loop: a JSON answer, or a ``ServerFault``, whatever the server does.

One deadline holds for the whole call, and a call that is cancelled closes its connection. Every call has one of its
own, so that an idle one that the server closed cannot be mistaken for a server that was lost.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import httpx

from swift_stage2.errors import FaultKind, ProtocolError
from swift_stage2.servers.call import FOREIGN_ERRORS, Answer, ServerAddress, read_answer


class ServerHttp(ServerAddress):
    """The way to one server; its calls may run at once on one event loop."""

    def __init__(self, base_url: str, *, api_key: str | None, connect_timeout_s: float) -> None:
        super().__init__(base_url, api_key=api_key, connect_timeout_s=connect_timeout_s)
        # A transport and not a client: that one keeps cookies.
        self._transport = httpx.AsyncHTTPTransport(
            verify=self.is_https,
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    async def ask(
        self, method: str, path: str, body: Any = None, *, timeout_s: float, most_bytes: int
    ) -> Any:
        """The JSON of a good answer, which may have ``most_bytes`` beyond those that were sent: servers echo.

        Raises:
            ServerFault: there is none. Of an answer with another status it carries status and record.
        """
        content = b"" if body is None else json.dumps(body).encode()
        connected: list[socket.socket] = []

        async def trace(event: str, info: Mapping[str, Any]) -> None:
            if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
                connected.append(info["return_value"].get_extra_info("socket"))

        request = self.request(method, path, content, timeout_s, headers={}, extensions={"trace": trace})
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._call(request, most_bytes + len(content))
                connected.clear()
        except (TimeoutError, ProtocolError, *FOREIGN_ERRORS) as error:
            kind = FaultKind.LATE if isinstance(error, TimeoutError) else None
            raise self.why_not(path, error, kind, timeout_s) from error
        finally:
            for each in connected:  # a process that was forked meanwhile holds it open as well
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        return self.record_of(path, answer)

    async def _call(self, request: httpx.Request, most_bytes: int) -> Answer:
        response = await self._transport.handle_async_request(request)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        chunks, num_bytes = list[bytes](), 0
        try:
            async for chunk in response.stream:
                chunks.append(chunk)
                num_bytes += len(chunk)
                if num_bytes > most_bytes:
                    break
        finally:
            await response.stream.aclose()
        return read_answer(response, chunks, most_bytes)

    async def close(self) -> None:
        """Frees what the last calls used."""
        await self._transport.aclose()
