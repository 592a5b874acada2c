"""Our server on vLLM, model and images real: who shares the engine, what fails alone, what a round proves."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from live_server import (
    LearnerRound,
    RunningServer,
    image_request,
    load_learner,
    picture,
    text_request,
)
from our_server import engine_here
from test_infer import hugging_face_answer
from test_installs_beside_rollouts import require_answers_as_stamped
from test_weight_sync import Learner, require_each_push_answered
from waiting import wait_for

from swift_stage2 import wire
from swift_stage2.servers.infer_wire import Completion
from swift_stage2.weights.disk_versions import DiskVersions
from swift_stage2.weights.transport import OurTransport

DEADLINE_S = 120.0
K_PROJ = "model.language_model.layers.1.self_attn.k_proj.weight"  # one of three in vLLM's parameter
# At this temperature the tiny model never ends its turn before the limit.
ENDLESS = {"temperature": 2.0, "seed": 3, "max_tokens": 900}


@pytest.fixture(scope="module")
def weights_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write into it what the worker's loader shall do; the next test finds a sound one."""
    return tmp_path_factory.mktemp("faults") / "fault"


@pytest.fixture(scope="module")
def running_server(weights_root: Path, fault: Path) -> Iterator[RunningServer]:
    with engine_here(weights_root, fault=fault) as server:
        yield server


@pytest.fixture
def server(running_server: RunningServer, fault: Path) -> Iterator[RunningServer]:
    """The shared server; a round that a test left open, or weights it left unproven, are cleared up."""
    yield running_server
    fault.unlink(missing_ok=True)
    end_all(running_server)
    if running_server.state() != "serving":
        LearnerRound(running_server, load_learner()).run()


@pytest.fixture
def learner(server: RunningServer) -> Iterator[Learner]:
    built = Learner(server)
    yield built
    built.sync.close()


def end_all(server: RunningServer) -> None:
    """As if all callers had gone."""
    for job in tuple(server.engine._open):
        job.abort()


def health(server: RunningServer) -> dict[str, Any]:
    reply = server.http.get(wire.HEALTH)
    assert reply.status_code == 200
    return dict(reply.json())


# --- requests -----------------------------------------------------------------------------------


def test_the_manifest_is_the_checkpoints_own_and_tied_weights_are_in_it_once(server: RunningServer) -> None:
    learner = load_learner()
    info = server.http.get(wire.SERVER_INFO).json()
    assert info["engine"] == "vllm"
    told = {spec["name"]: (tuple(spec["shape"]), spec["dtype"]) for spec in info["manifest"]}
    assert told == {name: (tuple(p.shape), "float32") for name, p in learner.named_parameters()}


def test_calls_of_several_callers_are_in_the_running_batch_together(server: RunningServer) -> None:
    calls = [[text_request(f"{caller} {i}") for i in range(16)] for caller in range(4)]
    with ThreadPoolExecutor(4) as pool:
        replies = [pool.submit(server.post_infer, call, **ENDLESS) for call in calls]
        wait_for(lambda: health(server)["num_running"] == 64, DEADLINE_S)
        assert server.http.post(wire.INFER, json={}).status_code == 422  # and others are heard
        end_all(server)
        assert {reply.result(DEADLINE_S).status_code for reply in replies} == {500}
    assert health(server)["num_running"] == 0


BROKEN_IMAGE = {"messages": [{"role": "user", "content": "<image>find"}], "images": ["bm90IGFuIGltYWdl"]}


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        (BROKEN_IMAGE, "an image must be PNG"),
        (text_request("word " * 400), "max_model_len"),  # fits the template, not the engine
        (text_request("word " * 2000), "max_length"),
    ],
    ids=["broken image", "too long for vLLM", "too long for the template"],
)
def test_one_bad_request_fails_alone_with_its_index(
    server: RunningServer, bad: dict[str, Any], cause: str
) -> None:
    with ThreadPoolExecutor(1) as pool:
        neighbour = pool.submit(server.infer, [image_request(i) for i in range(4)], max_tokens=200)
        reply = server.post_infer([text_request(), bad, text_request()])
        assert reply.status_code == 500
        (failure,) = reply.json()["failures"]
        assert failure["index"] == 1
        assert cause in failure["cause"]
        assert len(neighbour.result(DEADLINE_S)) == 4
    assert health(server)["status"] == "ok"


