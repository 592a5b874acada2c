"""A fake stock server, a merger in front of it, and threads to call from."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_rollout_server import FakeRolloutServer
from live_merger import LiveMerger, live_merger


@pytest.fixture
def upstream() -> Iterator[FakeRolloutServer]:
    with FakeRolloutServer() as server:
        yield server


@pytest.fixture
def merger(upstream: FakeRolloutServer) -> Iterator[LiveMerger]:
    with live_merger(upstream) as merger:
        yield merger


@pytest.fixture
def callers(gate: threading.Event) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=12) as threads:
        yield threads
        gate.set()
