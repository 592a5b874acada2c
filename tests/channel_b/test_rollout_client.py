"""The client against a real HTTP server that misbehaves; one fault per test."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rollout_batch
from fake_rollout_server import (
    Answer,
    Behaviour,
    Call,
    FakeRolloutServer,
    await_settled,
    echo,
    error,
    output,
    outputs,
    request,
    stamped,
)
from free_port import free_port
from rollout_batch import generate

from swift_stage2.channel_b.attempts import Attempts
from swift_stage2.channel_b.rollout_client import RolloutClient, ServedWeights, Terms, lane
from swift_stage2.channel_b.rollout_client.connection import ServerConnection
from swift_stage2.channel_b.rollout_client.plan import PostEnd
from swift_stage2.channel_b.rollout_client.trust import ServerTrust
from swift_stage2.config import DecodingConfig
from swift_stage2.errors import TicketTimeout
from swift_stage2.fence import InferFence, InferTicket
from swift_stage2.records import BatchOutcome, Sample, SampleKey
from swift_stage2.servers import protocol
from swift_stage2.servers.protocol import PREFIX
from swift_stage2.telemetry.event_log import EventLog, read_events
from swift_stage2.telemetry.sample_events import Finished, Sent

PATIENCE_S = 60.0
KEY = "sk-very-secret-0123456789"
UNSTAMPED = ServedWeights(None, 3, None)


@pytest.fixture
def server() -> Iterator[FakeRolloutServer]:
    with FakeRolloutServer() as server:
        yield server


@pytest.fixture
def fence() -> InferFence:
    return InferFence(version=3)


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=1) as thread:
        yield thread


def make_client(*servers: FakeRolloutServer | str, **changes: Any) -> RolloutClient:
    """A client of two ranks, whose servers are proven."""
    urls = [server if isinstance(server, str) else server.url for server in servers]
    settings: dict[str, Any] = {
        "decoding": DecodingConfig(temperature=0.7, max_new_tokens=64),
        "world_size": 2,
        "ticket_timeout_s": 0.05,
        "max_inflight_per_server": 4096,
    }
    client = rollout_batch.make_client(*urls, **settings | changes)
    client.set_proven(dict.fromkeys(urls, UNSTAMPED))
    return client


def by(incarnation: str) -> ServedWeights:
    """The weights of the fence's version in our own server."""
    return ServedWeights("run-1", 3, incarnation)


def make_samples(count: int, first: int = 0) -> list[Sample]:
    return [
        Sample(SampleKey(epoch=0, position=n, index=100 + n), row={}) for n in range(first, first + count)
    ]


def ask(client: RolloutClient, count: int, *, first: int = 0) -> BatchOutcome:
    """Asks for ``count`` samples; the text of a request is its position."""
    samples = make_samples(count, first)
    outcome = generate(client, samples, [request(str(sample.key.position)) for sample in samples])
    resolved = [r.sample for r in outcome.rollouts] + [sample for sample, _ in outcome.quarantined]
    everything = sorted(s.key.position for s in (*resolved, *outcome.returned))
    assert everything == list(range(first, first + count)), "every sample comes back exactly once"
    return outcome


def texts(outcome: BatchOutcome) -> list[str]:
    return [rollout.text for rollout in outcome.rollouts]


def positions(samples: tuple[Sample, ...]) -> list[int]:
    return [sample.key.position for sample in samples]


def closed_port() -> str:
    return f"http://127.0.0.1:{free_port()}"


def failing_on(*bad: str) -> Callable[[Call], Answer]:
    return lambda call: error() if set(bad) & set(call.texts) else echo(call)


# --- one good server -----------------------------------------------------------------------------


def test_a_rollout_carries_what_the_server_said_and_the_tickets_version(server: FakeRolloutServer) -> None:
    fence = InferFence(version=3)
    fence.close()
    fence.reopen(7)
    with make_client(server, fence=fence) as client:
        outcome = ask(client, 2)
    first = outcome.rollouts[0]
    assert (first.text, first.token_ids, first.prompt_token_ids) == ("echo 0", (6, 2), (1, 2, 3))
    assert (first.version, first.spans[0].start, first.spans[0].end) == (7, 0, 2)
    assert (first.server, first.seed, first.truncated) == (server.url, server.seeds[0], False)
    assert server.infer_calls[0].config == {
        "max_tokens": 64,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "repetition_penalty": 1.0,
        "seed": first.seed,
        "return_details": True,
    }
    assert (outcome.num_posts, outcome.failures, client.suspects) == (1, (), {})
    assert fence.in_flight == 0


def test_finish_reasons(server: FakeRolloutServer, fence: InferFence) -> None:
    reasons = ["stop", "length", "abort"]
    server.on_infer = lambda call: outputs([output("x", finish_reason=reason) for reason in reasons])
    with make_client(server, fence=fence) as client:
        outcome = ask(client, 3)
    assert [rollout.truncated for rollout in outcome.rollouts] == [False, True]
    (aborted,) = outcome.aborted
    assert aborted.sample.key.position == 2
    assert (aborted.text, aborted.spans[0].version) == ("x", fence.version)  # what it had said so far
    assert positions(outcome.returned) == [2]


def test_every_part_of_a_rollout_is_drawn_anew(server: FakeRolloutServer) -> None:
    """A seed's numbers may begin anew in every part, as vLLM's do."""
    server.on_infer = lambda call: outputs([output("x", finish_reason="abort")])
    with make_client(server) as client:
        for _ in range(3):
            assert positions(ask(client, 1).returned) == [0]
    assert len({call.config["seed"] for call in server.infer_calls}) == 3


def test_a_probe_asks_no_rest(server: FakeRolloutServer) -> None:
    """Of the one token that a probe asks for, the ids of a resumed request would leave none."""

    def answer(call: Call) -> Answer:
        return error() if "1" in call.texts else echo(call)

    server.on_infer = answer
    with make_client(server) as client:
        first, second = make_samples(2)
        resumed = {**request("0"), PREFIX: [5, 6]}
        assert len(generate(client, [first], [resumed]).rollouts) == 1
        assert len(generate(client, [second], [request("1")]).quarantined) == 1
    probe = server.infer_calls[-1]
    assert (PREFIX in probe.requests[0], probe.texts, probe.config["max_tokens"]) == (False, ["0"], 1)


