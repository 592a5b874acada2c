"""The learner's rollout client and our rollout server, both real, over a real socket."""

from __future__ import annotations

import base64
import threading
from typing import Any
from unittest.mock import MagicMock

import pytest
import rollout_batch
from live_server import (
    CALL_TIMEOUT_S,
    LearnerRound,
    RunningServer,
    hollow_png,
    image_request,
    load_learner,
)
from rollout_batch import ask, await_settled, prove, unsettled

from swift_stage2.channel_b.rollouts import RolloutClient
from swift_stage2.channel_b.rollouts.requests import PostEnd
from swift_stage2.config import DecodingConfig
from swift_stage2.servers.health_check import ServerKind
from swift_stage2.wire import WeightProof


@pytest.fixture
def proof(server: RunningServer) -> WeightProof:
    """The proof of a round that the server has just ended."""
    return LearnerRound(server, load_learner(), run_id="run-1").run()


def make_client(server: RunningServer, proof: WeightProof, **changes: Any) -> RolloutClient:
    settings: dict[str, Any] = {
        "decoding": DecodingConfig(temperature=1.0, max_new_tokens=4),
        "run_id": "run-1",
        "max_inflight_per_server": 16,
        "kinds": {server.base_url: ServerKind(is_ours=True)},
    }
    client = rollout_batch.make_client(server.base_url, **settings | changes)
    prove(client, version=proof.version)
    return client


def test_rollouts_are_stamped_with_what_the_round_proved(server: RunningServer, proof: WeightProof) -> None:
    with make_client(server, proof) as client:
        outcome = ask(client, [image_request(shade) for shade in (40, 120, 200)])
    assert (outcome.failures, client.suspects) == ((), {})
    assert [rollout.sample.key.position for rollout in outcome.rollouts] == [0, 1, 2]
    assert {rollout.version for rollout in outcome.rollouts} == {proof.version}
    assert all(1 <= len(rollout.token_ids) <= 4 for rollout in outcome.rollouts)
    assert all(len(rollout.prompt_token_ids) > 10 for rollout in outcome.rollouts)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (hollow_png(9000, 9000), "got 81.0"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "an image must"),
    ],
)
def test_an_image_that_the_server_refuses_is_quarantined_with_its_reason_and_not_asked_for_ever(
    server: RunningServer, proof: WeightProof, content: bytes, why: str
) -> None:
    refused = image_request() | {"images": [base64.b64encode(content).decode()]}
    with make_client(server, proof) as client:
        outcome = ask(client, [image_request(40), refused, image_request(200)])
    ((sample, reason),) = outcome.quarantined
    assert sample.key.position == 1
    assert why in reason
    assert "\n" not in reason
    assert (len(outcome.rollouts), client.suspects) == (2, {})


def test_an_abandoned_post_is_settled_once_the_engine_is_free(
    server: RunningServer, proof: WeightProof
) -> None:
    blocked, release = threading.Event(), threading.Event()

    def hold() -> None:
        blocked.set()
        release.wait(CALL_TIMEOUT_S)

    server.engine._queue.put_task(hold)
    assert blocked.wait(CALL_TIMEOUT_S)
    # The engine goes on as soon as the client has given the POST up.
    events = MagicMock(**{"finished.side_effect": lambda *_, **__: release.set()})
    with make_client(server, proof, request_timeout_s=5.0, observer=events) as client:
        outcome = ask(client, [image_request()])
        await_settled(client)
        assert (unsettled(client), client.suspects) == (set(), {})
    assert [(each.server, each.end) for each in outcome.failures] == [(server.base_url, PostEnd.TIMED_OUT)]
    assert [sample.key.position for sample in outcome.timed_out] == [0]
