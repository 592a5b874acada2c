"""Event loops on strands: every callback is a yield point, timers run in virtual time, and nothing is real I/O."""

from __future__ import annotations

import asyncio
import asyncio.base_events
import json
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import httpx
from interleaving.scheduler import Strand
from interleaving.virtual_servers import FOR_EVER, VirtualCall, VirtualServer
from interleaving.virtual_threading import active


class _Ready(deque[Any]):
    """Callbacks in their order; between two of them any strand may go on."""

    def popleft(self) -> Any:
        active().point("event loop")
        return super().popleft()


class _Selector:
    """Waits for what another strand tells the loop, or for a timer."""

    def __init__(self) -> None:
        self.strand: Strand | None = None

    def select(self, timeout: float | None) -> list[Any]:
        run = active()
        self.strand = run.current
        if timeout is None or timeout > 0:
            run.block("event loop waits", None if timeout is None else run.now + timeout)
        return []


class VirtualLoop(asyncio.base_events.BaseEventLoop):
    """In place of ``CallLoop``; several of them take turns on one real thread."""

    def __init__(self) -> None:
        super().__init__()
        self._ready = _Ready()
        self._selector = _Selector()

    def time(self) -> float:
        return active().now

    def run_forever(self) -> None:
        strand = active().current
        assert strand is not None
        strand.on_resume = lambda: asyncio._set_running_loop(self)
        try:
            super().run_forever()
        finally:
            strand.on_resume = None

    def _check_running(self) -> None:
        asyncio._set_running_loop(None)  # another one's, which waits
        super()._check_running()  # type: ignore[misc]

    def close(self) -> None:
        """Also ends what a run that failed has left in the middle, so that nothing of it wakes up in a later one."""
        for task in asyncio.all_tasks(self):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            with suppress(BaseException):  # what its clean-up runs into says nothing any more
                task.get_coro().close()  # type: ignore[union-attr]
        super().close()

    def run_in_executor(self, executor: Any, work: Callable[..., Any], *args: Any) -> Any:
        """On a strand of its own."""
        done: asyncio.Future[Any] = self.create_future()

        def run() -> None:
            result = work(*args)
            if not self.is_closed():
                self.call_soon_threadsafe(lambda: done.done() or done.set_result(result))

        active().spawn(run, "executor")
        return done

    def _write_to_self(self) -> None:
        if self._selector.strand is not None:
            active().wake(self._selector.strand)
        active().point("tells the event loop")

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none."""


class VirtualAsyncHttp:
    """In place of ``httpx.AsyncHTTPTransport``; each call is served on a strand of its own."""

    def __init__(self, servers: Mapping[str, VirtualServer]) -> None:
        self._servers = servers

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        server, path = self._servers[f"http://{request.url.host}"], request.url.path
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[tuple[int, Any]] = loop.create_future()
        timeout_s = request.extensions["timeout"]["read"] or FOR_EVER
        call = VirtualCall(path, json.loads(request.content or b"null"), request.headers, timeout_s)
        await request.extensions["trace"]("connection.connect_tcp.complete", {"return_value": call})

        def settle(error: Exception | None, answer: tuple[int, Any]) -> None:
            if answered.done():
                return
            if error is None:
                answered.set_result(answer)
            else:
                answered.set_exception(error)

        def serve() -> None:
            error, answer = None, (0, None)
            try:
                if not server.alive:
                    raise httpx.ConnectError("connection refused")
                call.check(server)
                answer = server.answer(call)
                active().point(f"reads {path}")
                call.check(server)
            except httpx.HTTPError as caught:
                error = caught
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, error, answer)

        asker = active().current
        assert asker is not None
        active().spawn(serve, f"call of {path} for {asker.name}")
        try:
            status, record = await answered
        finally:
            call.shutdown(0)
        return httpx.Response(status, stream=httpx.ByteStream(json.dumps(record).encode()))

    async def aclose(self) -> None:
        """Nothing is held."""
