"""Who answers on a server's port, and whether its model is the learner's: name, files, parameters."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_rollout_server import Answer, Behaviour, Call, FakeRolloutServer, error, outputs
from fake_rollout_server import output as wire_output
from live_server import MODEL

from swift_stage2.config import OnPending, RolloutConfig, ServerConfig
from swift_stage2.config.rollout import SyncConfig
from swift_stage2.doctor import server_identity
from swift_stage2.doctor.examination import Outcome, Verdict
from swift_stage2.doctor.server_identity import (
    Fingerprint,
    check_identity,
    check_model,
    check_same_files,
    compare_manifests,
    compare_names,
    is_unproven,
)
from swift_stage2.servers import protocol
from swift_stage2.servers.protocol import ServerInfo, TensorSpec
from swift_stage2.servers.session import ServerSession
from swift_stage2.servers.stock import vllm_name

KEY = "rollout.servers[0]"

CORRECT = "end what listens there, or correct rollout.servers[0].base_url: it is no rollout server"


def answers(body: object, status: int = 200) -> Behaviour:
    return lambda call: Answer(status=status, body=json.dumps(body).encode())


def stock(call: Call) -> Answer:
    bodies = {protocol.WORLD_SIZE: b'{"world_size": 2}', protocol.HEALTH: b'{"status": "ok"}'}
    return Answer(body=bodies[call.path]) if call.path in bodies else Answer(status=404)


def merged(call: Call) -> Answer:
    health = b'{"status": "ok", "upstream": "http://127.0.0.1:8000"}'
    return Answer(body=health) if call.path == protocol.HEALTH else stock(call)


@pytest.fixture
def server() -> Iterator[FakeRolloutServer]:
    with FakeRolloutServer() as running:
        yield running


@pytest.fixture
def identify(server: FakeRolloutServer) -> Callable[[], Outcome[ServerInfo]]:
    def ask() -> Outcome[ServerInfo]:
        rollout = RolloutConfig(servers=(ServerConfig(base_url=server.url),), request_timeout_s=5.0)
        with ServerSession(server.url, rollout.api_key()) as session:
            return check_identity(session, rollout, KEY)

    return ask


def test_a_stock_server_is_known_by_what_it_lacks_and_has(
    server: FakeRolloutServer, identify: Callable[[], Outcome[ServerInfo]]
) -> None:
    server.on_get = stock
    outcome = identify()
    assert outcome.verdict is Verdict.OK
    assert "stock swift rollout, 2 worker(s)" in outcome.found


def test_a_merger_is_told_with_the_server_behind_it(
    server: FakeRolloutServer, identify: Callable[[], Outcome[ServerInfo]]
) -> None:
    server.on_get = merged
    outcome = identify()
    assert outcome.verdict is Verdict.OK
    assert (
        "stock swift rollout at http://127.0.0.1:8000 behind swift-stage2 merge, 2 worker(s)" in outcome.found
    )


@pytest.mark.parametrize(
    ("can", "told"), [(True, "resumes aborted rollouts"), (False, "cannot resume aborted rollouts")]
)
def test_our_server_says_what_it_is(
    server: FakeRolloutServer, identify: Callable[[], Outcome[ServerInfo]], can: bool, told: str
) -> None:
    info = ServerInfo(
        False,
        incarnation="i",
        engine="transformers",
        model="/m",
        state="serving",
        weight_version=3,
        run_id="r",
        resume=can,
    )
    server.on_get = answers(info.to_json())
    outcome = identify()
    assert outcome.verdict is Verdict.OK
    assert (
        f"swift-stage2 rollout (transformers), serving, weights: version 3 of run r, {told}," in outcome.found
    )


def test_a_stock_server_that_takes_turns_fails(server: FakeRolloutServer) -> None:
    server.on_get = stock
    server.on_reset = answers({"enable_multi_turn": True})
    with ServerSession(server.url) as session:
        outcome = check_identity(session, RolloutConfig(request_timeout_s=5.0), KEY)
    assert outcome.verdict is Verdict.FAILED
    assert "enable_multi_turn" in outcome.found
    assert "--multi_turn_scheduler" in outcome.fix


def test_a_server_that_cannot_resume_fails_where_rollouts_shall_be_resumed(server: FakeRolloutServer) -> None:
    rollout = RolloutConfig(sync=SyncConfig(on_pending=OnPending.RESUME), request_timeout_s=5.0)
    ours = ServerInfo(False, incarnation="i", engine="vllm", model="/m", state="serving", can_abort=True)
    for said, kind, policy in (
        (stock, "stock swift rollout", "wait"),
        (answers(ours.to_json()), "swift-stage2 rollout of an earlier release", "abort"),
        (answers(replace(ours, resume=True).to_json()), "", ""),
    ):
        server.on_get = said
        with ServerSession(server.url) as session:
            outcome = check_identity(session, rollout, KEY)
        assert outcome.verdict is (Verdict.FAILED if kind else Verdict.OK)
        if kind:
            assert outcome.found.endswith(f"servers that resume aborted rollouts, got {server.url}, {kind}")
            assert outcome.fix.endswith(f"of this release, or write on_pending: {policy}")


@pytest.mark.parametrize(
    ("behaviour", "found", "fix"),
    [
        (lambda call: Answer(status=404), "status 404", CORRECT),
        (answers({"hello": "world"}), "incarnation", CORRECT),
        (lambda call: Answer(body=b"<html>a web page</html>"), "not JSON", CORRECT),
        (lambda call: error(500), "status 500", "read the server's log and restart it"),
        (lambda call: Answer(drop=True), "RemoteProtocolError", "read the server's log and restart it"),
        (lambda call: Answer(status=405), "status 405", CORRECT),
        (
            lambda call: (
                Answer(body=b'{"world_size": "two"}')
                if call.path == protocol.WORLD_SIZE
                else Answer(status=404)
            ),
            "no rollout server",
            CORRECT,
        ),
        (
            answers({"incarnation": "i", "state": "loading"}),
            "state=loading",
            "wait until the server has loaded its model",
        ),
        (
            answers({"incarnation": "i", "state": "round_open"}),
            "a sync round of another run is open",
            "end that run",
        ),
    ],
    ids=["404", "other-json", "html", "500", "dropped", "405", "odd-size", "loading", "round-open"],
)
def test_what_is_no_usable_server_fails_with_its_fix(
    server: FakeRolloutServer,
    identify: Callable[[], Outcome[ServerInfo]],
    behaviour: Behaviour,
    found: str,
    fix: str,
) -> None:
    server.on_get = behaviour
    outcome = identify()
    assert outcome.verdict is Verdict.FAILED
    assert found in outcome.found
    assert fix in outcome.fix


def test_a_server_that_takes_connections_and_never_answers_fails_soon(
    server: FakeRolloutServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_identity, "_LOOK_TIMEOUT_S", 0.2)
    never = threading.Event()
    server.on_get = lambda call: Answer(after=never)
    rollout = RolloutConfig(servers=(ServerConfig(base_url=server.url),))
    try:
        with ServerSession(server.url) as session:
            outcome = check_identity(session, rollout, KEY)
    finally:
        never.set()
    assert outcome.verdict is Verdict.FAILED
    assert outcome.found.startswith(f"{server.url} takes connections and answers nothing: ")
    assert [call.path for call in server.calls] == [protocol.HEALTH], "nothing else is waited for"


def test_a_question_that_is_late_names_the_deadline(server: FakeRolloutServer) -> None:
    never = threading.Event()
    server.on_get = lambda call: Answer(status=404, after=None if call.path == protocol.HEALTH else never)
    rollout = RolloutConfig(servers=(ServerConfig(base_url=server.url),), request_timeout_s=0.2)
    try:
        with ServerSession(server.url) as session:
            outcome = check_identity(session, rollout, KEY)
    finally:
        never.set()
    assert outcome.verdict is Verdict.FAILED
    assert "write a longer rollout.request_timeout_s than 0.2" in outcome.fix


@pytest.mark.parametrize(
    ("key", "told"), [(None, "holds no key"), ("wrong", "holds another key than the server's")]
)
@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_is_told_without_the_key(
    server: FakeRolloutServer,
    identify: Callable[[], Outcome[ServerInfo]],
    monkeypatch: pytest.MonkeyPatch,
    key: str | None,
    told: str,
    status: int,
) -> None:
    if key:
        monkeypatch.setenv("SWIFT_ROLLOUT_API_KEY", key)
    server.on_get = lambda call: error(status, "Unauthorized")
    outcome = identify()
    assert outcome.verdict is Verdict.FAILED
    assert told in outcome.found
    assert outcome.fix == "export SWIFT_ROLLOUT_API_KEY=<the key that the server was started with>"


def test_an_unproven_server_is_a_warning(
    server: FakeRolloutServer, identify: Callable[[], Outcome[ServerInfo]]
) -> None:
    server.on_get = answers({"incarnation": "i", "state": "unproven"})
    outcome = identify()
    assert outcome.verdict is Verdict.WARNING
    assert outcome.value is not None
    assert is_unproven(outcome.value)


# --- the model served --------------------------------------------------------------------------------


def ask_model(server: FakeRolloutServer, expected: str) -> Outcome[ServerInfo]:
    rollout = RolloutConfig(servers=(ServerConfig(base_url=server.url),), request_timeout_s=5.0)
    with ServerSession(server.url) as session:
        return check_model(session, ServerInfo(stock=True), rollout, expected, KEY)


def named(model: str) -> Behaviour:
    item = wire_output("x")
    item["response"]["model"] = model
    return lambda call: outputs([item])


def test_a_stock_server_names_the_last_part_of_its_models_path(server: FakeRolloutServer) -> None:
    server.on_infer = named("stage1")
    assert ask_model(server, "/models/stage1").verdict is Verdict.OK


def test_another_model_fails_with_the_model_to_start(server: FakeRolloutServer) -> None:
    server.on_infer = named("Qwen2.5-VL-7B")
    outcome = ask_model(server, "/models/stage1")
    assert outcome.verdict is Verdict.FAILED
    assert outcome.found == "serves Qwen2.5-VL-7B, the learner trains /models/stage1"
    assert "--model /models/stage1" in outcome.fix


def test_a_server_that_names_no_model_is_a_warning(server: FakeRolloutServer) -> None:
    outcome = ask_model(server, "/models/stage1")
    assert outcome.verdict is Verdict.WARNING
    assert outcome.fix == "make sure that the server was started with /models/stage1"


@pytest.mark.parametrize(
    ("behaviour", "fix"),
    [
        (lambda call: error(500), "read the server's log and restart it"),
        (lambda call: Answer(body=b"[]"), "start swift-stage2 rollout or swift rollout (ms-swift 4.6)"),
        (lambda call: Answer(body=b"not json"), CORRECT),
    ],
)
def test_rollouts_that_are_none_fail_with_their_fix(
    server: FakeRolloutServer, behaviour: Behaviour, fix: str
) -> None:
    server.on_infer = behaviour
    outcome = ask_model(server, "/models/stage1")
    assert outcome.verdict is Verdict.FAILED
    assert fix in outcome.fix


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL, tmp_path / "copy", ignore=shutil.ignore_patterns("*.safetensors")))


def test_the_checkpoint_has_every_part() -> None:
    found = Fingerprint.read(MODEL)
    assert all((found.tokenizer, found.chat_template, found.image_processor, found.dtype))
    assert (
        found.vocabulary_size == json.loads((MODEL / "config.json").read_text())["text_config"]["vocab_size"]
    )


def test_the_same_directory_and_an_equal_copy(copy: Path) -> None:
    assert "the same directory" in check_same_files(MODEL, MODEL).found
    outcome = check_same_files(MODEL, copy)
    assert outcome.verdict is Verdict.OK
    assert f"equal in {copy}" in outcome.found


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("chat_template.jinja", "chat_template"),
        ("tokenizer.json", "tokenizer"),
        ("processor_config.json", "image_processor"),
    ],
)
def test_a_changed_file_is_named(copy: Path, file: str, name: str) -> None:
    if file.endswith(".jinja"):
        (copy / file).write_text("other")
    elif name == "tokenizer":
        (copy / file).write_text((copy / file).read_text() + " ")
    else:
        settings = json.loads((copy / file).read_text())
        settings["image_processor"]["min_pixels"] = 1
        (copy / file).write_text(json.dumps(settings))
    outcome = check_same_files(MODEL, copy)
    assert outcome.verdict is Verdict.FAILED
    assert outcome.found.startswith(f"learner and server differ: {name} ")
    assert outcome.fix == f"restart the server with the learner's model: --model {MODEL}"


def test_a_directory_that_cannot_be_looked_into_is_said_so(tmp_path: Path) -> None:
    for place in (None, tmp_path / "absent"):
        outcome = check_same_files(MODEL, place)
        assert outcome.verdict is Verdict.NOT_CHECKED
        assert "cannot be looked into" in outcome.found


LAYER = "model.language_model.layers.0."

LEARNER = [
    TensorSpec("model.visual.patch_embed.proj.weight", (96, 3), "float32"),
    TensorSpec("model.language_model.embed_tokens.weight", (1282, 128), "float32"),
    *(TensorSpec(f"{LAYER}self_attn.{part}_proj.weight", (8, 8), "float32") for part in "qkvo"),
    *(TensorSpec(f"{LAYER}mlp.{part}_proj.weight", (8, 8), "float32") for part in ("gate", "up", "down")),
]

VLLM = [
    "visual.patch_embed.proj.weight",
    "language_model.model.embed_tokens.weight",
    "language_model.model.layers.0.self_attn.qkv_proj.weight",
    "language_model.model.layers.0.self_attn.o_proj.weight",
    "language_model.model.layers.0.mlp.gate_up_proj.weight",
    "language_model.model.layers.0.mlp.down_proj.weight",
]


def with_dtype(dtype: str) -> list[TensorSpec]:
    return [TensorSpec(spec.name, spec.shape, dtype) for spec in LEARNER]


def test_equal_manifests_are_counted() -> None:
    outcome = compare_manifests(LEARNER, LEARNER)
    assert outcome.verdict is Verdict.OK
    assert "9 tensors" in outcome.found
    assert "float32 on both sides" in outcome.found


def test_another_shape_and_a_missing_tensor_are_named_with_both_sides() -> None:
    other = [*LEARNER[1:-1], TensorSpec(LEARNER[-1].name, (8, 9), "float32")]
    outcome = compare_manifests(LEARNER, other)
    assert outcome.verdict is Verdict.FAILED
    assert "2 tensor(s) differ" in outcome.found
    assert f"{LAYER}mlp.down_proj.weight: learner 8x8, server 8x9" in outcome.found
    assert "patch_embed.proj.weight: learner 96x3, server none" in outcome.found
    assert outcome.fix == "start the server with the learner's model"


def test_another_dtype_is_a_warning_because_weights_are_converted() -> None:
    outcome = compare_manifests(LEARNER, with_dtype("bfloat16"))
    assert outcome.verdict is Verdict.WARNING
    assert "learner float32, server bfloat16" in outcome.found
    assert "start the server in the learner's dtype (float32)" in outcome.fix


def test_fused_names_fill_vllms() -> None:
    outcome = compare_names(LEARNER, VLLM)
    assert outcome.verdict is Verdict.OK
    assert "9 tensors fill all 6" in outcome.found
    assert "cannot be asked" in outcome.found


def test_experts_are_fused_over_their_numbers() -> None:
    assert vllm_name("model.layers.1.mlp.experts.7.up_proj.weight") == "layers.1.mlp.experts.w13_weight"
    assert vllm_name("model.layers.1.mlp.experts.7.down_proj.weight") == "layers.1.mlp.experts.w2_weight"


def test_a_tied_head_is_no_difference() -> None:
    assert compare_names(LEARNER, [*VLLM, "language_model.lm_head.weight"]).verdict is Verdict.OK


def test_a_name_that_only_one_side_has_is_told_as_not_fully_comparable() -> None:
    outcome = compare_names(LEARNER, [*VLLM, "language_model.model.layers.0.mystery.weight"])
    assert outcome.verdict is Verdict.WARNING
    assert "cannot be compared fully" in outcome.found
    assert "layers.0.mystery.weight" in outcome.found
    assert outcome.fix


def test_another_model_fails() -> None:
    outcome = compare_names(LEARNER, ["transformer.h.0.attn.weight", "transformer.wte.weight"])
    assert outcome.verdict is Verdict.FAILED
    assert outcome.fix == "start the server with the learner's model"
