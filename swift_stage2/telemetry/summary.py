"""Turns the audit of a finished, killed or running run into answers: what was wanted, what ran, where time went.

Pure apart from reading files. A resumed run's records that its checkpoint did not cover are left out, as the
counters leave them out. Called by ``demo`` and ``report``.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from swift_stage2.errors import UserError
from swift_stage2.telemetry.activity import NANOSECONDS
from swift_stage2.telemetry.audit import GAP, Record, read_audit
from swift_stage2.telemetry.metrics import METRICS, RATIOS, Kind, Merge

_DROPS = ("packs_dropped_stale", "packs_dropped_oldest", "segments_dropped_stale", "rollouts_failed")
_DROP_FAMILIES = ("samples_quarantined/", "objects_dropped/")


@dataclass(frozen=True, slots=True)
class Spread:
    """A set of durations, in seconds."""

    num: int
    total_s: float
    median_s: float
    max_s: float


@dataclass(frozen=True, slots=True)
class RankActivity:
    """Where one rank's main thread spent its time. ``seconds`` add up to ``wall_s``."""

    rank: int
    seconds: Mapping[str, float]
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What one run did, over all ranks."""

    num_ranks: int
    num_steps: int
    num_b_wanted: int
    num_b_run: int
    skips: Mapping[str, int]
    """Wanted B steps that ran channel A, by reason."""
    num_disagreements: int
    """Steps whose plan differs between ranks; anything but 0 is a fault."""
    lag_counts: Mapping[int, int]
    """Version lag → packs trained with it."""
    totals: Mapping[str, float]
    """Every counter, added up over ranks."""
    drops: Mapping[str, int]
    """What was lost, by cause; causes that occurred only."""
    ratios: Mapping[str, float]
    """Match quality, truncation and pack fill over the whole run, by tag; absent where nothing was counted."""
    num_rounds_committed: int
    num_rounds_failed: int
    round_seconds: Spread | None
    phase_seconds: Mapping[str, Spread]
    """By phase of a sync round; one duration per server and round."""
    proofs: Mapping[str, int]
    """Kind of proof → servers that passed it."""
    server_errors: Mapping[str, int]
    """Error → how often a server failed a round with it."""
    activity: tuple[RankActivity, ...]
    num_records_lost: int
    """Audit records that a full disk did not take."""


@dataclass(slots=True)
class _RankRecords:
    """One rank's records as far as they count."""

    rank: int
    steps: dict[int, Record] = field(default_factory=dict)
    rounds: list[Record] = field(default_factory=list)
    metrics: Record | None = None
    num_lost: int = 0

    def take(self, record: Record) -> None:
        match record["kind"]:
            case "step":
                self.steps[record["step"]] = record
            case "round":
                self.rounds.append(record)
            case "metrics":
                self.metrics = record
            case "start":
                self._void_from(record["step"])
            case kind if kind == GAP:
                self.num_lost += record["records_lost"]

    def _void_from(self, step: int) -> None:
        self.steps = {number: record for number, record in self.steps.items() if number < step}
        self.rounds = [record for record in self.rounds if record["step"] < step]


def summarise(audit_dir: Path) -> RunSummary:
    """Read every rank's file under ``audit_dir``.

    Raises:
        UserError: there is no audit, or one of its files cannot be read.
    """
    ranks = [_read_rank(path) for path in sorted(audit_dir.glob("rank*.jsonl"))]
    if not ranks:
        raise UserError(
            f"a summary needs the audit of a run, got audit_dir={audit_dir} without rank*.jsonl; "
            "name the directory audit/ of a run that had telemetry.audit: true"
        )
    ranks.sort(key=lambda rank: rank.rank)
    steps, totals = ranks[0].steps.values(), _totals(ranks)
    servers = [server for record in ranks[0].rounds for server in record["servers"].values()]
    return RunSummary(
        num_ranks=len(ranks),
        num_steps=len(steps),
        num_b_wanted=sum(step["wants_b"] for step in steps),
        num_b_run=sum(step["channel"] == "B" for step in steps),
        skips=_count(step["skip_reason"] for step in steps if step["skip_reason"]),
        num_disagreements=_disagreements(ranks),
        lag_counts=_lags(ranks),
        totals=totals,
        drops=_drops(totals),
        ratios=_ratios(totals),
        num_rounds_committed=sum(record["committed"] for record in ranks[0].rounds),
        num_rounds_failed=sum(not record["committed"] for record in ranks[0].rounds),
        round_seconds=_spread([record["seconds"] for record in ranks[0].rounds]),
        phase_seconds=_phases(ranks[0].rounds, servers),
        proofs=_count(server["proof"] for server in servers if server["proven"]),
        server_errors=_count(str(server["error"]) for server in servers if not server["proven"]),
        activity=tuple(_activity(rank.rank, rank.metrics) for rank in ranks if rank.metrics),
        num_records_lost=sum(rank.num_lost for rank in ranks),
    )


