"""The learner's pushes to the unmodified ``swift rollout``: what is proven, caught and survived."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from live_server import free_port, load_learner, train_a_little
from stock_server import ServerProcess
from stopped_process import stop_process
from test_weight_sync import GenerateCanary, require_each_push_answered
from weight_updates import make_updates, server_at

from swift_stage2.records import RoundOutcome
from swift_stage2.servers import infer_wire
from swift_stage2.servers.session import Deadline
from swift_stage2.weights.publisher import ThreadPublisher
from swift_stage2.weights.stock_transport import StockTransport

_CPU = torch.device("cpu")


class Learner:
    """A module, its canary and its pushes; the canary's answer is Hugging Face's own ``generate``."""

    def __init__(self, server: ServerProcess, *, seed: int = 1, transport: Any = StockTransport) -> None:
        self.server = server
        self.module = load_learner(seed=seed)
        self.canary = GenerateCanary(self.module)
        self.group_port = free_port()
        endpoints = [server_at(server.base_url, self.group_port)]
        self.publisher = ThreadPublisher(endpoints, lambda info: transport(_CPU))
        self.sync = make_updates(self.module, self.publisher, canary=self.canary)

    def push(self) -> RoundOutcome:
        return self.sync.run([0])

    def servers_answer(self) -> tuple[int, ...]:
        body = {"infer_requests": [self.canary.request], "request_config": self.canary.latest.config}
        reply = httpx.post(f"{self.server.base_url}/infer/", json=body, trust_env=False, timeout=60)
        assert reply.status_code == 200, reply.text
        (completion,) = infer_wire.parse_infer_reply(reply.json(), 1)
        return completion.token_ids


@pytest.fixture
def learner(stock: ServerProcess) -> Iterator[Learner]:
    built = Learner(stock)
    yield built
    built.sync.close()


def test_after_each_push_the_servers_greedy_answer_is_the_learners(learner: Learner) -> None:
    require_each_push_answered(learner, learner.servers_answer, "canary")


def test_a_learner_finds_the_communicator_of_one_that_was_killed(
    stock: ServerProcess, tmp_path: Path
) -> None:
    """A stock worker keeps its first communicator and says nothing: without an ordered close the next join hangs."""
    killed = subprocess.run(
        [sys.executable, __file__, stock.base_url],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert "proven (0,)" in killed.stdout
    learner = Learner(stock, seed=2)
    outcome = learner.push()
    learner.sync.close()
    assert outcome.proven == (0,), outcome.reports[0].error


class _SendsTheFirstVersionAgain(StockTransport):
    """Sends what a learner that exports a stale copy would."""

    sent: list[torch.Tensor]
    again = False

    def open(self, *terms: Any) -> str:
        kind = super().open(*terms)
        self.sent = self.sent[:] if self.again else []
        return kind

    def send(self, flat: torch.Tensor, deadline: Deadline) -> None:
        if not self.again:
            self.sent.append(flat.clone())
        super().send(self.sent.pop(0) if self.again else flat, deadline)


def test_the_canary_catches_weights_that_did_not_move(stock: ServerProcess) -> None:
    learner = Learner(stock, transport=_SendsTheFirstVersionAgain)
    assert learner.push().proven == (0,)
    transport = learner.publisher._kept[0]
    assert isinstance(transport, _SendsTheFirstVersionAgain)
    transport.again = True
    train_a_little(learner.module)
    outcome = learner.push()
    learner.sync.close()
    assert outcome.failed == (0,)
    assert "canary" in str(outcome.reports[0].error)


class _FlipsOneElement(StockTransport):
    """The lowest bit of one element, 1e-7 of its value."""

    def send(self, flat: torch.Tensor, deadline: Deadline) -> None:
        damaged = flat.clone()
        damaged[0] ^= 1
        super().send(damaged, deadline)


def test_a_server_that_dies_in_the_middle_of_a_push_is_its_own_fault(tmp_path: Path) -> None:
    from stock_server import start_stock

    server = start_stock(tmp_path, free_port())
    try:
        server.wait_until_it_answers()
        worker = server.named("VLLM::Worker")

        class KillsTheWorker(StockTransport):
            num_sent = 0

            def send(self, flat: torch.Tensor, deadline: Deadline) -> None:
                if self.num_sent == 2:
                    worker.kill()
                    worker.wait(timeout=60)
                self.num_sent += 1
                super().send(flat, deadline)

        learner = Learner(server, transport=KillsTheWorker)
        outcome = learner.push()
        assert outcome.failed == (0,)
        learner.sync.close()
    finally:
        server.end()


def test_a_server_that_dies_between_two_pushes_is_lost_without_being_asked(tmp_path: Path) -> None:
    from stock_server import start_stock

    server = start_stock(tmp_path, free_port())
    try:
        server.wait_until_it_answers()
        learner = Learner(server)
        outcome = learner.push()
        assert outcome.proven == (0,), outcome.reports[0].error
        assert learner.publisher.lost_servers() == ()
        worker = server.named("VLLM::Worker")
        stop_process(worker.pid)
        assert learner.publisher.lost_servers() == ()  # silent; rollouts will tell
        worker.resume()
        transport = learner.publisher._kept[0]
        assert isinstance(transport, StockTransport)
        question = transport._question
        assert question is not None
        assert question.ended_within(20)
        assert learner.publisher.lost_servers() == ()
        worker.kill()
        worker.wait(timeout=60)
        assert learner.publisher.lost_servers() == (0,)
        learner.sync.close()
    finally:
        server.end()


def _one_push_and_no_goodbye(base_url: str) -> None:
    """Leaves on the server what a killed learner does."""
    server = ServerProcess(base_url, subprocess.Popen(["true"]), Path(os.devnull))
    learner = Learner(server)
    print("proven", learner.push().proven, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _one_push_and_no_goodbye(sys.argv[1])
