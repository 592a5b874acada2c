"""Groups the tags into the charts of TensorBoard's custom-scalars page: the questions a user asks of a run."""

from __future__ import annotations

from collections.abc import Sequence

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.custom_scalar import layout_pb2, metadata
from tensorboard.util.tensor_util import make_tensor_proto

from swift_stage2.telemetry.activity import Activity
from swift_stage2.telemetry.metrics import EVALUATION_TAGS, PARSE_DROP_REASONS, PREFIX, SKIP_REASONS, STAGES

Charts = dict[str, Sequence[str]]

LAYOUT: dict[str, Charts] = {
    "Policy and outcome": {
        "wanted and run": (
            "async/policy_wants_b",
            "async/step_kind_b",
            "async/b_step_skipped_due_to_queue",
        ),
        "share of B": ("async/b_ratio_realized",),
        "debt": ("async/b_debt",),
        "skipped by reason": (
            "async/b_steps_skipped_total",
            *(f"async/skipped/{reason}_total" for reason in SKIP_REASONS),
        ),
    },
    "Queue and freshness": {
        "ready packs": ("async/queue_depth", "async/queue_limit", "async/prefetch_success_total"),
        "version": ("async/ver_current",),
        "lag": ("async/ver_lag",),
        "in flight": ("async/infer_inflight", "async/sync_pending"),
        "progress": ("async/prefetch_last_progress_s_ago",),
    },
    "Drops by cause": {
        "packs": ("async/drop_stale_total", "async/drop_oldest_total"),
        "samples and rollouts": ("async/quarantined_total", "async/rollout_fail_total"),
        "rounds": ("async/sync_failed_total",),
        "objects": tuple(f"parse/dropped/{reason}" for reason in PARSE_DROP_REASONS),
    },
    "Time by activity": {
        "learner": (*(f"time/learner_{activity}" for activity in Activity), "time/learner_wall"),
        "stages": tuple(f"time/{stage}" for stage in STAGES),
    },
    "Match quality": {
        "against ground truth": ("match/precision", "match/recall", "match/f1", "match/mean_iou"),
        "gated pairs": ("match/gated",),
        "parsed objects": ("parse/objects",),
        "truncated": ("parse/truncated_ratio",),
    },
    "Evaluation": {
        "against the validation set": EVALUATION_TAGS[:4],
        "truncated": ("eval/truncated_ratio",),
        "answered": ("eval/num_samples",),
        "version": ("eval/version",),
    },
    "Packing": {
        "fill": ("packing/fill_ratio",),
        "made": ("packing/segments", "packing/tokens"),
    },
}


def layout_summary() -> Summary:
    """The layout as TensorBoard stores it."""
    categories = [
        layout_pb2.Category(title=title, chart=[_chart(name, tags) for name, tags in charts.items()])
        for title, charts in LAYOUT.items()
    ]
    layout = layout_pb2.Layout(category=categories)
    # tensorboard's own function for this summary needs TensorFlow.
    value = Summary.Value(
        tag=metadata.CONFIG_SUMMARY_TAG,
        metadata=metadata.create_summary_metadata(),
        tensor=make_tensor_proto(layout.SerializeToString()),
    )
    return Summary(value=[value])


def _chart(title: str, tags: Sequence[str]) -> layout_pb2.Chart:
    exact = [f"^{PREFIX}{tag}$" for tag in tags]  # the page takes regular expressions
    return layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=exact))
