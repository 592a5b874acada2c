"""The connection that publishes weights: what it delivers, whom it lets in, and that every wait in it ends."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest
from torchrun_job import free_port

from swift_stage2.weights.stream import WeightListener, WeightStream, connect_stream

LONGEST_WAIT_S = 60.0
HOST = "127.0.0.1"
LARGER_THAN_SOCKET_BUFFERS = 1 << 26
SENT = memoryview(bytes(range(256)) * (LARGER_THAN_SOCKET_BUFFERS >> 8))


@contextmanager
def connected(
    size: int, receive_s: float = LONGEST_WAIT_S
) -> Iterator[tuple[WeightListener, WeightStream, memoryview, Future[None]]]:
    """The server's end, the learner's, and what the server receives meanwhile."""
    port = free_port()
    listener, memory = WeightListener(HOST, port), memoryview(bytearray(size))
    with ThreadPoolExecutor(1) as server, closing(listener):
        receiving = server.submit(listener.receive, memory, receive_s)
        with closing(connect_stream(HOST, port, listener.secret, LONGEST_WAIT_S)) as learner:
            yield listener, learner, memory, receiving
    socket.create_server((HOST, port)).close()  # the port is free again


@pytest.mark.parametrize("size", [0, 1, 1000, LARGER_THAN_SOCKET_BUFFERS])
def test_bytes_arrive_as_they_were_sent(size: int) -> None:
    with connected(size) as (_, learner, memory, receiving):
        learner.send(SENT[:size], LONGEST_WAIT_S)
        receiving.result(LONGEST_WAIT_S)
        assert memory == SENT[:size]


def test_a_lost_peer_is_an_error_on_either_side() -> None:
    with connected(8) as (_, learner, _, receiving):
        learner.close()
        assert isinstance(receiving.exception(LONGEST_WAIT_S), ConnectionError)
    with connected(LARGER_THAN_SOCKET_BUFFERS) as (server, learner, _, receiving):
        server.close()
        assert isinstance(receiving.exception(LONGEST_WAIT_S), OSError)
        with pytest.raises(ConnectionError):
            learner.send(SENT, LONGEST_WAIT_S)


def test_a_silent_learner_is_an_error_at_the_deadline() -> None:
    with connected(1, receive_s=0.5) as (_, _, _, receiving):
        assert isinstance(receiving.exception(LONGEST_WAIT_S), TimeoutError)
    listener = WeightListener(HOST, free_port())
    with pytest.raises(TimeoutError, match="no learner connected"):
        listener.receive(memoryview(b""), 0.1)


@pytest.mark.parametrize("size", [1, LARGER_THAN_SOCKET_BUFFERS])
def test_a_silent_server_is_an_error_at_the_deadline(size: int) -> None:
    """Also when the bytes fit into its buffers: it may stand still."""
    with connected(2 * LARGER_THAN_SOCKET_BUFFERS) as (server, learner, _, receiving):
        with pytest.raises(TimeoutError):
            learner.send(SENT[:size], 0.3)  # it waits for more
        server.close()
        assert isinstance(receiving.exception(LONGEST_WAIT_S), OSError)


def test_close_ends_what_another_thread_waits_for() -> None:
    with connected(8) as (server, _, _, receiving):
        server.close()
        assert isinstance(receiving.exception(LONGEST_WAIT_S), OSError)
    listener = WeightListener(HOST, free_port())
    with ThreadPoolExecutor(1) as other:
        receiving = other.submit(listener.receive, memoryview(b""), 600.0)
        listener.close()
        assert receiving.exception(LONGEST_WAIT_S) is not None


def test_nobody_but_the_learner_is_let_in_and_no_stranger_keeps_it_out() -> None:
    secret = "1" * 64
    words = [
        b"",
        b"x",
        b"1" * 31,
        b"1" * 31 + b"2",
        b"\0" * 4096,
        b"GET / HTTP/1.1\r\n\r\n",
        b"2" * 32 + b"1" * 32,
    ]
    port = free_port()
    listener = WeightListener(HOST, port, secret)
    with ExitStack() as stack, ThreadPoolExecutor(1) as server, closing(listener):
        received = memoryview(bytearray(3))
        receiving = server.submit(listener.receive, received, LONGEST_WAIT_S)
        strangers = []
        for number in range(70):
            stranger = stack.enter_context(socket.create_connection((HOST, port), LONGEST_WAIT_S))
            strangers.append(stranger)
            with suppress(ConnectionError):  # it has been turned away
                stranger.sendall(words[number % len(words)])
        assert not receiving.done()
        learner = stack.enter_context(closing(connect_stream(HOST, port, secret, LONGEST_WAIT_S)))
        learner.send(SENT[:3], LONGEST_WAIT_S)
        receiving.result(LONGEST_WAIT_S)
        assert received == SENT[:3]
        for stranger in strangers:
            assert heard(stranger) == b""
        with pytest.raises(ConnectionRefusedError):  # one learner, and nobody after it
            socket.create_connection((HOST, port), LONGEST_WAIT_S)


def heard(stranger: socket.socket) -> bytes:
    try:
        return stranger.recv(1)
    except ConnectionError:
        return b""


def test_a_program_that_is_not_the_server_gets_no_weights() -> None:
    with socket.create_server((HOST, 0)) as impostor, ThreadPoolExecutor(1) as other:

        def answer() -> None:
            with impostor.accept()[0] as peer:
                peer.sendall(b"x" * 32)

        answering = other.submit(answer)
        with pytest.raises(OSError, match="something else answers"):
            connect_stream(HOST, impostor.getsockname()[1], "1" * 64, LONGEST_WAIT_S)
        answering.result(LONGEST_WAIT_S)


def test_a_taken_port_is_an_error_at_once() -> None:
    with socket.create_server((HOST, 0)) as holder, pytest.raises(OSError, match="in use"):
        WeightListener(HOST, holder.getsockname()[1])
