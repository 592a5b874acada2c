"""Steps around an outage are chosen and compared."""

from __future__ import annotations

import dataclasses
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.faults import outage
from benchmarks.faults.accounting import Gap
from benchmarks.faults.outage import Phase, compare_phases

BEFORE, DURING, AFTER = Phase(0.0, 100.0), Phase(100.0, 200.0), Phase(200.0, 300.0)


def gap(start: float, seconds: float, channel: str = "A", waiting: float = 0.0, syncing: float = 0.0) -> Gap:
    return Gap(step=0, channel=channel, start=start, seconds=seconds, waiting_s=waiting, syncing_s=syncing)


def steps(start: float, seconds: float, count: int = 8) -> list[Gap]:
    return [gap(start + 10.0 * number, seconds) for number in range(count)]


def test_the_medians_of_the_phases_are_compared() -> None:
    report = compare_phases([*steps(0, 2.0), *steps(100, 2.06), *steps(200, 2.0)], BEFORE, DURING, AFTER)
    assert report.median_before_s == 2.0
    assert report.during.value == pytest.approx(1.03)
    assert report.after.value == report.after.low == report.after.high == 1.0
    assert report.during_to_both.value == pytest.approx(1.03)


def test_a_machine_that_drifts_does_not_count_as_an_outage() -> None:
    report = compare_phases([*steps(0, 2.0), *steps(100, 2.2), *steps(200, 2.4)], BEFORE, DURING, AFTER)
    assert report.during.value == pytest.approx(1.1)
    assert report.during_to_both.value == pytest.approx(1.0)


def test_rounds_channel_b_and_steps_across_a_border_are_not_compared() -> None:
    others = [gap(90, 5.0, syncing=3.0), gap(95, 4.0, channel="B"), gap(98, 7.0)]
    report = compare_phases(
        [*steps(0, 2.0), *others, *steps(110, 2.0), *steps(200, 2.0)], BEFORE, DURING, AFTER
    )
    assert report.num_before == 8
    assert report.b_steps == (1, 0, 0)


def test_the_longest_wait_of_the_outage_is_told_beyond_the_usual_one() -> None:
    during = [*steps(100, 2.0), gap(190, 2.0, waiting=1.5)]
    usual = [dataclasses.replace(each, waiting_s=0.25) for each in steps(0, 2.0)]
    report = compare_phases([*usual, *during, *steps(200, 2.0)], BEFORE, DURING, AFTER)
    assert report.longest_wait_s == 1.25
    assert outage.is_bad(report)  # and B did not come back either
    assert "1.250" in outage.outage_table([report]).markdown()


@given(
    st.lists(st.floats(0.1, 9.0), min_size=2, max_size=10),
    st.lists(st.floats(0.1, 9.0), min_size=2, max_size=10),
)
def test_the_interval_lies_between_the_extremes_of_any_resample(slow: list[float], base: list[float]) -> None:
    every = [
        *(gap(10.0 * number, seconds) for number, seconds in enumerate(base)),
        *(gap(100 + 10.0 * number, seconds) for number, seconds in enumerate(slow)),
        *(gap(200 + 10.0 * number, seconds) for number, seconds in enumerate(base)),
    ]
    found = compare_phases(every, BEFORE, DURING, AFTER).during
    assert found.value == pytest.approx(float(np.median(slow)) / statistics.median(base))
    assert min(slow) / max(base) - 1e-9 <= found.low <= found.high <= max(slow) / min(base) + 1e-9


def test_too_few_steps_to_compare_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"at least 2 channel-A steps, got \[8, 0, 8\]"):
        compare_phases([*steps(0, 2.0), *steps(200, 2.0)], BEFORE, DURING, AFTER)
