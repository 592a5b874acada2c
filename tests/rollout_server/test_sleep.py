"""The real engine gives its memory back and takes it again with the weights of an install; nobody is answered between.

As a process, whose memory is measured from outside, and as the shared server of this folder, allowed to sleep.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from live_server import (
    CALL_TIMEOUT_S,
    MODEL,
    LearnerRound,
    RunningServer,
    flip_element,
    held_before,
    hold_copies,
    image_request,
    load_generator,
    load_learner,
    picture,
    serve,
    text_request,
)
from test_app import server_process
from test_infer import hugging_face_answer
from test_installs import own_checksums
from test_weight_sync import Learner
from waiting import wait_for

from swift_stage2 import wire
from swift_stage2.rollout_server.engine import SleepMode
from swift_stage2.rollout_server.transformers_engine import TransformersRolloutEngine, copy_weights

pytestmark = pytest.mark.usefixtures("checkpoints_weights_again")
LEVELS = pytest.mark.parametrize("level", [1, 2])
DRAWN = {"max_tokens": 12, "temperature": 1.0, "seed": 11, "logprobs": True}
_WIDTH = 36_000  # of the feed-forward layers: about 220 MB


def put_to_sleep(server: RunningServer, timeout_s: float = CALL_TIMEOUT_S) -> httpx.Response:
    return server.post(wire.SLEEP, wire.SleepRequest(timeout_s).to_json())


def require_asleep(server: RunningServer, level: int = 2) -> None:
    """Whoever asks is refused as by weights that nobody vouches for; parameters have no storage, or a host's."""
    refused = server.post_infer([text_request()])
    assert (refused.status_code, refused.json()["reason"]) == (409, "unproven")
    assert (server.state(), server.http.get(wire.HEALTH).status_code) == ("asleep", 200)
    sizes = {parameter.untyped_storage().nbytes() for parameter in server.engine.generator.model.parameters()}
    assert (sizes == {0}) is (level == 2)


@pytest.fixture
def sleeper(server: RunningServer, monkeypatch: pytest.MonkeyPatch, request: Any) -> RunningServer:
    level = request.node.callspec.params.get("level", 2) if hasattr(request.node, "callspec") else 2
    monkeypatch.setattr(server.engine, "sleep_mode", SleepMode(level))
    return server


def push(server: RunningServer, module: torch.nn.Module) -> None:
    """By memory that both map, as on one machine."""
    round_ = LearnerRound(server, module)
    round_.push_shared().close()
    reply = round_.install()
    assert wire.WeightProof.from_json(reply.json()).vouches_for(own_checksums(module)), reply.text


# --- the shared server ------------------------------------------------------------------------------


