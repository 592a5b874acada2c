"""Carries a snapshot over one TCP connection, from the learner to one server that listens for it.

Whoever connects must at once present the secret that the server made for this offer and gave out in an answer to an
HTTP call. Until then 32 bytes of a peer are read and nothing else; afterwards exactly the bytes that a caller asks
for, into memory of its own. ``close`` may come from any thread and ends every call at once.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from contextlib import suppress

_WORD_BYTES = 32  # half a secret: the learner says the first, the server answers with the second
_GREETING_S = 0.2  # for a peer to say it; one whose words come later is turned away, and comes again
_RECEIVED = b"1"  # what has left may still lie in the buffers of a peer that stands still
_BACKLOG = 128
_RETRY_S = 0.05


class WeightStream:
    """One end of a connection. A transfer has a deadline and raises ``OSError`` when its peer is lost."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._in_use = threading.Lock()

    def send(self, memory: memoryview, timeout_s: float) -> None:
        """Returns when the peer has received all of ``memory``."""
        end = time.monotonic() + timeout_s
        with self._in_use:
            self._connection.settimeout(timeout_s)
            self._connection.sendall(memory)  # over loopback a fifth faster than sendfile(2)
            _fill(self._connection, memoryview(bytearray(len(_RECEIVED))), end)

    def close(self) -> None:
        """Ends the connection, and what another thread does with it. May be called again."""
        _close(self._connection, self._in_use)


class WeightListener:
    """The server's end: listens on exactly one address, for the one learner that knows ``secret``."""

    def __init__(self, host: str, port: int, secret: str | None = None) -> None:
        """Makes a secret unless it is given one. Raises OSError, OverflowError: the address cannot be listened on."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self._in_use = threading.Lock()
        self._is_closed = False
        self.secret = secret or secrets.token_hex(_WORD_BYTES)  # two digits a byte, so two words

    def receive(self, memory: memoryview, timeout_s: float) -> None:
        """Returns when the learner has filled ``memory``. Once it has come nobody listens any more.

        Raises:
            TimeoutError: it has not come, or has not sent it all, in time.
            OSError: it was lost, or ``close`` was called.
        """
        end = time.monotonic() + timeout_s
        word, answer = _words(self.secret)
        with self._in_use:
            with self._socket as listener:
                while (peer := _greet(listener, word, end)) is None:
                    pass
            with peer:
                self._socket = peer
                if self._is_closed:
                    raise ConnectionAbortedError("the offer has ended")
                peer.settimeout(max(_RETRY_S, end - time.monotonic()))
                peer.sendall(answer)
                _fill(peer, memory, end)
                peer.sendall(_RECEIVED)

    def close(self) -> None:
        """Frees the port, and ends ``receive``. May be called again."""
        self._is_closed = True
        _close(self._socket, self._in_use)


def connect_stream(host: str, port: int, secret: str, timeout_s: float) -> WeightStream:
    """The learner's end. Raises OSError: nobody listens there, something else does, or not in time."""
    end = time.monotonic() + timeout_s
    word, expected = _words(secret)
    answer = bytearray(_WORD_BYTES)
    while True:
        connection = socket.create_connection((host, port), max(_RETRY_S, end - time.monotonic()))
        try:
            connection.sendall(word)
            _fill(connection, memoryview(answer), end)
            if secrets.compare_digest(answer, expected):
                return WeightStream(connection)
            raise OSError(f"something else answers at {host}:{port}")
        except ConnectionError:  # among many strangers the server may have turned this one away
            connection.close()
            if time.monotonic() + _RETRY_S > end:
                raise
            time.sleep(_RETRY_S)
        except BaseException:
            connection.close()
            raise


def _greet(listener: socket.socket, word: bytes, end: float) -> socket.socket | None:
    """The next that connects, if it says the word at once; who does not may come again."""
    try:
        listener.settimeout(max(0.0, end - time.monotonic()))
        peer, said = listener.accept()[0], bytearray(_WORD_BYTES)
    except (TimeoutError, BlockingIOError):
        raise TimeoutError("no learner connected in time") from None
    with suppress(OSError):
        _fill(peer, memoryview(said), time.monotonic() + _GREETING_S)
        if secrets.compare_digest(said, word):
            return peer
    peer.close()
    return None


def _words(secret: str) -> tuple[bytes, bytes]:
    said = secret.encode()
    return said[:_WORD_BYTES], said[_WORD_BYTES:]


def _fill(connection: socket.socket, memory: memoryview, end: float) -> None:
    while len(memory):
        if time.monotonic() >= end + _RETRY_S:
            raise TimeoutError("the peer is too slow")
        connection.settimeout(max(_RETRY_S, end - time.monotonic()))
        num_read = connection.recv_into(memory)
        if not num_read:
            raise ConnectionResetError("the peer has closed the connection")
        memory = memory[num_read:]


def _close(end: socket.socket, in_use: threading.Lock) -> None:
    with suppress(OSError):  # it may be closed already
        end.shutdown(socket.SHUT_RDWR)
    with in_use:  # whoever used it has been woken; its number must not become another file's before
        end.close()
