"""A TCP proxy between learner and server that passes every byte on, but for the fault it was asked to commit.

A fault falls on the reply of one rollout: a ``POST /infer/`` that belongs to no sync round. One request per
connection is looked at, the first; learner and proxy open a connection for every call. Runs in a thread of the bench's
own process; its attributes may be read from any other.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from asyncio import StreamReader, StreamWriter
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from swift_stage2.servers import protocol

_HOST = "127.0.0.1"
_CHUNK_BYTES = 1 << 16
_END_OF_HEAD = b"\r\n\r\n"
_LONGEST_CALL_S = 600.0
_CLOSE_TIMEOUT_S = 5.0
_ERROR_BODY = b'{"detail": "a fault of the bench"}'
_ERROR_REPLY = (
    b"HTTP/1.1 500 Internal Server Error\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (len(_ERROR_BODY), _ERROR_BODY)
)


class ReplyFault(StrEnum):
    """The reply of the next rollout suffers this."""

    HTTP_500 = "500"  # the server is not asked, the proxy answers in its place
    CUT = "cut"  # half of it, then the connection ends
    DELAY = "delay"  # it is kept until the caller has gone, or for so many seconds


@dataclass(frozen=True, slots=True)
class Committed:
    """A fault that was committed. Unix times: of the request, and of the end of its reply."""

    fault: ReplyFault
    asked_at: float
    at: float
    caller_left: bool
    """True if the caller closed its connection first."""


class FaultProxy:
    """Listens on ``port`` of the loopback address for as long as the context lasts."""

    def __init__(self, upstream_port: int) -> None:
        self.committed: list[Committed] = []
        self.num_rollouts = 0
        """Rollout requests that have come so far."""
        self.num_held_rollouts = 0
        """Rollout requests that wait at the closed gate."""
        self.num_passing = 0
        """Connections that are between learner and server now."""
        self._upstream_port = upstream_port
        self._faults: deque[tuple[ReplyFault, float]] = deque()
        self._listener = socket.create_server((_HOST, 0))
        self.port = int(self._listener.getsockname()[1])
        self._gate, self._ended = asyncio.Event(), asyncio.Event()
        self._gate.set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)

    def commit_next(self, fault: ReplyFault, *, delay_s: float = 60.0) -> None:
        """The next rollout's reply suffers ``fault``; asked twice, the one after it as well."""
        self._faults.append((fault, delay_s))

    def hold(self) -> None:
        """Every new rollout waits and does not reach the server until ``release``. With one in flight no fenced
        round can begin, so that nothing else is sent to the server either."""
        self._gate.clear()

    def release(self) -> None:
        self._loop.call_soon_threadsafe(self._gate.set)

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(_CLOSE_TIMEOUT_S)
        self._listener.close()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._listen())

    async def _listen(self) -> None:
        async with await asyncio.start_server(self._serve, sock=self._listener):
            await self._ended.wait()  # deadline: the context's end

    async def _serve(self, caller: StreamReader, answer: StreamWriter) -> None:
        try:
            async with asyncio.timeout(_LONGEST_CALL_S):
                head = await caller.readuntil(_END_OF_HEAD)
                is_rollout = _is_rollout(head)
                if is_rollout:
                    self.num_rollouts += 1
                    self.num_held_rollouts += 1
                    try:
                        await self._gate.wait()  # deadline: the timeout around it
                    finally:
                        self.num_held_rollouts -= 1
                self.num_passing += 1
                try:
                    await self._exchange(head, caller, answer, is_rollout=is_rollout)
                finally:
                    self.num_passing -= 1
        except (OSError, EOFError):
            return  # one side has gone; the other is told by the end of its connection
        finally:
            answer.close()

    async def _exchange(
        self, head: bytes, caller: StreamReader, answer: StreamWriter, *, is_rollout: bool
    ) -> None:
        fault, delay_s = self._faults.popleft() if is_rollout and self._faults else (None, 0.0)
        asked_at = time.time()
        if fault is ReplyFault.HTTP_500:
            # Closed with a part unread, the connection would be reset.
            await caller.readexactly(_length(head))
            self.committed.append(Committed(fault, asked_at, time.time(), False))
            await _send(answer, _ERROR_REPLY)
            return
        server, request = await asyncio.open_connection(_HOST, self._upstream_port)
        await _send(request, head)
        upward = asyncio.create_task(_pump_up(caller, request))
        try:
            if fault is None:
                await _pump(server, answer)
                return
            reply_head = await server.readuntil(_END_OF_HEAD)
            body = await server.readexactly(_length(reply_head))
            if fault is ReplyFault.CUT:
                body = body[: len(body) // 2]
            else:
                await asyncio.wait({upward}, timeout=delay_s)
            caller_left = upward.done()
            self.committed.append(Committed(fault, asked_at, time.time(), caller_left))
            if not caller_left:
                await _send(answer, reply_head + body)
        finally:
            upward.cancel()
            request.close()


def _length(head: bytes) -> int:
    lines = head.decode("latin-1").lower().split("\r\n")
    return next((int(line.partition(":")[2]) for line in lines if line.startswith("content-length:")), 0)


def _is_rollout(head: bytes) -> bool:
    lines = head.decode("latin-1").lower().split("\r\n")
    of_round = any(line.startswith(f"{protocol.ROUND_HEADER.lower()}:") for line in lines[1:])
    return lines[0].startswith(f"post {protocol.INFER} ") and not of_round


async def _send(target: StreamWriter, data: bytes) -> None:
    target.write(data)
    await target.drain()


async def _pump(source: StreamReader, target: StreamWriter) -> None:
    while chunk := await source.read(_CHUNK_BYTES):
        await _send(target, chunk)


async def _pump_up(caller: StreamReader, request: StreamWriter) -> None:
    """The rest of the request; when the caller hangs up, the server is told so at once."""
    with suppress(OSError):
        await _pump(caller, request)
    request.close()
