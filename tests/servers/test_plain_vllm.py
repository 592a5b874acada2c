"""What a plain ``vllm serve`` is told by, asked and believed, against a stand-in for its wire (vLLM 0.32's answers)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from fake_rollout_server import Answer, Call, FakeRolloutServer, json_answer, request
from rollout_batch import generate
from weight_updates import delivery, server_at

from swift_stage2.channel_b import detection as detection  # registers the task
from swift_stage2.channel_b.rollouts import RolloutClient
from swift_stage2.channel_b.rollouts.requests import PostEnd
from swift_stage2.channel_b.rollouts.routes import InferRoute, route_to
from swift_stage2.checks import servers
from swift_stage2.checks.servers import FoundServers
from swift_stage2.config import DecodingConfig, Stage2Config
from swift_stage2.config.binding import bind
from swift_stage2.errors import ConfigError, ProtocolError, ServerFault
from swift_stage2.records import Sample, SampleKey
from swift_stage2.servers import vllm_serve
from swift_stage2.servers.health_check import ServerKind
from swift_stage2.servers.infer_wire import greedy_config
from swift_stage2.servers.session import Deadline, ServerSession
from swift_stage2.servers.vllm_serve import WeightVersion, chat_body
from swift_stage2.weights.stock_transport import VllmTransport, unreached
from swift_stage2.weights.tensors import checksum_tensors

_VERSION = WeightVersion("run", 3)
_PATIENCE_S = 60.0


class PlainVllm:
    """Answers as vLLM does; a text ``bad`` is refused, one in ``held`` is answered once its event is set."""

    def __init__(self) -> None:
        self.version = str(_VERSION)
        self.held, self.taken = threading.Event(), threading.Event()
        self.worker_fault, self.release = "", "0.32.0"

    def get(self, call: Call) -> Answer:
        answers = {
            vllm_serve.WEIGHT_INFO: {"weight_version": self.version},
            vllm_serve.MODELS: {"data": [{"id": "tiny", "root": "/models/tiny"}]},
            "/version": {"version": self.release},
        }
        if call.path.startswith("/get_world_size?"):
            return json_answer({"world_size": 4 if "true" in call.path else 2})
        return json_answer(answers[call.path]) if call.path in answers else Answer(status=404)

    def post(self, call: Call) -> Answer:
        if call.path == vllm_serve.CHAT:
            text = call.body["messages"][-1]["content"]
            if text == "bad":
                return json_answer({"error": {"message": "no"}}, status=400)
            choice = {
                "message": {"content": f"echo {text}"},
                "finish_reason": "stop",
                "token_ids": [len(text)],
                "logprobs": {"content": [{"logprob": -0.5}]} if call.body.get("logprobs") else None,
            }
            name = vllm_serve.engine_name(call.body["request_id"])
            reply = json_answer({"id": name, "choices": [choice], "prompt_token_ids": [1, 2]})
            return Answer(body=reply.body, after=self.held) if text == "slow" else reply
        if call.path == vllm_serve.UPDATE_WEIGHTS:  # the workers answer once they have all of a bucket
            return Answer(body=b"{}", after=self.taken)
        if self.worker_fault and call.path == vllm_serve.START_UPDATE:
            return json_answer({"error": {"message": self.worker_fault}}, status=500)
        return json_answer({})


@pytest.fixture
def vllm() -> PlainVllm:
    return PlainVllm()


@pytest.fixture
def server(vllm: PlainVllm) -> Iterator[FakeRolloutServer]:
    with FakeRolloutServer(on_get=vllm.get, on_reset=vllm.post) as server:
        yield server
        vllm.held.set()


@pytest.fixture
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def route(server: FakeRolloutServer) -> InferRoute:
    return route_to(server.url, "tiny", api_key=None)


def _asked(server: FakeRolloutServer) -> list[str]:
    return [call.path for call in server.calls]


def test_it_is_told_by_its_routes_and_is_neither_ours_nor_stock(server: FakeRolloutServer) -> None:
    with ServerSession(server.url) as session:
        info = session.info(Deadline(_PATIENCE_S))
    assert (info.stock, info.chat_model, info.model) == (True, "tiny", "/models/tiny")


@pytest.mark.parametrize("log_probs", [False, True])
def test_its_log_probs_are_of_another_distribution_and_refused_where_they_are_needed(
    server: FakeRolloutServer, log_probs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "vllm_is_installed", lambda: True)
    telemetry = {"record": True, "log_probs": log_probs}
    config = bind(
        Stage2Config,
        {"stage2_ab": {"schedule": {"b_ratio": 0}}, "swift": {"model": "m"}, "telemetry": telemetry},
    )
    found = FoundServers()
    with pytest.raises(ConfigError, match="got a run that asks for logprobs") if log_probs else nullcontext():
        found.look_for(config, server.url, time.monotonic() + _PATIENCE_S)
        assert found.kinds[server.url].chat_model == "tiny"


def test_a_post_is_one_call_a_request_in_order_and_names_its_weights(
    server: FakeRolloutServer, route: InferRoute, loop: asyncio.Runner
) -> None:
    texts = [str(10**n) for n in range(8)]
    asked = [request(text) for text in texts]
    result = loop.run(route.generate(asked, greedy_config(5), timeout_s=_PATIENCE_S))
    scored = loop.run(route.generate(asked, greedy_config(5) | {"logprobs": True}, timeout_s=_PATIENCE_S))
    assert {each.log_probs for each in result.completions} == {None}
    assert {each.log_probs for each in scored.completions} == {(-0.5,)}
    assert [each.text for each in result.completions] == [f"echo {text}" for text in texts], result
    assert {(each.run_id, each.weight_version) for each in result.completions} == {("run", 3)}
    # After the answers: a later process cannot have made them
    assert _asked(server)[-1] == vllm_serve.WEIGHT_INFO
    body = server.calls[0].body
    assert (body["model"], body["max_tokens"], body["temperature"], body["return_token_ids"]) == (
        "tiny",
        5,
        0.0,
        True,
    )


def test_requests_that_vllm_refuses_are_told(route: InferRoute, loop: asyncio.Runner) -> None:
    requests = [request(text) for text in ("a", "bad", "b", "bad")]
    result = loop.run(route.generate(requests, greedy_config(1), timeout_s=_PATIENCE_S))
    assert result.end is PostEnd.ERROR_ANSWER


def test_what_was_cut_is_aborted_by_name_before_it_counts_as_settled(
    server: FakeRolloutServer, route: InferRoute, loop: asyncio.Runner
) -> None:
    requests = [request("a"), request("slow"), request("slow")]
    assert loop.run(route.generate(requests, greedy_config(1), timeout_s=1.0)).end is PostEnd.TIMED_OUT
    assert loop.run(route.settle(timeout_s=_PATIENCE_S)).end is PostEnd.ANSWERED
    (abort,) = [call for call in server.calls if call.path == vllm_serve.ABORT_REQUESTS]
    slow = [
        call.body["request_id"]
        for call in server.calls
        if call.path == vllm_serve.CHAT and call.body["messages"][-1]["content"] == "slow"
    ]
    assert sorted(abort.body["request_ids"]) == sorted(f"chatcmpl-{each}" for each in slow)
    assert loop.run(route.settle(timeout_s=_PATIENCE_S)).end is PostEnd.ANSWERED
    # An abort that names none would end everybody's
    assert _asked(server).count(vllm_serve.ABORT_REQUESTS) == 1


def test_what_goes_on_is_not_aborted_with_what_was_cut(
    server: FakeRolloutServer, vllm: PlainVllm, route: InferRoute, loop: asyncio.Runner
) -> None:
    async def both() -> PostEnd:
        goes_on = asyncio.create_task(
            route.generate([request("slow")], greedy_config(1), timeout_s=_PATIENCE_S)
        )
        cut = await route.generate([request("slow"), request("b")], greedy_config(1), timeout_s=1.0)
        assert cut.end is PostEnd.TIMED_OUT
        assert (await route.settle(timeout_s=_PATIENCE_S)).end is PostEnd.ANSWERED
        vllm.held.set()
        return (await goes_on).end

    assert loop.run(both()) is PostEnd.ANSWERED
    (abort,) = [call for call in server.calls if call.path == vllm_serve.ABORT_REQUESTS]
    assert len(abort.body["request_ids"]) == 1


def test_every_engine_answers_the_canary(server: FakeRolloutServer) -> None:
    question = (request("who"), greedy_config(3))
    with ServerSession(server.url) as session:
        answers = vllm_serve.ask_canary(session, "tiny", question, Deadline(_PATIENCE_S))
    assert len(answers) == 2  # four workers, two an engine
    engines = [call.headers["X-data-parallel-rank"] for call in server.calls if call.path == vllm_serve.CHAT]
    assert engines == ["0", "1"]


def test_images_take_the_places_of_their_tags_and_those_without_one_come_first() -> None:
    asked = {
        "messages": [{"role": "user", "content": "a<image>b"}],
        "images": ["AAA", "data:image/png;base64,BBB"],
    }
    (turn,) = chat_body("m", asked, greedy_config(1), "id")["messages"]
    first, a, second, b = turn["content"]
    assert (first["image_url"]["url"], a["text"]) == ("data:image/*;base64,AAA", "a")
    assert (second["image_url"]["url"], b["text"]) == ("data:image/png;base64,BBB", "b")
    assert asked["messages"] == [{"role": "user", "content": "a<image>b"}]
    with pytest.raises(ProtocolError, match="more <image> tags"):
        chat_body("m", {"messages": asked["messages"]}, greedy_config(1), "id")


@pytest.mark.parametrize(
    "said", ["default", "", "3", "/3", "run/", "run/x", "run/-1", "run/²", "run/" + "9" * 5000]
)
def test_a_weight_version_that_no_learner_wrote_names_no_round(said: str) -> None:
    assert WeightVersion.parse(said) is None
    assert WeightVersion.parse(str(_VERSION)) == _VERSION


def test_parameters_that_stayed_zeros_are_named_unless_zeros_were_sent() -> None:
    full, zeros = checksum_tensors([torch.ones(4), torch.zeros(4)])
    blank = {f"dp0:{name}": "00" for name in ("a.qkv_proj.weight", "b.bias", "c.bias", "odd")}
    now = {"dp0:a.qkv_proj.weight": "00", "dp0:b.bias": "00", "dp0:c.bias": "11", "dp0:odd": "00"}
    sent = {"model.a.q_proj.weight": zeros, "model.a.k_proj.weight": full, "b.bias": zeros, "c.bias": full}
    assert unreached(blank, now, sent) == ["dp0:a.qkv_proj.weight", "dp0:odd"]


@pytest.mark.parametrize(
    ("worker_fault", "told"),
    [
        ("Weight transfer not configured. Please set", "start it with --weight-transfer-config"),
        ("called while a weight update is already active", "already active"),  # of four workers one tells it
    ],
)
def test_a_server_that_cannot_begin_is_refused_before_anybody_waits_for_its_workers(
    server: FakeRolloutServer, vllm: PlainVllm, worker_fault: str, told: str
) -> None:
    vllm.worker_fault = worker_fault
    transport = VllmTransport(torch.device("cpu"))
    with pytest.raises(ServerFault, match=told):
        transport.open(delivery(server_at(server.url, 29600), _PATIENCE_S))
    assert vllm_serve.INIT_TRANSFER not in _asked(server)
    assert vllm_serve.RESUME not in _asked(server)


def test_a_server_that_turns_out_to_be_one_is_asked_its_way(
    server: FakeRolloutServer, vllm: PlainVllm
) -> None:
    absent, keys = "http://127.0.0.1:9", [SampleKey(epoch=0, position=n, index=n) for n in range(2)]
    with RolloutClient(
        [absent, server.url],
        decoding=DecodingConfig(max_new_tokens=8),
        request_timeout_s=_PATIENCE_S,
        run_seed=1,
        rank=0,
        world_size=1,
        run_id=_VERSION.run_id,
    ) as client:
        client.learn_kind(server.url, ServerKind(chat_model="tiny"))
        client.update(server.url, _VERSION.version, closed=False)
        asked = [Sample(key, row={}) for key in keys]
        rollouts = generate(client, asked, [request("a"), request("b")]).rollouts
    assert sorted(rollout.text for rollout in rollouts) == ["echo a", "echo b"]
    assert {call.path for call in server.calls if "messages" in (call.body or {})} == {vllm_serve.CHAT}
