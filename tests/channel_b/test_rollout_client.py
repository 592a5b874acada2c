"""The client against a real HTTP server that misbehaves; one fault per test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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
    echo,
    error,
    json_answer,
    output,
    request,
    stamped,
)
from free_port import free_port
from rollout_batch import await_settled, generate, prove, unsettled, withdraw

from swift_stage2.channel_b.attempts import Attempts
from swift_stage2.channel_b.rollouts import RequestSettings, RolloutClient, batch
from swift_stage2.channel_b.rollouts.requests import PostEnd
from swift_stage2.config import DecodingConfig
from swift_stage2.fence import InferFence, InferTicket
from swift_stage2.records import BatchOutcome, Sample, SampleKey
from swift_stage2.servers import infer_wire
from swift_stage2.servers.health_check import ServerKind
from swift_stage2.telemetry.event_log import EventLog, read_events
from swift_stage2.telemetry.events import Finished, Sent

PATIENCE_S = 60.0
KEY = "sk-very-secret-0123456789"
OURS = ServerKind(is_ours=True)


@pytest.fixture
def silent(server: FakeRolloutServer, forever: threading.Event) -> FakeRolloutServer:
    """It answers no request while the test runs."""
    server.on_infer = lambda call: echo(call, after=forever)
    return server


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=1) as thread:
        yield thread


def make_client(*servers: FakeRolloutServer | str, **changes: Any) -> RolloutClient:
    """A client of two ranks, whose servers have proven version 3."""
    urls = [server if isinstance(server, str) else server.url for server in servers]
    settings: dict[str, Any] = {
        "decoding": DecodingConfig(temperature=0.7, max_new_tokens=64),
        "world_size": 2,
        "max_inflight_per_server": 4096,
    }
    client = rollout_batch.make_client(*urls, **settings | changes)
    prove(client)
    return client


def make_client_of_ours(server: FakeRolloutServer, **changes: Any) -> RolloutClient:
    """A client whose only server, one of ours, has proven version 3 of this run."""
    return make_client(server, run_id="run", kinds={server.url: OURS}, **changes)


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
    with make_client(server) as client:
        prove(client, version=7)
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
    assert client.in_flight == 0


def test_finish_reasons(server: FakeRolloutServer) -> None:
    reasons = ["stop", "length"]
    server.on_infer = lambda call: json_answer([output("x", finish_reason=reason) for reason in reasons])
    with make_client(server) as client:
        outcome = ask(client, 2)
    assert [rollout.truncated for rollout in outcome.rollouts] == [False, True]


def test_a_server_that_is_not_proven_is_never_asked(server: FakeRolloutServer) -> None:
    with make_client(server) as client:
        withdraw(client, server.url)
        assert positions(ask(client, 2).returned) == [0, 1]
        assert server.calls == []
        prove(client)
        assert texts(ask(client, 1)) == ["echo 0"]


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


# --- error answers -------------------------------------------------------------------------------


@pytest.mark.parametrize("poisonous", range(8))
def test_one_poisonous_request_among_eight(server: FakeRolloutServer, poisonous: int) -> None:
    server.on_infer = failing_on(str(poisonous))
    with make_client(server) as client:
        outcome = ask(client, 8)
        quarantined = outcome.quarantined
        if outcome.returned:  # it was the last one, and nothing has succeeded since
            assert positions(outcome.returned) == [7]
            quarantined = ask(client, 2, first=7).quarantined
        assert client.suspects == {}
    assert texts(outcome) == [f"echo {n}" for n in range(8) if n != poisonous]
    ((sample, reason),) = quarantined
    assert sample.key.position == poisonous
    assert "500" in reason
    assert server.most_at_once == 1


@pytest.mark.parametrize("at_once", [1, 8])
def test_everything_poisonous_condemns_the_server_and_no_sample(
    server: FakeRolloutServer, at_once: int
) -> None:
    server.on_infer = lambda call: error()
    with make_client(server, max_inflight_per_server=at_once) as client:
        outcome = ask(client, 8)
        assert "500" in client.suspects[server.url]
        asked = len(server.infer_calls)
        assert positions(ask(client, 2).returned) == [0, 1]
        assert len(server.infer_calls) == asked
    assert positions(outcome.returned) == list(range(8))
    assert (outcome.rollouts, outcome.quarantined) == ((), ())


def test_a_request_that_fails_once_returns_and_is_poisonous_once_it_fails_again_after_a_success(
    server: FakeRolloutServer,
) -> None:
    server.on_infer = failing_on("0")
    with make_client(server) as client:
        assert positions(ask(client, 1).returned) == [0]
        assert positions(ask(client, 1).returned) == [0], "nothing shows that the server is sound"
        assert texts(ask(client, 1, first=1)) == ["echo 1"]
        assert [sample.key.position for sample, _ in ask(client, 1).quarantined] == [0]
        assert client.suspects == {}


def test_a_server_without_room_is_asked_again_and_condemns_nobody(
    server: FakeRolloutServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "_BUSY_PAUSE_S", 0.01)

    def behave(call: Call) -> Answer:
        if len(server.infer_calls) in (1, 3, 4, 6):  # full while others' bodies are there
            return error(429, '{"detail": "ask again later"}')
        return failing_on("1")(call)

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
    monkeypatch.setattr(batch, "_BUSY_PAUSE_S", 0.01)
    server.on_infer = lambda call: error(429) if "1" in call.texts else echo(call)
    with make_client(server, request_timeout_s=1.0) as client:
        assert texts(ask(client, 1)) == ["echo 0"]
        outcome = ask(client, 2, first=1)
        assert (client.suspects, unsettled(client)) == ({}, set())
    assert (positions(outcome.returned), outcome.timed_out) == ([1, 2], ())
    assert {failure.end for failure in outcome.failures} == {PostEnd.BUSY}
    assert set(server.batch_sizes[1:]) == {2}, "it is asked for the same, and not bisected"


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


# --- connections ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [{"cut_after_bytes": 5}, {"cut_after_bytes": 0}, {"drop": True}], ids=str)
def test_a_connection_lost_during_a_post_ends_all_trust(
    server: FakeRolloutServer, cut: dict[str, Any]
) -> None:
    server.on_infer = lambda call: echo(call, **cut)
    with make_client(server) as client:
        outcome = ask(client, 4)
        assert not unsettled(client)
    assert positions(outcome.returned) == [0, 1, 2, 3]
    assert client.suspects.keys() == {server.url}
    assert [failure.end for failure in outcome.failures] == [PostEnd.LOST]
    assert len(server.calls) == 1  # nothing is tried again there


def test_a_server_that_is_gone_is_asked_twice_and_suspected() -> None:
    url = closed_port()
    with make_client(url) as client:
        outcome = ask(client, 4)
    assert positions(outcome.returned) == [0, 1, 2, 3]
    assert [failure.end for failure in outcome.failures] == [PostEnd.UNREACHABLE] * 2
    assert list(client.suspects) == [url]


def test_a_server_that_takes_batches_gets_one_post_at_a_time(
    server: FakeRolloutServer, background: ThreadPoolExecutor
) -> None:
    go_on = threading.Event()
    server.on_infer = lambda call: echo(call, after=go_on)
    with FakeRolloutServer(on_infer=lambda call: echo(call, after=go_on)) as other:
        with make_client(server, other, max_inflight_per_server=4) as client:
            outcome = background.submit(ask, client, 8)
            server.wait_until(lambda: len(server.infer_calls) == 1)
            other.wait_until(lambda: len(other.infer_calls) == 1)
            assert client.in_flight == 2  # one ticket per POST
            go_on.set()
            assert len(outcome.result(timeout=PATIENCE_S).rollouts) == 8
        assert (server.most_at_once, other.most_at_once) == (1, 1)


# --- whose weights answered ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"weight_version": 2, "run_id": "run"}, "weight_version=2 run_id='run' instead of 3"),
        ({"weight_version": 3, "run_id": "old"}, "run_id='old'"),
        ({"weight_version": None, "run_id": "run"}, "weight_version=None"),
        ({"weight_version": 3, "run_id": None}, "run_id=None"),
        ({}, "weight_version=None run_id=None"),
    ],
)
def test_an_answer_of_other_weights_is_discarded_and_its_server_suspect(
    server: FakeRolloutServer, wrong: dict[str, Any], named: str
) -> None:
    with make_client_of_ours(server) as client:
        server.on_infer = stamp(3)
        assert len(ask(client, 2).rollouts) == 2
        server.on_infer = stamped(**wrong)
        outcome = ask(client, 2, first=2)
        assert named in client.suspects[server.url]
    assert positions(outcome.returned) == [2, 3]
    assert [failure.end for failure in outcome.failures] == [PostEnd.DISTRUSTED]


def test_a_stock_server_that_stamps_is_another_one_unless_it_is_learned_to_be_ours(
    server: FakeRolloutServer,
) -> None:
    server.on_infer = stamp(3)
    with make_client(server, run_id="run") as client:
        ask(client, 1)
        assert "the kind that it was" in client.suspects[server.url]
        assert not client.stages(server.url)
        client.learn_kind(server.url, OURS)
        assert client.stages(server.url)
        prove(client)
        assert len(ask(client, 1).rollouts) == 1


def test_an_answer_to_another_row_is_no_answer_though_its_prompt_ids_are_the_same(
    server: FakeRolloutServer,
) -> None:
    def swapped(call: Call) -> Answer:
        ids = [request[infer_wire.REQUEST_ID] for request in call.requests]
        return json_answer(
            [output("x", weight_version=3, run_id="run", request_id=name) for name in reversed(ids)]
        )

    with make_client_of_ours(server) as client:
        server.on_infer = swapped
        outcome = ask(client, 2)
    assert [failure.end for failure in outcome.failures][:1] == [PostEnd.ERROR_ANSWER]
    assert "of the request in its place" in outcome.failures[0].reason


# --- new weights while the server answers ---------------------------------------------------------


def stamp(version: int | None, run_id: str | None = "run") -> Behaviour:
    """Echo as our server stamps it with that version's weights."""
    return stamped(weight_version=version, run_id=run_id)


