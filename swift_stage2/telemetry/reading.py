"""Tells whether a record of ledger, audit or recording has the form of its kind, so that readers may rely on it.

Files are damaged by disks, copies and hands. A record of another form is counted as lost by whoever reads it, and
never believed. Named are the fields that readers use; others may be there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)

from swift_stage2.errors import UserError
from swift_stage2.telemetry.audit import GAP, Record
from swift_stage2.telemetry.ledger import Entry
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


_Integer = Annotated[int, Field(gt=-_MOST, lt=_MOST)]
_Count = Annotated[int, Field(ge=0, lt=_MOST)]
_NumRanks = Annotated[int, Field(ge=1, le=2**16)]
# Nothing that sums and quotients of it would make infinite.
_Number = Annotated[float, Field(ge=0, lt=_MOST, allow_inf_nan=False)]
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


def _told(optional: Mapping[str, Any] | None = None, **required: Any) -> type[BaseModel]:
    """Of the ledger, whose records are numbered."""
    return _form({"sequence": _Count} | dict(optional or {}), **required)


_Samples = list[_Sample]
_Seconds = dict[str, _Number]
_State = _form(
    epoch=_Count, position=_Count, num_rows=_Count, world_size=_NumRanks, seed=_Integer, outstanding=_Samples
)
_Quality = _form(num_predictions=_Count, num_ground_truth=_Count, num_pairs=_Count, sum_iou=_Number)
_GAP = _form(records_lost=_Count)

LEDGER_FORMS: Forms = {
    "gap": _GAP,
    "start": _told(
        {"run_id": str, "world_size": _NumRanks},
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
    "sent": _told(samples=_Samples),
    "finished": _told(samples=_Samples, end=str, seconds=_Number),
    "matched": _told(samples=_Samples, version=_Count, num_rollout_tokens=_Count, quality=_Quality),
    "packed": _told(samples=_Samples, pack_id=str, num_tokens=_Count, capacity_tokens=_Count),
    "returned": _told(samples=_Samples, reason=str),
    "trained": _told(samples=_Samples, pack_id=str, step=_Count, version=_Count),
    "quarantined": _told(samples=_Samples, reason=str),
    "checkpoint": _told(step=_Count, save_id=str, state=_State),
    "end": _told(),
}

_SERVER = _form(proven=bool, error=str | None, proof=str | None, seconds=_Seconds)

AUDIT_FORMS: Forms = {
    "gap": _GAP,
    "unused_b": _form(cause=str),
    "start": _form(
        {"world_size": _NumRanks, "queue_limit": _Count, "settings": dict[str, Any]},
        time=_Number,
        step=_Count,
    ),
    "step": _form(
        time=_Number,
        step=_Count,
        channel=_Channel,
        wants_b=bool,
        skip_reason=str | None,
        version=_Count,
        version_lag=_Integer | None,
        queue_depth=_Count,
        infer_in_flight=_Count,
        packs=list[_form(pack_id=str, version=_Integer)],  # type: ignore[misc]
        activity_ns=_Seconds,
    ),
    "round": _form(
        time=_Number,
        step=_Count,
        committed=bool,
        seconds=_Number,
        canary_seconds=_Number,
        export_seconds=_Number,
        servers=dict[str, _SERVER],  # type: ignore[valid-type]
    ),
    "metrics": _form(
        {"pipeline_ns": _Seconds, "pipeline_wall_ns": _Number},
        time=_Number,
        step=_Count | None,
        numbers=_Numbers,
        activity_ns=_Seconds,
        wall_ns=_Number,
    ),
    "evaluation": _form(
        time=_Number,
        begun_step=_Count,
        version=_Count,
        end=str,
        counts=_form(num_answered=_Count, num_wanted=_Count),
        ratios=dict[str, _Number | None],
    ),
}

RECORD_FORMS: Forms = {
    "gap": _GAP,
    "start": _form(
        run_id=str, step=_Count, world_size=_NumRanks, config=dict[str, Any], surroundings=dict[str, Any]
    ),
    "completion": _form(sample=_Sample, text=str, token_ids=list[_Count], truncated=bool, spans=list[_Span]),
    "step": _form(step=_Count, channel=_Channel, version=_Count),
    "losses": _form(step=_Count, losses=list[_HexFloat]),
}
"""Of what a replay reads."""

LIVE_FORMS: Forms = {
    "start": _form(
        rank=_Count, step=_Count, world_size=_NumRanks, total_steps=_Count, queue_limit=_Count | None
    ),
    "step": _form(
        rank=_Count,
        step=_Count,
        channel=_Channel,
        skip_reason=str | None,
        version=_Count,
        version_lag=_Integer | None,
        queue_depth=_Count,
        round_pending=bool,
    ),
    "batch": _form(num_rollouts=_Count),
    "round": _form(
        rank=_Count,
        step=_Count,
        version=_Count,
        seconds=_Number,
        servers=dict[str, _form(proven=bool)],  # type: ignore[misc]
    ),
    "metrics": _form({"epoch": _Number}, rank=_Count, numbers=_Numbers),
    "loss": _form(rank=_Count, loss=_Loss),
    "warning": _form(message=str),
}
"""Of what the live view reads of an audit that this release writes."""


@dataclass(slots=True)
class RankRecords:
    """One rank's records as far as they count, in the order in which they were written."""

    rank: int
    steps: dict[int, Record] = field(default_factory=dict)
    rounds: list[Record] = field(default_factory=list)
    metrics: list[Record] = field(default_factory=list)
    evaluations: list[Record] = field(default_factory=list)
    starts: list[Record] = field(default_factory=list)
    matches: list[Record] = field(default_factory=list)
    num_odd_matches: int = 0
    """Lines of its matches that are no record."""
    quarantines: list[Record] = field(default_factory=list)
    num_lost: int = 0
    """Records that a full disk did not take, and lines that are none or have not the form of their kind."""
    has_ended: bool = False
    """Whether the last process came to its orderly end."""
    void: list[tuple[float, float]] = field(default_factory=list)
    """Spans of Unix time whose records a resume made void."""

    def take(self, record: Record) -> None:
        """Adds the next record of the audit."""
        if not has_form(record, AUDIT_FORMS):
            self.num_lost += 1
            return
        match record["kind"]:
            case "start":
                self._resume(record)
                self.starts.append(record)
                self.has_ended = False
            case "step":
                self.steps[record["step"]] = record
            case "round":
                self.rounds.append(record)
            case "metrics":
                self.metrics.append(record)
                self.has_ended = record["step"] is None
            case "quarantine":
                self.quarantines.append(record)
            case "evaluation":
                self.evaluations.append(record)
            case kind if kind == GAP:
                self.num_lost += record["records_lost"]

    @property
    def ended_run(self) -> str | None:
        """The id of the last process, if it came to its orderly end."""
        run_id = (self.starts[-1].get("settings") or {}).get("run_id") if self.starts else None
        return run_id if self.has_ended and isinstance(run_id, str) else None

    def until(self, time: float) -> RankRecords:
        """The same without the steps that were planned later."""
        return replace(
            self, steps={number: step for number, step in self.steps.items() if step["time"] <= time}
        )

    def is_void(self, time: object) -> bool:
        """Whether a record of that moment was made void; what is no moment was not."""
        return isinstance(time, int | float) and any(begin <= time < end for begin, end in self.void)

    def _resume(self, start: Record) -> None:
        step = start["step"]
        lost = [record["time"] for record in (*self.steps.values(), *self.rounds) if record["step"] >= step]
        self.steps = {number: record for number, record in self.steps.items() if number < step}
        self.rounds = [record for record in self.rounds if record["step"] < step]
        if lost:
            self.void.append((min(lost), start["time"]))
            self.metrics = [record for record in self.metrics if record["time"] < min(lost)]
            self.evaluations = [record for record in self.evaluations if record["time"] < min(lost)]
            self.quarantines = [record for record in self.quarantines if record["time"] < min(lost)]


