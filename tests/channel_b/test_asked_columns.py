"""The client asks for columns, and a server that does not give what it was asked for is at fault, never a sample."""

from __future__ import annotations

import re
from typing import Any

import pytest
import rollout_batch
from fake_rollout_server import Call, FakeRolloutServer, json_answer, output, request
from rollout_batch import make_client, prove

from swift_stage2.channel_b.rollouts import RequestSettings
from swift_stage2.columns import LOG_PROBS, Column
from swift_stage2.config import DecodingConfig
from swift_stage2.records import BatchOutcome

DECODING = DecodingConfig(temperature=0.7, max_new_tokens=64)


def with_log_probs(values: Any) -> Any:
    """Answers of two tokens with these log-probabilities, whatever was asked."""

    def answer(call: Call) -> Any:
        items = [output(text) for text in call.texts]
        for item in items:
            content = [{"logprob": value} for value in values] if values is not None else None
            item["response"]["choices"][0]["logprobs"] = None if content is None else {"content": content}
        return json_answer(items)

    return answer


def ask(
    server: FakeRolloutServer, columns: tuple[Column, ...], settings: RequestSettings | None = None
) -> BatchOutcome:
    client = make_client(server.url, decoding=DECODING, max_inflight_per_server=4, columns=columns)
    with client:
        prove(client)
        return rollout_batch.ask(client, [request(f"r{n}") for n in range(3)], settings)


def test_log_probs_come_with_every_rollout_if_the_client_was_made_to_ask(server: FakeRolloutServer) -> None:
    server.on_infer = with_log_probs([-0.25, -1.5])
    outcome = ask(server, (LOG_PROBS,))
    assert [rollout.log_probs for rollout in outcome.rollouts] == [(-0.25, -1.5)] * 3
    assert [call.config["logprobs"] for call in server.infer_calls] == [True]


def test_nobody_asks_without_need_and_an_evaluation_has_none(server: FakeRolloutServer) -> None:
    assert {rollout.log_probs for rollout in ask(server, ()).rollouts} == {None}
    assert {
        rollout.log_probs for rollout in ask(server, (LOG_PROBS,), RequestSettings(DECODING)).rollouts
    } == {None}
    for call in server.infer_calls:
        assert list(call.config) == [
            "max_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "seed", "return_details",
        ]  # fmt: skip


def test_what_is_only_wished_for_may_be_missing(server: FakeRolloutServer) -> None:
    settings = RequestSettings(DECODING, wished=(LOG_PROBS,))
    found = {}
    for values in (None, (-1.0,), (-0.25, -1.5)):
        server.on_infer = with_log_probs(values)
        found[values] = {rollout.log_probs for rollout in ask(server, (), settings).rollouts}
    assert found == {None: {None}, (-1.0,): {None}, (-0.25, -1.5): {(-0.25, -1.5)}}
    assert all(call.config["logprobs"] for call in server.infer_calls)


@pytest.mark.parametrize("values", [None, [], [-1.0], [-1.0, 0.25], [-1.0] * 3])
def test_a_server_without_them_or_with_others_is_suspect_and_no_sample_is_condemned(
    server: FakeRolloutServer, values: Any
) -> None:
    """The probe asks for them, too: a server that failed them alone would condemn every sample otherwise."""
    server.on_infer = with_log_probs(values)
    outcome = ask(server, (LOG_PROBS,))
    assert (outcome.rollouts, outcome.quarantined) == ((), ())
    assert len(outcome.returned) == 3
    assert re.search("log_?probs", outcome.failures[-1].reason)
    assert all(call.config["logprobs"] for call in server.infer_calls)
