"""Forms of the records of ledger, audit and recording: the fields that readers rely on; others may be there.

Files are damaged by disks, copies and hands: a record of another form counts as lost and is never believed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    ValidationError,
    create_model,
    model_validator,
)

from swift_stage2.columns import served
from swift_stage2.telemetry.metrics import METRICS, Kind

Forms = Mapping[str, type[BaseModel]]

_MOST = 2**62
_COUNTERS = {metric.name for metric in METRICS if metric.kind is Kind.COUNTER} | {"queue_limit"}
_STRICT = ConfigDict(strict=True)


def has_form(record: Mapping[str, Any], forms: Forms) -> bool:
    """Whether the record has every field of its kind's form, and each of them passes; kinds without a form have any."""
    form = forms.get(record["kind"])
    try:
        return form is None or form.model_validate(record) is not None
    except (ValidationError, OverflowError):
        return False


def _hex(value: str) -> str:
    float.fromhex(value)
    return value


def _finite_counters(numbers: dict[str, Any]) -> dict[str, Any]:
    """Of a metrics record. A gauge that is not finite is written as text."""
    for name in _COUNTERS & numbers.keys():
        number = numbers[name]
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < _MOST:
            raise ValueError(f"{name} is no count")
    return numbers


def _aligned(form: BaseModel) -> BaseModel:
    """Lists of one record are of one length."""
    if len({len(getattr(form, name)) for name in ("samples", "num_objects", "num_pixels")}) > 1:
        raise ValueError("one entry per sample")
    return form


def _whole(form: BaseModel) -> BaseModel:
    """Every column that a completion has is whole."""
    num_tokens = len(form.token_ids)  # type: ignore[attr-defined]
    for column in served():
        values = getattr(form, column.name)
        if values is not None and len(values) != column.num_values(num_tokens):
            raise ValueError(f"{column.name}: one value per {column.per}")
    return form


_Integer = Annotated[int, Field(gt=-_MOST, lt=_MOST)]
_Count = Annotated[int, Field(ge=0, lt=_MOST)]
_NumRanks = Annotated[int, Field(ge=1, le=2**16)]
# Nothing that sums and quotients of it would make infinite.
_Number = Annotated[float, Field(ge=0, lt=_MOST, allow_inf_nan=False)]
_Term = Annotated[float, Field(gt=-_MOST, lt=_MOST, allow_inf_nan=False)]
_Loss = float | Annotated[str, AfterValidator(float)]  # one that is not finite is written as text
_HexFloat = Annotated[str, AfterValidator(_hex)]
_Sample = Annotated[list[_Count], Field(min_length=4, max_length=4)]  # epoch, position, row, attempt
_Span = Annotated[list[_Count], Field(min_length=3, max_length=3)]  # version, start, end
_Numbers = Annotated[dict[str, Any], AfterValidator(_finite_counters)]
_Channel = Literal["A", "B"]


def _form(optional: Mapping[str, Any] | None = None, **required: Any) -> type[BaseModel]:
    """``optional`` fields may be null or absent: earlier releases did not write them."""
    fields: dict[str, Any] = {name: (kind, ...) for name, kind in required.items()}
    fields |= {name: (kind | None, None) for name, kind in (optional or {}).items()}
    return create_model("Form", __config__=_STRICT, **fields)


def _kept(optional: Mapping[str, Any] | None = None, **required: Any) -> type[BaseModel]:
    """Of the audit, whose records have a time and a rank."""
    return _form(optional, time=_Number, rank=_Count, **required)


def _told(optional: Mapping[str, Any] | None = None, **required: Any) -> type[BaseModel]:
    """Of the ledger, whose records are numbered."""
    return _form({"sequence": _Count} | dict(optional or {}), **required)


_Samples = list[_Sample]
_Seconds = dict[str, _Number]
_State = _form(
    {"num_generations": _Count},
    epoch=_Count,
    position=_Count,
    num_rows=_Count,
    world_size=_NumRanks,
    seed=_Integer,
    outstanding=_Samples,
)
_Quality = _form(
    {"num_truncated": bool | _Count, "dropped": dict[str, _Count], "reward": dict[str, _Term]},
    num_predictions=_Count,
    num_ground_truth=_Count,
    num_pairs=_Count,
    sum_iou=_Number,
)
_GAP = _form(records_lost=_Count)