def test_a_server_that_is_not_proven_is_never_asked(server: FakeRolloutServer) -> None:
    with make_client(server) as client:
        client.set_proven({})
        assert positions(ask(client, 2).returned) == [0, 1]
        assert server.calls == []
        client.set_proven({server.url: UNSTAMPED})
        assert texts(ask(client, 1)) == ["echo 0"]


def test_only_servers_of_the_client_can_be_proven(server: FakeRolloutServer) -> None:
    with make_client(server) as client, pytest.raises(ValueError, match="elsewhere"):
        client.set_proven({"http://elsewhere:1": UNSTAMPED})


def test_one_request_per_sample(server: FakeRolloutServer) -> None:
    with make_client(server) as client:
        with pytest.raises(ValueError, match="num_samples=2 num_requests=1"):
            generate(client, make_samples(2), [request("0")])


def test_copies_of_a_row_leave_in_different_posts_with_different_seeds(server: FakeRolloutServer) -> None:
    """A batch has one seed, and a server may give equal requests in it one answer."""
    rows = [7, 7, 7, 8, 8, 8, 9]
    samples = [Sample(SampleKey(0, position, row), row={}) for position, row in enumerate(rows)]
    with make_client(server) as client:
        outcome = generate(client, samples, [request(str(row)) for row in rows])
    assert sorted(rollout.sample.key.position for rollout in outcome.rollouts) == list(range(7))
    posts = [call.texts for call in server.infer_calls]
    assert [sorted(texts) for texts in posts] == [["7", "8", "9"], ["7", "8"], ["7", "8"]]
    assert len(set(server.seeds)) == 3


def test_an_empty_batch_asks_nobody(server: FakeRolloutServer) -> None:
    with make_client(server) as client:
        assert ask(client, 0) == BatchOutcome()
    assert server.calls == []


# --- error answers -------------------------------------------------------------------------------


def test_a_server_that_refuses_batches_larger_than_one(server: FakeRolloutServer) -> None:
    server.on_infer = lambda call: echo(call) if len(call.requests) == 1 else error()
    with make_client(server) as client:
        outcome = ask(client, 4)
    assert texts(outcome) == ["echo 0", "echo 1", "echo 2", "echo 3"]
    assert outcome.quarantined == ()
    assert server.most_at_once == 1


@pytest.mark.parametrize("poisonous", range(8))
def test_one_poisonous_request_among_eight(server: FakeRolloutServer, poisonous: int) -> None:
    server.on_infer = failing_on(str(poisonous))
    with make_client(server) as client:
        outcome = ask(client, 8)
        assert client.suspects == {}
    assert texts(outcome) == [f"echo {n}" for n in range(8) if n != poisonous]
    ((sample, reason),) = outcome.quarantined
    assert sample.key.position == poisonous
    assert "500" in reason
    assert server.most_at_once == 1


def test_the_last_poisonous_request_is_condemned_by_a_short_probe(server: FakeRolloutServer) -> None:
    server.on_infer = failing_on("1")
    with make_client(server) as client:
        ask(client, 2)
    probe = server.infer_calls[-1]
    assert (probe.texts, probe.config["max_tokens"]) == (["0"], 1)


@pytest.mark.parametrize("canary", [None, request("canary")])
def test_everything_poisonous_condemns_the_server_and_no_sample(
    server: FakeRolloutServer, canary: dict[str, Any] | None
) -> None:
    server.on_infer = lambda call: error()
    with make_client(server, canary=canary) as client:
        outcome = ask(client, 8)
        assert "500" in client.suspects[server.url]
        asked = len(server.infer_calls)
        assert positions(ask(client, 2).returned) == [0, 1]
        assert len(server.infer_calls) == asked
    assert positions(outcome.returned) == list(range(8))
    assert (outcome.rollouts, outcome.quarantined) == ((), ())
    assert client.suspects.keys() == {server.url}


def test_an_engine_that_died_after_good_answers_condemns_no_sample(server: FakeRolloutServer) -> None:
    with make_client(server) as client:
        ask(client, 4)
        server.on_infer = lambda call: error()
        outcome = ask(client, 4, first=4)
    assert positions(outcome.returned) == [4, 5, 6, 7]
    assert client.suspects.keys() == {server.url}


def test_a_canary_tells_a_poisonous_first_request_from_a_dead_server(server: FakeRolloutServer) -> None:
    server.on_infer = failing_on("0")
    with make_client(server, canary=request("canary")) as client:
        outcome = ask(client, 1)
    assert [sample.key.position for sample, _ in outcome.quarantined] == [0]
    assert server.infer_calls[-1].texts == ["canary"]


def test_one_bad_answer_costs_one_retry_with_another_seed(server: FakeRolloutServer) -> None:
    server.on_infer = lambda call: error() if len(server.infer_calls) == 1 else echo(call)
    with make_client(server) as client:
        outcome = ask(client, 3)
    assert len(outcome.rollouts) == 3
    assert server.batch_sizes == [3, 3]
    assert server.seeds[0] != server.seeds[1]


def test_a_server_without_room_is_asked_again_and_condemns_nobody(
    server: FakeRolloutServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "_BUSY_PAUSE_S", 0.01)
    bad = {"1"}

    def behave(call: Call) -> Answer:
        if len(server.infer_calls) in (1, 3, 4, 6):  # full while others' bodies are there
            return error(429, '{"detail": "ask again later"}')
        return failing_on(*bad)(call)

    server.on_infer = behave
    with make_client(server) as client:
        outcome = ask(client, 3)
        assert client.suspects == {}
    assert [sample.key.position for sample, _ in outcome.quarantined] == [1]
    assert texts(outcome) == ["echo 0", "echo 2"]
    assert PostEnd.BUSY in [failure.end for failure in outcome.failures]


