"""Turns the events of a finished, killed or running run into answers: what was wanted, what ran, where time went.

The only place that counts them: the demo's table and the report's sections show the same numbers. Pure, but for
``summarise``, which reads the files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from swift_stage2.records import ServerReport
from swift_stage2.scheduling.step_plan import Channel, SkipReason
from swift_stage2.telemetry.event_log import RankEvents, ranks_of, read_logs
from swift_stage2.telemetry.events import Round
from swift_stage2.telemetry.metrics import METRICS, RATIOS, Merge
from swift_stage2.telemetry.timing import in_seconds

_DROPS = (
    "packs_dropped_stale",
    "packs_dropped_oldest",
    "segments_dropped_stale",
    "rollouts_dropped_stale",
    "rollouts_failed",
    "rollouts_unconfirmed",
)


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
    steps_between_versions: Sequence[int]
    """Optimizer steps from one version that a server proved to the next."""
    round_seconds: Sequence[float]
    phase_seconds: Mapping[str, Sequence[float]]
    """By phase of a sync round; one duration per server and round."""
    proofs: Mapping[str, int]
    transports: Mapping[str, int]
    """Kind of proof → servers that passed it."""
    server_errors: Mapping[str, int]
    """Error → how often a server failed a round with it."""
    activity: Mapping[int, Mapping[str, float]]
    """By rank, seconds of its main thread in each activity, which add up to wall time."""
    unused_b: str
    """Why channel B hardly ran, in a sentence without a full stop; empty if it did."""


def summarise(run_dir: Path) -> RunSummary:
    """Read every rank's log of one run.

    Raises:
        UserError: there is no log, or one cannot be read.
    """
    return summary_of([*ranks_of(read_logs([run_dir])).values()])


def summary_of(ranks: Sequence[RankEvents]) -> RunSummary:
    """Everything that is counted of a run, from its ranks in order; of nothing without any.

    Values that are equal on all ranks are the first one's.
    """
    first, totals = ranks[0] if ranks else RankEvents(0), _totals(ranks)
    steps = first.steps.values()
    first_b = min((step.step for step in steps if step.channel is Channel.B), default=0)
    lags = Counter(
        step.version - version
        for rank in ranks
        for step in rank.steps.values()
        for version in step.packs.values()
    )
    rounds = [each for each in first.of(Round) if each.kind == "round"]
    servers = [server for each in rounds for server in each.servers.values()]
    errors = _count(str(server.error) for server in servers if not server.proven)
    return RunSummary(
        num_steps=len(steps),
        num_b_wanted=sum(step.wants_b for step in steps),
        num_b_run=sum(step.channel is Channel.B for step in steps),
        skips=_count(step.skip_reason for step in steps if step.skip_reason),
        num_b_too_early=sum(
            step.step < first_b and step.skip_reason is SkipReason.NOT_ENOUGH_PACKS for step in steps
        ),
        num_disagreements=_disagreements(ranks),
        lag_counts=dict(sorted(lags.items())),
        totals=totals,
        drops=_drops(totals),
        ratios={each.tag: value for each in RATIOS if (value := each.value(totals, {})) is not None},
        num_rounds_committed=sum(each.committed for each in rounds),
        num_rounds_failed=sum(not each.committed for each in rounds),
        num_caught_up=sum(
            server.proven
            for each in first.of(Round)
            if each.kind == "catch_up"
            for server in each.servers.values()
        ),
        steps_between_versions=[
            after.step - before.step for before, after in pairwise(each for each in rounds if each.committed)
        ],
        round_seconds=[each.seconds for each in rounds],
        phase_seconds=_phases(rounds, servers),
        proofs=_count(server.proof for server in servers if server.proven),
        transports=_count(server.transport for server in servers if server.transport),
        server_errors=errors,
        activity={
            rank.rank: in_seconds(rank.metrics.activity_ns) for rank in ranks if rank.metrics is not None
        },
        unused_b=why_b_is_unused(totals, errors) if first.metrics is not None else "",
    )


def _count(values: Iterable[str]) -> dict[str, int]:
    return dict(Counter(values).most_common())


def _disagreements(ranks: Sequence[RankEvents]) -> int:
    first, *others = ranks or [RankEvents(0)]
    plans = [
        {n: (step.channel, step.wants_b, step.skip_reason, step.version) for n, step in rank.steps.items()}
        for rank in (first, *others)
    ]
    return sum(any(other.get(n, plan) != plan for other in plans[1:]) for n, plan in plans[0].items())


def _totals(ranks: Sequence[RankEvents]) -> dict[str, float]:
    """From each rank's last metrics; what is the same on every rank counts once."""
    numbers = [last.numbers for rank in ranks if (last := rank.metrics) is not None]
    return {
        metric.name: sum(
            rank.get(metric.name, 0) for rank in (numbers[:1] if metric.merge is Merge.SAME else numbers)
        )
        for metric in METRICS
        if not metric.is_gauge
    }


