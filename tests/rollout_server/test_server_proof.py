"""The learner's proof against our real server: a canary must agree, and be stamped with the push's version."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from live_server import GREEDY, LearnerRound, RunningServer, load_learner, text_request
from stand_in_canary import AgreeingAnswer
from weight_updates import make_spec

from swift_stage2.config import Proof
from swift_stage2.errors import ServerFault
from swift_stage2.servers.session import Deadline, ServerSession
from swift_stage2.weights.proof import CanaryAnswer, prove_server
from swift_stage2.weights.snapshot import WeightIdentity


@pytest.fixture
def loaded(server: RunningServer) -> LearnerRound:
    """A round whose weights are installed, and that waits for its canary."""
    round_ = LearnerRound(server, load_learner())
    round_.run()
    return round_


def prove(
    round_: LearnerRound,
    *,
    kind: type[CanaryAnswer] = AgreeingAnswer,
    info: dict[str, Any] | None = None,
    **terms: Any,
) -> str:
    wanted: dict[str, Any] = {
        "identity": WeightIdentity(round_.run_id, round_.version),
        "manifest": round_.export.manifest(),
        "canary": kind(text_request(), GREEDY),
        "proof": Proof.CANARY,
    }
    with ServerSession(round_.server.base_url) as session:
        told = replace(session.info(Deadline(5.0)), **info or {})
        return prove_server(session, make_spec(30.0, **wanted | terms), told, {})


def test_a_server_without_checksums_proves_nothing_in_a_push_without_canary(loaded: LearnerRound) -> None:
    with pytest.raises(ServerFault, match="no canary was due"):
        prove(loaded, info={"stock": True}, canary=None, proof=Proof.AUTO)


@pytest.mark.parametrize("other", [WeightIdentity("run-1", 0), WeightIdentity("another", 1)])
def test_a_canary_of_other_weights_proves_nothing(loaded: LearnerRound, other: WeightIdentity) -> None:
    with pytest.raises(ServerFault, match="answers the canary as"):
        prove(loaded, identity=other)