def test_samples_of_a_server_that_stays_full_return_and_it_stays_trusted(
    server: FakeRolloutServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "_BUSY_PAUSE_S", 0.01)
    server.on_infer = lambda call: error(429) if "1" in call.texts else echo(call)
    with make_client(server, request_timeout_s=1.0) as client:
        assert texts(ask(client, 1)) == ["echo 0"]
        outcome = ask(client, 2, first=1)
        assert (client.suspects, client.num_unsettled) == ({}, 0)
    assert (positions(outcome.returned), outcome.timed_out) == ([1, 2], ())
    assert {failure.end for failure in outcome.failures} == {PostEnd.BUSY}
    assert set(server.batch_sizes[1:]) == {2}, "it is asked for the same, and not bisected"


def test_two_requests_answered_by_one_output_name_both_numbers(server: FakeRolloutServer) -> None:
    server.on_infer = lambda call: outputs([output("only one")])
    with make_client(server) as client:
        outcome = ask(client, 2)
    assert "num_outputs=1 num_requests=2" in outcome.failures[0].reason
    assert outcome.failures[0].end is PostEnd.ERROR_ANSWER
    assert len(outcome.rollouts) == 2  # each alone is answered by one output


GARBAGE = [
    b'[{"response": {"cho',
    b"",
    b"<html>",
    b"[" * 100_000,
    b"\xff\xfe",
    b'{"a": 1}',
    b"[null]",
    b"[{}]",
]


@pytest.mark.parametrize("body", GARBAGE, ids=lambda body: repr(body[:12]))
def test_a_body_that_is_no_reply_condemns_its_request(server: FakeRolloutServer, body: bytes) -> None:
    server.on_infer = lambda call: Answer(body=body) if "1" in call.texts else echo(call)
    with make_client(server) as client:
        outcome = ask(client, 3)
        assert client.suspects == {}
    assert [sample.key.position for sample, _ in outcome.quarantined] == [1]
    assert texts(outcome) == ["echo 0", "echo 2"]


def naming(*places: Any) -> Answer:
    return error(text=json.dumps({"detail": "no", "failures": [{"index": place} for place in places]}))


@pytest.mark.parametrize("places", [[99], [-1], [True], ["0"], [None], [{}], []])
def test_a_name_that_is_no_place_of_the_post_is_not_believed(
    server: FakeRolloutServer, places: list[Any]
) -> None:
    server.on_infer = lambda call: naming(*places) if "2" in call.texts else echo(call)
    with make_client(server) as client:
        outcome = ask(client, 4)
    assert server.batch_sizes[:3] == [4, 4, 2]  # asked again, then bisected
    assert [sample.key.position for sample, _ in outcome.quarantined] == [2]


def test_a_request_that_the_server_names_is_condemned_only_after_another_succeeded(
    server: FakeRolloutServer,
) -> None:
    """It is named, fails alone, and then the engine dies: nothing speaks against the request any more."""

    def engine(call: Call) -> Answer:
        return naming(1) if len(server.infer_calls) == 1 else naming(0)

    server.on_infer = engine
    with make_client(server, canary=request("canary")) as client:
        outcome = ask(client, 4)
    assert positions(outcome.returned) == [0, 1, 2, 3]
    assert (outcome.quarantined, client.suspects.keys()) == ((), {server.url})


# --- who may be asked ----------------------------------------------------------------------------


@pytest.mark.parametrize("status", [401, 403, 409])
def test_a_refusal_is_the_servers_and_is_not_argued_with(server: FakeRolloutServer, status: int) -> None:
    server.on_infer = lambda call: error(status, "no entry")
    with make_client(server) as client:
        outcome = ask(client, 4)
    assert positions(outcome.returned) == [0, 1, 2, 3]
    assert (outcome.num_posts, outcome.quarantined) == (1, ())
    assert str(status) in client.suspects[server.url]
    assert ("api_key_env" in client.suspects[server.url]) == (status != 409)