@pytest.fixture
def updating(server: FakeRolloutServer) -> Iterator[RolloutClient]:
    """A client whose server has proven version 3, and gets version 4 while it answers."""
    with make_client_of_ours(server) as client:
        client.expect(4)
        yield client


def test_an_answer_is_of_the_version_that_its_stamp_names(
    updating: RolloutClient, server: FakeRolloutServer
) -> None:
    """One POST's answers may be of two: an engine takes them one by one."""
    server.on_infer = lambda call: json_answer(
        [output("x", weight_version=3 + place, run_id="run") for place in range(len(call.texts))]
    )
    old, new = ask(updating, 2).rollouts
    assert [each.version for each in (old, new)] == [3, 4]
    assert (updating.confirms(old), updating.confirms(new)) == (True, None)
    prove(updating)  # one more step, in which nothing has come
    assert (updating.confirms(old), updating.confirms(new)) == (True, None)
    prove(updating, version=4)
    assert (updating.confirms(old), updating.confirms(new)) == (True, True)
    updating.expect(5)
    withdraw(updating, server.url)
    assert (updating.confirms(old), updating.confirms(new)) == (True, True), "what was proven stays so"


def test_a_version_that_another_follows_without_a_proof_confirms_nothing(
    updating: RolloutClient, server: FakeRolloutServer
) -> None:
    server.on_infer = stamp(4)
    (failed,) = ask(updating, 1).rollouts
    updating.expect(5)
    assert updating.confirms(failed) is False
    server.on_infer = stamp(5)
    (proven,) = ask(updating, 1).rollouts
    prove(updating, version=5)
    assert (updating.confirms(failed), updating.confirms(proven)) == (False, True)


