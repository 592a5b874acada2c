"""Two ranks' own clients on one merger: provenance, and what each fault behind the merger makes of the server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import rollout_batch
from fake_rollout_server import Answer, FakeRolloutServer, request
from live_merger import LONGEST_WAIT_S, LiveMerger
from rollout_batch import generate

from swift_stage2.channel_b.rollouts import RolloutClient
from swift_stage2.channel_b.rollouts.requests import PostEnd
from swift_stage2.config import DecodingConfig
from swift_stage2.config.rollout import MAX_REQUESTS_PER_POST
from swift_stage2.records import BatchOutcome, Sample, SampleKey


def make_client(merger: LiveMerger, rank: int, **changes: Any) -> RolloutClient:
    settings: dict[str, Any] = {
        "decoding": DecodingConfig(temperature=0.7),
        "rank": rank,
        "world_size": 2,
        "max_inflight_per_server": 16,
    }
    client = rollout_batch.make_client(merger.url, **settings | changes)
    rollout_batch.prove(client)
    return client


def ask(client: RolloutClient, *texts: str, first: int = 0) -> BatchOutcome:
    samples = [Sample(SampleKey(0, first + n, n), row={}) for n in range(len(texts))]
    return generate(client, samples, [request(text) for text in texts])


@pytest.fixture
def ranks(merger: LiveMerger) -> Iterator[tuple[RolloutClient, RolloutClient]]:
    with make_client(merger, 0) as first, make_client(merger, 1) as second:
        yield first, second


def test_no_two_ranks_ever_sample_with_a_common_seed(
    upstream: FakeRolloutServer, merger: LiveMerger, ranks: tuple[RolloutClient, RolloutClient]
) -> None:
    with ThreadPoolExecutor(2) as threads:
        for first in range(0, 40, 8):
            list(threads.map(lambda rank, first=first: ask(rank, *"abcdefgh", first=first), ranks))
    posts = sorted((call.config["seed"], len(call.requests)) for call in upstream.infer_calls)
    assert sum(size for _, size in posts) == 80
    for (seed, size), (following, _) in pairwise(posts):
        assert seed + size <= following
    interval = (2**31 - 1) // 2
    for seed, size in posts:  # whole POSTs stay in the interval of the rank that led them
        assert (seed - 1) // interval == (seed + size - 2) // interval
        assert (seed - 1) % interval <= interval - MAX_REQUESTS_PER_POST


def test_a_server_lost_behind_the_merger_is_suspect_for_every_rank_that_waited(
    upstream: FakeRolloutServer,
    merger: LiveMerger,
    ranks: tuple[RolloutClient, RolloutClient],
    callers: ThreadPoolExecutor,
    gate: threading.Event,
) -> None:
    upstream.on_infer = lambda call: Answer(drop=True, after=gate)
    first = callers.submit(ask, ranks[0], "a", "b")
    upstream.wait_until(lambda: len(upstream.infer_calls) == 1)
    second = callers.submit(ask, ranks[1], "c")
    merger.wait_until_queued(1)
    gate.set()
    for future, client in ((first, ranks[0]), (second, ranks[1])):
        outcome = future.result(LONGEST_WAIT_S)
        assert outcome.rollouts == ()
        assert [failure.end for failure in outcome.failures] == [PostEnd.LOST]
        assert merger.url in client.suspects
    assert len(upstream.infer_calls) == 1  # nobody asked a server again that may be another one by now
