"""Turns merged numbers into scalars, and scalars into one TensorBoard event file, written by rank 0 at logging steps.

Totals are totals of the run; ratios cover the window since the last logging step and are absent when nothing
happened in it. Records go straight to the file, without a thread. A write that fails is taken back whole, because
readers stop at a torn record: a full disk costs points of a curve, never the run.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import BytesIO, FileIO
from pathlib import Path

from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import custom_scalars

from swift_stage2.records import ObjectDropReason
from swift_stage2.scheduling.step_plan import SkipReason, StepPlan
from swift_stage2.telemetry.activity import NANOSECONDS, Activity
from swift_stage2.telemetry.audit import StorageWarning
from swift_stage2.telemetry.ledger import UnusedReason
from swift_stage2.telemetry.metrics import (
    EVALUATION_TAGS,
    METRICS,
    PREFIX,
    RATIOS,
    REWARD,
    SCORE_TAGS,
    STAGES,
    MergedMetrics,
    reward_ratios,
)

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
            *(f"async/skipped/{reason}_total" for reason in SkipReason),
        ),
    },
    "Queue and freshness": {
        "ready packs": ("async/queue_depth", "async/queue_limit", "async/prefetch_success_total"),
        "version": ("async/ver_current",),
        "lag": ("async/ver_lag",),
        "in flight": ("async/infer_inflight", "async/sync_pending", "async/sync_in_transfer"),
        "progress": ("async/prefetch_last_progress_s_ago",),
        "run-ahead": ("async/run_ahead_exhausted_total",),
    },
    "Drops by cause": {
        "packs": ("async/drop_stale_total", "async/drop_oldest_total"),
        "samples and rollouts": (
            "async/quarantined_total",
            "async/rollout_fail_total",
            "async/rollout_unconfirmed_total",
        ),
        "aborted rollouts": ("async/rollout_resumed_total",),
        "tokens of aborted rollouts": (
            "async/tokens_kept_total",
            "async/tokens_aborted_total",
            "async/tokens_partial_dropped_total",
        ),
        "rounds": ("async/sync_failed_total", "async/caught_up_total"),
        "objects": tuple(f"parse/dropped/{reason}" for reason in ObjectDropReason),
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
        "reward": (f"{REWARD}.+",),
    },
    "Objective": {
        "groups": ("group/compared_total", *(f"group/unused/{reason}_total" for reason in UnusedReason)),
        "stale in a group, left out beside": ("group/drop_stale_total", "group/targets_left_out_total"),
        "rewards of a group": ("group/reward_std",),
        "clipped and capped tokens": ("policy/clip_share", "policy/cap_share"),
        "log-probability gap": ("policy/log_prob_gap",),
        "entropy": ("policy/entropy",),
        "divergence from the reference model": ("policy/kl",),
    },
    "Evaluation": {
        "against the validation set": EVALUATION_TAGS[:4],
        "COCO": SCORE_TAGS[:4],
        "over IoU 0.5 to 0.95": SCORE_TAGS[4:7],
        "truncated, invalid, failed": ("eval/truncated_ratio", *SCORE_TAGS[7:]),
        "answered": ("eval/num_samples",),
        "version": ("eval/version",),
    },
    "Packing": {
        "fill": ("packing/fill_ratio",),
        "made": ("packing/segments", "packing/tokens"),
    },
}

_IF_USED = ("stage_seconds/", "groups_", "rollouts_unused/", "rollouts_dropped_stale", "targets_left_out")


def layout_summary() -> Summary:
    """The layout as TensorBoard stores it; the page takes regular expressions."""
    exact = {
        title: {name: ["Multiline", [f"^{PREFIX}{tag}$" for tag in tags]] for name, tags in charts.items()}
        for title, charts in LAYOUT.items()
    }
    return custom_scalars(exact)  # type: ignore[no-untyped-call]


def scalars_of_merge(merged: MergedMetrics, window_start: Mapping[str, float]) -> dict[str, float]:
    """Every scalar of one logging step. ``window_start`` holds the counters at the one before."""
    # Stages that this run does not time one by one, and groups that it does not make, would be lines at zero.
    used = {name: value for name, value in merged.values.items() if value or not name.startswith(_IF_USED)}
    scalars = {
        PREFIX + metric.tag: float(used[metric.name])
        for metric in METRICS
        if metric.tag is not None and metric.name in used
    }
    for ratio in (*RATIOS, *reward_ratios(merged.values)):
        if (value := ratio.value(merged.values, window_start)) is not None:
            scalars[PREFIX + ratio.tag] = value
    return scalars | _schedule(merged.values) | _activities(merged.activity_ns)


def scalars_of_plan(plan: StepPlan) -> dict[str, float]:
    """The plan of one step; equal on every rank."""
    return {
        f"{PREFIX}async/policy_wants_b": float(plan.wanted_b),
        f"{PREFIX}async/step_kind_b": float(plan.channel == "B"),
        f"{PREFIX}async/b_step_skipped_due_to_queue": float(plan.skip_reason == "not_enough_packs"),
    }


def _schedule(values: Mapping[str, float]) -> dict[str, float]:
    if not values["steps"]:
        return {}
    return {
        f"{PREFIX}async/b_ratio_realized": values["b_steps_run"] / values["steps"],
        f"{PREFIX}async/b_debt": values["b_steps_wanted"] - values["b_steps_run"],
        f"{PREFIX}async/b_steps_skipped_total": sum(values[f"b_steps_skipped/{why}"] for why in SkipReason),
    }


def _activities(activity_ns: Mapping[Activity, int]) -> dict[str, float]:
    times = {f"{PREFIX}time/learner_{activity}": ns / NANOSECONDS for activity, ns in activity_ns.items()}
    return times | {f"{PREFIX}time/learner_wall": sum(activity_ns.values()) / NANOSECONDS}


class TensorBoardSink:
    """One event file in ``directory``, made at the first write. Not for several threads at once."""

    def __init__(self, directory: Path, *, warning: StorageWarning | None = None) -> None:
        host = socket.gethostname()
        self._path = directory / f"events.out.tfevents.{int(time.time()):010d}.{host}.{os.getpid()}.stage2"
        self._warning = warning or StorageWarning()
        self._file: FileIO | None = None
        self._closed = False

    def write_scalars(self, step: int, scalars: Mapping[str, float], wall_time: float | None = None) -> None:
        """Write all ``scalars`` (by full tag) as one event."""
        if not scalars:
            return
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._write(Event(step=step, summary=Summary(value=values)), wall_time)

    def write_images(self, step: int, images: Mapping[str, bytes]) -> None:
        values = []
        for name, content in images.items():
            width, height = Image.open(BytesIO(content)).size
            image = Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=content)
            values.append(Summary.Value(tag=f"{PREFIX}eval/pictures/{name}", image=image))
        if values:
            self._write(Event(step=step, summary=Summary(value=values)), None)

    def write_text(self, tag: str, text: str) -> None:
        """Write ``text`` (Markdown) once, at step 0."""
        self._write(Event(step=0, summary=text_pb(tag, text)), None)

    def close(self) -> None:
        """Close the file; later writes are dropped. May be called again."""
        self._closed = True
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._warning.report(self._path, error)

    def _write(self, event: Event, wall_time: float | None) -> None:
        if self._closed:
            return
        event.wall_time = time.time() if wall_time is None else wall_time
        try:
            self._append(self._open(), event)
        except OSError as error:
            self._warning.report(self._path, error)

    def _open(self) -> FileIO:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = FileIO(self._path, "ab")
            try:
                self._append(file, Event(wall_time=time.time(), file_version="brain.Event:2"))
                self._append(file, Event(wall_time=time.time(), summary=layout_summary()))
            except OSError:
                with suppress(OSError):
                    file.close()
                raise
            self._file = file
        return self._file

    def _append(self, file: FileIO, event: Event) -> None:
        good = file.tell()
        try:
            RecordWriter(_Whole(file)).write(event.SerializeToString())
        except OSError:
            with suppress(OSError):  # a device, or a disk that is gone; nothing was to be saved there
                file.truncate(good)
            raise


class _Whole:
    """The writer that ``RecordWriter`` asks for: a short write goes on until all of it is in the file."""

    def __init__(self, file: FileIO) -> None:
        self._file = file

    def write(self, data: bytes) -> None:
        while data:
            data = data[self._file.write(data) :]
