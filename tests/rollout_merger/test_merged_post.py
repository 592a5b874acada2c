"""Bodies into one POST and its reply back: nothing is mixed up, and every output names the POST's seed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_rollout_server import output
from hypothesis import given
from hypothesis import strategies as st
from live_merger import infer_body

from swift_stage2.errors import ProtocolError
from swift_stage2.rollout_server.merger import InferBody, merge, split
from swift_stage2.servers.infer_wire import parse_infer_reply


def parsed(*texts: str, **config: Any) -> InferBody:
    return InferBody.from_json(infer_body(*texts, **config))


@given(
    parts=st.lists(st.lists(st.text(), min_size=1, max_size=5), min_size=1, max_size=6),
    seed=st.integers(1, 2**31),
)
def test_every_part_gets_the_outputs_of_its_own_requests(parts: list[list[str]], seed: int) -> None:
    bodies = [parsed(*texts, seed=seed + 10_000 * n) for n, texts in enumerate(parts)]
    sent = json.loads(merge(bodies))
    asked = [item["messages"][0]["content"] for item in sent["infer_requests"]]
    assert asked == [text for texts in parts for text in texts]
    assert sent["request_config"] == {"temperature": 0.5, "seed": seed}
    replies = split(json.dumps([output(text) for text in asked]).encode(), bodies)
    completions = [
        parse_infer_reply(json.loads(reply), len(texts)) for reply, texts in zip(replies, parts, strict=True)
    ]
    assert [[c.text for c in part] for part in completions] == parts
    assert [c.seed for part in completions for c in part] == [seed] * len(asked)


def test_the_outputs_are_the_servers_but_for_the_seed() -> None:
    items = [{**output("a"), "rollout_infos": {"turns": 3}, "messages": None}, output("b")]
    (reply,) = split(json.dumps(items).encode(), [parsed("a", "b")])
    stamped = json.loads(reply)
    assert stamped[0].pop("rollout_infos") == {"turns": 3, "stage2": {"seed": 7}}
    assert stamped[1].pop("rollout_infos") == {"stage2": {"seed": 7}}
    assert stamped == [
        {"response": items[0]["response"], "messages": None},
        {"response": items[1]["response"]},
    ]


def test_what_may_share_a_post() -> None:
    assert parsed("a", seed=1).key == parsed("b", seed=2).key
    assert parsed("a", temperature=0.1).key != parsed("a", temperature=0.2).key
    assert parsed("a", seed=None).key != parsed("a").key
    tqdm = InferBody.from_json({**infer_body("a"), "use_tqdm": False})
    assert tqdm.key != parsed("a").key
    assert json.loads(merge([tqdm]))["use_tqdm"] is False


@pytest.mark.parametrize(
    "raw",
    [b'{"infer_requests": []}', b'{"infer_requests": {}}',
     b'{"infer_requests": [{}], "request_config": 3}',
     b'{"infer_requests": [{}], "request_config": {"seed": "x"}}',
     b'{"infer_requests": [{}], "request_config": {"seed": true}}'],
)  # fmt: skip
def test_a_body_that_is_no_call_of_rollouts_is_refused(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        InferBody.from_json(json.loads(raw))


@pytest.mark.parametrize("reply", [b"null", b"{", b"[]", b"[1]", b'[{"response": {}}, {"response": {}}]'])
def test_a_reply_that_does_not_fit_is_refused(reply: bytes) -> None:
    with pytest.raises(ProtocolError):
        split(reply, [parsed("a")])
