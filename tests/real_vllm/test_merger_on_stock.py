"""The merger in front of the unmodified server: the records are the server's own, stamped with the POST's seed."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from live_merger import LiveMerger, live_merger
from live_server import image_request, text_request
from stock_server import ServerProcess

from swift_stage2 import wire
from swift_stage2.servers.infer_wire import Completion, parse_infer_reply

_CALL_S = 120.0
SAMPLED = {"max_tokens": 24, "temperature": 1.0, "return_details": True}
REQUESTS = [
    image_request(200),
    text_request("find"),
    image_request(90),
    image_request(20, "all"),
    text_request(),
]


@pytest.fixture
def merger(stock: ServerProcess) -> Iterator[LiveMerger]:
    with live_merger(stock.base_url, timeout_s=_CALL_S) as merger:
        yield merger


def post(url: str, requests: list[dict[str, Any]], **config: Any) -> httpx.Response:
    body = {"infer_requests": requests, "request_config": {**SAMPLED, **config}}
    return httpx.post(url + wire.INFER, json=body, timeout=_CALL_S, trust_env=False)


def completions(reply: httpx.Response, num_requests: int) -> list[Completion]:
    assert reply.status_code == 200, reply.text
    return list(parse_infer_reply(reply.json(), num_requests))


def said(completion: Completion) -> tuple[Any, ...]:
    return (
        completion.prompt_token_ids,
        completion.images_size,
        completion.token_ids,
        completion.finish_reason,
    )


def while_busy(
    stock: ServerProcess,
    merger: LiveMerger,
    threads: ThreadPoolExecutor,
    parts: list[tuple[list[dict[str, Any]], int]],
) -> list[httpx.Response]:
    """Posts the parts, in order, while the server is busy with a call of another kind, so that they are merged."""
    before = merger.merger.health()["num_posts"]
    with stock.held():
        busy = threads.submit(post, merger.url, [image_request()], temperature=1.5, seed=3)
        merger.wait_until(lambda state: state["running"] is not None)
        futures = []
        for number, (requests, seed) in enumerate(parts):
            futures.append(threads.submit(post, merger.url, requests, seed=seed))
            merger.wait_until_queued(number + 1)
    replies = [future.result(_CALL_S) for future in futures]
    assert busy.result(_CALL_S).status_code == 200
    assert merger.merger.health()["num_posts"] - before >= 2
    return replies


def test_merged_records_are_those_of_one_direct_post(stock: ServerProcess, merger: LiveMerger) -> None:
    with ThreadPoolExecutor(4) as threads:
        first, second = while_busy(stock, merger, threads, [(REQUESTS[:2], 1000), (REQUESTS[2:], 77_000)])
    merged = completions(first, 2) + completions(second, 3)
    assert merger.merger.health()["num_posts"] == 2
    assert {completion.seed for completion in merged} == {1000}
    direct = completions(post(stock.base_url, REQUESTS, seed=1000), 5)
    assert [said(completion) for completion in merged] == [said(completion) for completion in direct]
    items = first.json()
    assert {key for item in items for key in item} == set(
        post(stock.base_url, REQUESTS[:1], seed=1).json()[0]
    )


def test_a_picture_that_the_server_refuses_fails_its_own_caller_only(
    stock: ServerProcess, merger: LiveMerger
) -> None:
    broken = image_request()
    whole = base64.b64decode(broken["images"][0])
    broken["images"] = [base64.b64encode(whole[: len(whole) // 2]).decode()]  # the merger reads headers only
    with ThreadPoolExecutor(4) as threads:
        good, bad = while_busy(
            stock, merger, threads, [(REQUESTS[:2], 1000), ([broken, *REQUESTS[2:]], 2000)]
        )
    assert [completion.seed for completion in completions(good, 2)] == [1000, 1000]
    assert bad.status_code == 500
