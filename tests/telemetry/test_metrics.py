from __future__ import annotations

import threading

import pytest

from swift_stage2.channel_b.ready_queue import DropReason
from swift_stage2.telemetry.metrics import (
    METRICS,
    RATIOS,
    Counters,
    merged,
)


def test_the_queue_s_drop_reasons_are_declared() -> None:
    assert {f"packs_{reason}" for reason in DropReason} <= {metric.name for metric in METRICS}


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