def read_ranks(run_dirs: Sequence[Path]) -> dict[int, RankRecords]:
    """What counts of every rank's audit; empty without one.

    Raises:
        UserError: a file cannot be read.
    """
    ranks: dict[int, RankRecords] = {}
    for rank, records, num_unreadable in read_files(run_dirs, "audit"):
        found = ranks.setdefault(rank, RankRecords(rank))
        for record in records:
            found.take(record)
        found.num_lost += num_unreadable
    return ranks


def read_files(run_dirs: Sequence[Path], folder: str) -> Iterator[tuple[int, list[Record], int]]:
    """Rank, records and number of unreadable lines of every file of one folder.

    Raises:
        UserError: a file cannot be read.
    """
    for path in chain.from_iterable(rank_files(run_dir, folder) for run_dir in run_dirs):
        try:
            records, num_unreadable = read_lines(path)
            yield int(path.stem.removeprefix("rank")), records, num_unreadable
        except (OSError, ValueError) as error:
            raise UserError(
                f"a file in {folder}/ is rank<number>.jsonl and can be read, got path={path}: {error}; make it readable"
            ) from error


def rank_files(run_dir: Path, folder: str) -> list[Path]:
    """The ranks' files in one folder of a run."""
    return sorted((run_dir / folder).glob("rank*.jsonl"))


