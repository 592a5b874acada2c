"""The connection that carries weights: what it delivers, whom it lets in, and that every wait in it ends."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest
import torch
from torchrun_job import free_port

from swift_stage2.weights.stream import WeightListener, WeightStream, connect_stream

LONGEST_WAIT_S = 60.0
HOST = "127.0.0.1"
LARGER_THAN_SOCKET_BUFFERS = 1 << 26


@contextmanager
def listening() -> Iterator[tuple[WeightListener, int, Future[WeightStream]]]:
    port = free_port()
    listener = WeightListener(HOST, port)
    with ThreadPoolExecutor(1) as server, closing(listener):
        yield listener, port, server.submit(listener.accept, LONGEST_WAIT_S)
        listener.close()


@contextmanager
def connected() -> Iterator[tuple[WeightStream, WeightStream]]:
    """The server's end and the learner's."""
    with listening() as (listener, port, accepting):
        with closing(connect_stream(HOST, port, listener.secret, LONGEST_WAIT_S)) as learner:
            with closing(accepting.result(LONGEST_WAIT_S)) as server:
                yield server, learner


def test_bytes_arrive_as_they_were_sent() -> None:
    with connected() as (server, learner), ThreadPoolExecutor(1) as other:
        for size in (0, 1, 1000, LARGER_THAN_SOCKET_BUFFERS):
            sent = torch.arange(size).to(torch.uint8)
            sending = other.submit(learner.send, sent, LONGEST_WAIT_S)
            received = torch.zeros(size, dtype=torch.uint8)
            server.receive(received, LONGEST_WAIT_S)
            sending.result(LONGEST_WAIT_S)
            assert torch.equal(received, sent)


def test_a_lost_peer_is_an_error_on_either_side() -> None:
    memory = torch.zeros(LARGER_THAN_SOCKET_BUFFERS, dtype=torch.uint8)
    with connected() as (server, learner):
        learner.close()
        with pytest.raises(ConnectionError):
            server.receive(memory, LONGEST_WAIT_S)
    with connected() as (server, learner):
        server.close()
        with pytest.raises(ConnectionError):
            learner.send(memory, LONGEST_WAIT_S)


@pytest.mark.parametrize("size", [1, LARGER_THAN_SOCKET_BUFFERS])
def test_a_silent_peer_is_an_error_at_the_deadline(size: int) -> None:
    """Also when the bytes fit into its buffers: it may stand still."""
    memory = torch.zeros(size, dtype=torch.uint8)
    with connected() as (server, learner):
        with pytest.raises(TimeoutError):
            server.receive(memory, 0.1)
        with pytest.raises(TimeoutError):
            learner.send(memory, 0.1)


def test_close_ends_what_another_thread_waits_for() -> None:
    memory = torch.zeros(8, dtype=torch.uint8)
    with connected() as (server, _), ThreadPoolExecutor(1) as other:
        receiving = other.submit(server.receive, memory, 600.0)
        server.close()
        assert isinstance(receiving.exception(LONGEST_WAIT_S), OSError)
    port = free_port()
    listener = WeightListener(HOST, port)
    with ThreadPoolExecutor(1) as other:
        accepting = other.submit(listener.accept, 600.0)
        listener.close()
        assert isinstance(accepting.exception(LONGEST_WAIT_S), OSError)
    socket.create_server((HOST, port)).close()  # the port is free again


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
        accepting = server.submit(listener.accept, LONGEST_WAIT_S)
        strangers = []
        for number in range(300):
            stranger = stack.enter_context(socket.create_connection((HOST, port), LONGEST_WAIT_S))
            strangers.append(stranger)
            with suppress(ConnectionError):  # it has been turned away
                stranger.sendall(words[number % len(words)])
        assert not accepting.done()
        learner = stack.enter_context(closing(connect_stream(HOST, port, secret, LONGEST_WAIT_S)))
        stream = stack.enter_context(closing(accepting.result(LONGEST_WAIT_S)))
        sending = server.submit(learner.send, torch.full((3,), 7, dtype=torch.uint8), LONGEST_WAIT_S)
        received = torch.zeros(3, dtype=torch.uint8)
        stream.receive(received, LONGEST_WAIT_S)
        sending.result(LONGEST_WAIT_S)
        assert received.tolist() == [7, 7, 7]
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