@pytest.mark.parametrize("answer", [stamp(2), stamp(5), stamp(None, None), stamp(4, "other"), echo])
def test_anything_else_makes_the_server_suspect(
    updating: RolloutClient, server: FakeRolloutServer, answer: Behaviour
) -> None:
    server.on_infer = answer
    ask(updating, 1)
    assert updating.suspects.keys() == {server.url}
    assert updating.proven == ()


def test_an_answer_is_of_what_the_server_served_since_the_post_left(
    updating: RolloutClient, server: FakeRolloutServer, background: ThreadPoolExecutor
) -> None:
    """The proof is heard while a POST that the old weights have answered is on its way back."""
    heard = threading.Event()
    server.on_infer = lambda call: replace(stamp(3)(call), after=heard)
    future = start_and_wait_for_a_post(updating, server, background)
    prove(updating, version=4)
    updating.expect(5)
    heard.set()
    assert {each.version for each in future.result(timeout=PATIENCE_S).rollouts} == {3}
    ask(updating, 1)
    assert updating.suspects.keys() == {server.url}, "the next one left after the proof"


def test_what_must_be_of_one_version_is_asked_of_who_has_proven_it(
    updating: RolloutClient, server: FakeRolloutServer
) -> None:
    server.on_infer = stamp(3)
    samples = make_samples(1)
    of_4, of_3 = (
        generate(updating, samples, [request("0")], RequestSettings(DecodingConfig(), only_version=version))
        for version in (4, 3)
    )
    assert (of_4.num_posts, len(of_4.returned), len(of_3.rollouts)) == (0, 1, 1)