def test_the_ith_request_of_a_call_draws_with_the_seed_plus_i(server: RunningServer) -> None:
    drawn = {"temperature": 1.0, "max_tokens": 16}
    called = server.infer([text_request()] * 3, seed=40, **drawn)
    single = [server.infer([text_request()], seed=40 + i, **drawn)[0] for i in range(3)]
    assert [c.token_ids for c in called] == [c.token_ids for c in single]
    assert len({c.token_ids for c in called}) > 1


def test_new_weights_come_between_two_tokens_of_what_runs(server: RunningServer, learner: Learner) -> None:
    version = learner.push().version
    round_ = LearnerRound(server, load_learner(seed=7))
    file = round_.push_shared()
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(server.infer, [text_request("a"), image_request()], **ENDLESS)
        wait_for(lambda: health(server)["num_running"] == 2)
        installing = pool.submit(round_.install)
        assert installing.result(DEADLINE_S).status_code == 200
        answers: list[Completion] = asked.result(DEADLINE_S)
    file.close()
    for answer in answers:
        (first, before), (second, after) = answer.spans
        assert (first, second, answer.weight_version) == (version, round_.version, round_.version)
        assert before > 0 < after
        assert before + after == len(answer.token_ids)


# --- weights ------------------------------------------------------------------------------------
def test_after_each_round_the_same_image_is_answered_with_the_new_weights(
    server: RunningServer, learner: Learner
) -> None:
    """The image and the prompt are the same every time: a cache that outlived a round would answer."""

    def ask() -> tuple[int, ...]:
        completion, text = server.infer([learner.canary.request, text_request()], max_tokens=12)
        assert list(text.token_ids) == hugging_face_answer(learner.module, text.prompt_token_ids, 12)
        assert {completion.weight_version, text.weight_version} == {learner.sync.version}
        return completion.token_ids

    require_each_push_answered(learner, ask, "checksums+canary")


def test_a_proof_names_every_tensor_as_resident_also_those_that_vllm_fuses(server: RunningServer) -> None:
    learner = load_learner(seed=5)
    proof = LearnerRound(server, learner).run()
    names = {name for name, _ in learner.named_parameters()}
    assert any(".q_proj." in name for name in names)
    assert any(".gate_proj." in name for name in names)
    assert set(proof.arrived) == set(proof.resident) == set(proof.loaded) == names
    assert proof.resident == proof.arrived
    (answer,) = server.infer([image_request(70)], max_tokens=12)
    assert list(answer.token_ids) == hugging_face_answer(learner, answer.prompt_token_ids, 12, picture(70))


@pytest.mark.parametrize("how", [f"drop {K_PROJ}", "flip"])
def test_unchanged_and_wrong_weights_are_caught_by_checksums(
    server: RunningServer, learner: Learner, fault: Path, how: str
) -> None:
    assert learner.push().proven == (0,)
    with torch.no_grad():  # too little for any greedy answer to change, so the canary cannot see it
        for parameter in learner.module.parameters():
            parameter.view(-1)[0] += 1e-6
    fault.write_text(how)
    outcome = learner.push()
    assert outcome.failed == (0,)
    assert "resident checksum" in str(outcome.reports[0].error) or "canary" in str(outcome.reports[0].error)
    assert server.post_infer([text_request()]).status_code == 409  # and the server itself refuses too
    fault.unlink()
    assert learner.push().proven == (0,)


def test_a_completion_never_mixes_two_versions(server: RunningServer) -> None:
    require_answers_as_stamped(server, [text_request(), image_request(70)])


def test_workers_load_what_the_server_has_read_from_a_directory(
    server: RunningServer, learner: Learner, weights_root: Path
) -> None:
    disk = DiskVersions(weights_root, keep=1)
    learner.publisher.disk = disk
    learner.publisher.make_transport = lambda info: OurTransport(disk=disk)
    outcome = learner.push()
    assert outcome.proven == (0,), outcome.reports[0].error
    assert (outcome.reports[0].transport, outcome.reports[0].proof) == ("disk", "checksums+canary")
    (new,) = server.infer([text_request()])
    assert new.weight_version == outcome.version
    assert list(new.token_ids) == hugging_face_answer(learner.module, new.prompt_token_ids, 8)
