"""A push to a server whose group port is behind a firewall: packets are dropped, nothing refuses."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from fake_rollout_server import FakeRolloutServer
from weight_updates import make_updates, server_at

from swift_stage2.weights import transport as weight_transport
from swift_stage2.weights.publisher import ThreadPublisher
from swift_stage2.weights.transport import WeightTransport

LINEAR = torch.nn.Linear(2, 2)


@contextmanager
def dropping_port() -> Iterator[int]:
    """A port whose packets are dropped: Linux answers no SYN to a listener whose queue is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        probe = stack.enter_context(socket.socket())
        probe.settimeout(0.3)
        with pytest.raises(TimeoutError):
            probe.connect(address)
        yield address[1]


def a_push_to_a_dropping_port(
    monkeypatch: pytest.MonkeyPatch, fake: FakeRolloutServer, transport: Callable[[], WeightTransport]
) -> None:
    """The push has 300 s, of which 240 for calls; it fails in the joining time, here 1 s, and names the port."""
    monkeypatch.setattr(weight_transport, "JOIN_TIMEOUT_S", 1.0)
    with fake as server, dropping_port() as port:
        publisher = ThreadPublisher([server_at(server.url, port)], lambda info: transport())
        outcome = make_updates(LINEAR, publisher, timeout_s=300.0).run([0])
    assert outcome.failed == (0,)
    error = str(outcome.reports[0].error)
    assert f"the weight group did not form at 127.0.0.1:{port}: " in error
    assert "open group_port in every firewall between the two machines" in error
    assert outcome.reports[0].seconds["connect"] < 30
    assert outcome.seconds < 60