def test_the_key_is_sent_and_shown_nowhere(
    server: FakeRolloutServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server.on_infer = lambda call: error(500, f"you sent {call.headers['Authorization']}" + "x" * 245 + KEY)
    with make_client(server, api_key=KEY) as client:
        outcome = ask(client, 2)
        shown = [repr(client), str(vars(client)), repr(outcome), str(client.suspects), caplog.text]
    assert server.infer_calls[0].headers["Authorization"] == f"Bearer {KEY}"
    assert "you sent" in repr(outcome)
    assert not [text for text in shown if KEY[:12] in text]


# --- connections ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [{"cut_after_bytes": 5}, {"cut_after_bytes": 0}, {"drop": True}], ids=str)
def test_a_connection_lost_during_a_post_ends_all_trust(
    server: FakeRolloutServer, cut: dict[str, Any]
) -> None:
    server.on_infer = lambda call: echo(call, **cut)
    with make_client(server) as client:
        outcome = ask(client, 4)
        assert client.num_unsettled == 0
    assert positions(outcome.returned) == [0, 1, 2, 3]
    assert client.suspects.keys() == {server.url}
    assert [failure.end for failure in outcome.failures] == [PostEnd.LOST]
    assert len(server.calls) == 1  # nothing is tried again there


def test_a_connection_that_closes_between_posts_is_no_loss(server: FakeRolloutServer) -> None:
    # The stand-in closes every connection after its reply without having said so.
    with make_client(server) as client:
        for first in range(5):
            outcome = ask(client, 1, first=first)
            assert (len(outcome.rollouts), outcome.num_posts, outcome.failures) == (1, 1, ())


def test_a_server_that_is_gone_is_asked_twice_and_suspected() -> None:
    url = closed_port()
    with make_client(url) as client:
        outcome = ask(client, 4)
    assert positions(outcome.returned) == [0, 1, 2, 3]
    assert [failure.end for failure in outcome.failures] == [PostEnd.UNREACHABLE] * 2
    assert list(client.suspects) == [url]


def test_of_two_servers_the_dead_one_costs_its_share_once(server: FakeRolloutServer) -> None:
    dead = closed_port()
    with make_client(server, dead, max_inflight_per_server=3) as client:
        first = ask(client, 5)
        second = ask(client, 5)
        assert client.proven == (server.url,)
    assert texts(first) == ["echo 0", "echo 1", "echo 2"]
    assert positions(first.returned) == [3, 4]
    assert list(client.suspects) == [dead]
    assert len(second.rollouts) == 5


def test_two_servers_share_a_batch(server: FakeRolloutServer) -> None:
    few = {"max_inflight_per_server": 4}
    with FakeRolloutServer() as other, make_client(server, other, **few) as client:
        assert texts(ask(client, 7)) == [f"echo {n}" for n in range(7)]
        assert sorted(server.batch_sizes + other.batch_sizes) == [3, 4]
        for _ in range(2):  # to whom depends on how fast they were; test_placement says how
            ask(client, 1)
        assert len(server.calls) + len(other.calls) == 4


def test_a_server_that_takes_batches_gets_one_post_at_a_time(
    server: FakeRolloutServer, fence: InferFence, background: ThreadPoolExecutor
) -> None:
    go_on = threading.Event()
    server.on_infer = lambda call: echo(call, after=go_on)
    with FakeRolloutServer(on_infer=lambda call: echo(call, after=go_on)) as other:
        with make_client(server, other, fence=fence, max_inflight_per_server=4) as client:
            outcome = background.submit(ask, client, 8)
            server.wait_until(lambda: len(server.infer_calls) == 1)
            other.wait_until(lambda: len(other.infer_calls) == 1)
            assert fence.in_flight == 2  # one ticket per POST
            go_on.set()
            assert len(outcome.result(timeout=PATIENCE_S).rollouts) == 8
        assert (server.most_at_once, other.most_at_once) == (1, 1)


# --- whose weights answered ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stamp", "named"),
    [
        ({"weight_version": 2, "round_id": "run-1", "incarnation": "a", "run_id": "run"}, "weight_version=2"),
        (
            {"weight_version": 3, "round_id": "run-1", "incarnation": "b", "run_id": "run"},
            "incarnation='b' instead of 'a'",
        ),
        ({"weight_version": 3, "round_id": "run-1", "incarnation": "a", "run_id": "old"}, "run_id='old'"),
        ({}, "incarnation=None instead of 'a'"),
        (
            {"weight_version": None, "round_id": "run-1", "incarnation": "a", "run_id": "run"},
            "weight_version=None",
        ),
        ({"weight_version": 3, "round_id": "run-1", "incarnation": "a", "run_id": None}, "run_id=None"),
    ],
)
def test_an_answer_of_other_weights_is_discarded_and_its_server_suspect(
    server: FakeRolloutServer, stamp: dict[str, Any], named: str
) -> None:
    with make_client(server, run_id="run") as client:
        client.set_proven({server.url: by("a")})
        server.on_infer = stamped(weight_version=3, round_id="run-1", incarnation="a", run_id="run")
        assert len(ask(client, 2).rollouts) == 2
        server.on_infer = stamped(**stamp)
        outcome = ask(client, 2, first=2)
        assert named in client.suspects[server.url]
    assert positions(outcome.returned) == [2, 3]
    assert [failure.end for failure in outcome.failures] == [PostEnd.DISTRUSTED]


def test_an_answer_to_another_row_is_no_answer_though_its_prompt_ids_are_the_same(
    server: FakeRolloutServer,
) -> None:
    def swapped(call: Call) -> Answer:
        ids = [request[protocol.REQUEST_ID] for request in call.requests]
        return outputs(
            [
                output(
                    "x", weight_version=3, round_id="run-1", incarnation="a", run_id="run", request_id=name
                )
                for name in reversed(ids)
            ]
        )

    with make_client(server, run_id="run") as client:
        client.set_proven({server.url: by("a")})
        server.on_infer = swapped
        outcome = ask(client, 2)
    assert [failure.end for failure in outcome.failures][:1] == [PostEnd.ERROR_ANSWER]
    assert "of the request in its place" in outcome.failures[0].reason


def test_a_server_that_was_proven_as_a_stock_one_must_not_stamp(server: FakeRolloutServer) -> None:
    server.on_infer = stamped(weight_version=3, round_id="run-1", incarnation="a")
    with make_client(server) as client:
        ask(client, 1)
        assert "incarnation='a' instead of None" in client.suspects[server.url]


def test_a_proven_round_ends_the_suspicion(server: FakeRolloutServer) -> None:
    with make_client(server) as client:
        client.set_proven({server.url: by("a")})
        server.on_infer = stamped(weight_version=3, round_id="run-1", incarnation="b")
        ask(client, 1)
        client.set_proven({server.url: by("b")})
        assert client.suspects == {}
        assert len(ask(client, 1).rollouts) == 1


# --- staged rounds -------------------------------------------------------------------------------


def stamp(round_id: str | None, version: int, **changes: Any) -> Behaviour:
    """Echo as our server stamps it with that round's weights."""
    names = {"weight_version": version, "incarnation": "a", "run_id": "run", "round_id": round_id}
    return stamped(**names | changes)


@pytest.fixture
def staged(server: FakeRolloutServer) -> Iterator[RolloutClient]:
    """A client whose server was proven by run-1, of version 3, and gets run-2, of version 4, while it answers."""
    with make_client(server, run_id="run") as client:
        client.set_proven({server.url: by("a")})
        client.expect_round("run-2", 4)
        yield client


