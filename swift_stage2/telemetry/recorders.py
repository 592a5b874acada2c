"""Turns what channel B's pipeline and evaluations report into counters, gauges, records and spans.

One recorder each, so that nothing of an evaluation reaches the ledger or the counters of what trains.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from swift_stage2.records import (
    BatchOutcome,
    MatchQuality,
    Pack,
    Rollout,
    RowOrigin,
    SampleKey,
    Segment,
    Target,
)
from swift_stage2.telemetry.activity import IntervalClock, PipelineActivity
from swift_stage2.telemetry.audit import AuditLog
from swift_stage2.telemetry.ledger import Entry, Ledger, MatchLog, RecordEntry, completion_of
from swift_stage2.telemetry.metrics import Counters
from swift_stage2.telemetry.trace import Trace

logger = logging.getLogger(__name__)

_CUT_BY_OUR_OWN_STOP = "stopped"
_MOST_TOLD = 20


class PipelineRecorder:
    """One rank's side of the pipeline's events. ``seconds`` is how long the stage took."""

    def __init__(
        self,
        counters: Counters,
        audit: AuditLog,
        ledger: Ledger,
        record: AuditLog,
        matches: MatchLog,
        trace: Trace,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counters = counters
        self._audit = audit
        self._ledger = ledger
        self._record = record
        self._matches = matches
        self._trace = trace
        self.clock = IntervalClock(PipelineActivity.IDLE, trace.now_ns, trace.recorder_of("pipeline"))
        self._num_posts_out = 0
        self._posts_lock = threading.Lock()
        self._now_s = now_s
        self._last_progress_s = now_s()
        self._num_quarantined = 0

    @property
    def progress_s_ago(self) -> float:
        """Seconds since the last segment or pack was made, or since the start."""
        return self._now_s() - self._last_progress_s

    def batch(self, outcome: BatchOutcome, seconds: float) -> None:
        """One batch came back from the servers; ``seconds`` includes the wait for a ticket."""
        self._stage("rollout", seconds)
        self._counters.add("rollouts_received", len(outcome.rollouts))
        failed = [failure for failure in outcome.failures if failure.end != _CUT_BY_OUR_OWN_STOP]
        self._counters.add("rollouts_failed", sum(failure.num_requests > 0 for failure in failed))
        self._counters.add("samples_returned", len(outcome.returned))
        self._counters.add("rollouts_aborted", len(outcome.aborted))
        self._audit.write(
            "batch",
            seconds=seconds,
            num_rollouts=len(outcome.rollouts),
            num_returned=len(outcome.returned),
            num_aborted=len(outcome.aborted),
            num_quarantined=len(outcome.quarantined),
            num_posts=outcome.num_posts,
            failures=list(outcome.failures),
        )
        for rollout in outcome.rollouts:
            self._record.write(RecordEntry.COMPLETION, **completion_of(rollout))

    def read(
        self, keys: Sequence[SampleKey], *, num_objects: Sequence[int], num_pixels: Sequence[int | None]
    ) -> None:
        """Rows and images of drawn samples were read."""
        self._ledger.write(Entry.READ, keys, num_objects=num_objects, num_pixels=num_pixels)

    def enter(self, activity: PipelineActivity) -> None:
        """The pipeline's thread does this from now on."""
        self.clock.switch(activity)

    @contextmanager
    def post(self) -> Iterator[None]:
        """One POST is out, on its lane's thread. The pipeline is asking while at least one is."""
        with self._posts_lock:
            self._num_posts_out += 1
            if self._num_posts_out == 1:
                self.clock.switch_from(PipelineActivity.TICKET, PipelineActivity.ASKING)
        try:
            with self._trace.span("POST"):
                yield
        finally:
            with self._posts_lock:
                self._num_posts_out -= 1
                if self._num_posts_out == 0:
                    self.clock.switch_from(PipelineActivity.ASKING, PipelineActivity.TICKET)

    def matched(self, rollout: Rollout, target: Target, space: tuple[int, int] | None) -> None:
        """A rollout became the segment that was just told; ``space`` is that of the boxes, width and height."""
        self._matches.write("training", rollout, target, space)

    def segment(self, segment: Segment, seconds: float) -> None:
        """One rollout became a segment: parsed, matched, corrected and encoded."""
        self._stage("prepare", seconds)
        self._last_progress_s = self._now_s()
        self._count_quality(segment.quality)
        self._ledger.matched(segment)

    def pack(self, pack: Pack, seconds: float) -> None:
        """One pack was collated and is about to be offered to the queue."""
        self._stage("pack", seconds)
        self._last_progress_s = self._now_s()
        self._counters.add("packs_made")
        self._counters.add("segments_packed", len(pack.keys))
        self._counters.add("tokens_packed", pack.num_tokens)
        self._counters.add("tokens_capacity", pack.capacity_tokens)
        self._ledger.packed(pack)

    def dropped(self, pack: Pack, reason: str) -> None:
        """The queue dropped a pack; ``reason`` is ``dropped_stale`` or ``dropped_oldest``."""
        self._counters.add(f"packs_{reason}")

    def stale_segment(self, segment: Segment) -> None:
        """A segment went stale before it was packed."""
        self._counters.add("segments_dropped_stale")

    def quarantined(self, key: object, reason: str, message: str, origin: RowOrigin | None = None) -> None:
        """A sample was given up; ``reason`` is a ``QuarantineReason``. The first few are logged."""
        self._counters.add(f"samples_quarantined/{reason}")
        self._counters.add("samples_quarantined")
        place = {"file": origin.file, "line": origin.line, "images": origin.images} if origin else {}
        self._audit.write("quarantine", sample=key, reason=reason, message=message, **place)
        self._num_quarantined += 1
        if self._num_quarantined <= _MOST_TOLD:
            last = "; the audit holds those to come" if self._num_quarantined == _MOST_TOLD else ""
            logger.warning("a sample is given up (%s): %s: %s%s", reason, origin or key, message, last)

    def _stage(self, name: str, seconds: float) -> None:
        self._counters.add(f"stage_seconds/{name}", max(0.0, seconds))
        if name != "rollout":  # its POSTs have spans of their own
            end_ns = self._trace.now_ns()
            self._trace.record(name, end_ns - int(seconds * 1e9), end_ns)

    def _count_quality(self, quality: MatchQuality) -> None:
        add = self._counters.add
        add("rollouts_prepared")
        add("rollouts_truncated", quality.num_truncated)
        add("objects_parsed", quality.num_predictions)
        add("match_predictions", quality.num_predictions)
        add("match_ground_truths", quality.num_ground_truth)
        add("match_pairs", quality.num_pairs)
        add("match_sum_iou", quality.sum_iou)
        add("match_gated", quality.num_gated)
        for reason, count in quality.dropped.items():
            add(f"objects_dropped/{reason}", count)


class EvaluationRecorder:
    """One rank's side of evaluations."""

    def __init__(self, audit: AuditLog, matches: MatchLog) -> None:
        self._audit = audit
        self._matches = matches
        self._versions: dict[str, int] = {}  # of the POST that each server is asked; a lane has one at a time

    def sent(self, keys: Sequence[SampleKey], *, server: str, seed: int, version: int) -> None:
        """A POST begins."""
        self._versions[server] = version

    def finished(self, keys: Sequence[SampleKey], *, server: str, end: str, seconds: float) -> None:
        """It is over; its ticket is still held."""
        self._audit.write(
            "post",
            purpose="evaluation",
            server=server,
            version=self._versions[server],
            end=end,
            seconds=seconds,
            rows=[key.index for key in keys],
        )

    def matched(self, rollout: Rollout, target: Target, space: tuple[int, int] | None) -> None:
        """A sample was answered; ``space`` is that of the boxes, width and height."""
        self._matches.write("evaluation", rollout, target, space)

    def given_up(self, index: int, message: str) -> None:
        """Row ``index`` of the validation set counts as failed."""
        self._audit.write("evaluation_failure", row=index, message=message)
