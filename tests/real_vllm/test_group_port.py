"""Stock's own group, joined through vLLM, at a port that answers nothing."""

from __future__ import annotations

import pytest
import torch
from dropping_port import a_round_at_a_dropping_port
from fake_rollout_server import Answer, FakeRolloutServer

from swift_stage2.servers import protocol
from swift_stage2.weights.stock_transport import StockTransport


def test_a_group_port_behind_a_firewall_costs_a_round_the_joining_time_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = FakeRolloutServer(
        on_get=lambda call: (
            Answer(body=b'{"world_size": 1}') if call.path == protocol.WORLD_SIZE else Answer(status=404)
        )
    )
    a_round_at_a_dropping_port(monkeypatch, server, lambda: StockTransport(torch.device("cpu")))
