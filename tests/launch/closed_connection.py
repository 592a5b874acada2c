"""A killed server leaves this on its port: a connection that it closed first, kept for a minute."""

from __future__ import annotations

import socket


def leave_closed_connection() -> int:
    """A port of 127.0.0.1 with one connection in TIME_WAIT, and nobody who listens."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = int(listener.getsockname()[1])
        with socket.create_connection(("127.0.0.1", port), timeout=60) as caller:
            accepted, _ = listener.accept()
            accepted.close()  # this side closes first and keeps the address for a while
            assert caller.recv(1) == b""
    return port
