from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.channel_b.rollout_client.plan import Piece, PostEnd, RequestPlan

batches = st.integers(min_value=1, max_value=24).flatmap(
    lambda size: st.tuples(st.just(size), st.sets(st.integers(min_value=0, max_value=size - 1)))
)


class ScriptedServer:
    """Fails every POST that holds a poisonous request, and probes if it is dead; keeps what it was asked."""

    def __init__(self, poisonous: set[int], *, dead: bool = False, largest: int = 10**6) -> None:
        self.poisonous = poisonous
        self.dead = dead
        self.largest = largest
        self.asked: list[Piece] = []
        self.answered: list[int] = []

    def post(self, piece: Piece) -> PostEnd:
        self.asked.append(piece)
        if self.dead or self.poisonous & set(piece.indices) or len(piece.indices) > self.largest:
            return PostEnd.ERROR_ANSWER
        self.answered.extend(piece.indices)
        return PostEnd.ANSWERED


def run(plan: RequestPlan, server: ScriptedServer) -> None:
    while (piece := plan.next_piece()) is not None:
        plan.record(piece, server.post(piece), f"failed {piece.indices}")


@given(batches)
def test_exactly_the_poisonous_requests_are_quarantined(batch: tuple[int, set[int]]) -> None:
    size, poisonous = batch
    plan, server = RequestPlan(size), ScriptedServer(poisonous)
    run(plan, server)
    assert set(plan.quarantined) == poisonous
    assert all(plan.quarantined[index] == f"failed {(index,)}" for index in poisonous)
    assert server.answered == [index for index in range(size) if index not in poisonous]
    assert plan.server_fault is None


@given(batches)
def test_without_a_good_request_the_batch_itself_is_the_witness(batch: tuple[int, set[int]]) -> None:
    size, poisonous = batch
    plan, server = RequestPlan(size, probe_early=False), ScriptedServer(poisonous)
    while (piece := plan.next_piece()) is not None:
        if piece.is_probe and not server.answered:
            assert len(poisonous) == size  # asked only when nobody else is left
            plan.blame_server("nothing ever succeeded")
        else:
            plan.record(piece, server.post(piece), "failed")
    assert set(plan.quarantined) == (poisonous if len(poisonous) < size else set())


@given(batches)
def test_nothing_is_condemned_without_a_later_success(batch: tuple[int, set[int]]) -> None:
    size, poisonous = batch
    plan, server = RequestPlan(size), ScriptedServer(poisonous)
    while (piece := plan.next_piece()) is not None:
        before = dict(plan.quarantined)
        end = server.post(piece)
        plan.record(piece, end, "failed")
        if end is not PostEnd.ANSWERED:
            assert plan.quarantined == before


@given(st.integers(min_value=1, max_value=64))
def test_a_dead_server_is_found_out_in_logarithmic_time_and_condemns_nothing(size: int) -> None:
    plan, server = RequestPlan(size), ScriptedServer(set(), dead=True)
    run(plan, server)
    assert plan.quarantined == {}
    assert plan.server_fault is not None
    assert len(server.asked) <= math.ceil(math.log2(size)) + 5


@given(st.integers(min_value=2, max_value=64))
def test_one_poisonous_request_costs_a_bisection_and_no_more(size: int) -> None:
    plan, server = RequestPlan(size), ScriptedServer({size - 1})
    run(plan, server)
    assert len(server.asked) <= 2 * math.ceil(math.log2(size)) + 5


class NamingServer(ScriptedServer):
    """Names the first ``at_most`` poisonous requests of a POST, as our server does."""

    def __init__(self, poisonous: set[int], *, at_most: int = 1, dead: bool = False) -> None:
        super().__init__(poisonous, dead=dead)
        self.at_most = at_most

    def named(self, piece: Piece) -> list[int]:
        failed = [n for n, index in enumerate(piece.indices) if self.dead or index in self.poisonous]
        return failed[: self.at_most]


