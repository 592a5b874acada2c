"""The overlap bench: the bound, and what counts as the same work."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.learner_job import ArmRecords
from benchmarks.overlap import Mode, OverlapRun, Repetition, notes, overlap_table, run_of, work_table
from swift_stage2.errors import ChildFailed


def _run(mode: Mode, seconds: float, *, waited: float = 0.0, num_b_run: int = 5) -> OverlapRun:
    return OverlapRun(
        mode=mode, seconds=seconds, waited=waited, num_b_wanted=5, num_b_run=num_b_run, num_rollouts=40
    )


def _repetition(asynchronous: float, inline: float, waited: float, **options: int) -> Repetition:
    return Repetition(
        asynchronous=_run(Mode.ASYNC, asynchronous, **options),
        inline=_run(Mode.INLINE, inline, waited=waited),
        a_only=_run(Mode.A_ONLY, 8.0, num_b_run=0),
    )


@pytest.mark.parametrize(("waited", "bound"), [(4.0, 10 / 6), (8.0, 10 / 8), (5.0, 2.0)])
def test_the_bound_is_inline_over_the_longer_of_learner_and_pipeline(waited: float, bound: float) -> None:
    each = _repetition(asynchronous=6.25, inline=10.0, waited=waited)
    assert each.learner == 10.0 - waited
    assert each.bound == pytest.approx(bound)
    assert each.speed_up == pytest.approx(1.6)
    assert each.fraction == pytest.approx(1.6 / bound)


def test_the_table_ends_with_the_medians_of_the_repetitions() -> None:
    repetitions = [_repetition(seconds, 10.0, 4.0) for seconds in (6.0, 7.0, 8.0)]
    table = overlap_table(repetitions, 80)
    assert [row[0] for row in table.rows] == ["1", "2", "3", "all"]
    assert table.rows[-1][1] == "7.0 (6.5..7.5)"
    assert table.rows[0][-1] == "1.000"
    assert work_table(repetitions).rows[0] == ("1, asynchronous", "5 of 5", "40")


def test_the_budget_is_of_the_median_and_a_skipped_step_is_told() -> None:
    assert notes([_repetition(6.5, 10.0, 4.0)], "stand-in")[0].endswith("budget at least 0.9: held.")
    (budget, skipped) = notes([_repetition(7.0, 10.0, 4.0, num_b_run=3)], "stand-in")
    assert budget.endswith("missed.")
    assert "skipped 2 wanted B steps" in skipped


def _records(channels: str, waits: dict[int, float] | None = None) -> ArmRecords:
    steps: list[dict[str, Any]] = [
        {
            "kind": "step",
            "step": step,
            "wants_b": step % 4 == 3,
            "channel": channel,
            "plan_seconds": (waits or {}).get(step, 0.1),
        }
        for step, channel in enumerate(channels)
    ]
    clock = {"end_ns": [(step + 1) * 500_000_000 for step in range(len(channels))]}
    return ArmRecords(clock, [*steps, {"kind": "batch", "num_rollouts": 9}])


def test_a_run_counts_from_the_end_of_its_warm_up() -> None:
    run = run_of(Mode.INLINE, _records("AAABAAABAAAB", {3: 9.0, 7: 1.5, 11: 0.5}), num_warmup=4)
    assert (run.seconds, run.waited) == (4.0, 2.0)
    assert (run.num_b_wanted, run.num_b_run, run.num_rollouts) == (2, 2, 9)


def test_an_inline_run_that_skipped_a_step_is_no_measurement_but_an_asynchronous_one_is() -> None:
    skipping = _records("AAABAAABAAAA")
    with pytest.raises(ChildFailed, match="it ran 1 of 2"):
        run_of(Mode.INLINE, skipping, num_warmup=4)
    assert run_of(Mode.ASYNC, skipping, num_warmup=4).num_b_run == 1
