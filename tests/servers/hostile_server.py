"""A server on the loopback that answers an HTTP call with any bytes it is given."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

_ACCEPT_S = 0.2
_SOCKET_S = 30.0


Answer = Callable[[str], Iterable[bytes]]
"""Gets the call's path and returns what goes back, piece by piece."""


class HostileServer:
    """One call at a time."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.calls: list[bytes] = []
        """Heads of the calls, as they came."""
        self._ending = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(_ACCEPT_S)
        self._thread = threading.Thread(target=self._run, name="hostile-server", daemon=True)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> HostileServer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ending.set()
        self._thread.join(_SOCKET_S)
        self._listener.close()

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            # The caller may leave in the middle; that is its right.
            with connection, suppress(OSError):
                connection.settimeout(_SOCKET_S)
                self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        call = b""
        while b"\r\n\r\n" not in call:
            more = connection.recv(65536)
            if not more:
                return
            call += more
        head, _, body = call.partition(b"\r\n\r\n")
        self.calls.append(head)
        num_left = _content_length(head) - len(body)
        while num_left > 0 and (more := connection.recv(65536)):
            num_left -= len(more)
        path = head.split(b" ")[1].decode("latin-1")
        for piece in self.answer(path):
            if self._ending.is_set():
                return
            connection.sendall(piece)


def _content_length(head: bytes) -> int:
    values = (line.partition(b":") for line in head.lower().split(b"\r\n")[1:])
    return next((int(value) for name, _, value in values if name == b"content-length"), 0)
