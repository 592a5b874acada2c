"""Real pushes into the real server: what is proven, what is kept, what is refused."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from live_server import (
    LearnerRound,
    RunningServer,
    flip_element,
    image_request,
    load_learner,
    picture,
    skip_copy,
    text_request,
)
from test_infer import hugging_face_answer

from swift_stage2 import wire
from swift_stage2.rollout_server.transformers_engine import copy_weights
from swift_stage2.weights.tensors import checksum_tensor


def own_checksums(module: torch.nn.Module) -> dict[str, str]:
    return {name: checksum_tensor(parameter) for name, parameter in module.named_parameters()}


def resident_checksums(server: RunningServer) -> dict[str, str]:
    return own_checksums(server.engine.generator.model)


def test_a_round_installs_proves_and_stamps(server: RunningServer) -> None:
    learner = load_learner(seed=1)
    round_ = LearnerRound(server, learner)
    proof = round_.run()
    expected = own_checksums(learner)
    assert proof.arrived == expected
    assert proof.resident == expected
    assert set(proof.loaded) == set(expected)
    assert (proof.run_id, proof.version) == ("run-1", round_.version)
    assert proof.incarnation == server.service.incarnation
    text, image = server.infer([text_request(), image_request(shade=60)], max_tokens=12)
    assert (text.weight_version, text.run_id) == (round_.version, "run-1")
    assert list(text.token_ids) == hugging_face_answer(learner, text.prompt_token_ids, 12)
    assert list(image.token_ids) == hugging_face_answer(learner, image.prompt_token_ids, 12, picture(60))
    info = server.http.get(wire.SERVER_INFO).json()
    assert (info["weight_version"], info["run_id"], info["state"]) == (round_.version, "run-1", "serving")


@pytest.mark.parametrize("fault", [skip_copy, flip_element])
def test_a_load_that_lies_is_visible_in_the_proof_and_never_serves(server: RunningServer, fault: Any) -> None:
    learner = load_learner(seed=3)
    server.engine.copy = fault
    proof = LearnerRound(server, learner).run()
    expected = own_checksums(learner)
    assert proof.arrived == expected
    wrong = [name for name in expected if proof.resident[name] != expected[name]]
    assert len(wrong) == (1 if fault is flip_element else len(expected))
    refused = server.post_infer([text_request()])
    assert (refused.status_code, refused.json()["reason"]) == (409, "unproven")
    assert server.state() == "unproven"
    server.engine.copy = copy_weights
    assert LearnerRound(server, learner).run().resident == expected
    assert server.state() == "serving"


def test_weights_that_changed_on_the_wire_fail_their_round_and_the_old_ones_serve_on(
    server: RunningServer,
) -> None:
    LearnerRound(server, load_learner(seed=5)).run()
    before = resident_checksums(server)
    round_ = LearnerRound(server, load_learner(seed=4))
    first = next(iter(round_.snapshot.tensors))
    round_.snapshot.tensors[first].view(torch.uint8).view(-1)[3] ^= 1  # behind its header
    round_.push()
    reply = round_.install()
    assert reply.status_code == 500
    assert f"num_differences=1: {first} with other checksums" in reply.json()["detail"]
    assert (server.state(), resident_checksums(server)) == ("serving", before)


def test_a_push_cut_in_the_middle_leaves_the_old_weights_serving(server: RunningServer) -> None:
    good = LearnerRound(server, load_learner(seed=5))
    good.run()
    before = resident_checksums(server)
    answer = server.infer([text_request()])[0]
    cut = LearnerRound(server, load_learner(seed=6))
    cut.connect()
    assert cut.stream is not None
    cut.stream._connection.sendall(cut.snapshot.file.memory[: cut.snapshot.file.num_bytes // 2])
    cut.close()  # the learner dies here
    reply = cut.install()
    assert reply.status_code == 500
    assert "did not arrive: ConnectionResetError" in reply.json()["detail"]
    assert resident_checksums(server) == before
    again = server.infer([text_request()])[0]
    assert (again.weight_version, again.token_ids) == (good.version, answer.token_ids)
    assert cut.install().json()["reason"] == "no_weights"
    assert LearnerRound(server, load_learner(seed=6)).run().version == cut.version + 1


def test_a_server_of_another_dtype_casts_what_has_arrived_and_shows_it_as_resident(
    server: RunningServer,
) -> None:
    """Here the learner is the one in half precision; a load that does nothing is seen all the same."""
    learner = load_learner(seed=9).bfloat16()
    for fault, is_held in ((copy_weights, True), (flip_element, False)):
        server.engine.copy = fault
        proof = LearnerRound(server, learner).run()
        assert proof.arrived == own_checksums(learner)
        assert (proof.resident == proof.arrived) is is_held
    server.engine.copy = copy_weights
    LearnerRound(server, learner).run()
    for name, parameter in server.engine.generator.model.named_parameters():
        assert torch.equal(parameter, learner.get_parameter(name).float()), name


def _threads_of_rounds() -> int:
    pools = ("text_", "control_", "reset_")  # these grow with what is asked at once
    return sum(not thread.name.startswith(pools) for thread in threading.enumerate())


def test_ten_rounds_leave_no_thread_and_no_port(server: RunningServer) -> None:
    learner = load_learner()
    LearnerRound(server, learner).run()
    before = _threads_of_rounds()
    for _ in range(5):
        LearnerRound(server, learner).run()
    assert _threads_of_rounds() <= before
