"""Badly filled packs: the report names the key that helps, with a value."""

from __future__ import annotations

from typing import Any

import pytest

from swift_stage2.report.steps import fill_advice


def told(fills: list[float], **changes: Any) -> str:
    known: dict[str, Any] = {"segment_tokens": 100.0, "capacity": 1000, "min_fill": 0.65, "b_ratio": 0.5}
    return fill_advice(fills, **{**known, **changes})


def test_well_filled_packs_need_no_advice() -> None:
    assert told([0.7, 0.9]) == ""


@pytest.mark.parametrize(
    ("fills", "changes", "key"),
    [
        ([0.66, 0.7], {}, "stage2_ab.channel_b.packing.packing_min_fill_ratio: 0.9."),
        ([0.66, 0.7], {"segment_tokens": 200.0}, "stage2_ab.channel_b.packing.packing_min_fill_ratio: 0.8."),
        ([0.66, 0.7], {"min_fill": None}, "packing_min_fill_ratio: 0.9."),
        ([0.66, 0.7], {"segment_tokens": 400.0}, "stage2_ab.channel_b.packing.packing_length: 2048."),
        ([0.4, 0.5, 0.9], {}, "stage2_ab.schedule.b_ratio: 0.3."),
    ],
)
def test_the_key_that_helps_is_named_with_a_value(
    fills: list[float], changes: dict[str, Any], key: str
) -> None:
    assert told(fills, **changes).endswith(key)
