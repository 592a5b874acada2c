"""Client ranks: every body is posted once, at the same moment, and a failure is no measurement."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest
from fake_rollout_server import Call, FakeRolloutServer, echo, error, request

from benchmarks.merge import ClientRanks
from swift_stage2.errors import ChildFailed

_NUM_RANKS = 3


@pytest.fixture(scope="module")
def clients() -> Iterator[ClientRanks]:
    with ClientRanks(_NUM_RANKS) as clients:
        yield clients


def _body(*texts: str) -> bytes:
    return json.dumps({"infer_requests": [request(text) for text in texts], "request_config": {}}).encode()


def test_all_ranks_post_their_own_body_at_the_same_time(clients: ClientRanks) -> None:
    all_here = threading.Barrier(_NUM_RANKS)

    def meet(call: Call) -> object:
        all_here.wait(20)  # would break if one came only after another had its answer
        return echo(call)

    with FakeRolloutServer(on_infer=meet) as server:  # type: ignore[arg-type]
        posted = clients.post(server.url, [_body("a", "b"), _body("c"), _body("d")])
        assert sorted(call.texts for call in server.infer_calls) == [["a", "b"], ["c"], ["d"]]
    assert [each.num_completions for each in posted] == [2, 1, 1]
    assert [each.num_tokens for each in posted] == [4, 2, 2]
    assert all(each.ended_s > each.started_s for each in posted)


def test_a_rank_without_an_answer_is_an_error(clients: ClientRanks) -> None:
    with (
        FakeRolloutServer(on_infer=lambda call: error()) as server,
        pytest.raises(ChildFailed, match="HTTPStatusError"),
    ):
        clients.post(server.url, [_body("a")])


def test_fewer_bodies_than_ranks_use_the_first(clients: ClientRanks) -> None:
    with FakeRolloutServer() as server:
        assert len(clients.post(server.url, [_body("a")])) == 1
        assert server.batch_sizes == [1]