def read_audit(path: Path) -> list[Record]:
    """The records of one file, in the order in which they were written.

    Lines that are no whole record, torn by a crash or a full disk, are dropped.

    Raises:
        OSError: the file cannot be read.
    """
    return read_lines(path)[0]


def read_lines(path: Path) -> tuple[list[Record], int]:
    """The records of one file, and how many lines are none; a last line without its end may still be written.

    Raises:
        OSError: the file cannot be read.
    """
    records: list[Record] = []
    num_unreadable = 0
    with path.open("rb") as file:
        for line in file:
            if (record := record_of(line)) is None:
                num_unreadable += line.endswith(b"\n")
            elif not is_empty_gap(record):
                records.append(record)
    return records, num_unreadable


def record_of(line: bytes) -> Record | None:
    """The record that a line holds; None if it holds none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("kind"), str) else None


def is_empty_gap(record: Record) -> bool:
    """Whether it is the room for a number of lost records, and none is lost."""
    return record["kind"] == GAP and record.get("records_lost") == 0


_HEAD = b'{"kind":"'  # of every record


def read_ledger(path: Path) -> list[Record]:
    """The records of one file, in the order in which they were written.

    Where a line is none, or has not the form of its kind: ``Entry.TORN`` if it could be the beginning of one, else a
    gap of one record.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        records = [_parse(line) for line in file if line.strip()]
    return [record for record in records if not is_empty_gap(record)]


def read_ledgers(run_dirs: Sequence[Path]) -> dict[int, list[Record]]:
    """Every rank's records, those of the first directory first.

    Raises:
        UserError: a directory holds no ledger, or one of its files cannot be read.
    """
    ledgers: dict[int, list[Record]] = {}
    for run_dir in run_dirs:
        paths = sorted((run_dir / "ledger").glob("rank*.jsonl"))
        if not paths:
            inside = sorted(str(path.parent) for path in run_dir.glob("v*/ledger"))
            what = f"{run_dir}" if run_dir.is_dir() else f"{run_dir}, which does not exist"
            raise UserError(
                f"a report needs a run's directory with ledger/rank*.jsonl, got {what}; name "
                + (
                    " or ".join(inside)
                    or "swift.output_dir (and in it the folder vN-DATE) of a run that had channel B"
                )
                + ", with telemetry.audit: true"
            )
        for path in paths:
            try:
                ledgers.setdefault(int(path.stem.removeprefix("rank")), []).extend(read_ledger(path))
            except (OSError, ValueError) as error:
                raise UserError(
                    f"a ledger is rank<number>.jsonl and can be read, got path={path}: {error}; make it readable"
                ) from error
    return ledgers


def _parse(line: bytes) -> Record:
    record = record_of(line)
    if record is not None and record["kind"] in LEDGER_FORMS and has_form(record, LEDGER_FORMS):
        return record
    if record is None and (line.startswith(_HEAD) or _HEAD.startswith(line.rstrip(b"\n"))):
        return {"kind": str(Entry.TORN)}
    return {"kind": GAP, "records_lost": 1}
