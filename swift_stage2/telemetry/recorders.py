"""Turns what channel B's pipeline reports into counters, gauges, events and spans."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from swift_stage2.columns import given_by
from swift_stage2.records import (
    BatchOutcome,
    MatchQuality,
    Pack,
    Rollout,
    RowOrigin,
    SampleKey,
    Segment,
    Target,
    image_paths,
)
from swift_stage2.telemetry.event_log import EventLog
from swift_stage2.telemetry.events import (
    Advantages,
    FailedPosts,
    Match,
    Matched,
    Packed,
    RecordedCompletion,
)
from swift_stage2.telemetry.metrics import REWARD, Counters
from swift_stage2.telemetry.timing import IntervalClock, PipelineActivity, Trace

logger = logging.getLogger(__name__)

MOST_MATCH_BYTES = 64 * 2**20
_CUT_BY_OUR_OWN_STOP = "stopped"
_MOST_TOLD = 20


def rows_to_keep(num_rows: int, num_kept: int, seed: int) -> frozenset[int]:
    """Which rows of the training set have their matches kept, the same on all ranks; at most ``num_kept``.

    They are the same in every epoch, too, so that a row is seen again under later versions.
    """
    return frozenset(random.Random(seed).sample(range(num_rows), min(num_kept, num_rows)))


@dataclass(eq=False)
class PipelineRecorder:
    """One rank's side of the pipeline's events. ``seconds`` is how long the stage took."""

    counters: Counters
    log: EventLog
    trace: Trace
    records: bool = False
    """Whether answers are kept for a replay."""
    kept_rows: Container[int] = ()
    """Of the data set; their matches are kept whole."""

    def __post_init__(self) -> None:
        self.clock = IntervalClock(
            PipelineActivity.IDLE, on_closed=partial(self.trace.record, track="pipeline")
        )
        self._num_posts_out = 0
        self._posts_lock = threading.Lock()
        self._last_progress_s = time.monotonic()
        self._num_quarantined = 0
        self._num_match_bytes = 0

    @property
    def progress_s_ago(self) -> float:
        """Seconds since the last segment or pack was made, or since the start."""
        return time.monotonic() - self._last_progress_s

    def batch(self, outcome: BatchOutcome) -> None:
        """Some came back from the servers, out of one share."""
        self._stage("rollout", outcome.seconds)
        self.counters.add("rollouts_received", len(outcome.rollouts))
        failed = [failure for failure in outcome.failures if failure.end != _CUT_BY_OUR_OWN_STOP]
        self.counters.add("rollouts_failed", sum(failure.num_requests > 0 for failure in failed))
        self.counters.add("rollouts_kept", sum(len(rollout.spans) > 1 for rollout in outcome.rollouts))
        self.counters.add("tokens_kept", sum(rollout.spans[-1].start for rollout in outcome.rollouts))
        if outcome.failures:
            self.log.write(FailedPosts(failures=outcome.failures))
        for rollout in outcome.rollouts if self.records else ():
            self.log.write(
                RecordedCompletion.of(rollout, sample=rollout.sample.key, columns=given_by(rollout))
            )

    def count(self, name: str, amount: int = 1) -> None:
        """So many more of what ``metrics`` has a counter for, and nothing else tells of."""
        self.counters.add(name, amount)

    def enter(self, activity: PipelineActivity) -> None:
        """The pipeline's thread does this from now on; waiting for a ticket is asking while a POST is out."""
        with self._posts_lock:
            is_asking = activity is PipelineActivity.TICKET and self._num_posts_out > 0
            self.clock.switch(PipelineActivity.ASKING if is_asking else activity)

    @contextmanager
    def post(self) -> Iterator[None]:
        """One POST is out, on the thread of its place. The pipeline that waits is asking while at least one is."""
        with self._posts_lock:
            self._num_posts_out += 1
            if self._num_posts_out == 1:
                self.clock.switch_from(PipelineActivity.TICKET, PipelineActivity.ASKING)
        try:
            with self.trace.span("POST"):
                yield
        finally:
            with self._posts_lock:
                self._num_posts_out -= 1
                if self._num_posts_out == 0:
                    self.clock.switch_from(PipelineActivity.ASKING, PipelineActivity.TICKET)

    def matched(self, rollout: Rollout, target: Target, space: tuple[int, int] | None) -> None:
        """A rollout was parsed, matched and corrected; ``space`` is that of the boxes, width and height."""
        self._count_quality(target.quality)
        # First, so that whoever reads of it has read the whole match.
        self._keep_match(rollout, target, space)
        self.log.write(
            Matched.of(
                rollout,
                samples=(rollout.sample.key,),
                num_rollout_tokens=len(rollout.token_ids),
                quality=target.quality,
            )
        )

    def compared(self, rollouts: Sequence[Rollout], reward_std: float) -> None:
        """The rollouts of one group have advantages, and are about to become segments."""
        self.counters.add("groups_compared")
        self.counters.add("group_reward_std", reward_std)
        if self.records:
            self.log.write(
                Advantages(
                    samples=tuple(rollout.sample.key for rollout in rollouts),
                    advantages=tuple(rollout.advantages or () for rollout in rollouts),
                )
            )

    def segment(self, segment: Segment, seconds: float) -> None:
        """One rollout became a segment."""
        self._stage("prepare", seconds)
        self.counters.add("targets_left_out", segment.num_left_out)
        self._last_progress_s = time.monotonic()

    def pack(self, pack: Pack, seconds: float) -> None:
        """One pack was collated and is about to be offered to the queue."""
        self._stage("pack", seconds)
        self._last_progress_s = time.monotonic()
        self.counters.add("packs_made")
        self.counters.add("segments_packed", len(pack.keys))
        self.counters.add("tokens_packed", pack.num_tokens)
        self.counters.add("tokens_capacity", pack.capacity_tokens)
        self.log.write(Packed.of(pack, samples=pack.keys))

    def dropped(self, pack: Pack, reason: str) -> None:
        """The queue dropped a pack; ``reason`` is ``dropped_stale`` or ``dropped_oldest``."""
        self.counters.add(f"packs_{reason}")

    def quarantined(self, key: SampleKey, reason: str, message: str, origin: RowOrigin | None = None) -> None:
        """A sample was given up; ``reason`` is a ``QuarantineReason``. The first few are logged."""
        self.counters.add(f"samples_quarantined/{reason}")
        self.counters.add("samples_quarantined")
        self._num_quarantined += 1
        if self._num_quarantined <= _MOST_TOLD:
            last = "; the event log holds those to come" if self._num_quarantined == _MOST_TOLD else ""
            logger.warning("a sample is given up (%s): %s: %s%s", reason, origin or key, message, last)

    def _keep_match(self, rollout: Rollout, target: Target, space: tuple[int, int] | None) -> None:
        match, key = target.match, rollout.sample.key
        if key.index not in self.kept_rows or self._num_match_bytes > MOST_MATCH_BYTES:
            return
        if match is None or space is None:
            return
        self._num_match_bytes += self.log.write(
            Match(
                sample=key,
                version=rollout.version,
                images=image_paths(rollout.sample.row),
                space=space,
                truth=match.truth,
                predicted=match.predicted,
                pairs=tuple((prediction, truth, round(iou, 4)) for prediction, truth, iou in match.pairs),
                rollout=rollout.text,
                target=target.text,
                truncated=rollout.truncated,
                dropped=target.quality.dropped,
                reward={term: round(value, 4) for term, value in target.quality.reward.items()},
            )
        )

    def _stage(self, name: str, seconds: float) -> None:
        self.counters.add(f"stage_seconds/{name}", max(0.0, seconds))
        if name != "rollout":  # its POSTs have spans of their own
            self.trace.record_last(name, seconds)

    def _count_quality(self, quality: MatchQuality) -> None:
        add = self.counters.add
        add("rollouts_prepared")
        add("rollouts_truncated", quality.num_truncated)
        add("objects_parsed", quality.num_predictions)
        add("match_ground_truths", quality.num_ground_truth)
        add("match_pairs", quality.num_pairs)
        add("match_sum_iou", quality.sum_iou)
        add("match_gated", quality.num_gated)
        for reason, count in quality.dropped.items():
            add(f"objects_dropped/{reason}", count)
        for term, value in quality.reward.items():
            add(REWARD + term, value)
