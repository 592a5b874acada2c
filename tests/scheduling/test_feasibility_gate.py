from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.scheduling.feasibility_gate import GateOutcome, RankFacts, decide
from swift_stage2.scheduling.step_plan import Channel, SkipReason

NUM_SERVERS = 2
flags = st.booleans()
FLAGS = (
    "not_reserved", "pipeline_failed", "stop_requested", "truncation_guard", "evaluation_wanted", "update_news",
    "publishing", "server_waits", "makes_stale", "log_failed",
)  # fmt: skip
PER_SERVER = ("servers_suspect", "servers_closed", "servers_busy")
facts_of_a_rank = st.builds(
    RankFacts,
    **dict.fromkeys(FLAGS, flags),
    **dict.fromkeys(PER_SERVER, st.tuples(flags, flags)),
    servers_proven=st.tuples(st.integers(0, 2**31), st.integers(0, 2**31)),
)


def reduce_max(*ranks: RankFacts) -> list[int]:
    """The all-reduce of all ranks' vectors."""
    return [max(entries) for entries in zip(*(rank.encode() for rank in ranks), strict=True)]


def gate(*ranks: RankFacts, num_servers: int = 0) -> GateOutcome:
    return decide(reduce_max(*ranks), num_servers=num_servers)


@given(ranks=st.lists(facts_of_a_rank, min_size=1, max_size=5))
def test_the_maximum_says_what_any_rank_says(ranks: list[RankFacts]) -> None:
    outcome = gate(*ranks, num_servers=NUM_SERVERS)
    for fact in FLAGS:
        assert getattr(outcome, fact) == any(getattr(rank, fact) for rank in ranks), fact
    for server in range(NUM_SERVERS):
        for fact in PER_SERVER:
            assert getattr(outcome, fact)[server] == any(getattr(rank, fact)[server] for rank in ranks), fact
        proven = max(rank.servers_proven[server] for rank in ranks)
        assert outcome.servers_proven[server] == proven
        assert outcome.servers_asked[server] == (0 if outcome.servers_suspect[server] else proven)


@given(facts=facts_of_a_rank)
def test_the_length_depends_on_the_number_of_servers_only(facts: RankFacts) -> None:
    vector = facts.encode()
    assert len(vector) == len(FLAGS) + 4 * NUM_SERVERS
    assert all(type(entry) is int and entry >= 0 for entry in vector)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (RankFacts(truncation_guard=True), SkipReason.TRUNCATION_GUARD),
        (RankFacts(pipeline_failed=True), SkipReason.PIPELINE_FAILED),
        (RankFacts(pipeline_failed=True, truncation_guard=True), SkipReason.PIPELINE_FAILED),
    ],
)
def test_guard_and_failure_stop_b_even_with_packs_at_hand(facts: RankFacts, reason: SkipReason) -> None:
    plan = gate(RankFacts(), facts).plan(wants_b=True)
    assert (plan.channel, plan.skip_reason) == (Channel.A, reason)


def of_servers(**facts: tuple[int, ...]) -> RankFacts:
    """Facts of as many servers as one of ``facts`` names."""
    num_servers = len(next(iter(facts.values())))
    none: dict[str, Any] = dict.fromkeys(("servers_proven", *PER_SERVER), (0,) * num_servers)
    return RankFacts(not_reserved=True, **none | facts)


def test_servers_that_nobody_may_ask_stop_b_only_when_packs_run_out() -> None:
    suspect = of_servers(servers_proven=(3,), servers_suspect=(True,))
    assert gate(replace(suspect, not_reserved=False), num_servers=1).plan(wants_b=True).channel is Channel.B
    for dry in (suspect, of_servers(servers_proven=(0,))):
        plan = gate(dry, num_servers=1).plan(wants_b=True)
        assert plan.skip_reason is SkipReason.SERVERS_SUSPECT


def test_one_server_that_is_asked_blames_the_queue() -> None:
    outcome = gate(of_servers(servers_proven=(3, 3), servers_suspect=(True, False)), num_servers=2)
    assert (outcome.servers_asked, outcome.skip_reason) == ((0, 3), SkipReason.NOT_ENOUGH_PACKS)


@pytest.mark.parametrize(
    ("wants_b", "reserved", "channel", "reason", "wanted"),
    [
        (True, True, "B", None, True),
        (True, False, "A", SkipReason.NOT_ENOUGH_PACKS, True),
        (False, True, "A", None, False),
        (False, False, "A", None, False),
    ],
)
def test_schedule_wants_and_gate_allows(
    wants_b: bool, reserved: bool, channel: str, reason: SkipReason | None, wanted: bool
) -> None:
    plan = gate(RankFacts(not_reserved=not reserved)).plan(wants_b=wants_b)
    assert plan.channel == channel
    assert plan.skip_reason == reason
    assert plan.wanted_b is wanted


def test_a_cause_is_told_only_when_b_is_skipped() -> None:
    paused = gate(RankFacts(truncation_guard=True))
    assert paused.plan(wants_b=True).skip_reason is SkipReason.TRUNCATION_GUARD
    assert paused.plan(wants_b=False).skip_reason is None
