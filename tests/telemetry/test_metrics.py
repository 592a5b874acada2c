from __future__ import annotations

import pytest

from swift_stage2.telemetry.metrics import (
    METRICS,
    RATIOS,
    Counters,
    merged,
)


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


def test_no_two_numbers_share_a_name_or_a_tag() -> None:
    tags = [metric.tag for metric in METRICS if metric.tag is not None] + [ratio.tag for ratio in RATIOS]
    for names in (tags, [metric.name for metric in METRICS]):
        assert len(set(names)) == len(names)


def test_numbers_of_all_ranks_are_sums_minima_and_maxima_and_equal_ones_are_not_multiplied() -> None:
    ranks = [Counters(["own"]) for _ in range(3)]
    for number, rank in enumerate(ranks):
        rank.add("steps", 10)
        rank.add("packs_made", number)
        rank.add("reward/own", -1.5)
        if number:
            rank.set("queue_depth", number)  # the least
            rank.set("ver_lag", number)  # the most
            rank.set("infer_inflight", number)  # of all
    found = merged([rank.snapshot() for rank in ranks])
    names = ("steps", "packs_made", "reward/own", "queue_depth", "ver_lag", "infer_inflight", "ver_current")
    assert [found.get(name) for name in names] == [10, 3, -4.5, 1, 2, 3, None]