def test_an_answer_is_of_the_round_that_its_stamp_names(
    staged: RolloutClient, server: FakeRolloutServer
) -> None:
    """One POST's answers may be of two: an engine takes them one by one."""
    stamps = [("run-1", 3), ("run-2", 4)]
    server.on_infer = lambda call: outputs(
        [
            output("x", weight_version=version, incarnation="a", run_id="run", round_id=round_id)
            for _, (round_id, version) in zip(call.texts, stamps, strict=True)
        ]
    )
    old, new = ask(staged, 2).rollouts
    assert [(each.version, each.round_id) for each in (old, new)] == [(3, "run-1"), (4, "run-2")]
    assert (staged.confirms(old), staged.confirms(new)) == (True, None)
    staged.set_proven({server.url: by("a")}, drained=False)  # another server was proven
    assert (staged.confirms(old), staged.confirms(new)) == (True, None)
    staged.set_proven({server.url: ServedWeights("run-2", 4, "a")}, drained=False)
    assert (staged.confirms(old), staged.confirms(new)) == (True, True)
    staged.expect_round("run-3", 5)
    staged.withdraw([server.url])
    assert (staged.confirms(old), staged.confirms(new)) == (True, True), "what was proven stays so"


def test_a_round_that_ends_without_a_proof_confirms_nothing_and_its_version_comes_again(
    staged: RolloutClient, server: FakeRolloutServer
) -> None:
    server.on_infer = stamp("run-2", 4)
    (failed,) = ask(staged, 1).rollouts
    staged.expect_round("run-3", 4)
    assert staged.confirms(failed) is False
    server.on_infer = stamp("run-3", 4)
    (proven,) = ask(staged, 1).rollouts
    staged.set_proven({server.url: ServedWeights("run-3", 4, "a")}, drained=False)
    assert failed.version == proven.version
    assert (staged.confirms(failed), staged.confirms(proven)) == (False, True)


@pytest.mark.parametrize(
    "answer",
    [
        stamp("run-3", 4),
        stamp("run-2", 3),
        stamp("run-1", 4),
        stamp(None, 3),
        stamp(None, 4),
        stamp("run-2", 4, incarnation="b"),
        stamp("run-2", 4, run_id="other"),
        echo,
    ],
)
def test_anything_else_makes_the_server_suspect(
    staged: RolloutClient, server: FakeRolloutServer, answer: Behaviour
) -> None:
    server.on_infer = answer
    ask(staged, 1)
    assert staged.suspects.keys() == {server.url}
    assert staged.proven == ()


def test_an_answer_is_of_what_the_server_served_since_the_post_left(
    staged: RolloutClient,
    server: FakeRolloutServer,
    background: ThreadPoolExecutor,
) -> None:
    """The proof of a staged round is heard while a POST that the old weights have answered is on its way back."""
    heard = threading.Event()
    server.on_infer = lambda call: replace(stamp("run-1", 3)(call), after=heard)
    future = start_and_wait_for_a_post(staged, server, background)
    staged.set_proven({server.url: ServedWeights("run-2", 4, "a")}, drained=False)
    staged.expect_round("run-3", 5)
    heard.set()
    assert {each.version for each in future.result(timeout=PATIENCE_S).rollouts} == {3}
    ask(staged, 1)
    assert staged.suspects.keys() == {server.url}, "the next one left after the proof"


def test_a_post_that_left_before_the_round_began_may_be_answered_by_it(
    server: FakeRolloutServer, background: ThreadPoolExecutor
) -> None:
    installed = threading.Event()
    server.on_infer = lambda call: replace(stamp("run-2", 4)(call), after=installed)
    with make_client(server, run_id="run") as client:
        client.set_proven({server.url: by("a")})
        future = start_and_wait_for_a_post(client, server, background)
        client.expect_round("run-2", 4)
        installed.set()
        assert {each.version for each in future.result(timeout=PATIENCE_S).rollouts} == {4}


def test_a_server_behind_the_ticket_answers_with_its_own_version(
    staged: RolloutClient, server: FakeRolloutServer, fence: InferFence
) -> None:
    """In a rolling round another server's proof has moved the clock."""
    server.on_infer = stamp("run-1", 3)
    staged.set_proven({server.url: by("a")}, drained=False)
    fence.reopen(4)
    assert [each.version for each in ask(staged, 1).rollouts] == [3]
    samples = make_samples(1)
    of_4, of_3 = (
        generate(staged, samples, [request("0")], Terms(DecodingConfig(), only_version=version))
        for version in (4, 3)
    )
    assert (of_4.num_posts, len(of_4.returned), len(of_3.rollouts)) == (0, 1, 1)


def test_a_suspicion_of_a_staged_round_outlasts_its_proof_until_the_next(
    staged: RolloutClient, server: FakeRolloutServer
) -> None:
    second = ServedWeights("run-2", 4, "a")
    staged.distrust(server.url, "it permutes")
    staged.set_proven({server.url: second}, drained=False)
    assert (staged.proven, dict(staged.suspects)) == ((), {server.url: "it permutes"})
    staged.expect_round("run-3", 5)
    staged.forgive([server.url])  # the next round begins
    assert (staged.proven, dict(staged.suspects)) == ((), {}), "forgotten, and not asked until proven"
    staged.set_proven({server.url: second}, drained=False)  # another server was proven
    assert staged.proven == ()
    staged.set_proven({server.url: ServedWeights("run-3", 5, "a")}, drained=False)
    assert staged.proven == (server.url,)


def test_a_catch_up_brings_back_a_server_with_the_weights_that_it_had_unless_it_is_suspected_since(
    staged: RolloutClient, server: FakeRolloutServer
) -> None:
    again = replace(by("a"), heard_step=5)
    staged.distrust(server.url, "it was slow")
    staged.forgive([server.url])  # a catch-up begins
    staged.distrust(server.url, "it permutes")
    staged.set_proven({server.url: again}, drained=False)
    assert (staged.proven, dict(staged.suspects)) == ((), {server.url: "it permutes"})
    staged.forgive([server.url])
    staged.set_proven({server.url: again}, drained=False)  # another server was proven
    assert staged.proven == ()
    staged.set_proven({server.url: replace(by("a"), heard_step=9)}, drained=False)
    assert staged.proven == (server.url,)


def test_a_server_that_no_proof_names_is_withdrawn(staged: RolloutClient, server: FakeRolloutServer) -> None:
    staged.set_proven({}, drained=False)
    assert positions(ask(staged, 1).returned) == [0]
    assert (server.calls, dict(staged.suspects)) == ([], {})


