"""The merger between real callers and a fake stock server: what shares a POST, in which order, who hears of a fault."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fake_rollout_server import Answer, Call, FakeRolloutServer, echo, error
from live_merger import (
    LONGEST_WAIT_S,
    LiveMerger,
    free_port,
    infer_body,
    live_merger,
    seeds_of,
    texts_of,
)

from swift_stage2 import wire
from swift_stage2.servers.request_checks import RequestLimits

KEY = "sk-very-secret-0123456789"
RESET_MESSAGE = {"message": "Request received, resetting prefix cache status: True"}


def hold_first(upstream: FakeRolloutServer, gate: threading.Event, **answer: Any) -> None:
    """The first ``/infer/`` is answered when the gate opens, the others at once."""

    def behave(call: Call) -> Answer:
        return echo(call, after=gate, **answer) if len(upstream.infer_calls) == 1 else echo(call)

    upstream.on_infer = behave


def occupy(upstream: FakeRolloutServer, merger: LiveMerger, callers: ThreadPoolExecutor) -> Any:
    """Returns when the server is busy with a call of another kind."""
    first = callers.submit(merger.infer, "first", temperature=0.9)
    upstream.wait_until(lambda: len(upstream.infer_calls) == 1)
    return first


def test_calls_that_arrive_while_the_server_is_busy_leave_as_one(
    upstream: FakeRolloutServer, merger: LiveMerger, callers: ThreadPoolExecutor, gate: threading.Event
) -> None:
    hold_first(upstream, gate)
    first = occupy(upstream, merger, callers)
    later = [callers.submit(merger.infer, f"{n}a", f"{n}b", seed=1000 * (n + 1)) for n in range(4)]
    merger.wait_until_queued(4)
    gate.set()
    assert texts_of(first.result(LONGEST_WAIT_S)) == ["echo first"]
    for n, future in enumerate(later):
        assert texts_of(future.result(LONGEST_WAIT_S)) == [f"echo {n}a", f"echo {n}b"]
    assert upstream.batch_sizes == [1, 8]
    assert upstream.most_at_once == 1
    assert {seed for future in later for seed in seeds_of(future.result(0))} == {upstream.seeds[1]}
    assert merger.get(wire.HEALTH).json()["num_posts"] == 2


def test_a_post_holds_no_more_than_allowed_and_one_kind_only(
    upstream: FakeRolloutServer, callers: ThreadPoolExecutor, gate: threading.Event
) -> None:
    with live_merger(upstream, max_batch_size=4) as merger:
        hold_first(upstream, gate)
        occupy(upstream, merger, callers)
        texts = [("a", "b", "c"), ("d", "e"), ("f",), ("g", "h", "i", "j", "k")]
        later = []
        for number, part in enumerate(texts):
            later.append(callers.submit(merger.infer, *part))
            merger.wait_until_queued(number + 1)
        later.append(callers.submit(merger.infer, "other", temperature=0.1))
        merger.wait_until_queued(5)
        gate.set()
        for future in later:
            assert future.result(LONGEST_WAIT_S).status_code == 200
    assert [call.texts for call in upstream.infer_calls[1:]] == [
        ["a", "b", "c", "f"], ["d", "e"], ["g", "h", "i", "j", "k"], ["other"],
    ]  # fmt: skip


def test_callers_that_come_back_a_moment_late_are_not_a_post_behind_for_ever(
    upstream: FakeRolloutServer, callers: ThreadPoolExecutor, gate: threading.Event
) -> None:
    with live_merger(upstream, longest_gather_s=LONGEST_WAIT_S, return_share=1e6) as merger:
        hold_first(upstream, gate)
        early = callers.submit(merger.infer, "early 1")
        upstream.wait_until(lambda: len(upstream.infer_calls) == 1)
        others = [callers.submit(merger.infer, text) for text in ("b", "c")]
        merger.wait_until_queued(2)
        gate.set()
        assert early.result(LONGEST_WAIT_S).status_code == 200
        merger.infer("early 2")  # returns only now: the others have waited for it
        for future in others:
            assert future.result(LONGEST_WAIT_S).status_code == 200
        # Nobody else was waiting when that POST ended, and yet the next one waits for all three.
        again = [callers.submit(merger.infer, text) for text in ("x", "y")]
        merger.wait_until_queued(2)
        merger.infer("z")
        for future in again:
            assert future.result(LONGEST_WAIT_S).status_code == 200
    assert upstream.batch_sizes == [1, 3, 3]


def test_calls_beyond_the_room_for_their_bodies_are_refused_until_others_are_answered(
    upstream: FakeRolloutServer, callers: ThreadPoolExecutor, gate: threading.Event
) -> None:
    hold_first(upstream, gate)
    text = "x" * 900
    with live_merger(upstream, limits=RequestLimits(max_body_mib=2**-9)) as merger:  # 2 KiB, in all 8
        held = [callers.submit(merger.infer, text)]
        upstream.wait_until(lambda: len(upstream.infer_calls) == 1)
        for number in range(1, 7):
            held.append(callers.submit(merger.infer, text))
            merger.wait_until_queued(number)
        refused = merger.infer(text, text[:300])
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
        reset = callers.submit(merger.post, wire.RESET_PREFIX_CACHE, {})
        merger.wait_until_queued(6, 1)  # control calls have room of their own
        gate.set()
        assert [each.result(LONGEST_WAIT_S).status_code for each in (*held, reset)] == [200] * 8
        assert merger.infer(text, text[:300]).status_code == 200


def test_only_the_caller_with_the_poisonous_request_hears_of_it(
    upstream: FakeRolloutServer, merger: LiveMerger, callers: ThreadPoolExecutor, gate: threading.Event
) -> None:
    def behave(call: Call) -> Answer:
        if len(upstream.infer_calls) == 1:
            return echo(call, after=gate)
        return error(500, "cannot identify image") if "bad" in call.texts else echo(call)

    upstream.on_infer = behave
    occupy(upstream, merger, callers)
    good = callers.submit(merger.infer, "good", seed=100)
    merger.wait_until_queued(1)
    bad = callers.submit(merger.infer, "fine", "bad", seed=200)
    merger.wait_until_queued(2)
    late = callers.submit(merger.infer, "late", seed=300)
    merger.wait_until_queued(3)
    gate.set()
    assert texts_of(good.result(LONGEST_WAIT_S)) == ["echo good"]
    assert texts_of(late.result(LONGEST_WAIT_S)) == ["echo late"]
    refused = bad.result(LONGEST_WAIT_S)
    assert (refused.status_code, refused.text) == (500, "cannot identify image")
    assert upstream.batch_sizes == [1, 4, 1, 2, 1]
    assert seeds_of(late.result(0)) == [300]  # alone, with its own seed


@pytest.mark.parametrize("fault", [{"drop": True}, {"cut_after_bytes": 10}], ids=["dropped", "cut"])
def test_a_lost_server_is_lost_for_all_that_waited_for_it_and_is_not_asked_again(
    upstream: FakeRolloutServer,
    merger: LiveMerger,
    callers: ThreadPoolExecutor,
    gate: threading.Event,
    fault: dict[str, Any],
) -> None:
    assert merger.infer("before").status_code == 200

    def behave(call: Call) -> Answer:
        return echo(call, after=gate, **fault) if len(upstream.infer_calls) == 2 else echo(call)

    upstream.on_infer = behave
    running = callers.submit(merger.infer, "running")
    upstream.wait_until(lambda: len(upstream.infer_calls) == 2)
    queued = [callers.submit(merger.infer, text) for text in ("x", "y")]
    merger.wait_until_queued(2)
    control = callers.submit(merger.get, wire.WORLD_SIZE)
    merger.wait_until_queued(2, 1)
    gate.set()
    for future in (running, *queued, control):
        assert future.result(LONGEST_WAIT_S).status_code == 502
    assert len(upstream.infer_calls) == 2

    # Perhaps it was started again, with the weights of its checkpoint: nobody infers before a round.
    assert merger.infer("too early").status_code == 502
    assert merger.get(wire.HEALTH).json()["status"] == "lost"
    assert merger.post(wire.RESET_PREFIX_CACHE, {}).status_code == 200
    health = merger.get(wire.HEALTH)
    assert (health.status_code, health.json()["status"]) == (503, "needs_weights")
    assert merger.infer("still too early").status_code == 502
    assert len(upstream.infer_calls) == 2
    assert merger.post(wire.PROCESS_WEIGHTS, {}).status_code == 200
    assert texts_of(merger.infer("after")) == ["echo after"]
    assert merger.get(wire.HEALTH).status_code == 200


def test_a_server_that_is_not_there_yet_is_asked_again_when_it_is(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with live_merger(f"http://127.0.0.1:{port}") as merger:
        assert merger.infer("a").status_code == 502
        assert merger.infer("a").status_code == 502
        assert caplog.text.count("the server is lost") == 1
        health = merger.get(wire.HEALTH)
        assert (health.status_code, health.json()["status"]) == (503, "lost")
        with FakeRolloutServer(port=port):
            assert texts_of(merger.infer("a")) == ["echo a"]


def test_a_server_that_does_not_answer_in_time_is_a_504_and_the_next_call_is_made(
    upstream: FakeRolloutServer, gate: threading.Event
) -> None:
    with live_merger(upstream, timeout_s=2.0) as merger:
        hold_first(upstream, gate)
        reply = merger.infer("slow")
        assert reply.status_code == 504
        assert "upstream_timeout_s=2" in reply.text
        assert texts_of(merger.infer("next")) == ["echo next"]


def test_a_server_that_was_started_again_is_not_asked_before_it_has_weights(
    upstream: FakeRolloutServer,
) -> None:
    with live_merger(upstream, needs_weights=True) as merger:
        assert merger.get(wire.HEALTH).json()["status"] == "needs_weights"
        assert merger.get(wire.WORLD_SIZE).status_code == 200
        assert "after a round" in merger.infer("a").text
        assert upstream.infer_calls == []
        assert merger.post(wire.PROCESS_WEIGHTS, {}).status_code == 200
        assert merger.get(wire.HEALTH).json()["status"] == "ok"
        assert texts_of(merger.infer("a")) == ["echo a"]


# --- order ---------------------------------------------------------------------------------------


def test_what_an_abandoned_caller_left_never_starts_after_an_ordered_call_answered(
    upstream: FakeRolloutServer, merger: LiveMerger, callers: ThreadPoolExecutor, gate: threading.Event
) -> None:
    hold_first(upstream, gate)
    running = occupy(upstream, merger, callers)
    abandoned = merger.abandoned_call(wire.INFER, infer_body("abandoned"))
    merger.wait_until_queued(1)
    abandoned.close()
    reset = callers.submit(merger.post, wire.RESET_PREFIX_CACHE, {})
    merger.wait_until_queued(0, 1)
    later = callers.submit(merger.infer, "later")
    merger.wait_until_queued(1, 1)
    assert not reset.done()
    gate.set()
    assert reset.result(LONGEST_WAIT_S).json() == RESET_MESSAGE
    assert texts_of(running.result(LONGEST_WAIT_S)) == ["echo first"]
    assert texts_of(later.result(LONGEST_WAIT_S)) == ["echo later"]
    assert [call.path for call in upstream.calls] == [
        wire.INFER,
        wire.RESET_PREFIX_CACHE,
        wire.INFER,
    ]
    assert [call.texts for call in upstream.infer_calls] == [["first"], ["later"]]


# --- drop-in -------------------------------------------------------------------------------------


def test_it_is_a_stock_server_to_its_callers(upstream: FakeRolloutServer, merger: LiveMerger) -> None:
    upstream.on_get = lambda call: Answer(body=b'{"world_size": 1}')
    assert merger.get(wire.SERVER_INFO).status_code == 404
    assert merger.post(wire.INSTALL, {}).status_code == 404
    assert merger.get(wire.WORLD_SIZE).json() == {"world_size": 1}
    update = {"metadatas": [{"name": "a"}]}
    assert merger.post(wire.UPDATE_FLATTENED_PARAMS, update).status_code == 200
    upstream.on_infer = lambda call: error(422, '{"detail": "stock says so"}')
    refused = merger.infer("a")
    assert (refused.status_code, refused.json()) == (422, {"detail": "stock says so"})
    assert [(call.path, call.body) for call in upstream.calls] == [
        (wire.WORLD_SIZE, None),
        (wire.UPDATE_FLATTENED_PARAMS, update),
        (wire.INFER, infer_body("a")),
    ]


def test_it_wants_the_key_and_sends_it_on(
    upstream: FakeRolloutServer, caplog: pytest.LogCaptureFixture
) -> None:
    with live_merger(upstream, api_key=KEY) as merger:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
            assert merger.post(wire.INFER, infer_body("a"), headers=headers).status_code == 401
            assert merger.get(wire.WORLD_SIZE, headers=headers).status_code == 401
        assert upstream.calls == []
        right = {"Authorization": f"Bearer {KEY}"}
        assert merger.post(wire.INFER, infer_body("a"), headers=right).status_code == 200
        assert upstream.calls[0].headers["Authorization"] == f"Bearer {KEY}"
        upstream.on_infer = lambda call: Answer(drop=True)
        lost = merger.post(wire.INFER, infer_body("a"), headers=right)
        assert KEY not in lost.text + merger.get(wire.HEALTH).text
    assert KEY not in caplog.text