def test_a_suspicion_outlasts_a_proof_until_all_ranks_have_heard_of_it(
    updating: RolloutClient, server: FakeRolloutServer
) -> None:
    updating.mark_suspect(server.url, "a doubt")
    prove(updating, version=4)  # agreed on before
    assert (updating.proven, updating.suspects) == ((), {server.url: "a doubt"})
    assert [updating.take_suspicions() for _ in range(2)] == [{server.url}, frozenset()]
    withdraw(updating, server.url)
    assert (updating.proven, updating.busy()) == ((), frozenset())
    prove(updating, version=5)
    assert (updating.proven, updating.suspects) == ((server.url,), {})


# --- deadlines -----------------------------------------------------------------------------------


def test_a_single_request_that_never_answers_returns_after_one_post(silent: FakeRolloutServer) -> None:
    with make_client(silent, request_timeout_s=0.6) as client:
        outcome = ask(client, 1)
        await_settled(client)
        assert client.suspects == {}
    assert positions(outcome.returned) == positions(outcome.timed_out) == [0]
    assert silent.batch_sizes == [1]
    assert [failure.end for failure in outcome.failures] == [PostEnd.TIMED_OUT]
    assert len(silent.reset_calls) == 1


class WatchedFence(InferFence):
    """Says when somebody has asked for a ticket in vain."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.someone_waits = threading.Event()

    def enter(self) -> InferTicket | None:
        if (ticket := super().enter()) is None:
            self.someone_waits.set()
        return ticket


class WatchedClient(RolloutClient):
    make_fence = WatchedFence


@pytest.fixture
def closed(server: FakeRolloutServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[RolloutClient]:
    """A client whose only server is about to get other weights, and is asked nothing new."""
    monkeypatch.setattr(rollout_batch, "RolloutClient", WatchedClient)
    with make_client(server, request_timeout_s=0.2) as client:
        client.update(server.url, 3, closed=True)
        yield client


def wait_at_the_fence(client: RolloutClient, thread: ThreadPoolExecutor) -> Future[BatchOutcome]:
    """Two samples are asked for, and wait."""
    outcome = thread.submit(ask, client, 2)
    (server,) = client._servers.values()
    assert isinstance(server.fence, WatchedFence)
    assert server.fence.someone_waits.wait(PATIENCE_S)
    return outcome


def test_waiting_for_a_ticket_costs_no_budget_and_is_no_failure(
    closed: RolloutClient, background: ThreadPoolExecutor
) -> None:
    outcome = wait_at_the_fence(closed, background)
    threading.Event().wait(0.5)  # longer than the whole budget of 0.4 s
    prove(closed, version=4)
    answered = outcome.result(timeout=PATIENCE_S)
    assert (texts(answered), answered.failures) == (["echo 0", "echo 1"], ())
    assert answered.rollouts[0].version == 4


# --- abandoned POSTs -----------------------------------------------------------------------------


def test_the_server_stays_busy_until_the_ordered_call_answers(silent: FakeRolloutServer) -> None:
    answer_reset, good_reset = threading.Event(), silent.on_reset
    silent.on_reset = lambda call: Answer(body=good_reset(call).body, after=answer_reset)
    with make_client(silent, request_timeout_s=1.0) as client:
        ask(client, 1)
        silent.wait_until(lambda: len(silent.reset_calls) == 1)
        client.update(silent.url, 3, closed=True)
        assert (client.in_flight, client.busy()) == (0, {silent.url})
        answer_reset.set()
        await_settled(client)
        assert (client.busy(), client.proven) == (frozenset(), (silent.url,))


def test_a_server_that_does_not_settle_becomes_suspect_and_is_busy_no_more(
    server: FakeRolloutServer, forever: threading.Event
) -> None:
    server.on_infer = server.on_reset = lambda call: Answer(after=forever)
    with make_client(server, request_timeout_s=0.2) as client:
        ask(client, 1)
        await_settled(client)
        assert client.proven == ()
        assert "could not be settled" in client.suspects[server.url]
    assert len(server.reset_calls) == 1


@pytest.mark.parametrize(
    ("answer", "named"),
    [(error(), "500"), (Answer(body=b'{"message": "cache reset, status: False"}'), "status=False")],
)
def test_an_ordered_call_that_fails_is_tried_once_more(
    silent: FakeRolloutServer, answer: Answer, named: str
) -> None:
    silent.on_reset = lambda call: answer
    with make_client(silent, request_timeout_s=1.5) as client:
        ask(client, 1)
        await_settled(client)
        assert named in client.suspects[silent.url]
    assert len(silent.reset_calls) == 2


# --- the fence and the end -----------------------------------------------------------------------


def start_and_wait_for_a_post(
    client: RolloutClient, server: FakeRolloutServer, thread: ThreadPoolExecutor, count: int = 2
) -> Future[BatchOutcome]:
    outcome = thread.submit(ask, client, count)
    server.wait_until(lambda: len(server.infer_calls) == 1)
    return outcome


def test_a_server_that_is_withdrawn_is_noticed_by_who_waited(
    closed: RolloutClient, server: FakeRolloutServer, background: ThreadPoolExecutor
) -> None:
    outcome = wait_at_the_fence(closed, background)
    withdraw(closed, server.url)
    assert positions(outcome.result(timeout=PATIENCE_S).returned) == [0, 1]
    assert server.calls == []


def test_one_server_is_drained_while_the_other_is_asked_on(
    server: FakeRolloutServer, background: ThreadPoolExecutor
) -> None:
    go_on = threading.Event()
    server.on_infer = lambda call: echo(call, after=go_on)
    with FakeRolloutServer() as other, make_client(server, other, max_inflight_per_server=2) as client:
        withdraw(client, other.url)
        outcome = start_and_wait_for_a_post(client, server, background)
        client.update(server.url, 3, closed=True)
        assert (client.busy(), client.is_open) == ({server.url}, False)
        prove(client, other.url, version=4)
        go_on.set()
        assert {each.version for each in outcome.result(timeout=PATIENCE_S).rollouts} == {3}
        assert {(each.server, each.version) for each in ask(client, 4).rollouts} == {(other.url, 4)}
        assert (client.busy(), client.is_open) == ({other.url}, True)
        prove(client, server.url, version=4)
        assert client.busy() == {server.url, other.url}
    assert len(server.infer_calls) == 1


def test_a_batch_does_not_wait_for_a_server_that_is_withdrawn(
    silent: FakeRolloutServer, background: ThreadPoolExecutor
) -> None:
    with (
        FakeRolloutServer() as other,
        make_client(silent, other, request_timeout_s=3600.0, max_inflight_per_server=1) as client,
    ):
        future = start_and_wait_for_a_post(client, silent, background)
        other.wait_until(lambda: len(other.infer_calls) == 1)
        withdraw(client, silent.url)
        outcome = future.result(timeout=PATIENCE_S)
        assert (len(outcome.rollouts), len(outcome.returned)) == (1, 1)
        assert [(failure.server, failure.end) for failure in outcome.failures] == [(silent.url, PostEnd.LOST)]
        assert (client.in_flight, unsettled(client)) == (0, set())
        prove(client, version=4)
        assert set(client.proven) == {silent.url, other.url}


def test_a_stop_ends_the_wait_for_a_ticket(
    closed: RolloutClient, server: FakeRolloutServer, background: ThreadPoolExecutor
) -> None:
    outcome = wait_at_the_fence(closed, background)
    closed.request_stop()
    assert positions(outcome.result(timeout=PATIENCE_S).returned) == [0, 1]
    assert positions(ask(closed, 1).returned) == [0]
    assert server.calls == []


def test_a_stop_cuts_the_post_in_flight_and_condemns_nobody(
    silent: FakeRolloutServer, background: ThreadPoolExecutor
) -> None:
    with make_client(silent, request_timeout_s=3600.0) as client:
        future = start_and_wait_for_a_post(client, silent, background)
        client.request_stop()
        outcome = future.result(timeout=PATIENCE_S)
        assert (client.suspects, unsettled(client), client.in_flight) == ({}, {silent.url}, 0)
    assert positions(outcome.returned) == [0, 1]
    assert [failure.end for failure in outcome.failures] == [PostEnd.STOPPED]


def test_close_leaves_no_thread_even_with_a_post_in_flight(
    silent: FakeRolloutServer, background: ThreadPoolExecutor
) -> None:
    client = make_client(silent, request_timeout_s=3600.0)
    outcome = start_and_wait_for_a_post(client, silent, background)
    threads = [thread for thread in threading.enumerate() if thread.name == "rollouts"]
    client.close()
    client.close()
    outcome.result(timeout=PATIENCE_S)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert threads
    assert not [thread for thread in threads if thread.is_alive()]


# --- what is told ------------------------------------------------------------------------------------


def test_every_post_is_told_with_its_samples_its_seed_and_how_it_ended(
    server: FakeRolloutServer, tmp_path: Path
) -> None:
    server.on_infer = failing_on("2")
    path = tmp_path / "rank0.jsonl"
    attempts = Attempts(EventLog(path))
    attempts.begin([sample.key for sample in make_samples(4)])
    with make_client(server, observer=attempts) as client:
        outcome = ask(client, 4)
    told = read_events(path)
    sent = [each for each in told[::2] if isinstance(each, Sent)]
    finished = [each for each in told[1::2] if isinstance(each, Finished)]
    assert len(sent) + len(finished) == len(told)
    assert [each.samples for each in sent] == [each.samples for each in finished]
    posted = [[str(position) for _, position, _, _ in each.samples] for each in sent]
    called = [list(call.texts) for call in server.infer_calls]
    assert all(texts in called for texts in posted)
    assert (posted[0], posted.count(["2"])) == (["0", "1", "2", "3"], 2), "it is asked again, alone"
    assert {(each.server, each.version) for each in sent} == {(server.url, 3)}
    assert len({each.seed for each in sent}) == len(sent)
    is_answered = [each for each in finished if each.end == PostEnd.ANSWERED]
    answered = sorted(position for each in is_answered for _, position, _, _ in each.samples)
    assert answered == sorted(rollout.sample.key.position for rollout in outcome.rollouts) == [0, 1, 3]
    assert {each.end for each in finished} == {"answered", "error_answer"}
