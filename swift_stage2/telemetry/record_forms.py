"""Tells whether a record of the ledger or the audit has the form of its kind, so that readers may rely on it. Pure.

Files are damaged by disks, copies and hands. A record of another form is counted as lost by whoever reads it, and
never believed. Named are the fields that readers use; others may be there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from swift_stage2.telemetry.metrics import METRICS, Kind

Check = Callable[[Any], bool]
Form = dict[str, Check]

_ALIGNED = {"read": ("samples", "num_objects", "num_pixels")}
"""Lists of a kind that are of one length."""
_ABSENT = object()
_MOST = 2**62
_MOST_RANKS = 2**16
_COUNTERS = {metric.name for metric in METRICS if metric.kind is Kind.COUNTER} | {"queue_limit"}


def has_form(record: Mapping[str, Any], forms: Mapping[str, Form]) -> bool:
    """Whether the record has every field of its kind's form, and each of them passes; kinds without a form have any."""
    kind = record["kind"]
    return all(check(record.get(name, _ABSENT)) for name, check in forms.get(kind, {}).items()) and (
        kind not in forms or len({len(record[name]) for name in _ALIGNED.get(kind, ())}) <= 1
    )


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_MOST < value < _MOST


def _count(value: Any) -> bool:
    return _integer(value) and value >= 0


def _num_ranks(value: Any) -> bool:
    return _integer(value) and 1 <= value <= _MOST_RANKS


def _number(value: Any) -> bool:
    """Not negative, and nothing that sums and quotients of it would make infinite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _MOST


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _hex(value: Any) -> bool:
    """A loss to its last bit, not finite ones included."""
    try:
        return isinstance(value, str) and float.fromhex(value) is not None
    except (ValueError, OverflowError):
        return False


def _loss(value: Any) -> bool:
    """One that is not finite is written as text."""
    try:
        return isinstance(value, int | float | str) and float(value) is not None
    except (ValueError, OverflowError):
        return False


def _mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _span(value: Any) -> bool:
    """[version, start, end]."""
    return isinstance(value, list) and len(value) == 3 and all(map(_count, value))


def _channel(value: Any) -> bool:
    return value in ("A", "B")


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _maybe(check: Check) -> Check:
    """Of what earlier releases did not write."""
    return lambda value: value is None or value is _ABSENT or check(value)


def _each(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _by_name(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _with(**form: Check) -> Check:
    return lambda value: (
        isinstance(value, dict) and all(check(value.get(name, _ABSENT)) for name, check in form.items())
    )


def _sample(value: Any) -> bool:
    """[epoch, position, row, attempt]."""
    return isinstance(value, list) and len(value) == 4 and all(map(_count, value))


def _numbers(value: Any) -> bool:
    """Of a metrics record. A gauge that is not finite is written as text."""
    return isinstance(value, dict) and all(
        _number(number) or name not in _COUNTERS for name, number in value.items()
    )


_samples = _each(_sample)
_state = _with(
    epoch=_count, position=_count, num_rows=_count, world_size=_num_ranks, seed=_integer, outstanding=_samples
)
_ns_by_name = _by_name(_number)
_sequence: Form = {"sequence": _maybe(_count)}
_gap: Form = {"records_lost": _count}

LEDGER_FORMS: Mapping[str, Form] = {
    "gap": _gap,
    "start": _sequence
    | {
        "run_id": _maybe(_text),
        "step": _count,
        "world_size": _maybe(_num_ranks),
        "version_window": _count,
        "save_id": _or_none(_text),
        "state": _state,
    },
    "drawn": _sequence | {"samples": _samples},
    "read": _sequence
    | {"samples": _samples, "num_objects": _each(_count), "num_pixels": _each(_or_none(_count))},
    "sent": _sequence | {"samples": _samples},
    "finished": _sequence | {"samples": _samples, "end": _text, "seconds": _number},
    "matched": _sequence
    | {
        "samples": _samples,
        "version": _count,
        "num_rollout_tokens": _count,
        "quality": _with(num_predictions=_count, num_ground_truth=_count, num_pairs=_count, sum_iou=_number),
    },
    "packed": _sequence
    | {"samples": _samples, "pack_id": _text, "num_tokens": _count, "capacity_tokens": _count},
    "returned": _sequence | {"samples": _samples, "reason": _text},
    "trained": _sequence | {"samples": _samples, "pack_id": _text, "step": _count, "version": _count},
    "quarantined": _sequence | {"samples": _samples, "reason": _text},
    "checkpoint": _sequence | {"step": _count, "save_id": _text, "state": _state},
    "end": _sequence,
}

_server = _with(proven=_flag, error=_or_none(_text), proof=_or_none(_text), seconds=_by_name(_number))

AUDIT_FORMS: Mapping[str, Form] = {
    "gap": _gap,
    "unused_b": {"cause": _text},
    "start": {
        "time": _number,
        "step": _count,
        "world_size": _maybe(_num_ranks),
        "queue_limit": _maybe(_count),
        "settings": _maybe(_by_name(lambda value: True)),
    },
    "step": {
        "time": _number,
        "step": _count,
        "channel": _channel,
        "wants_b": _flag,
        "skip_reason": _or_none(_text),
        "version": _count,
        "version_lag": _or_none(_integer),
        "queue_depth": _count,
        "infer_in_flight": _count,
        "packs": _each(_with(pack_id=_text, version=_integer)),
        "activity_ns": _ns_by_name,
    },
    "round": {
        "time": _number,
        "step": _count,
        "committed": _flag,
        "seconds": _number,
        "canary_seconds": _number,
        "export_seconds": _number,
        "servers": _by_name(_server),
    },
    "metrics": {
        "time": _number,
        "step": _or_none(_count),
        "numbers": _numbers,
        "activity_ns": _ns_by_name,
        "wall_ns": _number,
        "pipeline_ns": _maybe(_ns_by_name),
        "pipeline_wall_ns": _maybe(_number),
    },
    "evaluation": {
        "time": _number,
        "begun_step": _count,
        "version": _count,
        "end": _text,
        "counts": _with(num_answered=_count, num_wanted=_count),
        "ratios": _by_name(_or_none(_number)),
    },
}

RECORD_FORMS: Mapping[str, Form] = {
    "gap": _gap,
    "start": {
        "run_id": _text,
        "step": _count,
        "world_size": _num_ranks,
        "config": _mapping,
        "surroundings": _mapping,
    },
    "completion": {
        "sample": _sample,
        "text": _text,
        "token_ids": _each(_count),
        "truncated": _flag,
        "spans": _each(_span),
    },
    "step": {"step": _count, "channel": _channel, "version": _count},
    "losses": {"step": _count, "losses": _each(_hex)},
}
"""Of what a replay reads."""

_of_rank: Form = {"rank": _count}

LIVE_FORMS: Mapping[str, Form] = {
    "start": _of_rank
    | {
        "step": _count,
        "world_size": _num_ranks,
        "total_steps": _count,
        "queue_limit": _or_none(_count),
    },
    "step": _of_rank
    | {
        "step": _count,
        "channel": _channel,
        "skip_reason": _or_none(_text),
        "version": _count,
        "version_lag": _or_none(_integer),
        "queue_depth": _count,
        "round_pending": _flag,
    },
    "batch": {"num_rollouts": _count},
    "round": _of_rank
    | {"step": _count, "version": _count, "seconds": _number, "servers": _by_name(_with(proven=_flag))},
    "metrics": _of_rank | {"epoch": _maybe(_number), "numbers": _numbers},
    "loss": _of_rank | {"loss": _loss},
    "warning": {"message": _text},
}
"""Of what the live view reads of an audit that this release writes."""
