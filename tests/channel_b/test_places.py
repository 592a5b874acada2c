"""A server of ours, asked request by request: one POST per place, against a real HTTP server."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from channel_b.test_rollout_client import PATIENCE_S, make_client_of_ours, make_samples, positions, stamp
from fake_rollout_server import Answer, Behaviour, Call, FakeRolloutServer, error, request
from rollout_batch import all_samples, await_settled, collect, prove, unsettled, withdraw
from waiting import wait_for

from swift_stage2.channel_b.rollouts import RolloutClient, batch
from swift_stage2.channel_b.rollouts.requests import PostEnd
from swift_stage2.channel_b.rollouts.server_state import PlaceLimit
from swift_stage2.records import BatchOutcome, Sample, SampleKey

PLACES = 4
good = stamp(3)


@pytest.fixture
def server() -> Iterator[FakeRolloutServer]:
    with FakeRolloutServer(on_infer=good) as server:
        yield server


def streaming(server: FakeRolloutServer, **changes: Any) -> RolloutClient:
    """A client of one rank whose server is proven as ours, and agreed with."""
    client = make_client_of_ours(server, **{"world_size": 1, "max_inflight_per_server": PLACES} | changes)
    client.note_agreement([server.url])
    return client


def submit(client: RolloutClient, count: int, *, first: int = 0) -> list[Sample]:
    samples = make_samples(count, first)
    client.submit(samples, [request(str(sample.key.position)) for sample in samples])
    return samples


def next_text(client: RolloutClient) -> str:
    outcome = client.next_finished(PATIENCE_S)
    assert outcome is not None
    (rollout,) = outcome.rollouts
    return rollout.text


def holding(gate: threading.Event, *texts: str) -> Behaviour:
    """Answers of these requests wait."""
    return lambda call: replace(good(call), after=gate if set(texts) & set(call.texts) else None)


# --- places ----------------------------------------------------------------------------------------------


def test_a_rollout_without_end_holds_its_own_place_only(
    server: FakeRolloutServer, gate: threading.Event
) -> None:
    server.on_infer = holding(gate, "0")
    with streaming(server) as client:
        submit(client, PLACES)
        ended = [next_text(client) for _ in range(PLACES - 1)]
        for first in range(PLACES, 4 * PLACES):
            submit(client, 1, first=first)
            ended.append(next_text(client))
        gate.set()
        assert next_text(client) == "echo 0"
    assert sorted(ended) == sorted(f"echo {n}" for n in range(1, 4 * PLACES))
    assert set(server.batch_sizes) == {1}


def test_every_place_has_a_post_and_a_ticket_and_what_waits_takes_a_free_one_at_once(
    server: FakeRolloutServer, gate: threading.Event
) -> None:
    server.on_infer = holding(gate, "1", "2", "3")
    first_ends = threading.Event()
    held = server.on_infer
    server.on_infer = lambda call: replace(held(call), after=first_ends if call.texts == ["0"] else gate)
    with streaming(server) as client:
        assert client.free_places == PLACES + 1, "one may wait"
        samples = submit(client, PLACES + 1)
        server.wait_until(lambda: len(server.infer_calls) == PLACES)
        assert (client.in_flight, client.free_places) == (PLACES, 0)
        first_ends.set()
        server.wait_until(lambda: len(server.infer_calls) == PLACES + 1)  # nobody had to look
        gate.set()
        assert len(collect(client, samples).rollouts) == PLACES + 1
        assert client.free_places == PLACES + 1
    assert server.most_at_once == PLACES


def test_a_server_without_room_gets_fewer_posts_at_once(
    server: FakeRolloutServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "_BUSY_PAUSE_S", 0.01)
    num_refused = iter(range(1))
    server.on_infer = lambda call: error(429) if next(num_refused, None) is not None else good(call)
    with streaming(server) as client:
        (only,) = client._servers.values()
        assert len(collect(client, submit(client, 1)).rollouts) == 1
        assert only.num_places == PLACES // 2
        for first in range(1, 20):
            collect(client, submit(client, 1, first=first))
        assert only.num_places == PLACES


def test_the_limit_halves_when_there_is_no_room_and_grows_by_one_per_full_set() -> None:
    limit = PlaceLimit()
    assert limit.within(8) == 8
    limit.observe(PostEnd.BUSY, began_s=0.0, ended_s=1.0, most=8)
    assert limit.within(8) == 4
    limit.observe(PostEnd.TIMED_OUT, began_s=0.5, ended_s=2.0, most=8)
    assert limit.within(8) == 4, "it left before the cut"
    for _ in range(5):
        limit.observe(PostEnd.ANSWERED, began_s=2.0, ended_s=3.0, most=8)
    assert limit.within(8) == 5
    limit.observe(PostEnd.LOST, began_s=3.0, ended_s=4.0, most=8)
    assert limit.within(8) == 5, "trust, not room"


# --- trust, with several POSTs out -----------------------------------------------------------------------


def test_a_doubt_ends_all_that_is_out_and_nothing_of_it_is_believed(
    server: FakeRolloutServer, gate: threading.Event
) -> None:
    wrong, held = stamp(9), holding(gate, "0", "1", "2")
    server.on_infer = lambda call: wrong(call) if call.texts == ["3"] else held(call)
    with streaming(server, request_timeout_s=3600.0) as client:
        samples = submit(client, PLACES - 1)
        server.wait_until(lambda: len(server.infer_calls) == PLACES - 1)
        samples += submit(client, 1, first=3)
        outcome = collect(client, samples)
        assert "weight_version=9" in client.suspects[server.url], "the first reason stays"
        assert server._num_running == PLACES - 1, "nobody waited for those"
        assert (client.in_flight, unsettled(client), client.free_places) == (0, set(), 0)
    assert (outcome.rollouts, len(outcome.returned)) == ((), PLACES)
    assert {failure.end for failure in outcome.failures} == {PostEnd.LOST, PostEnd.DISTRUSTED}


def test_copies_of_a_poisonous_row_that_fail_together_blame_nobody(server: FakeRolloutServer) -> None:
    server.on_infer = lambda call: error() if call.texts == ["bad"] else good(call)
    copies = [Sample(SampleKey(0, position, 7), row={}) for position in range(PLACES)]
    with streaming(server) as client:
        client.submit(copies, [request("bad")] * PLACES)
        assert positions(collect(client, copies).returned) == list(range(PLACES))
        assert client.suspects == {}
        assert len(collect(client, submit(client, 1, first=PLACES)).rollouts) == 1
        client.submit(copies[:1], [request("bad")])
        ((sample, _),) = collect(client, copies[:1]).quarantined
    assert sample.key.index == 7


@pytest.mark.parametrize(
    "lose_trust",
    [
        withdraw,
        lambda client, url: client.mark_suspect(url, "a doubt"),
        lambda client, url: (withdraw(client, url), prove(client, url, version=4)),
    ],
    ids=["withdrawn", "suspect", "withdrawn and proven anew"],
)
def test_a_post_that_is_about_to_leave_when_its_server_loses_trust_stays(
    server: FakeRolloutServer,
    gate: threading.Event,
    lose_trust: Callable[[RolloutClient, str], object],
) -> None:
    server.on_infer = holding(gate, "0")
    clients: list[RolloutClient] = []

    @contextmanager
    def last_moment() -> Iterator[None]:
        lose_trust(clients[0], server.url)
        yield

    with streaming(server, request_timeout_s=3600.0, watch_post=last_moment) as client:
        clients.append(client)
        outcome = collect(client, submit(client, 1))
        assert (positions(outcome.returned), client.in_flight, unsettled(client)) == ([0], 0, set())
        assert [failure.end for failure in outcome.failures] == [PostEnd.LOST]
    assert server.infer_calls == []


def test_one_that_does_not_end_in_time_is_settled_and_the_others_come(
    server: FakeRolloutServer, gate: threading.Event
) -> None:
    server.on_infer = holding(gate, "0")
    with streaming(server, request_timeout_s=3.0) as client:
        samples = submit(client, PLACES)
        outcome = collect(client, samples)
        await_settled(client)
        assert client.suspects == {}
    assert (positions(outcome.timed_out), len(outcome.rollouts)) == ([0], PLACES - 1)
    assert len(server.reset_calls) == 1


# --- fence and end ---------------------------------------------------------------------------------------


def test_a_server_is_drained_when_all_places_have_ended(
    server: FakeRolloutServer, gate: threading.Event
) -> None:
    server.on_infer = lambda call: replace(stamp(3)(call), after=gate)
    with streaming(server) as client:
        samples = submit(client, PLACES + 1)
        server.wait_until(lambda: len(server.infer_calls) == PLACES)
        client.update(server.url, 3, closed=True)
        assert client.busy() == {server.url}
        gate.set()
        outcomes = [client.next_finished(PATIENCE_S) for _ in range(PLACES)]
        wait_for(lambda: not client.busy())
        assert len(server.infer_calls) == PLACES, "the one that waits got no ticket"
        server.on_infer = stamp(4)
        prove(client, version=4)
        outcomes.append(client.next_finished(PATIENCE_S))
    rollouts = [rollout for outcome in outcomes if outcome is not None for rollout in outcome.rollouts]
    assert sorted(rollout.version for rollout in rollouts) == [3] * PLACES + [4]
    assert {rollout.sample.key for rollout in rollouts} == {sample.key for sample in samples}


@pytest.mark.parametrize("seed", range(8))
def test_under_faults_every_sample_comes_out_once(
    server: FakeRolloutServer, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors, refusals, lost connections, hangs, foreign stamps and withdrawals, in drawn order."""
    monkeypatch.setattr(batch, "_BUSY_PAUSE_S", 0.01)
    rng, never = random.Random(seed), threading.Event()
    faults: list[Behaviour] = [
        lambda call: error(),
        lambda call: error(429),
        lambda call: Answer(drop=True),
        lambda call: replace(good(call), after=never),
        stamp(9),
        lambda call: replace(good(call), cut_after_bytes=9),
    ]

    def behave(call: Call) -> Answer:
        return rng.choice(faults)(call) if rng.random() < 0.25 else good(call)

    server.on_infer = behave
    with streaming(server, request_timeout_s=0.4) as client:
        missing = {sample.key for sample in make_samples(40)}
        waiting, ended = make_samples(40), 0
        while missing:
            free = client.free_places
            if waiting and not client.proven:
                client.take_suspicions()
                withdraw(client, server.url)
                prove(client)
                client.note_agreement([server.url])
            if waiting and free:
                count = min(free, rng.randint(1, 5), len(waiting))
                asked, waiting = waiting[:count], waiting[count:]
                client.submit(asked, [request(str(sample.key.position)) for sample in asked])
            if rng.random() < 0.03:
                withdraw(client, server.url)
            outcome: BatchOutcome | None = client.next_finished(0.05)
            if outcome is not None:
                keys = {sample.key for sample in all_samples(outcome)}
                assert keys <= missing
                missing -= keys
                ended += 1
        never.set()
    assert ended >= 1
