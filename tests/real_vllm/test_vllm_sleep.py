"""Our engine on vLLM between sleep and install: in which order vLLM is asked, who is refused, what it answers then.

vLLM's CPU build keeps its memory and runs all else of its sleep: pause, parts, resumption.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from live_server import LearnerRound, RunningServer, image_request, load_learner, picture, text_request
from our_server import engine_here, our_arguments
from stock_server import MODEL
from test_infer import hugging_face_answer
from test_sleep import put_to_sleep
from test_vllm_engine import DEADLINE_S, ENDLESS, health
from waiting import wait_for

from swift_stage2.rollout_server.engine import SleepMode

AWAKE_AGAIN = ["wake_up weights", "stage2_load_weights", "update_weight_version", "stage2_weight_sums",
               "reset_encoder_cache", "wake_up kv_cache"]  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with engine_here(None, "--sleep-level", "2", "--load-when-asked") as server:
        yield server


@pytest.fixture
def calls(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What vLLM is asked, in order; waits of its own are left out."""
    made: list[str] = []
    llm = server.engine._generator.engine

    def record(name: str) -> None:
        call = getattr(llm, name)

        def recorded(*arguments: Any, **options: Any) -> Any:
            shown = {
                "collective_rpc": arguments[:1],
                "wake_up": (name, *arguments[:1]),
                "sleep": (name, *arguments),
            }
            words = shown.get(name, (name,))
            made.append(" ".join(" ".join(word) if isinstance(word, list) else str(word) for word in words))
            return call(*arguments, **options)

        monkeypatch.setattr(llm, name, recorded)

    for name in ("sleep", "wake_up", "collective_rpc", "update_weight_version", "generate", "pause_generation",
                 "resume_generation", "reset_encoder_cache", "reset_prefix_cache"):  # fmt: skip
        record(name)
    return made


def is_sleeping(server: RunningServer) -> bool:
    asked = asyncio.run_coroutine_threadsafe(server.engine._generator.is_sleeping(), server.engine._loop)
    return asked.result(DEADLINE_S)


def require_asleep(server: RunningServer) -> None:
    assert put_to_sleep(server).json() == {"state": "asleep"}
    assert (server.state(), is_sleeping(server)) == ("asleep", True)
    refused = server.post_infer([text_request()])
    assert (refused.status_code, refused.json()["reason"]) == (409, "unproven")


def install(server: RunningServer, seed: int) -> torch.nn.Module:
    """Who asks then is answered as by Hugging Face, with the same weights."""
    learner = load_learner(seed=seed)
    LearnerRound(server, learner).run()
    assert not is_sleeping(server)
    text, image = server.infer([text_request(), image_request(70)], max_tokens=12)
    assert list(text.token_ids) == hugging_face_answer(learner, text.prompt_token_ids, 12)
    assert list(image.token_ids) == hugging_face_answer(learner, image.prompt_token_ids, 12, picture(70))
    return learner


def test_the_cpu_build_refuses_the_memory_of_sleep_mode_in_these_words() -> None:
    """Hence ``enable_sleep_mode`` on accelerators only."""
    from vllm.config import ModelConfig

    with pytest.raises(ValueError, match="Sleep mode is not supported on current platform"):
        ModelConfig(model=str(MODEL), enable_sleep_mode=True)


@pytest.mark.parametrize("available", [False, True])
@pytest.mark.parametrize("sleeps", [False, True])
def test_vllm_is_told_of_it_where_there_is_an_accelerator(
    monkeypatch: pytest.MonkeyPatch, sleeps: bool, available: bool
) -> None:
    from swift_stage2.rollout_server import vllm_generator

    given: dict[str, Any] = {}
    monkeypatch.setattr(
        vllm_generator,
        "VllmGenerator",
        lambda **options: given.update(options) or SimpleNamespace(template=None),
    )
    monkeypatch.setattr(vllm_generator, "seal_template", lambda template: None)
    monkeypatch.setattr(vllm_generator.ServerArguments, "_check_device_count", lambda self: None)
    arguments = our_arguments(0)[2:]
    at = arguments.index("--host")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda *_: available)
    vllm_generator.build_generator([*arguments[:at], *arguments[at + 4 :]], sleeps=sleeps)
    assert given["enable_sleep_mode"] is (sleeps and available)


def test_it_sleeps_before_its_first_answer_and_an_install_wakes_weights_and_then_caches(
    server: RunningServer, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the pause of an install beside rollouts, whose end would let vLLM compute without a cache."""
    assert (server.state(), is_sleeping(server)) == ("asleep", True)
    for seed, level in ((80, 2), (80, 2), (81, 1)):
        monkeypatch.setattr(server.engine, "sleep_mode", SleepMode(level))
        require_asleep(server)
        install(server, seed)
        assert calls[-len(AWAKE_AGAIN) - 2 :] == [*AWAKE_AGAIN, "generate", "generate"]
    assert [call for call in calls if call.startswith("sleep")] == [
        "sleep 2",
        "sleep 1",
    ]  # the first one did already
    assert not {"pause_generation", "resume_generation"} & set(calls)
    calls.clear()
    install(server, 82)  # of one that is awake
    assert (calls[0], "wake_up weights" in calls) == ("pause_generation", False)


def test_what_is_being_answered_ends_before_vllm_sleeps(server: RunningServer, calls: list[str]) -> None:
    install(server, 83)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.post_infer, [text_request("a"), image_request()], **ENDLESS)
        wait_for(lambda: health(server)["num_running"] == 2)
        require_asleep(server)
        reply = asked.result(DEADLINE_S)
    assert (reply.status_code, "falls asleep" in reply.text) == (503, True)
    assert calls[-1] == "sleep 2"
    assert health(server)["num_running"] == 0
    install(server, 84)


@pytest.mark.parametrize("sleeps_again", [False, True])
def test_an_install_that_breaks_half_way_leaves_a_server_that_the_next_one_wakes(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, sleeps_again: bool
) -> None:
    """Weights are awake then, and caches asleep."""
    require_asleep(server)
    with monkeypatch.context() as patch:

        async def fail() -> Any:
            raise RuntimeError("no memory left")

        patch.setattr(server.engine._generator, "held_weights", fail)
        round_ = LearnerRound(server, load_learner(seed=85))
        round_.push()
        failed = round_.install()
        round_.close()
    assert (failed.status_code, "no memory left" in failed.text) == (500, True)
    assert (server.state(), is_sleeping(server)) == ("unproven", True)
    assert server.post_infer([text_request()]).status_code == 409
    if sleeps_again:
        require_asleep(server)
    install(server, 86)


def test_an_engine_that_cannot_take_its_memory_again_ends(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Last in this file: the server is broken then. vLLM would say that it sleeps, and hold what it has got."""
    require_asleep(server)

    async def fail(part: str) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(server.engine._generator, "wake", fail)
    round_ = LearnerRound(server, load_learner(seed=87))
    round_.push()
    assert round_.install().status_code >= 500
    round_.close()
    status = server.engine.status()
    assert (str(status.state), status.detail) == ("broken", "vLLM has no memory for weights: out of memory")