def test_a_staged_proof_does_not_settle_an_abandoned_post() -> None:
    trust = ServerTrust()
    trust.prove(ServedWeights("run-1", 3, "a"), drained=True)
    post = trust.begin_post()
    assert post is not None
    assert trust.end_post(post, settle_by=1.0)
    trust.prove(ServedWeights("run-2", 4, "a"), drained=False)
    assert trust.settle_by == 1.0
    trust.prove(ServedWeights("run-3", 5, "a"), drained=True)
    assert trust.settle_by is None


def test_a_stock_servers_answer_is_of_the_ticket_and_needs_no_confirmation(
    server: FakeRolloutServer, fence: InferFence
) -> None:
    with make_client(server, fence=fence) as client:
        client.set_proven({server.url: ServedWeights("run-1", 3, None)})
        fence.reopen(5)
        (rollout,) = ask(client, 1).rollouts
        assert (rollout.version, rollout.round_id, client.confirms(rollout)) == (5, None, True)


# --- deadlines -----------------------------------------------------------------------------------


def test_what_was_agreed_with_a_server_is_forgotten_when_it_returns(server: FakeRolloutServer) -> None:
    with make_client(server.url) as client:
        client.set_proven({server.url: UNSTAMPED})
        assert client.note_agreement([]) == frozenset()
        assert client.note_agreement([server.url]) == {server.url}
        client.set_proven({server.url: UNSTAMPED})
        assert client.note_agreement([]) == {server.url}
        client.withdraw([server.url])
        client.set_proven({server.url: UNSTAMPED})
        assert client.note_agreement([]) == frozenset()


def test_a_timeout_is_not_asked_again_at_the_same_size(
    server: FakeRolloutServer, forever: threading.Event
) -> None:
    server.on_infer = lambda call: echo(call, after=forever if len(call.requests) > 1 else None)
    with make_client(server, request_timeout_s=2.0) as client:
        outcome = ask(client, 2)
        assert client.num_unsettled == 0
    assert texts(outcome) == ["echo 0", "echo 1"]
    assert server.batch_sizes == [2, 1, 1]
    assert [failure.end for failure in outcome.failures] == [PostEnd.TIMED_OUT]
    # The abandoned POST is over before the next one begins.
    assert [call.path for call in server.calls][:3] == ["/infer/", "/reset_prefix_cache/", "/infer/"]


def test_a_single_request_that_never_answers_returns_after_one_post(
    server: FakeRolloutServer, forever: threading.Event
) -> None:
    server.on_infer = lambda call: echo(call, after=forever)
    with make_client(server, request_timeout_s=0.6) as client:
        outcome = ask(client, 1)
        await_settled(client)
        assert (client.num_unsettled, client.suspects) == (0, {})
    assert positions(outcome.returned) == positions(outcome.timed_out) == [0]
    assert server.batch_sizes == [1]
    assert [failure.end for failure in outcome.failures] == [PostEnd.TIMED_OUT]
    assert len(server.reset_calls) == 1


def test_the_budget_of_a_batch_is_two_timeouts(server: FakeRolloutServer, forever: threading.Event) -> None:
    server.on_infer = lambda call: echo(call, after=forever)
    with make_client(server, request_timeout_s=1.5) as client:
        outcome = ask(client, 8)
        # The second POST gets what the first one and its settling have left, and nothing is left for a third.
        assert server.batch_sizes == [8, 4]
        assert [failure.end for failure in outcome.failures] == [PostEnd.TIMED_OUT] * 2
    assert positions(outcome.returned) == list(range(8))


class PatientFence(InferFence):
    """Reopens after a waiter has come back empty-handed a number of times."""

    def __init__(self, num_timeouts: int) -> None:
        super().__init__(version=3, start_closed=True)
        self.num_timeouts = num_timeouts

    def ticket(self, timeout_s: float) -> AbstractContextManager[InferTicket]:
        if self.num_timeouts == 0 and not self.is_open:
            self.reopen(4)
        self.num_timeouts -= 1
        return super().ticket(timeout_s)


def test_waiting_for_a_ticket_costs_no_budget_and_is_no_failure(server: FakeRolloutServer) -> None:
    # 50 slices of 0.05 s are longer than the whole budget of 2 s.
    with make_client(server, fence=PatientFence(50), request_timeout_s=1.0) as client:
        outcome = ask(client, 2)
    assert (texts(outcome), outcome.failures) == (["echo 0", "echo 1"], ())
    assert outcome.rollouts[0].version == 4


def test_a_server_that_trickles_meets_the_same_deadline(server: FakeRolloutServer) -> None:
    server.on_infer = lambda call: Answer(trickle=True)
    with make_client(server, request_timeout_s=0.3) as client:
        outcome = ask(client, 1)
    assert [failure.end for failure in outcome.failures] == [PostEnd.TIMED_OUT]


# --- abandoned POSTs -----------------------------------------------------------------------------


def test_a_post_is_unsettled_before_its_ticket_goes_back(
    server: FakeRolloutServer, forever: threading.Event
) -> None:
    seen: list[tuple[int, int]] = []
    server.on_infer = lambda call: echo(call, after=forever)

    class WatchedFence(InferFence):
        @contextmanager
        def ticket(self, timeout_s: float) -> Iterator[InferTicket]:
            with super().ticket(timeout_s) as ticket:
                yield ticket
                seen.append((self.in_flight, client.num_unsettled))

    client: RolloutClient = make_client(server, fence=WatchedFence(version=3), request_timeout_s=0.2)
    with client:
        ask(client, 1)
    assert seen == [(1, 1)]


def test_the_server_stays_busy_until_the_ordered_call_answers(
    server: FakeRolloutServer, fence: InferFence, forever: threading.Event
) -> None:
    answer_reset, good_reset = threading.Event(), server.on_reset
    server.on_infer = lambda call: echo(call, after=forever)
    server.on_reset = lambda call: Answer(body=good_reset(call).body, after=answer_reset)
    with make_client(server, fence=fence, request_timeout_s=1.0) as client:
        ask(client, 1)
        server.wait_until(lambda: len(server.reset_calls) == 1)
        assert (fence.in_flight, client.num_unsettled) == (0, 1)
        answer_reset.set()
        await_settled(client)
        assert (client.num_unsettled, client.proven) == (0, (server.url,))


