"""Declares every number that is kept: its name, whether it counts or gauges, how ranks merge, and its tag.

One table, so that a misspelt name raises, all ranks exchange vectors of one order, and
``docs/design/metrics.md`` can be checked against it. Read by ``Counters``, the merging and the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

PREFIX = "stage2_ab/"

# Declared here because telemetry stands below the modules that own these reasons; a test compares them.
PARSE_DROP_REASONS = (
    "not_an_object",
    "unexpected_key",
    "missing_box",
    "wrong_arity",
    "invalid_box",
    "missing_label",
)
SKIP_REASONS = ("not_enough_packs", "truncation_guard", "servers_suspect", "pipeline_failed")
QUARANTINE_REASONS = ("bad_sample", "prompt_mismatch", "poisonous_request", "too_slow")
STAGES = ("rollout", "prepare", "parse", "match", "target", "encode", "pack", "plan")


class Kind(StrEnum):
    """How a number moves."""

    COUNTER = "counter"
    """Only grows; zero at the start of a run; continues after a resume."""
    GAUGE = "gauge"
    """Takes any value, and none before it is first set."""


class Merge(StrEnum):
    """How the ranks' values become one."""

    SUM = "sum"
    MIN = "min"
    MAX = "max"
    SAME = "same"
    """Every rank holds the same value, because every rank takes the same decisions."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One declared number."""

    name: str
    kind: Kind
    merge: Merge
    help: str
    tag: str | None = None
    """Without the prefix ``stage2_ab/``; None keeps the number in the audit only."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A tag that divides sums of counters; with a denominator of zero it has no value."""

    tag: str
    numerator: tuple[str, ...]
    denominator: tuple[str, ...]
    help: str


def _counter(name: str, help: str, tag: str | None = None, merge: Merge = Merge.SUM) -> Metric:
    return Metric(name, Kind.COUNTER, merge, help, tag)


def _family(name: str, members: Iterable[str], help: str, tag: str | None, merge: Merge) -> Iterator[Metric]:
    """One counter per member; ``tag`` has a place for it."""
    for member in members:
        member_tag = None if tag is None else tag.format(member)
        yield Metric(f"{name}/{member}", Kind.COUNTER, merge, f"{help}: {member}", member_tag)


def _gauge(name: str, merge: Merge, help: str) -> Metric:
    return Metric(name, Kind.GAUGE, merge, help, f"async/{name}")


METRICS: tuple[Metric, ...] = (
    _counter("steps", "optimizer steps", None, Merge.SAME),
    _counter("b_steps_wanted", "steps at which the schedule wanted channel B", None, Merge.SAME),
    _counter("b_steps_run", "steps that trained on channel B", None, Merge.SAME),
    *_family(
        "b_steps_skipped",
        SKIP_REASONS,
        "wanted B steps that ran channel A",
        "async/skipped/{}_total",
        Merge.SAME,
    ),
    _counter("sync_rounds_committed", "rounds with at least one server proven", None, Merge.SAME),
    _counter("sync_rounds_failed", "rounds that proved no server", "async/sync_failed_total", Merge.SAME),
    _counter("sync_servers_failed", "servers that a round could not prove", None, Merge.SAME),
    _counter("rollouts_received", "rollouts that came back"),
    _counter("rollouts_prepared", "rollouts that became segments"),
    _counter("rollouts_truncated", "those of them that were cut off at max_new_tokens"),
    _counter("rollouts_failed", "POSTs that brought no rollout", "async/rollout_fail_total"),
    _counter("rollouts_aborted", "rollouts that a pending round ended; their samples are asked again"),
    _counter("samples_returned", "samples that go back to the stream without a rollout"),
    _counter("samples_quarantined", "samples given up", "async/quarantined_total"),
    *_family("samples_quarantined", QUARANTINE_REASONS, "samples given up", None, Merge.SUM),
    _counter("objects_parsed", "objects kept by the parser", "parse/objects"),
    *_family("objects_dropped", PARSE_DROP_REASONS, "objects dropped", "parse/dropped/{}", Merge.SUM),
    _counter("match_predictions", "predictions that went into matching"),
    _counter("match_ground_truths", "ground-truth objects that went into matching"),
    _counter("match_pairs", "matched pairs"),
    _counter("match_sum_iou", "sum of the IoU of matched pairs"),
    _counter("match_gated", "candidate pairs under the IoU threshold", "match/gated"),
    _counter("packs_made", "packs offered to the ready queue", "async/prefetch_success_total"),
    _counter("segments_packed", "segments in those packs", "packing/segments"),
    _counter("tokens_packed", "tokens in those packs", "packing/tokens"),
    _counter("tokens_capacity", "tokens that those packs could hold"),
    _counter("segments_dropped_stale", "segments that went stale before they were packed"),
    _counter("packs_dropped_stale", "packs whose version left the window", "async/drop_stale_total"),
    _counter("packs_dropped_oldest", "packs pushed out of a full queue", "async/drop_oldest_total"),
    _counter("packs_trained", "packs that a step trained on"),
    _counter("tokens_trained", "tokens in those packs"),
    _counter("supervised_tokens_trained", "tokens in those packs that carry a loss"),
    *_family("stage_seconds", STAGES, "seconds in stage", "time/{}", Merge.SUM),
    _gauge("queue_depth", Merge.MIN, "ready packs"),
    _gauge("queue_limit", Merge.SAME, "the most packs the queue holds"),
    _gauge("ver_current", Merge.SAME, "the learner's version"),
    _gauge("ver_lag", Merge.MAX, "oldest pack trained since the last logging step, in versions behind"),
    _gauge(
        "prefetch_last_progress_s_ago", Merge.MAX, "seconds since a pipeline last made a segment or a pack"
    ),
    _gauge("sync_pending", Merge.SAME, "1 while a round waits for the drain"),
    _gauge("infer_inflight", Merge.SUM, "tickets of the fence that are out"),
)

# Over the window since the last logging step: a mean over the whole run would hide every change.
RATIOS: tuple[Ratio, ...] = (
    Ratio("match/precision", ("match_pairs",), ("match_predictions",), "matched share of predictions"),
    Ratio("match/recall", ("match_pairs",), ("match_ground_truths",), "matched share of ground truth"),
    Ratio(
        "match/f1", ("match_pairs", "match_pairs"), ("match_predictions", "match_ground_truths"), "their mean"
    ),
    Ratio("match/mean_iou", ("match_sum_iou",), ("match_pairs",), "mean IoU of matched pairs"),
    Ratio("parse/truncated_ratio", ("rollouts_truncated",), ("rollouts_prepared",), "rollouts cut off"),
    Ratio("packing/fill_ratio", ("tokens_packed",), ("tokens_capacity",), "filled share of packs"),
)

# Of a whole evaluation, when it has ended; the audit's record ``evaluation`` holds its counts.
EVALUATION_TAGS: tuple[str, ...] = tuple(
    f"eval/{name}"
    for name in ("precision", "recall", "f1", "mean_iou", "truncated_ratio", "num_samples", "version")
)

METRICS_BY_NAME: dict[str, Metric] = {metric.name: metric for metric in METRICS}
