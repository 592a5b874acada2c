"""The rollout attempts of one rank that servers have in hand, and what becomes of a sample whose attempt has ended.

An attempt is a sample as it was drawn; a sample that returns is drawn for another one. It is open until its share ends,
and on, where its rollout was aborted and is to be resumed. The pipeline begins and closes attempts, the places of the
client tell of POSTs, and the pacer is told what is in the making.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from swift_stage2.channel_b.sample_source import SampleSource
from swift_stage2.errors import MatchingError, PromptMismatch, SampleError
from swift_stage2.records import (
    BatchOutcome,
    QuarantineReason,
    ReturnReason,
    Rollout,
    SampleKey,
    UnusedReason,
)
from swift_stage2.telemetry.event_log import EventLog
from swift_stage2.telemetry.events import Finished, Sent
from swift_stage2.telemetry.recorders import PipelineRecorder

logger = logging.getLogger(__name__)

MANY_GIVEN_UP = 8  # samples, because one server was asked another prompt; then that is told, once

_WORDS = {
    ReturnReason.STALE: "went stale",
    ReturnReason.OVERFLOW: "was pushed out of a full queue",
    ReturnReason.TIMED_OUT: "did not end in time",
}


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt as it stands."""

    version: int | None = None
    """The version of the weights that its server held, proven, when its latest POST left."""
    sent_s: float | None = None
    """When that was; of a resumed one earlier by as long as its parts before had taken."""
    so_far: Rollout | None = None
    """Its tokens until it was aborted last, if it had any."""
    num_cuts: int = 0
    """Number of times that a server aborted this attempt's rollout."""

    @property
    def oldest_version(self) -> int | None:
        """Of what it has and is being given."""
        return self.version if self.so_far is None else self.so_far.version


class Attempts:
    """Those that are open. Safe from any thread."""

    def __init__(self, log: EventLog | None = None) -> None:
        """``log`` keeps every POST."""
        self._log = log or EventLog(None)
        self._lock = threading.Lock()
        self._open: dict[SampleKey, Attempt] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self) -> dict[SampleKey, Attempt]:
        """All of them, as they stand now."""
        with self._lock:
            return dict(self._open)

    def of(self, key: SampleKey) -> Attempt:
        """A sample's attempt as it stands now; one that has not begun if none is open."""
        return self._open.get(key, Attempt())

    def begin(self, keys: Sequence[SampleKey]) -> None:
        """They were drawn and are about to be submitted. Raises ValueError: one of them is open already."""
        with self._lock:
            if twice := self._open.keys() & set(keys):
                raise ValueError(
                    f"a sample has one attempt at a time, got {sorted(list(key) for key in twice)}"
                )
            self._open.update(dict.fromkeys(keys, Attempt()))

    def close(self, keys: Sequence[SampleKey]) -> None:
        """Their share has ended. Raises KeyError: one of them is not open, so that it would come out twice."""
        with self._lock:
            for key in keys:
                del self._open[key]

    def set_aside(self, key: SampleKey, so_far: Rollout) -> None:
        """It was aborted with ``so_far``, and is to be resumed. Raises KeyError as ``close``."""
        with self._lock:
            attempt = self._open[key]
            kept = so_far if so_far.token_ids else None
            self._open[key] = replace(attempt, so_far=kept, num_cuts=attempt.num_cuts + 1)

    def sent(self, keys: Sequence[SampleKey], *, server: str, seed: int, version: int) -> None:
        now_s = time.monotonic()
        with self._lock:
            for key in keys:
                attempt = self._open[key]
                seconds = attempt.so_far.seconds if attempt.so_far is not None else 0.0
                self._open[key] = replace(attempt, version=version, sent_s=now_s - seconds)
        self._log.write(Sent(samples=tuple(keys), server=server, seed=seed, version=version))

    def finished(self, keys: Sequence[SampleKey], *, server: str, end: str, seconds: float) -> None:
        """It ended; what that means for them their share says."""
        self._log.write(Finished(samples=tuple(keys), server=server, end=end, seconds=round(seconds, 4)))


