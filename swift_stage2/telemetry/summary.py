"""Turns the audit of a finished, killed or running run into answers: what was wanted, what ran, where time went.

The only place that counts them: the demo's table and the report's sections show the same numbers. Pure, but for
``summarise``, which reads the files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swift_stage2.errors import UserError
from swift_stage2.telemetry.activity import NANOSECONDS, in_seconds
from swift_stage2.telemetry.audit import Record
from swift_stage2.telemetry.metrics import METRICS, RATIOS, Kind, Merge
from swift_stage2.telemetry.reading import RankRecords, read_ranks

_DROPS = (
    "packs_dropped_stale",
    "packs_dropped_oldest",
    "segments_dropped_stale",
    "rollouts_dropped_stale",
    "rollouts_failed",
    "rollouts_aborted",
    "rollouts_unconfirmed",
)
_DROP_FAMILIES = ("samples_quarantined/", "objects_dropped/")


@dataclass(frozen=True, slots=True)
class RankActivity:
    """Seconds that one rank's thread spent in each activity. ``seconds`` add up to ``wall_s``."""

    rank: int
    seconds: Mapping[str, float]
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    num_steps: int
    num_b_wanted: int
    num_b_run: int
    skips: Mapping[str, int]
    """Wanted B steps that ran channel A, by reason."""
    num_b_too_early: int
    """Of those that lacked packs, the ones before the first B step; none where no B step ran."""
    num_disagreements: int
    """Steps whose plan differs between ranks; anything but 0 is a fault."""
    lag_counts: Mapping[int, int]
    """Version lag → packs trained with it."""
    totals: Mapping[str, float]
    """Every counter, added up over ranks."""
    drops: Mapping[str, int]
    """Drops, failures and samples given up, by cause; causes that occurred only."""
    ratios: Mapping[str, float]
    """Match quality, truncation and pack fill over the whole run, by tag; absent where nothing was counted."""
    num_rounds_committed: int
    num_rounds_failed: int
    num_caught_up: int
    """Servers that were proven between two rounds, once each time."""
    round_seconds: Sequence[float]
    phase_seconds: Mapping[str, Sequence[float]]
    """By phase of a sync round; one duration per server and round."""
    proofs: Mapping[str, int]
    transports: Mapping[str, int]
    """Kind of proof → servers that passed it."""
    server_errors: Mapping[str, int]
    """Error → how often a server failed a round with it."""
    activity: tuple[RankActivity, ...]
    num_records_lost: int
    """Audit records that a full disk did not take, or that cannot be read any more."""
    missing_ranks: tuple[int, ...]
    """Ranks that the run had and whose audit is not there."""


def summarise(run_dir: Path) -> RunSummary:
    """Read every rank's audit of one run.

    Raises:
        UserError: there is no audit, or one of its files cannot be read.
    """
    ranks = read_ranks([run_dir])
    if not ranks:
        raise UserError(
            f"a summary needs the audit of a run, got run_dir={run_dir} without audit/rank*.jsonl; "
            "name the directory of a run that had telemetry.audit: true"
        )
    return summary_of([ranks[rank] for rank in sorted(ranks)])


def summary_of(ranks: Sequence[RankRecords]) -> RunSummary:
    """Everything that is counted of a run, from its ranks in order; of nothing without any.

    Values that are equal on all ranks are the first one's.
    """
    first, totals = ranks[0] if ranks else RankRecords(0), _totals(ranks)
    steps = first.steps.values()
    first_b = min((number for number, step in first.steps.items() if step["channel"] == "B"), default=0)
    servers = [server for record in first.rounds for server in record["servers"].values()]
    return RunSummary(
        num_steps=len(steps),
        num_b_wanted=sum(step["wants_b"] for step in steps),
        num_b_run=sum(step["channel"] == "B" for step in steps),
        skips=_count(step["skip_reason"] for step in steps if step["skip_reason"]),
        num_b_too_early=sum(
            number < first_b and step["skip_reason"] == "not_enough_packs"
            for number, step in first.steps.items()
        ),
        num_disagreements=_disagreements(ranks),
        lag_counts=_lags(ranks),
        totals=totals,
        drops=_drops(totals),
        ratios={each.tag: value for each in RATIOS if (value := each.value(totals, {})) is not None},
        num_rounds_committed=sum(record["committed"] for record in first.rounds),
        num_rounds_failed=sum(not record["committed"] for record in first.rounds),
        num_caught_up=sum(
            server["proven"] for record in first.catch_ups for server in record["servers"].values()
        ),
        round_seconds=[record["seconds"] for record in first.rounds],
        phase_seconds=_phases(first.rounds, servers),
        proofs=_count(server["proof"] for server in servers if server["proven"]),
        transports=_count(server["transport"] for server in servers if server.get("transport")),
        server_errors=_count(str(server["error"]) for server in servers if not server["proven"]),
        activity=tuple(
            RankActivity(rank.rank, in_seconds(last["activity_ns"]), last["wall_ns"] / NANOSECONDS)
            for rank in ranks
            for last in rank.metrics[-1:]
        ),
        num_records_lost=sum(rank.num_lost for rank in ranks),
        missing_ranks=_missing(ranks),
    )


