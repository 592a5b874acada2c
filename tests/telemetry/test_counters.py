from __future__ import annotations

import threading

import pytest

from swift_stage2.telemetry.metrics import METRICS, Counters, Kind


def test_a_misspelt_name_raises_and_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'packs_dropped_stale'"):
        Counters().add("packs_droped_stale")


def test_an_undeclared_reason_of_a_family_raises() -> None:
    counters = Counters()
    counters.add("objects_dropped/invalid_box", 2)
    with pytest.raises(ValueError, match="must be declared"):
        counters.add("objects_dropped/ugly_box")
    assert counters.value("objects_dropped/invalid_box") == 2


@pytest.mark.parametrize("amount", [-1, -0.001, float("nan")])
def test_a_counter_only_grows(amount: float) -> None:
    counters = Counters()
    with pytest.raises(ValueError, match="only grows"):
        counters.add("packs_made", amount)
    assert counters.value("packs_made") == 0


def test_counters_and_gauges_are_not_mixed_up() -> None:
    counters = Counters()
    with pytest.raises(ValueError, match="is a gauge; set it"):
        counters.add("queue_depth")
    with pytest.raises(ValueError, match="is a counter; add to it"):
        counters.set("packs_made", 3)


def test_a_gauge_has_no_value_until_it_is_set() -> None:
    counters = Counters()
    assert counters.value("ver_lag") is None
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
    assert counters.value("packs_made") == 8000


def test_counters_continue_after_a_resume_and_gauges_do_not() -> None:
    before = Counters()
    before.add("packs_made", 5)
    before.set("queue_depth", 3)
    after = Counters()
    after.add("packs_trained", 1)
    after.load_state_dict({**before.state_dict(), "a_counter_of_another_release": 4})
    after.add("packs_made")
    assert after.value("packs_made") == 6
    assert after.value("packs_trained") == 0
    assert after.value("queue_depth") is None
    assert after.snapshot().keys() == {m.name for m in METRICS if m.kind is Kind.COUNTER}
