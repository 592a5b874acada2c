"""The health check against real servers: it asks those that it watches until they answer, and ends when told to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_rollout_server import Answer, Call, FakeRolloutServer, json_answer
from waiting import wait_for

from swift_stage2 import wire
from swift_stage2.errors import ConfigError
from swift_stage2.runtime.background import BackgroundFailures
from swift_stage2.servers.health_check import HealthCheck, JoiningServer, ServerKind

Start = Callable[..., HealthCheck]
INTERVAL_S = 0.01
OURS = ServerKind(is_ours=True)


@pytest.fixture
def server() -> Iterator[FakeRolloutServer]:
    with FakeRolloutServer(on_get=_ours("ready")) as server:
        yield server


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a check of these servers, which ends with the test."""
    checks: list[HealthCheck] = []

    def start(*servers: FakeRolloutServer, **settings: Any) -> HealthCheck:
        urls = [server.url for server in servers]
        checks.append(HealthCheck(base_urls=urls, api_key="sk-key", interval_s=INTERVAL_S, **settings))
        checks[-1].start()
        return checks[-1]

    yield start
    for check in checks:
        check.stop()
        assert not check._thread.is_alive()


def _ours(state: str) -> Callable[[Call], Answer]:
    info = wire.ServerInfo(stock=False, incarnation="one", state=state)
    return lambda call: json_answer(info.to_json())


def _silent(call: Call) -> Answer:
    """As a stock server whose workers are gone."""
    return Answer(status=500 if call.path == wire.STATE_KEYS else 404)


def _wait_until_answering(check: HealthCheck, server: int) -> None:
    """Waits until it has heard of this one, and of no other."""
    heard: set[int] = set()
    wait_for(lambda: bool(heard.update(check.take_answering()) or heard))
    assert heard == {server}


def _has_been_asked(server: FakeRolloutServer, num_calls: int) -> None:
    num_before = len(server.calls)
    server.wait_until(lambda: len(server.calls) >= num_before + num_calls)


def test_who_has_answered_is_told_of_once_and_asked_no_more_before_that_and_forgotten_when_watched_no_more(
    server: FakeRolloutServer, start: Start
) -> None:
    with FakeRolloutServer(on_get=_silent) as other:  # its workers say nothing: it does not answer
        check = start(server, other)
        check.watch([0, 1])
        wait_for(lambda: check._answering == {0})
        num_calls = len(server.calls)
        _has_been_asked(other, 6)
        assert len(server.calls) == num_calls
        assert (check.take_answering(), check.take_answering()) == ({0}, set())
        wait_for(lambda: check._answering == {0})
        check.watch([1])
        assert check.take_answering() == set()
        num_calls = len(server.calls)
        _has_been_asked(other, 6)
        assert len(server.calls) == num_calls
        check.stop()


def test_a_server_that_was_absent_has_answered_once_it_is_known_who_it_is(
    server: FakeRolloutServer, start: Start
) -> None:
    says: list[ServerKind | None] = [None, OURS]
    failures = BackgroundFailures()

    def examine(base_url: str) -> ServerKind | None:
        if server.on_get is refused:
            raise ConfigError("it is another one")
        return says.pop(0)

    def locked(call: Call) -> Answer:
        return Answer(status=401, body=b"send the key")

    refused, server.on_get = _ours("ready"), locked
    check = start(server, absent=[0], examine=examine, failures=failures)
    check.watch([0])
    _has_been_asked(server, 4)
    server.on_get = refused
    _has_been_asked(server, 4)
    assert (check.take_answering(), check.take_joining(), len(says)) == (set(), [], 2)
    key, refusal = failures.take()
    assert "status 401" in key
    assert refusal == f"{server.url} may not join the run: it is another one"
    server.on_get = _ours("ready")
    _wait_until_answering(check, 0)
    assert (says, check.take_joining(), check.take_joining()) == ([], [JoiningServer(0, OURS)], [])
    check.watch([])
    check.watch([0])  # it was lost meanwhile: known, it is examined no more
    _wait_until_answering(check, 0)
    assert check.take_joining() == []


@pytest.mark.parametrize("state", ["loading", "broken", "closed", wire.INSTALLING_STATE])
def test_an_engine_that_is_not_ready_is_no_answer(
    server: FakeRolloutServer, start: Start, state: str
) -> None:
    server.on_get = _ours(state)
    check = start(server)
    check.watch([0])
    _has_been_asked(server, 3)
    assert check.take_answering() == set()
    server.on_get = _ours("ready")
    _wait_until_answering(check, 0)


def test_a_stock_server_whose_worker_is_wedged_does_not_answer_again(start: Start) -> None:
    """ms-swift answers other calls from its arguments, whatever became of its workers."""
    keys: list[str] = []

    def stock(call: Call) -> Answer:
        if call.path == wire.STATE_KEYS:
            return json_answer({"keys": keys})
        return json_answer({"world_size": 1}) if call.path == wire.WORLD_SIZE else Answer(status=404)

    with FakeRolloutServer(on_get=stock) as server:
        check = start(server)
        check.watch([0])
        _has_been_asked(server, 6)
        assert check.take_answering() == set()
        keys.append("model.embed_tokens.weight")
        _wait_until_answering(check, 0)


def test_what_goes_wrong_with_one_server_is_noted_and_the_others_are_asked(
    server: FakeRolloutServer, start: Start
) -> None:
    failures = BackgroundFailures()

    def examine(base_url: str) -> ServerKind | None:
        raise RuntimeError("can't start new thread")

    with FakeRolloutServer(on_get=_ours("ready")) as other:
        check = start(other, server, absent=[0], examine=examine, failures=failures)
        check.watch([0, 1])
        _wait_until_answering(check, 1)
        check.stop()
    assert failures.take() == (
        "the background thread 'health-check' failed: RuntimeError: can't start new thread",
    )


@pytest.mark.timeout(120)
def test_stopping_does_not_wait_for_a_server_that_hangs(server: FakeRolloutServer, start: Start) -> None:
    forever = threading.Event()
    server.on_get = lambda call: Answer(after=forever)
    check = start(server)
    check.watch([0])
    server.wait_until(lambda: len(server.calls) == 1)
    check.stop()
    assert not check._thread.is_alive(), "the question under way has a deadline of its own"
    check.stop()
    forever.set()
