"""The merge bench: what is compared with what, and client ranks whose bodies are posted once, at the same moment."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest
from fake_rollout_server import Call, FakeRolloutServer, echo, error, request

from benchmarks import merge
from benchmarks.merge import Cell, ClientRanks, merge_table, ratios_to_single_call
from swift_stage2.errors import ChildFailed


def _cell(system: str, num_ranks: int, repetition: int, seconds: float) -> Cell:
    return Cell(system, num_ranks, repetition, seconds, num_requests=64, num_tokens=1000)


CELLS = [
    _cell("a", 1, 0, 1.0),
    _cell("a", 4, 0, 2.0),
    _cell("a", 1, 1, 4.0),
    _cell("a", 4, 1, 4.0),
    _cell("b", 1, 0, 2.0),
    _cell("b", 4, 0, 1.0),
]


def test_a_rate_is_compared_with_the_single_call_of_its_own_system_and_repetition() -> None:
    assert ratios_to_single_call(CELLS, "a", 4) == [0.5, 1.0]
    assert ratios_to_single_call(CELLS, "b", 4) == [2.0]
    # A repetition without its single call tells nothing
    assert ratios_to_single_call(CELLS[1:], "a", 4) == [1.0]


def test_the_table_shows_median_rates_and_ratios_with_quartiles() -> None:
    table = merge_table(CELLS)
    assert table.columns == ("system", "1 rank", "4 ranks")
    assert table.rows[0] == ("a", "40.0", "24.0 (0.75; 0.62..0.88)")  # the median of 64/1 and 64/4


def test_every_rank_gets_its_own_share_and_seed() -> None:
    pictures = iter(range(100))
    bodies = [json.loads(body) for body in merge._bodies(pictures, 8, 4)]
    assert [len(body["infer_requests"]) for body in bodies] == [2, 2, 2, 2]
    images = [request["images"][0] for body in bodies for request in body["infer_requests"]]
    assert len(set(images)) == 8
    assert len({body["request_config"]["seed"] for body in bodies}) == 4
    assert next(pictures) == 8  # no picture comes twice


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
