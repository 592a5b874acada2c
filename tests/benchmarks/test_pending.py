"""The pending bench reads waits and pauses from an audit."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.pending import arm_of, pending_table


def _step(step: int, *, pending: bool = False, wants_b: bool = False, channel: str = "A") -> dict[str, Any]:
    return {"kind": "step", "step": step, "round_pending": pending, "wants_b": wants_b, "channel": channel}


def _round(step: int, pending_seconds: float, snapshot: float) -> dict[str, Any]:
    return {
        "kind": "round",
        "step": step,
        "pending_seconds": pending_seconds,
        "seconds": 1.0,
        "canary_seconds": 0.5,
        "snapshot_seconds": snapshot,
    }


RECORDS = [
    {"kind": "start"},
    _round(0, 0.0, 9.0),
    _step(0),
    _step(1, wants_b=True, channel="B"),
    _step(2, pending=True),
    _step(3, pending=True, wants_b=True),
    _round(4, 2.5, 0.1),
    {"kind": "batch", "num_aborted": 3, "partial": [], "num_rollouts": 5},
    _step(4),
    {"kind": "batch", "num_aborted": 0, "partial": [{}], "num_rollouts": 8},
    _round(8, 0.0, 0.2),
    {"kind": "metrics", "numbers": {"tokens_kept": 9, "tokens_aborted": 20, "tokens_partial_dropped": 4}},
]


def test_waits_pauses_and_aborts_come_from_the_audit_without_the_first_round() -> None:
    arm = arm_of("abort", RECORDS)
    assert arm.pending == [2.5, 0.0]
    assert arm.steps_pending == [2, 0]
    assert [pause["snapshot"] for pause in arm.pauses] == [0.1, 0.2]
    assert [pause["total"] for pause in arm.pauses] == [0.6, 0.7]
    assert {pause["round"] for pause in arm.pauses} == {1.0}
    assert (arm.num_aborted, arm.num_rollouts) == (4, 13)
    assert (arm.tokens_kept, arm.tokens_thrown_away) == (9, 24)
    assert (arm.num_b_run, arm.num_b_wanted) == (1, 2)


@pytest.mark.parametrize("records", [RECORDS, RECORDS[:3]])
def test_the_table_has_a_column_for_each_policy(records: list[dict[str, Any]]) -> None:
    table = pending_table([arm_of("wait", records), arm_of("abort", records), arm_of("wait", records)])
    assert table.columns == ("", "on_pending: wait", "on_pending: abort")
    assert len(table.rows) == 10