def test_a_server_that_does_not_settle_becomes_suspect_and_is_busy_no_more(
    server: FakeRolloutServer, forever: threading.Event
) -> None:
    server.on_infer = server.on_reset = lambda call: Answer(after=forever)
    with make_client(server, request_timeout_s=0.2) as client:
        ask(client, 1)
        await_settled(client)
        assert (client.num_unsettled, client.proven) == (0, ())
        assert "could not be settled" in client.suspects[server.url]
    assert len(server.reset_calls) == 1


def test_a_batch_whose_budget_ends_does_not_cut_the_settling_short(
    server: FakeRolloutServer, forever: threading.Event
) -> None:
    answer_reset, good_reset = threading.Event(), server.on_reset

    def fail_late_then_hang(call: Call) -> Answer:
        if len(server.infer_calls) > 1:
            return echo(call, after=forever)
        forever.wait(1.2)  # a slow server: most of the first of two timeouts
        return error()

    server.on_infer = fail_late_then_hang
    server.on_reset = lambda call: Answer(body=good_reset(call).body, after=answer_reset)
    with make_client(server, request_timeout_s=2.0) as client:
        outcome = ask(client, 2)
        assert (client.suspects, client.num_unsettled) == ({}, 1)
        answer_reset.set()
        await_settled(client)
        assert client.suspects == {}
    assert positions(outcome.returned) == [0, 1]
    assert server.batch_sizes == [2, 2]


@pytest.mark.parametrize(
    ("answer", "named"),
    [(error(), "500"), (Answer(body=b'{"message": "cache reset, status: False"}'), "status=False")],
)
def test_an_ordered_call_that_fails_is_tried_once_more(
    server: FakeRolloutServer, forever: threading.Event, answer: Answer, named: str
) -> None:
    server.on_infer = lambda call: echo(call, after=forever)
    server.on_reset = lambda call: answer
    with make_client(server, request_timeout_s=1.5) as client:
        ask(client, 1)
        await_settled(client)
        assert named in client.suspects[server.url]
    assert len(server.reset_calls) == 2


# --- the fence and the end -----------------------------------------------------------------------


def start_and_wait_for_a_post(
    client: RolloutClient, server: FakeRolloutServer, thread: ThreadPoolExecutor, count: int = 2
) -> Future[BatchOutcome]:
    outcome = thread.submit(ask, client, count)
    server.wait_until(lambda: len(server.infer_calls) == 1)
    return outcome


class WatchedFence(InferFence):
    """Says when somebody has asked for a ticket in vain."""

    def __init__(self) -> None:
        super().__init__(version=3, start_closed=True)
        self.someone_waits = threading.Event()

    @contextmanager
    def ticket(self, timeout_s: float) -> Iterator[InferTicket]:
        try:
            with super().ticket(timeout_s) as ticket:
                yield ticket
        except TicketTimeout:
            self.someone_waits.set()
            raise


def test_a_round_that_leaves_the_server_out_is_noticed_by_who_waited(
    server: FakeRolloutServer, background: ThreadPoolExecutor
) -> None:
    fence = WatchedFence()
    with make_client(server, fence=fence) as client:
        outcome = background.submit(ask, client, 2)
        assert fence.someone_waits.wait(PATIENCE_S)
        client.set_proven({})
        fence.reopen(4)
        assert positions(outcome.result(timeout=PATIENCE_S).returned) == [0, 1]
    assert server.calls == []


@pytest.mark.parametrize("by_a_round", [True, False])
def test_a_batch_does_not_wait_for_a_server_that_is_withdrawn(
    server: FakeRolloutServer,
    fence: InferFence,
    forever: threading.Event,
    background: ThreadPoolExecutor,
    by_a_round: bool,
) -> None:
    server.on_infer = lambda call: echo(call, after=forever)
    with (
        FakeRolloutServer() as other,
        make_client(
            server, other, fence=fence, request_timeout_s=3600.0, max_inflight_per_server=1
        ) as client,
    ):
        future = start_and_wait_for_a_post(client, server, background)
        other.wait_until(lambda: len(other.infer_calls) == 1)
        if by_a_round:
            client.set_proven({other.url: UNSTAMPED}, drained=False)
        else:
            client.withdraw([server.url])
        outcome = future.result(timeout=PATIENCE_S)
        assert (len(outcome.rollouts), len(outcome.returned)) == (1, 1)
        assert [(failure.server, failure.end) for failure in outcome.failures] == [(server.url, PostEnd.LOST)]
        assert (fence.in_flight, client.num_unsettled) == (0, 0)
        client.forgive([server.url])
        later = ServedWeights(None, 4, None)
        client.set_proven({server.url: later, other.url: later}, drained=False)
        assert set(client.proven) == {server.url, other.url}


def test_a_stop_ends_the_wait_for_a_ticket(server: FakeRolloutServer, background: ThreadPoolExecutor) -> None:
    fence, stop = WatchedFence(), threading.Event()
    with make_client(server, fence=fence, stop=stop) as client:
        outcome = background.submit(ask, client, 2)
        assert fence.someone_waits.wait(PATIENCE_S)
        stop.set()
        assert positions(outcome.result(timeout=PATIENCE_S).returned) == [0, 1]
        assert positions(ask(client, 1).returned) == [0]
    assert server.calls == []


