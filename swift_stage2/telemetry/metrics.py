"""Declares every number that is kept, holds one rank's, and adds all ranks' up.

One table says of each number whether it counts or gauges, how ranks merge, and its tag: a misspelt name raises, and
``docs/design/formats.md`` can be checked against it. A reward's terms, which it does not name, are summed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from swift_stage2.records import ObjectDropReason, QuarantineReason, UnusedReason
from swift_stage2.scheduling.step_plan import SkipReason

PREFIX = "stage2_ab/"
REWARD = "reward/"  # begins the names of a reward's sums, one per term of the task, and their tags

STAGES = ("rollout", "prepare", "pack", "plan")


class Merge(StrEnum):
    """How the ranks' values become one."""

    SUM = "sum"
    MIN = "min"
    MAX = "max"
    SAME = "same"
    """Every rank holds the same value, because every rank takes the same decisions."""


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    merge: Merge
    help: str
    tag: str | None = None
    """Without the prefix ``stage2_ab/``; None keeps the number in the event log only."""
    is_gauge: bool = False
    """Takes any value, and none before it is first set; else it only grows, also after a resume."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A tag that divides sums of counters; with a denominator of zero it has no value."""

    tag: str
    numerator: tuple[str, ...]
    denominator: tuple[str, ...]
    help: str

    def value(self, totals: Mapping[str, float], before: Mapping[str, float]) -> float | None:
        """The quotient of what counters have grown by since they stood at ``before``."""
        numerator, denominator = (
            sum(totals[name] - before.get(name, 0) for name in names)
            for names in (self.numerator, self.denominator)
        )
        return numerator / denominator if denominator else None


def _counter(name: str, help: str, tag: str | None = None, merge: Merge = Merge.SUM) -> Metric:
    return Metric(name, merge, help, tag)


def _family(name: str, members: Iterable[str], help: str, tag: str | None, merge: Merge) -> Iterator[Metric]:
    """One counter per member; ``tag`` has a place for it."""
    for member in members:
        member_tag = None if tag is None else tag.format(member)
        yield Metric(f"{name}/{member}", merge, f"{help}: {member}", member_tag)


def _gauge(name: str, merge: Merge, help: str) -> Metric:
    return Metric(name, merge, help, f"async/{name}", is_gauge=True)


METRICS: tuple[Metric, ...] = (
    _counter("steps", "optimizer steps", None, Merge.SAME),
    _counter("b_steps_wanted", "steps at which the schedule wanted channel B", None, Merge.SAME),
    _counter("b_steps_run", "steps that trained on channel B", None, Merge.SAME),
    *_family(
        "b_steps_skipped",
        SkipReason,
        "wanted B steps that ran channel A",
        "async/skipped/{}_total",
        Merge.SAME,
    ),
    _counter("sync_rounds_committed", "rounds with at least one server proven", None, Merge.SAME),
    _counter("sync_rounds_failed", "rounds that proved no server", "async/sync_failed_total", Merge.SAME),
    _counter("sync_servers_caught_up", "servers proven without a round", "async/caught_up_total", Merge.SAME),
    _counter("rollouts_received", "rollouts that came back"),
    _counter("rollouts_prepared", "rollouts that were matched to their ground truth"),
    _counter("rollouts_truncated", "those of them that were cut off at max_new_tokens"),
    _counter("rollouts_failed", "POSTs that brought no rollout", "async/rollout_fail_total"),
    _counter("rollouts_kept", "rollouts that new weights came under", "async/rollout_kept_total"),
    _counter("tokens_kept", "tokens that these had by then", "async/tokens_kept_total"),
    _counter(
        "rollouts_unconfirmed",
        "rollouts of weights that no round proved in the end; their samples are asked again",
        "async/rollout_unconfirmed_total",
    ),
    _counter("samples_quarantined", "samples given up", "async/quarantined_total"),
    *_family("samples_quarantined", QuarantineReason, "samples given up", None, Merge.SUM),
    _counter("objects_parsed", "objects kept by the parser", "parse/objects"),
    *_family("objects_dropped", ObjectDropReason, "objects dropped", "parse/dropped/{}", Merge.SUM),
    _counter("groups_compared", "groups of rollouts that got advantages", "group/compared_total"),
    _counter("group_reward_std", "sum of the standard deviations of their rewards"),
    *_family(
        "rollouts_unused",
        UnusedReason,
        "compared rollouts of which nothing is trained",
        "group/unused/{}_total",
        Merge.SUM,
    ),
    _counter("rollouts_dropped_stale", "rollouts that went stale in a group", "group/drop_stale_total"),
    _counter("targets_left_out", "corrected answers with no room in a pack", "group/targets_left_out_total"),
    _counter("policy_tokens", "sampled tokens that steps trained by rewards"),
    _counter("policy_clipped", "those of them that moved too far from what sampled to count"),
    _counter("policy_capped", "those of them whose importance weight was capped"),
    _counter("policy_log_prob_gap", "sum of |log-probability under the learner - under the server|"),
    _counter("policy_surprise", "sum of -log-probability under the learner"),
    _counter("policy_kl", "sum of their divergence from the reference model"),
    _counter("match_ground_truths", "ground-truth objects that went into matching"),
    _counter("match_pairs", "matched pairs"),
    _counter("match_sum_iou", "sum of the IoU of matched pairs"),
    _counter("match_gated", "candidate pairs under the IoU threshold", "match/gated"),
    _counter("packs_made", "packs offered to the ready queue", "async/prefetch_success_total"),
    _counter("segments_packed", "segments in the packs offered", "packing/segments"),
    _counter("tokens_packed", "tokens in the packs offered", "packing/tokens"),
    _counter("tokens_capacity", "tokens that those packs could hold"),
    _counter("segments_dropped_stale", "segments that went stale before they were packed"),
    _counter("packs_dropped_stale", "packs whose version left the window", "async/drop_stale_total"),
    _counter("packs_dropped_oldest", "packs pushed out of a full queue", "async/drop_oldest_total"),
    _counter("packs_trained", "packs that a step trained on"),
    _counter("supervised_tokens_trained", "tokens in those packs that carry a loss"),
    *_family("stage_seconds", STAGES, "seconds in stage", "time/{}", Merge.SUM),
    _gauge("queue_depth", Merge.MIN, "ready packs"),
    _gauge("queue_limit", Merge.SAME, "the most packs the queue holds"),
    _gauge("ver_current", Merge.SAME, "the learner's version"),
    _gauge("ver_lag", Merge.MAX, "oldest pack trained since the last logging step, in versions behind"),
    _gauge(
        "prefetch_last_progress_s_ago", Merge.MAX, "seconds since a pipeline last made a segment or a pack"
    ),
    _gauge("sync_pending", Merge.SAME, "1 while a round is due and waits for a push or an evaluation"),
    _gauge("sync_in_transfer", Merge.SAME, "1 while servers take and prove weights, beside training"),
    _gauge("infer_inflight", Merge.SUM, "tickets of the fence that are out"),
)