def _read_rank(path: Path) -> _RankRecords:
    try:
        records = read_audit(path)
        rank = _RankRecords(int(path.stem.removeprefix("rank")))
    except (OSError, ValueError) as error:
        raise UserError(
            f"an audit file is rank<number>.jsonl and can be read, got path={path}: {error}"
        ) from error
    for record in records:
        rank.take(record)
    return rank


def _count(values: Iterable[str]) -> dict[str, int]:
    return dict(Counter(values).most_common())


def _disagreements(ranks: Sequence[_RankRecords]) -> int:
    first, *others = ranks
    plan = ("channel", "wants_b", "skip_reason", "version")
    return sum(
        any(
            step[name] != other.steps[number][name]
            for other in others
            if number in other.steps
            for name in plan
        )
        for number, step in first.steps.items()
    )


def _lags(ranks: Sequence[_RankRecords]) -> dict[int, int]:
    lags = Counter(
        step["version"] - pack["version"]
        for rank in ranks
        for step in rank.steps.values()
        for pack in step["packs"]
    )
    return dict(sorted(lags.items()))


def _totals(ranks: Sequence[_RankRecords]) -> dict[str, float]:
    """From each rank's last metrics record; what is the same on every rank counts once."""
    numbers = [rank.metrics["numbers"] for rank in ranks if rank.metrics]
    return {
        metric.name: sum(
            rank.get(metric.name, 0) for rank in (numbers[:1] if metric.merge is Merge.SAME else numbers)
        )
        for metric in METRICS
        if metric.kind is Kind.COUNTER
    }


def _drops(totals: Mapping[str, float]) -> dict[str, int]:
    return {
        name: int(total)
        for name, total in totals.items()
        if total and (name in _DROPS or name.startswith(_DROP_FAMILIES))
    }


def _ratios(totals: Mapping[str, float]) -> dict[str, float]:
    sums = {
        ratio.tag: (sum(totals[n] for n in ratio.numerator), sum(totals[n] for n in ratio.denominator))
        for ratio in RATIOS
    }
    return {tag: numerator / denominator for tag, (numerator, denominator) in sums.items() if denominator}


def _phases(rounds: Sequence[Record], servers: Sequence[Record]) -> dict[str, Spread]:
    durations: dict[str, list[float]] = {
        "canary": [record["canary_seconds"] for record in rounds],
        "export": [record["export_seconds"] for record in rounds],
    }
    for server in servers:
        for phase, seconds in server["seconds"].items():
            durations.setdefault(phase, []).append(seconds)
    spreads = {phase: _spread(seconds) for phase, seconds in durations.items()}
    return {phase: spread for phase, spread in spreads.items() if spread is not None}


def _spread(seconds: Sequence[float]) -> Spread | None:
    if not seconds:
        return None
    return Spread(len(seconds), sum(seconds), statistics.median(seconds), max(seconds))


def _activity(rank: int, metrics: Record) -> RankActivity:
    seconds = {name: ns / NANOSECONDS for name, ns in metrics["activity_ns"].items()}
    return RankActivity(rank, seconds, metrics["wall_ns"] / NANOSECONDS)