def test_a_stop_cuts_the_post_in_flight_and_condemns_nobody(
    server: FakeRolloutServer, fence: InferFence, forever: threading.Event, background: ThreadPoolExecutor
) -> None:
    stop = threading.Event()
    server.on_infer = lambda call: echo(call, after=forever)
    with make_client(server, fence=fence, stop=stop, request_timeout_s=3600.0) as client:
        future = start_and_wait_for_a_post(client, server, background)
        stop.set()
        outcome = future.result(timeout=PATIENCE_S)
        assert (client.suspects, client.num_unsettled) == ({}, 1)
        client.set_proven({server.url: UNSTAMPED})  # only a round could settle it now
        assert client.num_unsettled == 0
    assert positions(outcome.returned) == [0, 1]
    assert [failure.end for failure in outcome.failures] == [PostEnd.STOPPED]
    assert fence.in_flight == 0


def test_a_connection_that_was_ended_sends_nothing_more(server: FakeRolloutServer) -> None:
    connection = ServerConnection(server.url, api_key=None, connect_timeout_s=1.0)
    connection.end()
    assert connection.infer([request("0")], {"max_tokens": 1}, timeout_s=PATIENCE_S).end is PostEnd.STOPPED
    connection.close()
    assert server.calls == []


def test_a_shut_down_fence_ends_all_that_waits_for_it(
    server: FakeRolloutServer, background: ThreadPoolExecutor
) -> None:
    fence = WatchedFence()
    with make_client(server, fence=fence) as client:
        outcome = background.submit(ask, client, 2)
        assert fence.someone_waits.wait(PATIENCE_S)
        fence.shutdown()
        assert positions(outcome.result(timeout=PATIENCE_S).returned) == [0, 1]
        assert client.free_places == 0, "nothing more can be asked"


def test_close_leaves_no_thread_even_with_a_post_in_flight(
    server: FakeRolloutServer, forever: threading.Event, background: ThreadPoolExecutor
) -> None:
    server.on_infer = lambda call: echo(call, after=forever)
    client = make_client(server, request_timeout_s=3600.0)
    outcome = start_and_wait_for_a_post(client, server, background)
    lanes = [thread for thread in threading.enumerate() if thread.name.startswith("rollout-lane")]
    client.close()
    client.close()
    outcome.result(timeout=PATIENCE_S)
    for thread in lanes:
        thread.join(PATIENCE_S)
    assert lanes
    assert not [thread for thread in lanes if thread.is_alive()]


# --- seeds ---------------------------------------------------------------------------------------


def test_a_sample_that_comes_back_is_asked_with_another_seed(server: FakeRolloutServer) -> None:
    with make_client(server) as client:
        server.on_infer = lambda call: echo(call, drop=True)
        assert positions(ask(client, 2).returned) == [0, 1]
        client.set_proven({server.url: UNSTAMPED})
        server.on_infer = echo
        assert len(ask(client, 2).rollouts) == 2
    assert len(set(server.seeds)) == 2


def test_the_same_place_of_the_stream_gets_the_same_seed_in_every_process(server: FakeRolloutServer) -> None:
    for _ in range(2):
        with make_client(server) as client:
            for _ in range(2):  # what is resolved leaves no count behind
                ask(client, 3, first=5)
    assert len(server.seeds) == 4
    assert len(set(server.seeds)) == 1


def test_two_ranks_never_send_a_common_seed(server: FakeRolloutServer) -> None:
    for rank in (0, 1):
        with make_client(server, rank=rank) as client:
            for first in range(40):
                ask(client, 1, first=first)
    assert len(set(server.seeds)) == 80
    assert 0 not in server.seeds


# --- what is told ------------------------------------------------------------------------------------


def test_every_post_is_told_with_its_samples_its_seed_and_how_it_ended(
    server: FakeRolloutServer, tmp_path: Path
) -> None:
    server.on_infer = failing_on("2")
    path = tmp_path / "rank0.jsonl"
    attempts = Attempts(EventLog(path))
    attempts.begin([sample.key for sample in make_samples(4)])
    with make_client(server, events=attempts) as client:
        outcome = ask(client, 4)
    told = read_events(path)
    sent = [each for each in told[::2] if isinstance(each, Sent)]
    finished = [each for each in told[1::2] if isinstance(each, Finished)]
    assert len(sent) + len(finished) == len(told)
    assert [each.samples for each in sent] == [each.samples for each in finished]
    posted = [[str(position) for _, position, _, _ in each.samples] for each in sent]
    called = [list(call.texts) for call in server.infer_calls]
    assert all(texts in called for texts in posted)
    assert (posted[0], posted.count(["2"])) == (["0", "1", "2", "3"], 2), "an error answer is asked once more"
    assert {(each.server, each.version) for each in sent} == {(server.url, 3)}
    assert len({each.seed for each in sent}) == len(sent)
    is_answered = [each for each in finished if each.end == PostEnd.ANSWERED]
    answered = sorted(position for each in is_answered for _, position, _, _ in each.samples)
    assert answered == sorted(rollout.sample.key.position for rollout in outcome.rollouts) == [0, 1, 3]
    assert {each.end for each in finished} == {"answered", "error_answer"}


def test_a_share_that_ends_after_its_lane_was_closed_is_returned(
    server: FakeRolloutServer, forever: threading.Event, background: ThreadPoolExecutor
) -> None:
    """Its POST was abandoned, and it would have that settled on a thread that takes nothing any more."""
    # A loaded machine must connect within it
    client = make_client(server, request_timeout_s=2.0)
    (lane,) = client._lanes.values()
    decides, go_on = threading.Event(), threading.Event()
    is_set = client._stop.is_set

    def at_the_end() -> bool:
        is_stopped = is_set()
        if sys._getframe(1).f_code.co_name == "_serve":
            decides.set()
            assert go_on.wait(PATIENCE_S)
        return is_stopped

    client._stop.is_set = at_the_end  # type: ignore[method-assign]
    server.on_infer = lambda call: Answer(drop=forever.wait(PATIENCE_S))
    # One request, whose time-out ends the share: behind two the first would be settled before the second is asked.
    asked = background.submit(ask, client, 1)
    assert decides.wait(PATIENCE_S)
    client._stop.set()
    assert not lane.close(timeout_s=0.0)
    go_on.set()
    assert positions(asked.result(PATIENCE_S).returned) == [0]
    assert lane.close(PATIENCE_S)
    client.close()
