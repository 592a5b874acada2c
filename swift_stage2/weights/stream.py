"""Carries bytes of weights over one TCP connection, from the learner to one server that listens for it.

Whoever connects must first present the secret that the server made for this round and gave out in an answer to an
HTTP call. Until then 32 bytes of a peer are kept and nothing else; afterwards exactly the bytes that a caller asks
for are read, into memory of its own. ``close`` may come from any thread and ends every call at once.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import threading
import time
from contextlib import closing, suppress
from typing import Any

import torch

_WORD_BYTES = 32  # half a secret: the learner says the first, the server answers with the second
_MOST_STRANGERS = 64  # connected without having said the word; the oldest gives way, and may come again
_RECEIVED = b"1"  # what has left may still lie in the buffers of a peer that stands still
_BACKLOG = 128
_RETRY_S = 0.05


class WeightStream:
    """One end of a connection. A transfer has a deadline and raises ``OSError`` when its peer is lost."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._in_use = threading.Lock()

    def send(self, flat: torch.Tensor, timeout_s: float) -> None:
        """Returns when the peer has received all of a contiguous uint8 tensor on the CPU."""
        end = time.monotonic() + timeout_s
        with self._in_use:
            self._connection.settimeout(timeout_s)
            self._connection.sendall(_bytes_of(flat))
            _fill(self._connection, memoryview(bytearray(len(_RECEIVED))), end)

    def receive(self, flat: torch.Tensor, timeout_s: float) -> None:
        """Returns when a contiguous uint8 tensor on the CPU is full."""
        with self._in_use:
            _fill(self._connection, _bytes_of(flat), time.monotonic() + timeout_s)
            self._connection.sendall(_RECEIVED)

    def close(self) -> None:
        """Ends the connection, and what another thread does with it. May be called again."""
        _close(self._connection, self._in_use)


class WeightListener:
    """Listens on exactly one address for the one learner that knows ``secret``."""

    def __init__(self, host: str, port: int, secret: str | None = None) -> None:
        """Makes a secret unless it is given one. Raises OSError, OverflowError: the address cannot be listened on."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self._in_use = threading.Lock()
        self.secret = secret or secrets.token_hex(_WORD_BYTES)  # two digits a byte, so two words

    def accept(self, timeout_s: float) -> WeightStream:
        """The learner's connection. Afterwards nobody listens any more.

        Raises:
            TimeoutError: no learner has come in time.
            OSError: ``close`` was called.
        """
        end = time.monotonic() + timeout_s
        word, answer = _words(self.secret)
        with self._in_use, self._listener, closing(_Strangers(self._listener)) as strangers:
            while (left_s := end - time.monotonic()) > 0:
                if (peer := strangers.find(word, left_s)) is not None:
                    peer.settimeout(left_s)
                    peer.sendall(answer)
                    return WeightStream(peer)
        raise TimeoutError(f"no learner connected within timeout_s={timeout_s:.1f}")

    def close(self) -> None:
        """Frees the port and ends ``accept``. May be called again."""
        _close(self._listener, self._in_use)


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


class _Strangers:
    """Peers that have connected and have not said the word yet."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._heard: dict[socket.socket, bytes] = {}  # in the order of their arrival
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def find(self, word: bytes, timeout_s: float) -> socket.socket | None:
        """The one that has said the word, if it came within the time. Raises OSError when the listener was shut."""
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._let_in()
                continue
            peer = key.fileobj
            if not isinstance(peer, socket.socket) or peer not in self._heard:
                continue  # has given way to one that came in this same round of the loop
            said = _read(peer, _WORD_BYTES - len(self._heard[peer]))
            self._heard[peer] += said
            if secrets.compare_digest(self._heard[peer], word):
                self._forget(peer)
                return peer
            if not said or len(self._heard[peer]) == _WORD_BYTES:
                self._forget(peer).close()
        return None

    def close(self) -> None:
        self._selector.close()
        for peer in self._heard:
            peer.close()

    def _let_in(self) -> None:
        with suppress(BlockingIOError, ConnectionError):  # it has gone already
            peer = self._listener.accept()[0]
            peer.setblocking(False)
            self._heard[peer] = b""
            self._selector.register(peer, selectors.EVENT_READ)
        if len(self._heard) > _MOST_STRANGERS:
            self._forget(next(iter(self._heard))).close()

    def _forget(self, peer: socket.socket) -> socket.socket:
        self._selector.unregister(peer)
        del self._heard[peer]
        return peer


def _bytes_of(flat: torch.Tensor) -> memoryview:
    array: Any = flat.numpy()  # numpy's stubs hide that an array is a buffer
    return memoryview(array)


def _words(secret: str) -> tuple[bytes, bytes]:
    said = secret.encode()
    return said[:_WORD_BYTES], said[_WORD_BYTES:]


def _read(peer: socket.socket, num_bytes: int) -> bytes:
    """Reads at most so many of the bytes that are there; none when the peer has gone."""
    try:
        return peer.recv(num_bytes)
    except OSError:
        return b""


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