def _missing(ranks: Sequence[RankRecords]) -> tuple[int, ...]:
    world_size = max((start.get("world_size") or 0 for rank in ranks for start in rank.starts), default=0)
    return tuple(sorted(set(range(world_size)) - {rank.rank for rank in ranks if rank.starts or rank.steps}))


def _count(values: Iterable[str]) -> dict[str, int]:
    return dict(Counter(values).most_common())


def _disagreements(ranks: Sequence[RankRecords]) -> int:
    first, *others = ranks or [RankRecords(0)]
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


def _lags(ranks: Sequence[RankRecords]) -> dict[int, int]:
    lags = Counter(
        step["version"] - pack["version"]
        for rank in ranks
        for step in rank.steps.values()
        for pack in step["packs"]
    )
    return dict(sorted(lags.items()))


def _totals(ranks: Sequence[RankRecords]) -> dict[str, float]:
    """From each rank's last metrics record; what is the same on every rank counts once."""
    numbers = [rank.metrics[-1]["numbers"] for rank in ranks if rank.metrics]
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


def _phases(rounds: Sequence[Record], servers: Sequence[Record]) -> dict[str, list[float]]:
    durations: dict[str, list[float]] = {
        "canary": [record["canary_seconds"] for record in rounds],
        "snapshot": [record["snapshot_seconds"] for record in rounds],
    }
    for server in servers:
        for phase, seconds in server["seconds"].items():
            durations.setdefault(phase, []).append(seconds)
    return {phase: seconds for phase, seconds in durations.items() if seconds}


def share_of_b(numbers: Mapping[str, float]) -> str:
    """How much of channel B ran, from a run's counters; empty where none was wanted."""
    ran, wanted = numbers.get("b_steps_run", 0), numbers.get("b_steps_wanted", 0)
    return f"B at {ran:g} of {wanted:g} wanted ({ran / wanted:.0%})" if wanted else ""


_CAUSES = {
    "not_enough_packs": "packs were not ready in time",
    "truncation_guard": "too many rollouts were cut off, raise rollout.decoding.max_new_tokens",
    "servers_suspect": "no proven server was left",
    "pipeline_failed": "the pipeline had failed",
}
_MOST_CHARACTERS = 600  # of a server's error


def why_b_is_unused(
    *,
    num_wanted: int,
    num_run: int,
    skips: Mapping[str, int],
    num_rounds: int,
    num_proven: int,
    errors: Mapping[str, int],
) -> str:
    """One sentence without a full stop; empty when half of the wanted B steps ran, or none was wanted and nothing else
    went wrong.

    ``skips`` counts wanted steps that did not run by cause, ``num_proven`` the sync rounds that proved a server,
    ``errors`` the servers that a round did not prove by error.
    """
    if num_run and 2 * num_run >= num_wanted:
        return ""
    cause = ""
    if num_rounds and not num_proven:
        cause = f"none of {num_rounds} sync rounds proved a server"
        if errors:
            cause += f", mostly: {' '.join(max(errors, key=errors.__getitem__).split())[:_MOST_CHARACTERS]}"
    elif any(skips.values()):
        causes = sorted(((count, reason) for reason, count in skips.items() if count), reverse=True)
        cause = ", ".join(f"{_CAUSES.get(reason, reason)} ({count})" for count, reason in causes)
    if num_wanted:
        cause = cause or "no cause is recorded"
        return f"channel B ran at {num_run or 'none'} of the {num_wanted} steps that wanted it: {cause}"
    return cause
