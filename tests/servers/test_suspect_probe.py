"""The probe against real servers: it asks suspects only, never during a round, and ends when told to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fake_rollout_server import LONGEST_WAIT_S, Answer, Call, FakeRolloutServer
from swift_stage2.servers.probe import JoiningServer, SuspectProbe

from swift_stage2 import wire
from swift_stage2.errors import ConfigError
from swift_stage2.runtime.background import BackgroundFailures
from swift_stage2.servers import probe as suspect_probe

INTERVAL_S = 0.01


@pytest.fixture
def server() -> Iterator[FakeRolloutServer]:
    with FakeRolloutServer(on_get=_ours("ready")) as server:
        yield server


@pytest.fixture
def probe() -> Iterator[SuspectProbe]:
    probe = SuspectProbe(rank=0, api_key="sk-key", interval_s=INTERVAL_S)
    probe.start()
    yield probe
    probe.stop()
    assert not probe._thread.is_alive()


@contextmanager
def paused(probe: SuspectProbe) -> Iterator[None]:
    probe.pause()
    yield
    probe.go_on()


def _json(body: Any, **answer: Any) -> Answer:
    return Answer(body=json.dumps(body).encode(), **answer)


def _ours(state: str) -> Any:
    info = wire.ServerInfo(stock=False, incarnation="one", state=state)
    return lambda call: _json(info.to_json())


def _silent(call: Call) -> Answer:
    """As a stock server whose workers are gone."""
    return Answer(status=500 if call.path == wire.STATE_KEYS else 404)


def _wait_until(holds: Callable[[], bool]) -> None:
    """Bounded polling: the probe's thread tells nobody what it did."""
    end = time.monotonic() + LONGEST_WAIT_S
    while not holds():
        assert time.monotonic() < end, "it never happened"
        threading.Event().wait(INTERVAL_S)


def _wait_for(probe: SuspectProbe, urls: set[str]) -> None:
    """Waits until the probe has heard of exactly these."""
    _wait_until(lambda: probe.answering() == urls)


def test_a_server_that_answered_is_asked_no_more(server: FakeRolloutServer, probe: SuspectProbe) -> None:
    with FakeRolloutServer(on_get=_silent) as other:  # its workers say nothing: it does not answer
        probe.watch([server.url, other.url])
        _wait_for(probe, {server.url})
        count = len(server.calls)
        asked = len(other.calls)
        other.wait_until(lambda: len(other.calls) >= asked + 6)
        assert len(server.calls) == count
        assert probe.answering() == {server.url}


def test_a_server_that_was_absent_has_answered_once_it_is_known_who_it_is(
    server: FakeRolloutServer,
) -> None:
    says: list[JoiningServer | None] = [None, JoiningServer(server.url, True, None)]
    failures = BackgroundFailures()

    def examine(base_url: str) -> JoiningServer | None:
        if server.on_get is refused:
            raise ConfigError("it is another one")
        return says.pop(0)

    def locked(call: Call) -> Answer:
        return Answer(status=401, body=b"send the key")

    refused, server.on_get = _ours("ready"), locked
    probe = SuspectProbe(
        rank=0,
        api_key=None,
        interval_s=INTERVAL_S,
        absent=[server.url],
        examine=examine,
        failures=failures,
    )
    probe.start()
    try:
        probe.watch([server.url])
        for on_get in (locked, refused):
            server.on_get = on_get
            server.calls.clear()
            server.wait_until(lambda: len(server.calls) >= 4)
        assert (probe.answering(), probe.has_joining, len(says)) == (frozenset(), False, 2)
        key, refusal = failures.take()
        assert "status 401" in key
        assert refusal == f"{server.url} may not join the run: it is another one"
        server.on_get = _ours("ready")
        _wait_for(probe, {server.url})
        assert says == []
        assert [probe.has_joining, *probe.take_joining()] == [True, JoiningServer(server.url, True, None)]
        probe.watch([])
        probe.watch([server.url])  # it was lost meanwhile: known, it is examined no more
        _wait_for(probe, {server.url})
        assert not probe.has_joining
    finally:
        probe.stop()


@pytest.mark.parametrize("state", ["loading", "broken", "closed", "installing"])
def test_an_engine_that_is_not_ready_is_no_answer(
    server: FakeRolloutServer, probe: SuspectProbe, state: str
) -> None:
    server.on_get = _ours(state)
    probe.watch([server.url])
    server.wait_until(lambda: len(server.calls) >= 3)
    assert probe.answering() == frozenset()
    server.on_get = _ours("ready")
    _wait_for(probe, {server.url})


