"""``--live`` against the real server: all green, and every wrong server, model or setting a failed row with its fix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from doctor_run import Report
from fake_rollout_server import Answer, Call, FakeRolloutServer, json_answer
from live_server import LearnerRound, RunningServer, flip_element, free_port, load_learner
from stopped_process import stop_process

from swift_stage2 import wire
from swift_stage2.checks import servers
from swift_stage2.checks.live_servers import check_identity
from swift_stage2.config import load_config
from swift_stage2.records import RoundOutcome
from swift_stage2.rollout_server.engine import SleepMode
from swift_stage2.rollout_server.transformers_engine import copy_weights
from swift_stage2.weights.waited_updates import WaitedUpdates

Configure = Callable[..., Path]
Doctor = Callable[..., Report]
Check = Callable[..., Report]


@pytest.fixture
def check(server: RunningServer, configure: Configure, doctor: Doctor) -> Check:
    """The doctor's report of the real server, with options."""
    return lambda *options: doctor(configure(server.base_url), "--live", *options)


@pytest.fixture
def fake_stock() -> Iterator[FakeRolloutServer]:
    def on_get(call: Call) -> Answer:
        bodies = {
            wire.HEALTH: {"status": "ok"},
            wire.WORLD_SIZE: {"world_size": 1},
            wire.STATE_KEYS: {"keys": []},
        }
        body = bodies.get(call.path)
        return Answer(status=404) if body is None else json_answer(body)

    with FakeRolloutServer(on_get=on_get) as running:
        yield running


def resident_sum(server: RunningServer) -> float:
    generator = server.engine._generator
    assert generator is not None
    return sum(float(parameter.detach().double().abs().sum()) for parameter in generator.model.parameters())


# --- a good server -----------------------------------------------------------------------------------


def test_a_good_server_is_green_keeps_its_weights_and_takes_a_later_run(
    server: RunningServer, check: Check
) -> None:
    LearnerRound(server, load_learner()).run()
    before = resident_sum(server)
    report = check("--step-seconds", "5")
    assert report.status == 0, report.text
    assert [row["check"] for row in report.findings if row["verdict"] != "ok"] == []
    assert resident_sum(server) == before
    texts = {
        "server 0": "swift-stage2 rollout (transformers), serving",
        "prompts": "images as the model sees them: 140x112",
        "dry sync round": "proven by checksums+canary",
        "timed rollouts": "8 in ",
        "parsed and matched": "8 rollout(s): ",
        "coordinates": "healthy: ",
        "rate": "a B step trains 2 packs * 1 rank(s)",
        "settings": "as written",
    }
    for check, text in texts.items():
        assert text in report.row(check)["found"]
    info = server.http.get(wire.SERVER_INFO).json()
    assert info["run_id"].startswith("doctor-")
    assert info["state"] == "serving"
    assert LearnerRound(server, load_learner(seed=3), run_id="a-later-run").run().version
    assert server.http.get(wire.SERVER_INFO).json()["run_id"] == "a-later-run"


@pytest.mark.slow
def test_the_dry_round_can_be_left_out_and_touches_nothing(server: RunningServer, check: Check) -> None:
    LearnerRound(server, load_learner(), run_id="mine").run()
    report = check("--no-sync")
    assert report.status == 0, report.text
    row = report.row("dry sync round")
    assert (row["verdict"], row["found"]) == ("not checked", "left out by --no-sync")
    assert not row["counts_as_failed"]
    assert report.verdict("timed rollouts") == "ok"
    assert server.http.get(wire.SERVER_INFO).json()["run_id"] == "mine"