# Over the window since the last logging step: a mean over the whole run would hide every change.
RATIOS: tuple[Ratio, ...] = (
    Ratio("match/precision", ("match_pairs",), ("objects_parsed",), "matched share of predictions"),
    Ratio("match/recall", ("match_pairs",), ("match_ground_truths",), "matched share of ground truth"),
    Ratio(
        "match/f1",
        ("match_pairs", "match_pairs"),
        ("objects_parsed", "match_ground_truths"),
        "harmonic mean of precision and recall",
    ),
    Ratio("match/mean_iou", ("match_sum_iou",), ("match_pairs",), "mean IoU, or closeness, of matched pairs"),
    Ratio("parse/truncated_ratio", ("rollouts_truncated",), ("rollouts_prepared",), "rollouts cut off"),
    Ratio(
        "group/reward_std", ("group_reward_std",), ("groups_compared",), "mean deviation of a group's rewards"
    ),
    Ratio("policy/clip_share", ("policy_clipped",), ("policy_tokens",), "clipped share of sampled tokens"),
    Ratio("policy/cap_share", ("policy_capped",), ("policy_tokens",), "capped share of sampled tokens"),
    Ratio(
        "policy/log_prob_gap",
        ("policy_log_prob_gap",),
        ("policy_tokens",),
        "mean |log-probability under the learner - under the server|, nats",
    ),
    Ratio(
        "policy/entropy",
        ("policy_surprise",),
        ("policy_tokens",),
        "mean -log-probability of sampled tokens, nats: the policy's entropy, as rollouts estimate it",
    ),
    Ratio("policy/kl", ("policy_kl",), ("policy_tokens",), "mean divergence from the reference model, nats"),
    Ratio("packing/fill_ratio", ("tokens_packed",), ("tokens_capacity",), "filled share of packs"),
)


class Counters:
    """One rank's counters and gauges, which any thread may move. A name that is not declared raises KeyError.

    Gauges have no value until they are set. Counters continue after a resume; gauges do not. The terms of the task's
    reward are summed beside them, and may be below 0: ``reward_terms`` names them, the same on all ranks.
    """

    def __init__(self, reward_terms: Iterable[str] = ()) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {m.name: 0 for m in METRICS if not m.is_gauge}
        self._counts |= {REWARD + term: 0.0 for term in reward_terms}
        self._gauges: dict[str, float | None] = {m.name: None for m in METRICS if m.is_gauge}

    def add(self, name: str, amount: float = 1) -> None:
        """Grow a counter."""
        with self._lock:
            self._counts[name] += amount

    def set(self, name: str, value: float | None) -> None:
        """Set a gauge; None takes its value away."""
        if name not in self._gauges:
            raise KeyError(name)
        with self._lock:
            self._gauges[name] = value

    def raise_to(self, name: str, value: float) -> None:
        """Set a gauge to ``value`` unless it is higher already."""
        with self._lock:
            before = self._gauges[name]
            self._gauges[name] = value if before is None else max(value, before)

    def snapshot(self) -> dict[str, float]:
        """Every number at one moment; gauges that were never set are left out."""
        with self._lock:
            return self._counts | {name: value for name, value in self._gauges.items() if value is not None}

    def state_dict(self) -> dict[str, float]:
        """The counters, for a checkpoint."""
        with self._lock:
            return dict(self._counts)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint. Counters it does not know start at zero; others it names are ignored."""
        with self._lock:
            for name in self._counts:
                self._counts[name] = state.get(name, 0)


Gather = Callable[[str], Sequence[str]]
"""Every rank's text, in the order of ranks, on every rank."""

_MERGED: dict[Merge, Callable[[Iterable[float]], float]] = {
    Merge.SUM: sum,
    Merge.MIN: min,
    Merge.MAX: max,
    Merge.SAME: max,
}


def reward_ratios(names: Iterable[str]) -> tuple[Ratio, ...]:
    """The mean of each of a reward's terms that is among ``names``, over the rollouts that were matched."""
    return tuple(
        Ratio(name, (name,), ("rollouts_prepared",), "mean of the term")
        for name in names
        if name.startswith(REWARD)
    )


def merged(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One from what ``Counters.snapshot()`` gives on every rank. A gauge that no rank has set is left out."""
    ways = {metric.name: _MERGED[metric.merge] for metric in METRICS}
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: ways.get(name, sum)(part[name] for part in parts if name in part) for name in names}