def test_a_stock_server_whose_worker_is_wedged_does_not_answer_again(probe: SuspectProbe) -> None:
    """ms-swift answers other calls from its arguments, whatever became of its workers."""
    keys: list[str] = []

    def stock(call: Call) -> Answer:
        if call.path == wire.STATE_KEYS:
            return _json({"keys": keys})
        return _json({"world_size": 1}) if call.path == wire.WORLD_SIZE else Answer(status=404)

    with FakeRolloutServer(on_get=stock) as server:
        probe.watch([server.url])
        server.wait_until(lambda: len(server.calls) >= 6)
        assert probe.answering() == frozenset()
        keys.append("model.embed_tokens.weight")
        _wait_for(probe, {server.url})


def test_nothing_is_asked_while_a_round_runs(
    server: FakeRolloutServer, probe: SuspectProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    turned_away: list[str] = []
    ask = probe._ask

    def counted(url: str) -> None:
        ask(url)
        turned_away.append(url)

    with paused(probe):
        monkeypatch.setattr(probe, "_ask", counted)
        probe.watch([server.url])
        _wait_until(lambda: len(turned_away) >= 3)
        assert server.calls == []
    _wait_for(probe, {server.url})


def test_a_round_waits_for_the_question_under_way_and_forgets_its_answer(
    server: FakeRolloutServer, probe: SuspectProbe
) -> None:
    go_on = threading.Event()
    server.on_get = lambda call: _json(json.loads(_ours("ready")(call).body), after=go_on)
    probe.watch([server.url])
    server.wait_until(lambda: len(server.calls) == 1)
    began = threading.Event()

    def run_round() -> None:
        with paused(probe):
            began.set()
            server.on_get = lambda call: Answer(status=500)

    round_ = threading.Thread(target=run_round, name="round")
    round_.start()
    assert not began.is_set()
    go_on.set()
    round_.join(LONGEST_WAIT_S)
    assert began.is_set()
    assert probe.answering() == frozenset(), "it answered before the round, so it proves no retry due"
    server.wait_until(lambda: len(server.calls) >= 3)
    assert probe.answering() == frozenset()


def test_a_loss_that_is_found_within_a_round_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is of what the round has replaced."""
    monkeypatch.setattr(suspect_probe, "_LOCK_TIMEOUT_S", 0.0)
    looking, go_on, told = threading.Event(), threading.Event(), list[int]()
    looks: list[tuple[int, ...]] = []

    def find_lost() -> tuple[int, ...]:
        looks.append(() if looks else (0,))
        looking.set()
        assert go_on.wait(LONGEST_WAIT_S)
        return looks[-1]

    probe = SuspectProbe(
        rank=0, api_key=None, interval_s=INTERVAL_S, find_lost=find_lost, on_lost=told.append
    )
    probe.start()
    assert looking.wait(LONGEST_WAIT_S)
    with paused(probe):
        go_on.set()
        _wait_until(probe._asking.acquire)
        probe._asking.release()
    _wait_until(lambda: len(looks) >= 3)
    assert (probe.lost(), told) == (frozenset(), [])
    probe.stop()


def test_a_trusted_server_that_was_lost_is_told_until_a_round_ran(server: FakeRolloutServer) -> None:
    answers: list[tuple[int, ...]] = [(), (1,), ()]
    probe = SuspectProbe(
        rank=0, api_key=None, interval_s=INTERVAL_S, find_lost=lambda: answers.pop(0) if answers else ()
    )
    probe.start()
    _wait_until(lambda: not answers)
    _wait_until(lambda: probe.lost() == {1})  # and it stays so, though the last answer names nobody
    with paused(probe):
        assert probe.lost() == {1}
    assert probe.lost() == frozenset()
    probe.stop()


def test_other_ranks_ask_nobody(server: FakeRolloutServer) -> None:
    probe = SuspectProbe(rank=1, api_key=None, interval_s=INTERVAL_S, find_lost=lambda: (0,))
    probe.start()
    probe.watch([server.url])
    assert probe._thread.ident is None
    assert probe.answering() == frozenset()
    assert probe.lost() == frozenset()
    with paused(probe):
        pass
    probe.stop()
    assert server.calls == []


@pytest.mark.timeout(120)
def test_stopping_does_not_wait_for_a_server_that_hangs(server: FakeRolloutServer) -> None:
    forever = threading.Event()
    server.on_get = lambda call: Answer(after=forever)
    probe = SuspectProbe(rank=0, api_key=None, interval_s=INTERVAL_S)
    probe.start()
    probe.watch([server.url])
    server.wait_until(lambda: len(server.calls) == 1)
    probe.stop()
    assert not probe._thread.is_alive(), "the question under way has a deadline of its own"
    probe.stop()
    forever.set()
