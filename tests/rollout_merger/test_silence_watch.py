"""What a merger says while no server is behind it."""

from __future__ import annotations

import queue
import socket

import pytest
from live_merger import LONGEST_WAIT_S, free_port

from swift_stage2.rollout_merger.app import SilenceWatch


def test_it_warns_at_each_moment_and_then_no_more() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    said: list[str] = []
    with SilenceWatch(url, said.append, moments_s=(0.0, 0.01)) as watch:
        assert watch.wait(LONGEST_WAIT_S)
    assert len(said) == 2
    assert f"nothing listens at {url} after 0.01 s (" in said[1]
    assert "start the server there, or correct --upstream" in said[1]


def test_a_server_that_listens_is_no_reason_to_warn() -> None:
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with SilenceWatch(url, said.append, moments_s=(0.0, 3600.0)) as watch:
            assert watch.wait(LONGEST_WAIT_S)
    assert said == []


def test_a_server_that_comes_ends_the_warnings() -> None:
    port = free_port()
    said: queue.Queue[str] = queue.Queue()
    with SilenceWatch(f"http://127.0.0.1:{port}", said.put, moments_s=(0.0, 3600.0)) as watch:
        said.get(timeout=LONGEST_WAIT_S)
        with socket.create_server(("127.0.0.1", port)):
            assert watch.wait(LONGEST_WAIT_S)
    assert said.empty()


def test_it_ends_with_the_merger(monkeypatch: pytest.MonkeyPatch) -> None:
    with SilenceWatch(f"http://127.0.0.1:{free_port()}", pytest.fail, moments_s=(3600.0,)) as watch:
        pass
    assert watch.wait(0.0)