def _drops(totals: Mapping[str, float]) -> dict[str, int]:
    return {
        name: int(total)
        for name, total in totals.items()
        if total and (name in _DROPS or name.startswith(("samples_quarantined/", "objects_dropped/")))
    }


def _phases(rounds: Sequence[Round], servers: Sequence[ServerReport]) -> dict[str, list[float]]:
    durations: dict[str, list[float]] = {
        "canary": [each.canary_seconds for each in rounds],
        "snapshot": [each.snapshot_seconds for each in rounds],
    }
    for server in servers:
        for phase, seconds in server.seconds.items():
            durations.setdefault(phase, []).append(seconds)
    return {phase: seconds for phase, seconds in durations.items() if seconds}


def share_of_b(numbers: Mapping[str, float]) -> str:
    """How much of channel B ran, from a run's counters; empty where none was wanted."""
    ran, wanted = numbers.get("b_steps_run", 0), numbers.get("b_steps_wanted", 0)
    return f"B at {ran:g} of {wanted:g} wanted ({ran / wanted:.0%})" if wanted else ""


SKIP_CAUSES = {
    "not_enough_packs": "packs were not ready in time",
    "truncation_guard": "too many rollouts were cut off, raise rollout.decoding.max_new_tokens",
    "servers_suspect": "no proven server was left",
    "pipeline_failed": "the pipeline had failed",
}
_MOST_CHARACTERS = 600  # of a server's error


def why_b_is_unused(numbers: Mapping[str, float], errors: Mapping[str, int]) -> str:
    """One sentence without a full stop; empty when half of the wanted B steps ran, or none was wanted and nothing else
    went wrong. ``numbers`` are a run's counters, ``errors`` the servers that no round proved, by error.
    """
    num_wanted, num_run = int(numbers["b_steps_wanted"]), int(numbers["b_steps_run"])
    if num_run and 2 * num_run >= num_wanted:
        return ""
    num_proven, num_failed = numbers["sync_rounds_committed"], numbers["sync_rounds_failed"]
    cause = ""
    if num_failed and not num_proven:
        cause = f"none of {num_failed:g} sync rounds proved a server"
        if errors:
            cause += f", mostly: {' '.join(max(errors, key=errors.__getitem__).split())[:_MOST_CHARACTERS]}"
    elif num_wanted:
        skips = ((int(numbers[f"b_steps_skipped/{reason}"]), reason) for reason in SkipReason)
        told = sorted((each for each in skips if each[0]), reverse=True)
        cause = ", ".join(f"{SKIP_CAUSES[reason]} ({count})" for count, reason in told)
    if not num_wanted:
        return cause
    ran = f"channel B ran at {num_run or 'none'} of the {num_wanted} steps that wanted it"
    return f"{ran}: {cause or 'no cause is recorded'}"