def run_named(plan: RequestPlan, server: NamingServer) -> None:
    while (piece := plan.next_piece()) is not None:
        plan.record(piece, server.post(piece), f"failed {piece.indices}", server.named(piece))


@given(batches, st.integers(min_value=1, max_value=24))
def test_exactly_the_poisonous_requests_are_quarantined_where_the_server_names_them(
    batch: tuple[int, set[int]], at_most: int
) -> None:
    size, poisonous = batch
    plan, server = RequestPlan(size), NamingServer(poisonous, at_most=at_most)
    run_named(plan, server)
    assert plan.quarantined == {index: f"failed {(index,)}" for index in poisonous}
    assert sorted(server.answered) == [index for index in range(size) if index not in poisonous]
    assert plan.server_fault is None


@given(st.integers(min_value=2, max_value=64))
def test_one_named_request_costs_two_posts_more_than_a_good_batch(size: int) -> None:
    plan, server = RequestPlan(size), NamingServer({size - 1})
    run_named(plan, server)
    assert [len(piece.indices) for piece in server.asked] == [size, 1, size - 1]


@given(batches, st.sets(st.integers(min_value=0, max_value=23)))
def test_a_wrong_name_condemns_nobody(batch: tuple[int, set[int]], wrong: set[int]) -> None:
    size, poisonous = batch
    plan, server = RequestPlan(size), ScriptedServer(poisonous)
    while (piece := plan.next_piece()) is not None:
        named = [place for place in wrong if place < len(piece.indices)]
        plan.record(piece, server.post(piece), "failed", named)
    assert set(plan.quarantined) == poisonous
    assert sorted(server.answered) == [index for index in range(size) if index not in poisonous]


@given(st.integers(min_value=1, max_value=64), st.integers(min_value=1, max_value=64))
def test_a_dead_server_that_names_requests_is_found_out_at_once(size: int, at_most: int) -> None:
    plan, server = RequestPlan(size), NamingServer(set(), dead=True, at_most=at_most)
    run_named(plan, server)
    assert (plan.quarantined, plan.server_fault is None) == ({}, False)
    assert len(server.asked) <= 6


@given(st.integers(min_value=1, max_value=32))
def test_a_timeout_is_never_asked_again_at_the_same_size(size: int) -> None:
    plan = RequestPlan(size)
    asked: list[Piece] = []
    while (piece := plan.next_piece()) is not None:
        asked.append(piece)
        plan.record(piece, PostEnd.TIMED_OUT)
    assert len({piece.indices for piece in asked}) == len(asked)
    assert plan.timed_out == list(range(size))
    assert plan.quarantined == {}
    assert plan.server_fault is None


def test_a_server_that_cannot_be_reached_twice_is_at_fault() -> None:
    plan = RequestPlan(4)
    for is_retry in (False, True):
        piece = plan.next_piece()
        assert piece == Piece((0, 1, 2, 3), is_retry=is_retry)
        assert plan.server_fault is None
        plan.record(piece, PostEnd.UNREACHABLE, "refused")
    assert plan.server_fault == "refused"
    assert plan.next_piece() is None


def test_a_lost_connection_ends_everything_at_once() -> None:
    for end in (PostEnd.LOST, PostEnd.REFUSED, PostEnd.DISTRUSTED):
        plan = RequestPlan(4)
        piece = plan.next_piece()
        assert piece is not None
        plan.record(piece, end, "reason")
        assert (plan.server_fault, plan.next_piece()) == ("reason", None)


def test_a_probe_that_times_out_proves_nothing_either_way() -> None:
    plan = RequestPlan(1)
    for _ in range(2):
        piece = plan.next_piece()
        assert piece is not None
        plan.record(piece, PostEnd.ERROR_ANSWER, "bad")
    probe = plan.next_piece()
    assert probe is not None
    assert probe.is_probe
    plan.record(probe, PostEnd.TIMED_OUT)
    assert plan.next_piece() is None
    assert (plan.quarantined, plan.server_fault, tuple(plan.accused)) == ({}, None, (0,))