LEDGER_FORMS: Forms = {
    "gap": _GAP,
    "start": _told(
        {"run_id": str, "world_size": _NumRanks, "likeness": str},
        step=_Count,
        version_window=_Count,
        save_id=str | None,
        state=_State,
    ),
    "drawn": _told(samples=_Samples),
    "read": create_model(
        "Read",
        __base__=_told(samples=_Samples, num_objects=list[_Count], num_pixels=list[_Count | None]),
        __validators__={"aligned": model_validator(mode="after")(_aligned)},  # type: ignore[dict-item]
    ),
    "sent": _told({"server": str}, samples=_Samples),
    "finished": _told(samples=_Samples, end=str, seconds=_Number),
    "cut": _told(samples=_Samples, num_tokens=_Count, spans=list[_Span]),
    "matched": _told(
        {"spans": list[_Span]}, samples=_Samples, version=_Count, num_rollout_tokens=_Count, quality=_Quality
    ),
    "packed": _told(samples=_Samples, pack_id=str, num_tokens=_Count, capacity_tokens=_Count),
    "returned": _told(samples=_Samples, reason=str),
    "trained": _told(samples=_Samples, pack_id=str, step=_Count, version=_Count),
    "quarantined": _told(samples=_Samples, reason=str),
    "unused": _told(samples=_Samples, reason=str),
    "checkpoint": _told(step=_Count, save_id=str, state=_State),
    "end": _told(),
}

_SERVER = _form({"transport": str}, proven=bool, error=str | None, proof=str | None, seconds=_Seconds)

AUDIT_FORMS: Forms = {
    "gap": _GAP,
    "unused_b": _kept(cause=str),
    "quarantine": _kept(),
    "start": _kept(
        {
            "world_size": _NumRanks,
            "total_steps": _Count,
            "queue_limit": _Count,
            "settings": dict[str, Any],
        },
        step=_Count,
    ),
    "step": _kept(
        {"round_in_transfer": bool},
        step=_Count,
        channel=_Channel,
        wants_b=bool,
        skip_reason=str | None,
        version=_Count,
        version_lag=_Integer | None,
        queue_depth=_Count,
        infer_in_flight=_Count,
        round_pending=bool,
        packs=list[_form(pack_id=str, version=_Integer)],  # type: ignore[misc]
        activity_ns=_Seconds,
    ),
    "round": _kept(
        step=_Count,
        version=_Count,
        committed=bool,
        seconds=_Number,
        canary_seconds=_Number,
        snapshot_seconds=_Number,
        servers=dict[str, _SERVER],  # type: ignore[valid-type]
    ),
    "catch_up": _kept(
        step=_Count,
        version=_Count,
        seconds=_Number,
        servers=dict[str, _SERVER],  # type: ignore[valid-type]
    ),
    "batch": _kept(num_rollouts=_Count),
    "metrics": _kept(
        {"epoch": _Number, "pipeline_ns": _Seconds, "pipeline_wall_ns": _Number},
        step=_Count | None,
        numbers=_Numbers,
        activity_ns=_Seconds,
        wall_ns=_Number,
    ),
    "evaluation": _kept(
        {"due_step": _Count},
        begun_step=_Count,
        version=_Count,
        end=str,
        counts=_form(num_answered=_Count, num_wanted=_Count),
        ratios=dict[str, _Number | None],
    ),
    "loss": _kept({"step": _Count}, loss=_Loss),
    "warning": _kept(message=str),
}

RECORD_FORMS: Forms = {
    "gap": _GAP,
    "start": _form(
        run_id=str, step=_Count, world_size=_NumRanks, config=dict[str, Any], surroundings=dict[str, Any]
    ),
    "completion": create_model(
        "Completion",
        __base__=_form(
            {column.name: list[FiniteFloat] for column in served()},
            sample=_Sample,
            text=str,
            token_ids=list[_Count],
            truncated=bool,
            spans=list[_Span],
        ),
        __validators__={"whole": model_validator(mode="after")(_whole)},  # type: ignore[dict-item]
    ),
    "advantages": _form(
        samples=_Samples,
        advantages=list[Annotated[list[FiniteFloat], Field(min_length=1, max_length=2)]],
    ),
    "step": _form(step=_Count, channel=_Channel, version=_Count),
    "losses": _form(step=_Count, losses=list[_HexFloat]),
}
"""Of what a replay reads."""
