"""The rollout attempts of one rank that servers have in hand, and what becomes of their samples.

An attempt is a sample as it was drawn; a sample that returns is drawn for another one. The pipeline begins and closes
attempts, the places of the client tell of POSTs, and the pacer is told what is in the making.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

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
    """When that was."""


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

    def begin(self, keys: Sequence[SampleKey]) -> None:
        """They were drawn, so that none of them is open, and are about to be submitted."""
        with self._lock:
            assert not self._open.keys() & set(keys), "a sample has one attempt at a time"
            self._open.update(dict.fromkeys(keys, Attempt()))

    def close(self, keys: Sequence[SampleKey]) -> None:
        """Their share has ended. Raises KeyError: one of them is not open, so that it would come out twice."""
        with self._lock:
            for key in keys:
                del self._open[key]

    def sent(self, keys: Sequence[SampleKey], *, server: str, seed: int, version: int) -> None:
        attempt = Attempt(version, time.monotonic())
        with self._lock:
            assert self._open.keys() >= set(keys), "only open attempts are asked for"
            self._open.update(dict.fromkeys(keys, attempt))
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

    def take_back(self, outcome: BatchOutcome, *, is_stopped: bool) -> None:
        """Those that a share did not answer."""
        too_slow = [sample.key for sample in outcome.timed_out]
        returned = [sample.key for sample in outcome.returned if sample.key not in too_slow]
        self.source.give_back(returned, ReturnReason.STOPPED if is_stopped else ReturnReason.FAILED)
        # A sample that does not answer even when it is asked alone would otherwise be asked first, for ever.
        self._count_attempt(too_slow, ReturnReason.TIMED_OUT)

    def unconfirmed(self, keys: Sequence[SampleKey]) -> None:
        """Their rollouts are of weights that no round is going to prove."""
        self.source.give_back(keys, ReturnReason.FAILED)
        self.events.count("rollouts_unconfirmed", len(keys))

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

    def unused(self, keys: Sequence[SampleKey], reason: UnusedReason) -> None:
        if keys:
            self.source.settle_unused(keys, reason)
            self.events.count(f"rollouts_unused/{reason}", len(keys))

    def refused(self, rollout: Rollout, refusal: SampleError | MatchingError) -> None:
        """Its sample cannot be used, or its server was asked another prompt than the learner's."""
        is_of_prompt = isinstance(refusal, PromptMismatch)
        reason = QuarantineReason.PROMPT if is_of_prompt else QuarantineReason.SAMPLE
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
