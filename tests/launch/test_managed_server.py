"""A server may start, with real ports and a job that only listens; it answers, and is or is not started again."""

from __future__ import annotations

import pytest
from closed_connection import leave_closed_connection

from swift_stage2.config import RestartConfig, RestartPolicy, ServerConfig
from swift_stage2.errors import ServerUnavailable
from swift_stage2.launch import managed_server
from swift_stage2.launch.managed_server import ManagedServer, restart_delay_s
from swift_stage2.launch.plan import PlannedServer
from swift_stage2.runtime.supervisor import Command


class ListeningJob:
    """Keeps what was said, and starts nothing."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.started: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def start(self, command: Command) -> None:
        self.started.append(command.name)


@pytest.mark.parametrize(("patience_s", "is_stock"), [(3600.0, True), (0.0, True), (3600.0, False)])
def test_a_stock_server_waits_for_its_port_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, patience_s: float, is_stock: bool
) -> None:
    """One of ours takes it at once."""
    monkeypatch.setattr(managed_server, "_LOOK_INTERVAL_S", 0.0)
    port, job = leave_closed_connection(), ListeningJob()
    command = Command(name="server0", argv=("x",), environment={}, grace_s=1.0)
    address = ServerConfig(base_url=f"http://127.0.0.1:{port}")
    planned = PlannedServer(command=command, address=address, index=0, is_stock=is_stock)
    server = ManagedServer(planned, RestartConfig(), 60.0, port_patience_s=patience_s)
    server.turn(job)  # type: ignore[arg-type]
    if not is_stock:
        assert (job.said, job.started) == ([], ["server0"])
    elif patience_s:
        server.turn(job)  # type: ignore[arg-type]
        (line,) = job.said
        assert line.startswith(f"server0: port {port} ")
    else:
        with pytest.raises(ServerUnavailable, match=f"port {port} of server0 .*change the port"):
            server.turn(job)  # type: ignore[arg-type]
    assert server.has_started is not is_stock


def test_restarts_follow_a_failure_alone_are_bounded_and_their_delay_doubles() -> None:
    config = RestartConfig(max_restarts=3, backoff_s=2.0)
    assert [restart_delay_s(config, 137, number) for number in range(5)] == [2.0, 4.0, 8.0, None, None]
    assert restart_delay_s(config, 0, 0) is None
    assert restart_delay_s(RestartConfig(policy=RestartPolicy.NEVER), 137, 0) is None
