from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.telemetry.activity import Activity
from swift_stage2.telemetry.metrics import (
    METRICS,
    Counters,
    Kind,
    Merge,
    MergedMetrics,
    decode,
    encode,
    vector_length,
)

GAUGES = [metric for metric in METRICS if metric.kind is Kind.GAUGE]
SUMMED = [metric for metric in METRICS if metric.kind is Kind.COUNTER and metric.merge is Merge.SUM]


def merge(ranks: list[Counters], activities: list[dict[Activity, int]] | None = None) -> list[MergedMetrics]:
    """What every rank reads, with the collective written out."""
    spent = activities or [dict.fromkeys(Activity, 0) for _ in ranks]
    numbers = [rank.snapshot() for rank in ranks]
    vectors = [
        encode(mine, spent[rank], rank=rank, world_size=len(ranks)) for rank, mine in enumerate(numbers)
    ]
    summed = [sum(column) for column in zip(*vectors, strict=True)]
    return [decode(summed, mine, world_size=len(ranks)) for mine in numbers]


values = st.one_of(st.none(), st.integers(-5, 10**6))


@given(st.data())
def test_every_rank_reads_sums_minima_and_maxima(data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, 5))
    ranks = [Counters() for _ in range(world_size)]
    drawn = {m.name: data.draw(st.lists(values, min_size=world_size, max_size=world_size)) for m in GAUGES}
    offset = data.draw(st.integers(0, 10**6))
    counts = {m.name: offset + place for place, m in enumerate(SUMMED)}
    for index, rank in enumerate(ranks):
        for name, column in drawn.items():
            rank.set(name, column[index])
        for name, count in counts.items():
            rank.add(name, count + index)
    views = merge(ranks)
    oracle: dict[Merge, Callable[[list[int]], int]] = {
        Merge.SUM: sum,
        Merge.MIN: min,
        Merge.MAX: max,
        Merge.SAME: max,
    }
    for metric in GAUGES:
        present = [value for value in drawn[metric.name] if value is not None]
        expected = oracle[metric.merge](present) if present else None
        assert views[0].values.get(metric.name) == expected
        assert views[0].per_rank[metric.name] == tuple(drawn[metric.name])
    for name, count in counts.items():
        assert views[0].values[name] == sum(count + index for index in range(world_size))
    assert all(view == views[0] for view in views)


def test_what_every_rank_decides_alike_is_not_multiplied() -> None:
    ranks = [Counters() for _ in range(4)]
    for rank in ranks:
        rank.add("steps", 10)
        rank.add("sync_rounds_failed", 2)
        rank.set("ver_current", 7)
    values_now = merge(ranks)[0].values
    assert (values_now["steps"], values_now["sync_rounds_failed"], values_now["ver_current"]) == (10, 2, 7)


@given(st.lists(st.lists(st.integers(0, 10**13), min_size=6, max_size=6), min_size=1, max_size=16))
def test_activities_of_all_ranks_add_up_exactly(rows: list[list[int]]) -> None:
    activities = [dict(zip(Activity, row, strict=True)) for row in rows]
    merged = merge([Counters() for _ in rows], activities)[0]
    assert merged.activity_ns == {a: sum(row[a] for row in activities) for a in Activity}


def test_the_length_depends_on_the_number_of_ranks_only() -> None:
    counters = Counters()
    empty = encode(counters.snapshot(), dict.fromkeys(Activity, 0), rank=1, world_size=3)
    counters.set("queue_depth", 2)
    counters.add("packs_made", 2)
    full = encode(counters.snapshot(), dict.fromkeys(Activity, 5), rank=2, world_size=3)
    assert len(empty) == len(full) == vector_length(3)


def test_a_vector_of_another_world_size_is_refused() -> None:
    with pytest.raises(ValueError, match="entries for 2 ranks, got"):
        decode([0.0] * vector_length(3), Counters().snapshot(), world_size=2)