@dataclass(eq=False, repr=False)
class AttemptOutcomes:
    """Gives samples back to their source, or gives them up."""

    source: SampleSource
    events: PipelineRecorder
    redraw_dropped: bool
    max_attempts: int

    def __post_init__(self) -> None:
        self._num_given_up: Counter[str] = Counter()  # by server, because it was asked another prompt

    def take_back(self, outcome: BatchOutcome, *, is_stopped: bool) -> None:
        """Those that a share did not answer and that are not resumed."""
        too_slow = [sample.key for sample in outcome.timed_out]
        aborted = {rollout.sample.key for rollout in outcome.aborted}
        unanswered = ReturnReason.STOPPED if is_stopped else ReturnReason.FAILED
        returned = [sample.key for sample in outcome.returned if sample.key not in too_slow]
        self.source.give_back([key for key in returned if key in aborted], ReturnReason.ABORTED)
        self.source.give_back([key for key in returned if key not in aborted], unanswered)
        # A sample that does not answer even when it is asked alone would otherwise be asked first, for ever.
        self._count_attempt(too_slow, ReturnReason.TIMED_OUT)

    def unconfirmed(self, keys: Sequence[SampleKey]) -> None:
        """Their rollouts are of weights that no round is going to prove."""
        self.source.give_back(keys, ReturnReason.FAILED)
        self.events.count("rollouts_unconfirmed", len(keys))

    def stopped(self, keys: Sequence[SampleKey]) -> None:
        """The run ends before their rollouts are here."""
        self.source.give_back(keys, ReturnReason.STOPPED)

    def thrown_away(self, so_far: Rollout) -> None:
        """A partial rollout is not resumed; what becomes of its sample is told apart."""
        self.events.count("tokens_partial_dropped", len(so_far.token_ids))

    def dropped(self, keys: Sequence[SampleKey], reason: ReturnReason) -> None:
        if not reason.counts_attempt:
            self.source.give_back(keys, reason)
            return
        if self.redraw_dropped:
            self._count_attempt(keys, reason)
            return
        for key in keys:
            message = f"its rollout {_WORDS[reason]}; redraw_dropped is false"
            self.quarantine(key, QuarantineReason.TOO_SLOW, message)

    def stale_in_group(self, keys: Sequence[SampleKey]) -> None:
        """Their rollouts waited for others of their rows, until they were too old."""
        self.events.count("rollouts_dropped_stale", len(keys))
        self.dropped(keys, ReturnReason.STALE)

    def unused(self, keys: Sequence[SampleKey], reason: UnusedReason) -> None:
        if keys:
            self.source.settle_unused(keys, reason)
            self.events.count(f"rollouts_unused/{reason}", len(keys))

    def refused(self, rollout: Rollout, refusal: SampleError | MatchingError) -> None:
        """Its sample cannot be used, or its server was asked another prompt than the learner's."""
        reason = QuarantineReason.SAMPLE
        if isinstance(refusal, PromptMismatch):
            reason = QuarantineReason.PROMPT
            self._num_given_up[rollout.server] += 1
            if self._num_given_up[rollout.server] == MANY_GIVEN_UP:
                logger.warning(
                    "%s: its prompts agree with the learner's for some samples and differed for %d, which were given "
                    "up; where only large images differ, pixel limits do: compare max_pixels and template of server "
                    "and learner; the last one: %s",
                    rollout.server,
                    MANY_GIVEN_UP,
                    refusal,
                )
        self.quarantine(rollout.sample.key, reason, str(refusal))

    def quarantine(self, key: SampleKey, reason: str, message: str) -> None:
        origin = self.source.settle_quarantined(key, reason, message)
        self.events.quarantined(key, reason, message, origin)

    def _count_attempt(self, keys: Sequence[SampleKey], reason: ReturnReason) -> None:
        """Samples whose rollout was lost are asked again, up to ``max_attempts`` rollouts."""
        again: list[SampleKey] = []
        for key in keys:
            if key.attempt + 1 < self.max_attempts:
                again.append(key)
                continue
            message = f"max_attempts={self.max_attempts} rollouts were lost, the last one {_WORDS[reason]}"
            self.quarantine(key, QuarantineReason.TOO_SLOW, message)
        self.source.give_back(again, reason)
