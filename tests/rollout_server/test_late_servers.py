"""A real server that comes late takes the weights of the last round, of which the learner has trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from live_server import RunningServer, free_port, load_learner, train_a_little
from test_weight_sync import GenerateCanary
from weight_rounds import make_sync

from swift_stage2.records import RoundOutcome
from swift_stage2.rollout_server.engine import InstallFault
from swift_stage2.servers.protocol import Completion
from swift_stage2.weights.courier import ThreadCourier
from swift_stage2.weights.transport import ServerEndpoint, StreamTransport


class Learner:
    """Rank 0 with one server."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.module = load_learner(seed=1)
        self.canary = GenerateCanary(self.module)
        self.sync = make_sync(
            self.module,
            ThreadCourier([ServerEndpoint(server.base_url, free_port())], lambda info: StreamTransport()),
            canary=self.canary,
            run_id="run-1",
            timeout_s=30.0,
            canary_every_rounds=8,
        )

    def round(self) -> RoundOutcome:
        self.sync.begin(next(self.server.versions), [0], round_id="run-1-7", staged=True)
        return self.sync.hear()

    def catch_up(self, round_id: str = "run-1-7") -> RoundOutcome:
        self.sync.catch_up([0], round_id=round_id)
        return self.sync.hear()

    def ask(self) -> Completion:
        return self.server.infer([self.canary.request], max_tokens=12)[0]


@pytest.fixture
def learner(server: RunningServer) -> Iterator[Learner]:
    built = Learner(server)
    yield built
    built.sync.close()


def test_a_server_is_brought_the_weights_that_it_had_lost_and_not_newer_ones(learner: Learner) -> None:
    outcome = learner.round()
    before = learner.ask()
    other = load_learner(seed=2)
    foreign = Learner(learner.server)  # another job's weights, as a process that was started anew has others
    foreign.module.load_state_dict(other.state_dict())
    assert foreign.round().proven == (0,)
    foreign.sync.close()
    assert learner.ask().token_ids != before.token_ids
    train_a_little(learner.module)
    caught_up = learner.catch_up()
    assert (caught_up.proven, caught_up.is_catch_up, caught_up.ended) == ((0,), True, True)
    assert (caught_up.version, caught_up.round_id) == (outcome.version, outcome.round_id)
    assert caught_up.reports[0].proof == "checksums+canary", "the round had asked it"
    assert (caught_up.snapshot_seconds, caught_up.canary_seconds) == (0.0, 0.0)
    after = learner.ask()
    assert replace(after, token_ids=()) == replace(before, token_ids=()), "the stamp is the round's"
    assert after.token_ids == before.token_ids


def test_the_same_process_takes_them_again_and_is_proven_by_what_it_holds_now(learner: Learner) -> None:
    learner.round()
    learner.server.engine.install_fault = InstallFault.FLIP_ELEMENT
    failed = learner.catch_up()
    assert "does not hold the weights it was sent: resident" in str(failed.reports[0].error)
    assert learner.server.state() == "unproven"
    learner.server.engine.install_fault = InstallFault.NONE
    assert learner.catch_up().proven == (0,)
    assert learner.server.state() == "serving"


def test_where_the_round_asked_no_canary_checksums_prove_and_the_next_round_asks(learner: Learner) -> None:
    learner.round()
    assert learner.round().reports[0].proof == "checksums"
    learner.sync.distrust([0])  # as every server is that was lost
    assert learner.catch_up().reports[0].proof == "checksums"
    assert learner.round().reports[0].proof == "checksums+canary"


def test_only_weights_that_a_round_has_proven_and_that_lie_there_are_brought(learner: Learner) -> None:
    with pytest.raises(RuntimeError, match="kept and proven"):
        learner.catch_up()
    learner.round()
    with pytest.raises(RuntimeError, match="round_id=run-1-6"):
        learner.catch_up(round_id="run-1-6")
    learner.server.engine.install_fault = InstallFault.FLIP_ELEMENT
    assert learner.round().failed == (0,)
    learner.server.engine.install_fault = InstallFault.NONE
    with pytest.raises(RuntimeError, match="kept and proven"):
        learner.catch_up()


def test_a_catch_up_that_a_round_waits_for_has_what_stragglers_have(learner: Learner) -> None:
    learner.round()
    learner.sync._straggler_s = 0.0
    learner.server.engine.install_fault = InstallFault.NONE
    with learner.server.service.rounds._lock:  # the server answers nothing
        learner.sync.catch_up([0], round_id="run-1-7")
        assert not learner.sync.has_news
        learner.sync.hurry()
        assert learner.sync.has_news
        outcome = learner.sync.hear()
    assert outcome.failed == (0,)
    assert "within 0 s of the moment at which a round fell due" in str(outcome.reports[0].error)
