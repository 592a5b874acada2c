"""A TCP proxy between learner and server that passes every byte on, but for the fault it was asked to commit.

A fault falls on the reply of one rollout: a ``POST /infer/`` that belongs to no sync round. One request per
connection is looked at, the first; learner and proxy open a connection for every call. Runs in the bench's
own process.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType

from swift_stage2.servers import protocol

_HOST = "127.0.0.1"
_CHUNK_BYTES = 1 << 16
_MAX_HEAD_BYTES = 1 << 16
_END_OF_HEAD = b"\r\n\r\n"
_IDLE_S = 600.0
_ACCEPT_SLICE_S = 0.1
_WAIT_SLICE_S = 0.05
_CLOSE_TIMEOUT_S = 5.0
_ERROR_BODY = b'{"detail": "a fault of the bench"}'
_ERROR_REPLY = (
    b"HTTP/1.1 500 Internal Server Error\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (len(_ERROR_BODY), _ERROR_BODY)
)


class ReplyFault(StrEnum):
    """What becomes of the reply of the next rollout."""

    HTTP_500 = "500"  # the server is not asked, the proxy answers in its place
    CUT = "cut"  # half of it, then the connection ends
    DELAY = "delay"  # it is kept until the caller has gone, or for so many seconds


@dataclass(frozen=True, slots=True)
class Committed:
    """A fault that was committed. Unix times: of the request, and of the end of its reply. ``caller_left`` is whether
    the caller hung up first."""

    fault: ReplyFault
    asked_at: float
    at: float
    num_bytes: int
    caller_left: bool


class FaultProxy:
    """Listens on ``port`` of the loopback address for as long as the context lasts."""

    def __init__(self, upstream_port: int, *, delay_s: float = 60.0) -> None:
        self._upstream_port = upstream_port
        self._delay_s = delay_s
        self._changed = threading.Condition()
        self._faults: list[tuple[ReplyFault, float]] = []
        self._committed: list[Committed] = []
        self._holding = False
        self._num_held_rollouts = 0
        self._num_passing = 0
        self._closed = False
        self._listener = socket.create_server((_HOST, 0))
        self._listener.settimeout(_ACCEPT_SLICE_S)
        self._threads: set[threading.Thread] = set()
        self._acceptor = threading.Thread(target=self._accept, name="fault-proxy", daemon=True)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    @property
    def committed(self) -> tuple[Committed, ...]:
        """The faults so far."""
        with self._changed:
            return tuple(self._committed)

    @property
    def num_held_rollouts(self) -> int:
        """Rollout requests that wait at the closed gate."""
        with self._changed:
            return self._num_held_rollouts

    @property
    def num_passing(self) -> int:
        """Connections that are between learner and server now."""
        with self._changed:
            return self._num_passing

    def commit_next(self, fault: ReplyFault, *, delay_s: float | None = None) -> None:
        """The next rollout's reply suffers ``fault``; asked twice, the one after it as well. ``delay_s`` None: as long
        as the proxy was told."""
        with self._changed:
            self._faults.append((fault, self._delay_s if delay_s is None else delay_s))

    def hold(self) -> None:
        """Every new rollout waits and does not reach the server until ``release``. With one in flight no sync round
        can begin, so that nothing else is sent to the server either."""
        with self._changed:
            self._holding = True

    def release(self) -> None:
        """Lets rollouts pass again."""
        with self._changed:
            self._holding = False
            self._changed.notify_all()

    def __enter__(self) -> FaultProxy:
        self._acceptor.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._acceptor.join(_CLOSE_TIMEOUT_S)
        self._listener.close()
        for thread in tuple(self._threads):
            thread.join(_CLOSE_TIMEOUT_S)

    def _accept(self) -> None:
        while not self._closed:
            with suppress(TimeoutError):
                caller, _ = self._listener.accept()
                thread = threading.Thread(
                    target=self._serve, args=(caller,), name="fault-proxy-call", daemon=True
                )
                self._threads.add(thread)
                thread.start()

    def _serve(self, caller: socket.socket) -> None:
        try:
            with caller:
                caller.settimeout(_IDLE_S)
                head = _read_head(caller)
                is_rollout = _is_rollout(head)
                if is_rollout:
                    self._pass_gate()
                with self._changed:
                    self._num_passing += 1
                try:
                    if not self._closed:
                        fault, delay_s = (self._take_fault() if is_rollout else None) or (None, 0.0)
                        if fault is ReplyFault.HTTP_500:
                            self._refuse(caller, head)
                        else:
                            self._exchange(caller, head, fault, delay_s)
                finally:
                    with self._changed:
                        self._num_passing -= 1
        except OSError:
            return  # one side has gone; the other was told by the end of its connection
        finally:
            self._threads.discard(threading.current_thread())

    def _pass_gate(self) -> None:
        with self._changed:
            self._num_held_rollouts += 1
            self._changed.wait_for(lambda: not self._holding or self._closed, _IDLE_S)
            self._num_held_rollouts -= 1

    def _take_fault(self) -> tuple[ReplyFault, float] | None:
        with self._changed:
            return self._faults.pop(0) if self._faults else None

    def _refuse(self, caller: socket.socket, head: bytes) -> None:
        asked_at = time.time()
        _read_message(caller, head)  # closed with a part unread, the connection would be reset
        self._note(Committed(ReplyFault.HTTP_500, asked_at, time.time(), len(_ERROR_REPLY), False))
        caller.sendall(_ERROR_REPLY)

    def _exchange(self, caller: socket.socket, head: bytes, fault: ReplyFault | None, delay_s: float) -> None:
        with socket.create_connection((_HOST, self._upstream_port), timeout=_IDLE_S) as server:
            asked_at = time.time()
            server.sendall(head)
            caller_left = threading.Event()
            upward = threading.Thread(
                target=_pump_up, args=(caller, server, caller_left), name="fault-proxy-up", daemon=True
            )
            upward.start()
            try:
                if fault is None:
                    _pump(server, caller)
                else:
                    self._commit(fault, delay_s, asked_at, _read_message(server), caller, caller_left)
            finally:
                # Also when the server was killed: closed alone, the caller would not hear of it, because the other
                # thread still reads from it.
                _shut(caller)
                _shut(server)
                upward.join(_CLOSE_TIMEOUT_S)

    def _commit(
        self,
        fault: ReplyFault,
        delay_s: float,
        asked_at: float,
        reply: bytes,
        caller: socket.socket,
        caller_left: threading.Event,
    ) -> None:
        if fault is ReplyFault.CUT:
            body_start = reply.find(_END_OF_HEAD) + len(_END_OF_HEAD)
            reply = reply[: body_start + (len(reply) - body_start) // 2]
        else:
            end = time.monotonic() + delay_s
            while not caller_left.wait(_WAIT_SLICE_S) and not self._closed and time.monotonic() < end:
                continue
        self._note(Committed(fault, asked_at, time.time(), len(reply), caller_left.is_set()))
        if not caller_left.is_set():
            caller.sendall(reply)

    def _note(self, committed: Committed) -> None:
        with self._changed:
            self._committed.append(committed)


def _read_head(caller: socket.socket) -> bytes:
    """The request up to its body, and what came with it."""
    data = b""
    while _END_OF_HEAD not in data and len(data) < _MAX_HEAD_BYTES:
        chunk = caller.recv(_CHUNK_BYTES)
        if not chunk:
            break
        data += chunk
    return data


def _is_rollout(head: bytes) -> bool:
    lines = head.partition(_END_OF_HEAD)[0].decode("latin-1").lower().split("\r\n")
    of_round = any(line.startswith(f"{protocol.ROUND_HEADER.lower()}:") for line in lines[1:])
    return lines[0].startswith(f"post {protocol.INFER} ") and not of_round


def _read_message(source: socket.socket, data: bytes = b"") -> bytes:
    """One whole HTTP request or reply that says its length; ``data`` is what was read of it before."""
    while True:
        head, found, body = data.partition(_END_OF_HEAD)
        if found:
            lengths = [
                int(line.partition(":")[2])
                for line in head.decode("latin-1").split("\r\n")
                if line.lower().startswith("content-length:")
            ]
            if lengths and len(body) >= lengths[0]:
                return data
        chunk = source.recv(_CHUNK_BYTES)
        if not chunk:
            return data
        data += chunk


def _pump(source: socket.socket, target: socket.socket) -> None:
    while chunk := source.recv(_CHUNK_BYTES):
        target.sendall(chunk)


def _pump_up(caller: socket.socket, server: socket.socket, caller_left: threading.Event) -> None:
    """The rest of the request; when the caller hangs up, the server is told so at once."""
    with suppress(OSError):
        _pump(caller, server)
    caller_left.set()
    _shut(server)


def _shut(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
