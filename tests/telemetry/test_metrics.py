from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.channel_b.ready_queue import DropReason
from swift_stage2.telemetry.metrics import (
    METRICS,
    RATIOS,
    Counters,
    Merge,
    merged,
)


def table_tags() -> list[str]:
    return [metric.tag for metric in METRICS if metric.tag is not None] + [ratio.tag for ratio in RATIOS]


def test_the_queue_s_drop_reasons_are_declared() -> None:
    assert {f"packs_{reason}" for reason in DropReason} <= {metric.name for metric in METRICS}


def test_no_two_numbers_share_a_tag() -> None:
    assert len(table_tags()) == len(set(table_tags()))


@pytest.mark.parametrize("name", ["packs_droped_stale", "objects_dropped/ugly_box"])
def test_a_name_that_is_not_declared_raises(name: str) -> None:
    with pytest.raises(KeyError):
        Counters().add(name)
    for move in (Counters().set, Counters().raise_to):
        with pytest.raises(KeyError):
            move(name, 1)


def test_a_gauge_has_no_value_until_it_is_set() -> None:
    counters = Counters()
    assert counters.snapshot().get("ver_lag") is None
    assert "ver_lag" not in counters.snapshot()
    counters.raise_to("ver_lag", 2)
    counters.raise_to("ver_lag", 1)
    assert counters.snapshot()["ver_lag"] == 2
    counters.set("ver_lag", None)
    assert "ver_lag" not in counters.snapshot()


def test_a_name_is_declared_once() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_no_increment_is_lost_between_threads() -> None:
    counters = Counters()
    start = threading.Barrier(4)

    def work() -> None:
        start.wait(10)
        for _ in range(2000):
            counters.add("packs_made")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert counters.snapshot()["packs_made"] == 8000


def test_counters_continue_after_a_resume_and_gauges_do_not() -> None:
    before = Counters()
    before.add("packs_made", 5)
    before.set("queue_depth", 3)
    after = Counters()
    after.add("packs_trained", 1)
    after.load_state_dict({**before.state_dict(), "a_counter_of_another_release": 4})
    after.add("packs_made")
    assert after.snapshot()["packs_made"] == 6
    assert after.snapshot()["packs_trained"] == 0
    assert after.snapshot().get("queue_depth") is None
    assert after.snapshot().keys() == {m.name for m in METRICS if not m.is_gauge}


GAUGES = [metric for metric in METRICS if metric.is_gauge]
SUMMED = [metric for metric in METRICS if not metric.is_gauge and metric.merge is Merge.SUM]


values = st.one_of(st.none(), st.integers(-5, 10**6))


@given(st.data())
def test_numbers_of_all_ranks_are_sums_minima_and_maxima(data: st.DataObject) -> None:
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
    found = merged([rank.snapshot() for rank in ranks])
    oracle: dict[Merge, Callable[[list[int]], int]] = {
        Merge.SUM: sum,
        Merge.MIN: min,
        Merge.MAX: max,
        Merge.SAME: max,
    }
    for metric in GAUGES:
        present = [value for value in drawn[metric.name] if value is not None]
        expected = oracle[metric.merge](present) if present else None
        assert found.get(metric.name) == expected
    for name, count in counts.items():
        assert found[name] == sum(count + index for index in range(world_size))


def test_what_every_rank_decides_alike_is_not_multiplied() -> None:
    ranks = [Counters() for _ in range(4)]
    for rank in ranks:
        rank.add("steps", 10)
        rank.add("sync_rounds_failed", 2)
        rank.set("ver_current", 7)
    values_now = merged([rank.snapshot() for rank in ranks])
    assert (values_now["steps"], values_now["sync_rounds_failed"], values_now["ver_current"]) == (10, 2, 7)
