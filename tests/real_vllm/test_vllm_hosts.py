"""Servers on vLLM, ours and the stock one over gloo, on another host than the learner's two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs_on_hosts import HTTP_PORT, assert_trained_on_both_channels, running_server, two_ranks
from network_hosts import Host, network_hosts
from our_server import our_arguments
from stock_server import ENVIRONMENT, stock_arguments

pytestmark = [pytest.mark.namespaces, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("is_stock", "proof"), [(False, "checksums+canary"), (True, "canary")], ids=["ours", "stock"]
)
def test_two_ranks_train_both_channels_with_a_server_on_another_host(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch, is_stock: bool, proof: str
) -> None:
    for name, text in ENVIRONMENT.items():
        monkeypatch.setenv(name, text)
    directory = tmp_path / "run"
    with network_hosts("server", "learner") as (server, learner):
        weights = server.second_address
        words = stock_arguments(HTTP_PORT) if is_stock else _ours(weights)
        ready = "Application startup complete" if is_stock else "serving "
        # The learner names what a stock server binds; no member may then take the wildcard for its own address.
        bind = {"group_bind": "0.0.0.0"} if is_stock else {}
        with running_server(server, tmp_path / "server.log", _bound_to(server, words), ready) as address:
            two_ranks(learner, directory, rows, address, group_host=weights, **bind)
    assert_trained_on_both_channels(directory, 2, proof)


def _ours(weights: str) -> list[str]:
    return ["-m", "swift_stage2", "rollout", *our_arguments(HTTP_PORT), "--group-bind", weights, "--insecure"]


def _bound_to(host: Host, words: list[str]) -> list[str]:
    return [host.address if word == "127.0.0.1" else word for word in words]