def test_a_server_that_must_sleep_and_does_not_is_told_with_the_option(
    server: RunningServer,
    fake_stock: FakeRolloutServer,
    configure: Configure,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(servers, "vllm_is_installed", lambda: True)
    in_turns = {"stage2_ab__mode": "inline", "launch__share_devices": True}
    for url in (server.base_url, fake_stock.url):
        told = check_identity(url, load_config(configure(url, **in_turns)))
        assert (told.verdict, told.result.incarnation is None) == ("warning", url == fake_stock.url)
        assert told.found.endswith("it does not sleep, so it keeps its memory while the learner trains")
        assert "swift-stage2 rollout --sleep-level 2" in told.fix
        assert check_identity(url, load_config(configure(url))).verdict == "ok"
    monkeypatch.setattr(server.engine, "sleep_mode", SleepMode(1))
    config = load_config(configure(server.base_url, **in_turns))
    assert check_identity(server.base_url, config).verdict == "ok"


@pytest.mark.slow
def test_a_server_that_sleeps_is_woken_by_the_dry_round_and_put_to_sleep_again(
    server: RunningServer, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    LearnerRound(server, load_learner(), run_id="doctor-before").run()  # a run's it would leave alone
    monkeypatch.setattr(server.engine, "sleep_mode", SleepMode(2))
    assert server.post(wire.SLEEP).json() == {"state": "asleep"}
    report = check("--step-seconds", "5")
    assert report.status == 0, report.text
    assert [row["check"] for row in report.findings if row["verdict"] != "ok"] == []
    assert "asleep" in report.row("server 0")["found"]
    assert "proven by checksums+canary" in report.row("dry sync round")["found"]
    assert server.state() == "asleep"


def test_an_unproven_server_is_mended_by_the_dry_round(server: RunningServer, check: Check) -> None:
    torn = LearnerRound(server, load_learner(seed=5))
    server.engine.copy = flip_element
    torn.push()
    torn.install()
    torn.close()
    server.engine.copy = copy_weights
    assert server.state() == "unproven"
    report = check()
    assert report.status == 0, report.text
    assert report.row("server 0")["verdict"] == "warning"
    assert "proven by checksums+canary" in report.row("dry sync round")["found"]
    assert report.verdict("parsed and matched") == "ok"
    assert server.state() == "serving"


# --- wrong servers -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_weights_that_do_not_arrive_whole_fail_the_dry_round(server: RunningServer, check: Check) -> None:
    server.engine.copy = flip_element
    try:
        report = check()
    finally:
        server.engine.copy = copy_weights
    assert report.failed == ["dry sync round"]
    row = report.row("dry sync round")
    assert "does not hold the weights it was sent" in row["found"]
    assert row["fix"]
    assert report.row("timed rollouts")["found"] == "since dry sync round failed"


@pytest.mark.slow
def test_one_dead_server_of_two_leaves_the_other_checked(
    server: RunningServer, configure: Configure, doctor: Doctor
) -> None:
    report = doctor(configure(server.base_url, f"http://127.0.0.1:{free_port()}"), "--live")
    assert report.status == 1
    assert "start the server there" in report.row("server 1")["found"]
    assert report.row("prompts", "Server 1")["found"] == "since server 1 (Addresses) failed"
    assert report.row("dry sync round", "Server 0")["verdict"] == "ok"
    assert report.row("rate")["found"] == "since server 1 (Addresses) failed"


def test_prompts_that_differ_are_told_with_their_place(
    fake_stock: FakeRolloutServer, configure: Configure, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "vllm_is_installed", lambda: True)
    report = doctor(configure(fake_stock.url), "--live")
    assert report.status == 1
    assert report.row("server 0")["found"].startswith("stock swift rollout")
    assert report.failed == ["prompts"]
    row = report.row("prompts")
    assert "the server reads 3 prompt tokens, the learner " in row["found"]
    assert "different from place 1 on" in row["found"]
    assert row["fix"].startswith("give the server the learner's model, template and pixel limits")
    assert report.row("dry sync round")["found"] == "since prompts failed"
    resets = [call for call in fake_stock.calls if call.path == wire.INIT_COMMUNICATOR]
    assert resets == [], "no weights are sent to a server that reads other prompts"


# --- settings ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_answers_that_are_cut_off_fail_with_a_longer_limit(
    server: RunningServer, configure: Configure, doctor: Doctor
) -> None:
    config = configure(server.base_url, rollout__decoding={"temperature": 0.0, "max_new_tokens": 3})
    report = doctor(config, "--live")
    assert report.failed == ["parsed and matched"]
    row = report.row("parsed and matched")
    assert "100% were cut off by max_new_tokens" in row["found"]
    assert "write rollout.decoding.max_new_tokens: 6" in row["fix"]


def test_a_push_that_hangs_is_a_failed_row(
    server: RunningServer, configure: Configure, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, stopped = WaitedUpdates.run, []

    def run_with_a_stopped_publisher(sync: WaitedUpdates, targets: Sequence[int]) -> RoundOutcome:
        publisher: Any = sync.updates.publisher
        stopped.append(publisher.pid)
        stop_process(publisher.pid)
        return run(sync, targets)

    monkeypatch.setattr(WaitedUpdates, "run", run_with_a_stopped_publisher)
    report = doctor(configure(server.base_url, rollout__sync={"timeout_s": 2.0}), "--live")
    assert report.failed == ["dry sync round"]
    assert "did not take and prove the weights within 2 s" in report.row("dry sync round")["found"]
    assert [pid for pid in stopped if psutil.pid_exists(pid)] == []