@LEVELS
def test_an_install_wakes_the_engine_and_its_answers_are_those_of_the_new_weights(
    sleeper: RunningServer, level: int
) -> None:
    """Parameters stay the same objects, so that ties and hooks stay."""
    model = sleeper.engine.generator.model
    parameters = list(model.parameters())
    for seed in (70, 71):
        for _ in range(2):  # one that sleeps says so again
            answer = put_to_sleep(sleeper)
            assert (answer.status_code, answer.json()) == (200, {"state": "asleep"})
        require_asleep(sleeper, level)
        learner = load_learner(seed=seed)
        assert LearnerRound(sleeper, learner).run().vouches_for(own_checksums(learner))
        text, image = sleeper.infer([text_request(), image_request(shade=60)], max_tokens=12)
        assert list(text.token_ids) == hugging_face_answer(learner, text.prompt_token_ids, 12)
        assert list(image.token_ids) == hugging_face_answer(learner, image.prompt_token_ids, 12, picture(60))
    assert all(now is before for now, before in zip(model.parameters(), parameters, strict=True))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_what_is_being_answered_ends_and_memory_is_given_back_behind_its_batch(
    sleeper: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One waits for its batch, one is between two of its tokens: no further token is computed."""
    forwards, batches = [], []
    engine, model = sleeper.engine, sleeper.engine.generator.model
    give_back = engine._give_memory_back
    monkeypatch.setattr(engine, "_give_memory_back", lambda: batches.append(engine._running) or give_back())
    with (
        held_before(sleeper, 3) as (stopped, go_on),
        model.register_forward_pre_hook(lambda *_: forwards.append(engine.is_asleep)),
        ThreadPoolExecutor(4) as callers,
    ):
        running = callers.submit(sleeper.post_infer, [text_request("running")], max_tokens=40)
        assert stopped.wait(CALL_TIMEOUT_S)
        waiting = callers.submit(sleeper.post_infer, [text_request("waiting")], temperature=1.0)
        wait_for(lambda: len(engine._queue._waiting) == 1)
        sleeping = callers.submit(put_to_sleep, sleeper)
        for ended in (running, waiting):
            reply = ended.result(CALL_TIMEOUT_S)
            assert (reply.status_code, "falls asleep" in reply.text) == (503, True)
        assert not sleeping.done()
        late = callers.submit(sleeper.post_infer, [text_request("late")])
        go_on.set()
        assert sleeping.result(CALL_TIMEOUT_S).json() == {"state": "asleep"}
        assert late.result(CALL_TIMEOUT_S).status_code == 409
    require_asleep(sleeper)
    assert (forwards, batches) == ([False] * 3, [()])


def test_a_sleep_behind_an_install_waits_for_its_copy_and_not_for_its_weights(
    sleeper: RunningServer,
) -> None:
    begun, go_on = hold_copies(sleeper)
    learner, silent = (LearnerRound(sleeper, load_learner(seed=seed)) for seed in (72, 73))
    learner.push_shared().close()
    with ThreadPoolExecutor(3) as callers:
        installing = callers.submit(learner.install)
        assert begun.wait(CALL_TIMEOUT_S)
        assert put_to_sleep(sleeper, 0.1).status_code == 500
        sleeping = callers.submit(put_to_sleep, sleeper)
        go_on.set()
        assert installing.result(CALL_TIMEOUT_S).status_code == 200
        assert sleeping.result(CALL_TIMEOUT_S).json() == {"state": "asleep"}
        silent.connect()
        installing = callers.submit(silent.install)
        wait_for(lambda: sleeper.service.slot._installing is not None)
        assert put_to_sleep(sleeper).json() == {"state": "asleep"}
        assert installing.result(CALL_TIMEOUT_S).status_code == 500
    silent.close()
    require_asleep(sleeper)


def test_an_install_that_fails_leaves_a_sleeper_asleep_or_nobody_served_and_the_next_one_serves(
    sleeper: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no memory left")

    assert put_to_sleep(sleeper).status_code == 200
    cut = LearnerRound(sleeper, load_learner(seed=74))
    cut.connect()
    cut.close()  # the learner dies here
    assert cut.install().status_code == 500
    require_asleep(sleeper)
    for fault, status in ((fail, 500), (flip_element, 200)):
        sleeper.engine.copy = fault
        learner = LearnerRound(sleeper, load_learner(seed=75))
        learner.push_shared().close()
        assert learner.install().status_code == status
        assert (sleeper.state(), sleeper.post_infer([text_request()]).status_code) == ("unproven", 409)
        assert put_to_sleep(sleeper).status_code == 200
        require_asleep(sleeper)
    sleeper.engine.copy = copy_weights
    LearnerRound(sleeper, load_learner(seed=76)).push_shared().close()  # an offer is let go, too
    assert put_to_sleep(sleeper).status_code == 200
    assert sleeper.service.slot._offered is None
    assert LearnerRound(sleeper, load_learner(seed=77)).run()
    assert sleeper.state() == "serving"


def test_a_sleep_that_comes_too_late_is_taken_back_and_one_that_is_not_allowed_changes_nothing(
    sleeper: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_before(sleeper, 1) as (stopped, go_on), ThreadPoolExecutor(1) as callers:
        asked = callers.submit(sleeper.post_infer, [text_request()])
        assert stopped.wait(CALL_TIMEOUT_S)
        late = put_to_sleep(sleeper, 0.1)
        assert (late.status_code, "did not sleep" in late.text) == (503, True)
        assert asked.result(CALL_TIMEOUT_S).status_code == 503
        go_on.set()
    assert (sleeper.state(), sleeper.post_infer([text_request()]).status_code) == ("unproven", 409)
    round_ = LearnerRound(sleeper, load_learner(seed=78))
    round_.run()
    monkeypatch.setattr(sleeper.engine, "sleep_mode", SleepMode(0))
    refused = put_to_sleep(sleeper)
    assert (refused.status_code, refused.json()["reason"]) == (409, "no_sleep")
    assert sleeper.infer([text_request()])[0].weight_version == round_.version


@pytest.mark.parametrize("mode", [SleepMode(1), SleepMode(2), SleepMode(2, loads_when_asked=True)], ids=str)
def test_one_that_may_sleep_does_so_before_it_is_healthy_and_a_push_wakes_it(mode: SleepMode) -> None:
    """Its proof is whole, also of one that had nothing to show when the push began."""
    loaded: list[tuple[bool, bool]] = []

    def load() -> Any:
        generator = load_generator()
        loaded.append((engine.status().state == "ready", engine.is_asleep))
        return generator

    engine = TransformersRolloutEngine(load, model=str(MODEL), sleep_mode=mode)
    try:
        with serve(engine) as server:
            refused = server.post_infer([text_request()])  # whether it has loaded or not
            assert (refused.status_code, refused.json()["reason"]) == (409, "unproven")
            if mode.loads_when_asked:
                assert (server.state(), server.http.get(wire.HEALTH).status_code) == ("asleep", 200)
                assert loaded == []
            else:
                assert engine.wait_loaded(CALL_TIMEOUT_S)
                require_asleep(server, mode.level)
            learner = Learner(server)
            outcome = learner.push()
            assert outcome.reports[0].proof == "checksums+canary", outcome.reports[0].error
            (answer,) = server.infer([text_request()])
            assert list(answer.token_ids) == hugging_face_answer(learner.module, answer.prompt_token_ids, 8)
            learner.sync.close()
        assert loaded == [(False, True)]
    finally:
        engine.close(timeout_s=10.0)


# --- processes ---------------------------------------------------------------------------------------


@contextmanager
def process(directory: Path, model: Path, *options: str) -> Iterator[tuple[RunningServer, Callable[[], int]]]:
    """``swift-stage2 rollout`` with a client, and its resident memory in bytes."""
    directory.mkdir()
    with (
        server_process(directory, *options, model=model) as (started, base_url),
        httpx.Client(base_url=base_url, timeout=CALL_TIMEOUT_S, trust_env=False) as http,
    ):
        server = RunningServer(None, None, http, base_url)  # type: ignore[arg-type]
        yield server, lambda: psutil.Process(started.pid).memory_info().rss


def said(server: RunningServer) -> list[Any]:
    """Tokens and log-probabilities, drawn and greedy, of texts and an image."""
    asked = [text_request("a"), image_request(60), text_request("b")]
    answers = [*server.infer(asked, **DRAWN), *server.infer(asked, logprobs=True)]
    return [(answer.token_ids, answer.log_probs) for answer in answers]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model with random weights of more than 200 MB."""
    from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

    directory = tmp_path_factory.mktemp("wide") / "model"
    shutil.copytree(MODEL, directory, ignore=shutil.ignore_patterns("model.safetensors"))
    config = AutoConfig.from_pretrained(MODEL)
    config.text_config.intermediate_size = _WIDTH
    torch.manual_seed(0)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(directory)
    return directory


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(900)
def test_a_process_gives_the_weights_memory_back_and_answers_as_a_fresh_one_after_every_install(
    wide: Path, tmp_path: Path
) -> None:
    """Bit for bit: also one that loads with the first offer."""
    learner = load_learner(model=wide, seed=1)
    learner.save_pretrained(trained := tmp_path / "trained")
    for file in wide.iterdir():
        if not (trained / file.name).exists():
            shutil.copy(file, trained)
    num_bytes = sum(parameter.nbytes for parameter in learner.parameters())
    assert num_bytes >= 200e6
    with process(tmp_path / "fresh", trained) as (server, _):
        expected = said(server)
    with process(tmp_path / "late", wide, "--sleep-level", "2", "--load-when-asked") as (server, rss):
        assert server.state() == "asleep"
        assert server.post_infer([text_request()]).status_code == 409
        assert put_to_sleep(server).json() == {"state": "asleep"}
        unloaded, measured = rss(), []
        for _ in range(2):
            push(server, learner)
            assert said(server) == expected
            measured.append(rss())
            assert put_to_sleep(server).json() == {"state": "asleep"}
            measured.append(rss())
    assert unloaded < min(measured) - 0.2 * num_bytes
    for awake, asleep in zip(measured[::2], measured[1::2], strict=True):
        assert awake - asleep >= 0.9 * num_bytes
        assert asleep < measured[1] + 0.1 * num_bytes  # it does not pile up
    assert "Traceback" not in (tmp_path / "late" / "log").read_text()
