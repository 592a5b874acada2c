"""Turns every rank's numbers into one view of all ranks, with a single sum over a vector of fixed length.

Counters and activities are added up. Gauges that need a minimum or a maximum travel in one slot per rank, where
every other rank adds zero, so that the sum hands every rank all values and no second collective is needed.
Called on all ranks alike, at logging steps only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from swift_stage2.telemetry.activity import Activity
from swift_stage2.telemetry.metrics import METRICS, Kind, Merge, Metric

SumAcrossRanks = Callable[[Sequence[float]], Sequence[float]]

_SUMMED = tuple(m.name for m in METRICS if m.kind is Kind.COUNTER and m.merge is Merge.SUM)
_SAME = tuple(m.name for m in METRICS if m.kind is Kind.COUNTER and m.merge is Merge.SAME)
_GAUGES = tuple(m for m in METRICS if m.kind is Kind.GAUGE)


@dataclass(frozen=True, slots=True)
class MergedMetrics:
    """One view of all ranks."""

    values: Mapping[str, float]
    """By metric name; gauges that no rank has set are left out."""
    per_rank: Mapping[str, tuple[float | None, ...]]
    """Gauges by rank; None where a rank has not set one."""
    activity_ns: Mapping[Activity, int]
    """Added up over ranks."""


def vector_length(world_size: int) -> int:
    """How many numbers every rank contributes."""
    return len(_SUMMED) + len(Activity) + len(_GAUGES) * world_size


def encode(
    numbers: Mapping[str, float], activity_ns: Mapping[Activity, int], *, rank: int, world_size: int
) -> tuple[float, ...]:
    """One rank's contribution. ``numbers`` is a ``Counters.snapshot()``; an unset gauge travels as NaN."""
    slots = [0.0] * (len(_GAUGES) * world_size)
    for index, metric in enumerate(_GAUGES):
        slots[index * world_size + rank] = numbers.get(metric.name, math.nan)
    return (
        *(float(numbers[name]) for name in _SUMMED),
        *(float(activity_ns[activity]) for activity in Activity),
        *slots,
    )


def decode(vector: Sequence[float], numbers: Mapping[str, float], *, world_size: int) -> MergedMetrics:
    """Read the element-wise sum of all ranks' contributions; ``numbers`` gives what is the same on every rank.

    Raises:
        ValueError: the vector was not made for ``world_size`` ranks.
    """
    if len(vector) != vector_length(world_size):
        raise ValueError(
            f"the merged vector has {vector_length(world_size)} entries for {world_size} ranks, got {len(vector)}; "
            "all ranks must run the same release"
        )
    values = dict(zip(_SUMMED, vector, strict=False)) | {name: numbers[name] for name in _SAME}
    begin = len(_SUMMED) + len(Activity)
    activity_ns = {a: round(ns) for a, ns in zip(Activity, vector[len(_SUMMED) : begin], strict=True)}
    per_rank: dict[str, tuple[float | None, ...]] = {}
    for index, metric in enumerate(_GAUGES):
        start = begin + index * world_size
        slots = tuple(None if math.isnan(slot) else slot for slot in vector[start : start + world_size])
        per_rank[metric.name] = slots
        merged = _merge_gauge(metric, [slot for slot in slots if slot is not None])
        if merged is not None:
            values[metric.name] = merged
    return MergedMetrics(values, per_rank, activity_ns)


def _merge_gauge(metric: Metric, present: Sequence[float]) -> float | None:
    if not present:
        return None
    match metric.merge:
        case Merge.SUM:
            return sum(present)
        case Merge.MIN:
            return min(present)
        case Merge.MAX | Merge.SAME:
            return max(present)
