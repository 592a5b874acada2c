"""Every message: what is sent arrives as it was, and whatever else arrives is refused in one line."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
from builders import ODD_VALUES
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2 import wire
from swift_stage2.errors import ProtocolError, RequestTooLarge
from swift_stage2.servers.infer_wire import (
    Completion,
    Conversation,
    FailedRequest,
    FailedRequests,
    InferCall,
    SamplingOptions,
    greedy_config,
    output_json,
    parse_infer_reply,
    request_config,
)
from swift_stage2.servers.stock import WeightSums

SPEC = wire.TensorSpec("w", (2, 3), "float32")
MESSAGES: list[wire.Message] = [
    SPEC,
    wire.ServerInfo(False, "one", "vllm", "m", weight_version=3, run_id="run", manifest=(SPEC,)),
    wire.WeightOffer("run", 4, (SPEC,), wire.WeightWay.STREAM, port=20_000, num_bytes=100, timeout_s=5.0),
    wire.WeightOffer("run", 4, (SPEC,), wire.WeightWay.SHARED_MEMORY, path="/proc/1/fd/3"),
    wire.OfferAnswer(True, "listening", "secret"),
    wire.InstallRequest("run", 4, {"w": "sum"}, 5.0),
    wire.WeightProof("run", 4, "one", {"w": "sum"}, {"w": "sum"}, ("w",)),
    wire.SleepRequest(5.0),
    WeightSums("one", {"w": "sum"}, {}, ("q",), ("e",)),
    FailedRequests((FailedRequest(3, "image"),), "refused"),
    SamplingOptions.from_json(greedy_config(8)),
]
BAD_OPTIONS = (
    ("top_p", 0),
    ("stream", True),
    ("temperature", -1),
    ("max_tokens", 0),
    ("seed", -3),
    ("stop", [""]),
)
OFFER = {"run_id": "a", "version": 1, "manifest": [], "way": "tcp", "port": 1}
MANY_MEMBERS = {str(number): 0 for number in range(100_000)}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def sent(message: wire.Message) -> Any:
    return json.loads(json.dumps(message.to_json()))


def read_or_refuse(kind: type[wire.Message], data: Any) -> None:
    try:
        kind.from_json(data)
    except ProtocolError as refused:
        assert "\n" not in str(refused)  # noqa: PT017
        assert len(str(refused)) < 400  # noqa: PT017


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent_and_an_odd_member_is_refused_in_one_line(
    message: wire.Message,
) -> None:
    assert type(message).from_json(sent(message)) == message
    record = sent(message)
    for key, odd in product(record, ODD_VALUES):
        read_or_refuse(type(message), {**record, key: odd})


@given(data=json_values, key=st.sampled_from(["infer_requests", "messages", "manifest", "token"]))
def test_any_json_is_read_or_refused_in_one_line(data: Any, key: str) -> None:
    for message in MESSAGES:
        read_or_refuse(type(message), data)
        read_or_refuse(type(message), {**sent(message), key: data})
    for kind in (Conversation, InferCall, Completion):
        read_or_refuse(kind, {key: data})


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (wire.TensorSpec, {"name": "w", "shape": [1.0], "dtype": "float32"}),
        (wire.TensorSpec, {"name": "w", "shape": [2**63], "dtype": "float32"}),
        (wire.TensorSpec, {"name": 1, "shape": [], "dtype": "float32"}),
        (wire.WeightOffer, OFFER | {"version": True}),
        (wire.WeightOffer, OFFER | {"timeout_s": 0}),
        (wire.WeightOffer, OFFER | {"way": "nccl"}),
        (wire.WeightOffer, OFFER | {"port": 65536}),
        (wire.WeightOffer, OFFER | {"port": None}),
        (wire.WeightOffer, OFFER | {"num_bytes": "1"}),
        (wire.WeightOffer, OFFER | {"way": "shared_memory"}),
        (wire.InstallRequest, {"run_id": "a", "version": 1}),
        (wire.InstallRequest, {"run_id": "a", "version": 1, "checksums": MANY_MEMBERS}),
        (InferCall, {}),
        (InferCall, {"infer_requests": []}),
        (InferCall, {"infer_requests": [1], "adapter_request": {"path": "lora"}}),
        (InferCall, {"infer_requests": [1], "request_config": {"temprature": 1}}),
        (InferCall, {"infer_requests": [1], "request_config": {"n": 2}}),
        *((InferCall, {"infer_requests": [1], "request_config": {key: value}}) for key, value in BAD_OPTIONS),
        (InferCall, {"infer_requests": [1], "request_config": MANY_MEMBERS}),
        (Conversation, {"messages": []}),
        (Conversation, {"messages": [{"role": "user", "content": "a"}], "videos": ["x"]}),
        (Conversation, {"messages": [{"role": "user", "content": "a", "path": "x"}]}),
        (Conversation, {"messages": [MANY_MEMBERS]}),
    ],
)
def test_what_is_no_message_is_refused(kind: type[wire.Message], data: Any) -> None:
    with pytest.raises(ProtocolError) as refused:
        kind.from_json(data)
    assert "\n" not in str(refused.value)


def test_a_server_of_a_newer_version_may_say_more_and_one_of_no_process_is_none_of_ours() -> None:
    info = sent(MESSAGES[1])
    assert wire.ServerInfo.from_json({**info, "newer": 1, "stock": True, "chat_model": "m"}) == MESSAGES[1]
    with pytest.raises(ProtocolError, match="incarnation"):
        wire.ServerInfo.from_json({**info, "incarnation": None})


completions = st.builds(
    Completion,
    text=st.text(),
    token_ids=st.lists(st.integers(0, 2**31), max_size=4).map(tuple),
    prompt_token_ids=st.lists(st.integers(0, 2**31), max_size=4).map(tuple),
    finish_reason=st.sampled_from(["stop", "length"]),
    images_size=st.lists(st.tuples(st.integers(1, 99), st.integers(1, 99)), max_size=2).map(tuple),
    weight_version=st.none() | st.integers(0, 9),
    run_id=st.none() | st.text(),
    request_id=st.none() | st.text(),
)


@given(completion=completions, log_prob=st.floats(-99, 0))
def test_an_answer_arrives_as_it_was_written(completion: Completion, log_prob: float) -> None:
    log_probs = (log_prob,) * len(completion.token_ids)
    given_ones = Completion(**{**vars_of(completion), "log_probs": log_probs})
    record = output_json(given_ones, request_id=completion.request_id, model="m", return_details=True)
    assert parse_infer_reply(json.loads(json.dumps([record])), 1, {"log_probs"}) == (given_ones,)


def vars_of(completion: Completion) -> dict[str, Any]:
    return {name: getattr(completion, name) for name in completion.__dataclass_fields__}


def test_a_reply_has_one_output_per_request_and_what_was_asked_for() -> None:
    record = output_json(Completion("x", (1,), (2,)), request_id=None, model="m", return_details=True)
    for data, asked in (({}, ()), ([], ()), ([record, record], ()), ([record], {"log_probs"}), ([{}], ())):
        with pytest.raises(ProtocolError):
            parse_infer_reply(data, 1, asked)


def test_a_call_of_too_many_values_is_too_large() -> None:
    with pytest.raises(RequestTooLarge):
        wire.parse_call(b"[" + b"0," * 1_000_001 + b"0]")
    for raw in (b"[" * 100_000, b'"\\ud800"', b"NaN", b"1" * 5000, b"\xff", b"{"):
        with pytest.raises(ProtocolError):
            wire.parse_call(raw)


def test_a_learner_never_asks_for_what_a_server_refuses() -> None:
    with pytest.raises(ProtocolError):
        request_config(max_new_tokens=1, temperature=-1, top_p=1.0, top_k=-1, repetition_penalty=1.0, seed=1)
