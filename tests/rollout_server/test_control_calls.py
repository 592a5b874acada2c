"""Calls that wait: they fill no threads, end with their callers, pass large bodies, and none is forgotten."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack, closing

import pytest
from live_server import (
    LearnerRound,
    RunningServer,
    call_and_wait,
    load_learner,
    text_request,
)
from waiting import wait_for

from swift_stage2 import wire
from swift_stage2.rollout_server.routes import _CONTROL_THREADS

MANY = 2 * _CONTROL_THREADS + 2
pytestmark = pytest.mark.usefixtures("checkpoints_weights_again")


def status_of(connection: socket.socket) -> int:
    return int(connection.recv(12).split()[1])


@pytest.fixture
def half_pushed(server: RunningServer) -> LearnerRound:
    """An offer whose learner has connected and sends nothing."""
    round_ = LearnerRound(server, load_learner(seed=30))
    round_.connect(timeout_s=300.0)
    return round_


def ask_to_install(round_: LearnerRound) -> socket.socket:
    return call_and_wait(round_.server, wire.INSTALL, json.dumps(round_.installation).encode())


def test_one_install_waits_all_others_are_refused_at_once_and_a_newer_offer_ends_it(
    server: RunningServer, half_pushed: LearnerRound
) -> None:
    with ExitStack() as stack:
        installs = [stack.enter_context(closing(ask_to_install(half_pushed))) for _ in range(MANY)]
        wait_for(lambda: server.service.slot._installing is not None)
        next_round = LearnerRound(server, load_learner(seed=31))
        next_round.run()
        assert sorted(status_of(each) for each in installs) == [409] * (MANY - 1) + [500]
    assert server.infer([text_request()])[0].weight_version == next_round.version
    half_pushed.close()


def test_an_install_whose_caller_has_gone_ends_and_installs_nothing(
    server: RunningServer, half_pushed: LearnerRound
) -> None:
    before = server.engine.stamp
    install = ask_to_install(half_pushed)
    wait_for(lambda: server.service.slot._installing is not None)
    install.close()
    wait_for(lambda: server.service.slot._installing is None)
    assert (server.state(), server.engine.stamp) == ("serving", before)
    half_pushed.close()
