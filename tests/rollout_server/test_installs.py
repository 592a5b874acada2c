"""Real pushes into the real server: what is proven, what is kept, what is refused."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from live_server import (
    CALL_TIMEOUT_S,
    LearnerRound,
    RunningServer,
    image_request,
    load_learner,
    picture,
    text_request,
)
from test_infer import block_engine, hugging_face_answer, wait_until_queued

from swift_stage2 import wire
from swift_stage2.rollout_server.engine import InstallFault
from swift_stage2.weights.tensors import checksum_tensor
from swift_stage2.wire import RoundProof


def own_checksums(module: torch.nn.Module) -> dict[str, str]:
    return {name: checksum_tensor(parameter) for name, parameter in module.named_parameters()}


def resident_checksums(server: RunningServer) -> dict[str, str]:
    return own_checksums(server.engine.generator.model)


def test_a_round_loads_proves_and_stamps(server: RunningServer) -> None:
    learner = load_learner(seed=1)
    round_ = LearnerRound(server, learner)
    proof = round_.run()
    expected = own_checksums(learner)
    assert proof.arrived == expected
    assert proof.resident == expected
    assert set(proof.loaded) == set(expected)
    assert (proof.round_id, proof.weight_version) == (round_.round_id, round_.version)
    assert proof.incarnation == server.service.incarnation
    text, image = server.infer([text_request(), image_request(shade=60)], max_tokens=12)
    assert (text.weight_version, text.run_id) == (round_.version, "run-1")
    assert list(text.token_ids) == hugging_face_answer(learner, text.prompt_token_ids, 12)
    assert list(image.token_ids) == hugging_face_answer(learner, image.prompt_token_ids, 12, picture(60))
    info = server.http.get(wire.SERVER_INFO).json()
    assert (info["weight_version"], info["run_id"], info["state"]) == (round_.version, "run-1", "serving")


def test_the_canary_sees_the_new_weights_inside_the_round_only(server: RunningServer) -> None:
    round_ = LearnerRound(server, load_learner(seed=2))
    before = server.infer([text_request()])[0].weight_version
    assert round_.begin().status_code == 200
    refused = server.post_infer([text_request()])
    assert (refused.status_code, refused.json()["reason"]) == (409, "round_open")
    assert server.post_infer([text_request()], round_id="another").json()["reason"] == "round_open"
    round_.push()
    (old,) = server.infer([text_request()], round_id=round_.round_id)
    assert old.weight_version == before  # not loaded yet
    assert round_.load().status_code == 200
    (new,) = server.infer([text_request()], round_id=round_.round_id)
    assert new.weight_version == round_.version
    assert round_.finish().status_code == 200
    assert server.post_infer([text_request()], round_id=round_.round_id).json()["reason"] == "no_round"
    assert server.infer([text_request()])[0].weight_version == round_.version


@pytest.mark.parametrize("fault", [InstallFault.SKIP_COPY, InstallFault.FLIP_ELEMENT])
def test_a_load_that_lies_is_visible_in_the_proof_and_never_serves(
    server: RunningServer, fault: InstallFault
) -> None:
    learner = load_learner(seed=3)
    server.engine.install_fault = fault
    proof = LearnerRound(server, learner).run()
    expected = own_checksums(learner)
    assert proof.arrived == expected
    wrong = [name for name in expected if proof.resident[name] != expected[name]]
    assert len(wrong) == (1 if fault is InstallFault.FLIP_ELEMENT else len(expected))
    refused = server.post_infer([text_request()])
    assert (refused.status_code, refused.json()["reason"]) == (409, "unproven")
    assert server.state() == "unproven"
    server.engine.install_fault = InstallFault.NONE
    assert LearnerRound(server, learner).run().resident == expected
    assert server.state() == "serving"


def test_weights_that_changed_on_the_wire_fail_their_round_and_the_old_ones_serve_on(
    server: RunningServer,
) -> None:
    LearnerRound(server, load_learner(seed=5)).run()
    before = resident_checksums(server)
    round_ = LearnerRound(server, load_learner(seed=4))
    assert round_.begin().status_code == 200
    first = next(iter(round_.snapshot.tensors))
    round_.snapshot.tensors[first].view(torch.uint8).view(-1)[3] ^= 1  # behind its header
    round_.push()
    reply = round_.load()
    assert reply.status_code == 500
    assert f"num_differences=1: {first} with other checksums" in reply.json()["detail"]
    assert (server.state(), resident_checksums(server)) == ("serving", before)


def test_a_copy_that_lies_about_its_checksums_proves_nothing(server: RunningServer) -> None:
    """A broken courier, whose header fits what has arrived, and not what the learner has sent."""
    expected = own_checksums(load_learner(seed=4))
    round_ = LearnerRound(server, load_learner(seed=3))
    assert round_.begin().status_code == 200
    round_.push()
    assert round_.load().status_code == 200
    (canary,) = server.post_infer([text_request()], round_id=round_.round_id).json()
    assert canary["rollout_infos"]["stage2"]["proven"] is False
    proof = RoundProof.from_json(round_.finish(checksums=expected).json())
    assert all(proof.arrived[name] != expected[name] for name in expected)
    info = server.http.get(wire.SERVER_INFO).json()
    assert (info["state"], info["weight_version"]) == ("unproven", round_.version)
    assert server.http.get(wire.HEALTH).json()["state"] == "unproven"
    refused = server.post_infer([text_request()])
    assert (refused.status_code, refused.json()["reason"]) == (409, "unproven")
    round_.finish(checksums=dict(proof.arrived))  # asked again, the same proof: no second opinion
    assert server.state() == "unproven"
    LearnerRound(server, load_learner(seed=3)).run()
    (completion,) = server.post_infer([text_request()]).json()
    assert completion["rollout_infos"]["stage2"]["proven"] is True


@pytest.mark.parametrize("change", ["none", "missing", "additional", "other"])
def test_checksums_of_other_tensors_than_arrived_prove_nothing(server: RunningServer, change: str) -> None:
    learner = load_learner(seed=4)
    round_ = LearnerRound(server, learner)
    assert round_.begin().status_code == 200
    round_.push()
    assert round_.load().status_code == 200
    sums = own_checksums(learner)
    first = next(iter(sums))
    if change == "none":
        sums = None  # type: ignore[assignment]
    elif change == "missing":
        del sums[first]
    else:
        sums[first if change == "other" else "no.such.tensor"] = "0"
    assert round_.finish(checksums=sums).status_code == 200
    assert server.state() == "unproven"


def test_a_push_cut_in_the_middle_leaves_the_old_weights_serving(server: RunningServer) -> None:
    good = LearnerRound(server, load_learner(seed=5))
    good.run()
    before = resident_checksums(server)
    answer = server.infer([text_request()])[0]
    cut = LearnerRound(server, load_learner(seed=6))
    assert cut.begin().status_code == 200
    cut.connect()
    assert cut.stream is not None
    cut.stream._connection.sendall(cut.snapshot.file.memory[: cut.snapshot.file.num_bytes // 2])
    cut.close()  # the learner dies here
    reply = cut.load()
    assert reply.status_code == 500
    assert "did not arrive: ConnectionResetError" in reply.json()["detail"]
    assert resident_checksums(server) == before
    again = server.infer([text_request()])[0]
    assert (again.weight_version, again.token_ids) == (good.version, answer.token_ids)
    assert cut.finish().status_code == 409
    assert LearnerRound(server, load_learner(seed=6)).run().weight_version == cut.version + 1


def test_a_manifest_that_differs_is_refused_before_anything_stops(server: RunningServer) -> None:
    round_ = LearnerRound(server, load_learner())
    manifest = [spec.to_json() for spec in round_.export.manifest()]
    manifest[0]["shape"] = [7]
    for spec in manifest[1:8]:
        spec["name"] += ".renamed"
    body = {"round_id": "r", "run_id": "run-1", "version": 1, "manifest": manifest}
    reply = server.post(wire.BEGIN_ROUND, body)
    assert (reply.status_code, reply.json()["reason"]) == (409, "manifest_differs")
    assert "num_differences=15" in reply.json()["detail"]
    assert reply.json()["detail"].count("learner") == 5
    assert server.state() == "serving"


def test_a_round_is_refused_while_completions_are_made(server: RunningServer) -> None:
    _, release = block_engine(server)
    round_ = LearnerRound(server, load_learner())
    with ThreadPoolExecutor(1) as caller:
        running = caller.submit(server.infer, [text_request()])
        wait_until_queued(server, 1)
        reply = round_.begin()
        release.set()
        running.result(CALL_TIMEOUT_S)
    assert (reply.status_code, reply.json()["reason"]) == (409, "busy")
    assert "num_running=1" in reply.json()["detail"]
    assert round_.begin().status_code == 200
    assert round_.finish(commit=False).status_code == 200
    assert server.state() == "serving"


def test_a_server_of_another_dtype_casts_what_has_arrived_and_shows_it_as_resident(
    server: RunningServer,
) -> None:
    """Here the learner is the one in half precision; a load that does nothing is seen all the same."""
    learner = load_learner(seed=9).bfloat16()
    for fault, is_held in ((InstallFault.NONE, True), (InstallFault.FLIP_ELEMENT, False)):
        server.engine.install_fault = fault
        proof = LearnerRound(server, learner).run()
        assert proof.arrived == own_checksums(learner)
        assert (proof.resident == proof.arrived) is is_held
    server.engine.install_fault = InstallFault.NONE
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
