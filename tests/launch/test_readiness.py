"""The probe tells at once what no waiting mends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from fake_rollout_server import FakeRolloutServer, error

from swift_stage2.launch.managed_server import ReadinessProbe
from swift_stage2.servers import protocol as rollout_protocol

DEADLINE_S = 20.0


@contextmanager
def probing(url: str) -> Iterator[ReadinessProbe]:
    probe = ReadinessProbe("server0", url, None, 3600.0)
    try:
        yield probe
    finally:
        probe.close()


def wait_for_refusal(probe: ReadinessProbe) -> str:
    end = time.monotonic() + DEADLINE_S
    while probe.refusal is None:
        assert time.monotonic() < end, probe.last_error
        threading.Event().wait(0.02)
    return probe.refusal


def test_a_wrong_key_is_a_refusal() -> None:
    with FakeRolloutServer(on_infer=lambda call: error(401, "no")) as server, probing(server.url) as probe:
        assert "status 401" in wait_for_refusal(probe)
        assert not probe.answered


def test_a_fault_of_the_probe_itself_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(reply: object, num_requests: int) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(rollout_protocol, "parse_infer_reply", explode)
    with FakeRolloutServer() as server, probing(server.url) as probe:
        assert wait_for_refusal(probe) == "the probe itself failed: RuntimeError: a bug"
