"""The rollout attempts of one rank that servers have in hand, those that go on, and what becomes of their samples.

An attempt is a sample as it was drawn; a sample that returns is drawn for another one. It is open until its share ends,
and on, where its rollout was aborted and is to be resumed. The pipeline begins and closes attempts, the places of the
client tell of POSTs, and the pacer is told what is in the making.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from swift_stage2.channel_b.sample_source import SampleSource
from swift_stage2.errors import MatchingError, PromptMismatch, SampleError
from swift_stage2.records import (
    BatchOutcome,
    QuarantineReason,
    ReturnReason,
    Rollout,
    Sample,
    SampleKey,
    UnusedReason,
    VersionSpan,
)
from swift_stage2.scheduling.version_clock import VersionClock, is_fresh
from swift_stage2.servers.infer_wire import PREFIX, protect_from_abort
from swift_stage2.telemetry.event_log import EventLog
from swift_stage2.telemetry.events import Finished, Sent
from swift_stage2.telemetry.recorders import PipelineRecorder

_END_S = 10.0  # places end within their calls' cut
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
        """They were drawn, so that none of them is open, and are about to be submitted."""
        with self._lock:
            assert not self._open.keys() & set(keys), "a sample has one attempt at a time"
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


def join(so_far: Rollout | None, rest: Rollout) -> Rollout | None:
    """The rollout up to here, as of the server that gave its newest token; None if its parts answer two prompts.

    ``rest.text`` is that of the whole answer: a character may be spelt on both sides of the cut.
    """
    if so_far is None:
        return rest
    if not rest.token_ids:  # aborted before it began, so that it says nothing
        return replace(so_far, seconds=so_far.seconds + rest.seconds)
    if rest.prompt_token_ids != so_far.prompt_token_ids:
        return None
    begin = len(so_far.token_ids)
    more = (VersionSpan(span.version, span.start + begin, span.end + begin) for span in rest.spans)
    both = so_far.log_probs is not None and rest.log_probs is not None
    return replace(
        rest,
        token_ids=so_far.token_ids + rest.token_ids,
        spans=(*so_far.spans, *more),
        log_probs=(*(so_far.log_probs or ()), *(rest.log_probs or ())) if both else None,
        seconds=so_far.seconds + rest.seconds,
    )


def newest_version(rollout: Rollout) -> int:
    """The newest version that sampled any of its tokens. A later part may be older: servers install one by one."""
    return max(span.version for span in rollout.spans)


@dataclass(eq=False, repr=False)
class PartialRollouts:
    """Rollouts of one rank that servers aborted for new weights and that go on. Of the pipeline's thread.

    One is asked for its rest by the same request with the ids so far behind it, on any proven server. Its attempt stays
    open meanwhile, so its sample is drawn once. Every part keeps the version that sampled it, and a rollout is as old
    as its oldest token: one that another abort would make useless is protected, and waited for instead.
    """

    attempts: Attempts
    ends: AttemptOutcomes
    confirms: Callable[[Rollout], bool | None]
    """``RolloutClient.confirms``: True once its round is proven, False if it never will be, None as long as it may."""
    clock: VersionClock
    max_resumes: int | None
    """None: aborted rollouts begin anew, and only once."""
    version_window: int

    def __post_init__(self) -> None:
        self._waiting: deque[Sample] = deque()
        self._begun_anew: set[SampleKey] = set()

    @property
    def num_asked(self) -> int:
        """Attempts that servers have in hand. Where no server may be asked, partial ones wait as long as that lasts."""
        return len(self.attempts) - len(self._waiting)

    def handle_result(self, outcome: BatchOutcome) -> BatchOutcome:
        """The same with whole rollouts, and without the samples that go on; it closes the attempts of all others."""
        if self.max_resumes is not None:
            outcome = self._sort(outcome)
        done = [rollout.sample.key for rollout in outcome.rollouts]
        ended = [sample.key for sample in outcome.returned]
        quarantined = [sample.key for sample, _ in outcome.quarantined]
        self.attempts.close([*done, *ended, *quarantined])
        self._begun_anew |= {rollout.sample.key for rollout in outcome.aborted}
        self._begun_anew -= {*done, *quarantined}
        return outcome

    def _sort(self, outcome: BatchOutcome) -> BatchOutcome:
        """Aborted ones go on, and so does one whose rest nobody gave. A server that refuses a rest condemns nobody."""
        so_far = {sample.key: self.attempts.of(sample.key).so_far for sample in outcome.samples}
        wholes = [(each.sample, join(so_far[each.sample.key], each)) for each in outcome.rollouts]
        parts = [(each, join(so_far[each.sample.key], each)) for each in outcome.aborted]
        partial = tuple(part for _, part in parts if part is not None)
        aborted = {rollout.sample.key for rollout in outcome.aborted}
        over = aborted | {sample.key for sample in outcome.timed_out}
        unanswered = [
            sample for sample in outcome.returned if so_far[sample.key] is not None and sample.key not in over
        ]
        for each in partial:
            self.attempts.set_aside(each.sample.key, each)
        self._waiting += [*unanswered, *(each.sample for each in partial)]
        going_on = {sample.key for sample in unanswered} | {each.sample.key for each in partial}
        finished = {sample.key for sample, whole in wholes if whole is not None}
        for key, part in so_far.items():
            if part is not None and key not in going_on | finished:
                self.ends.events.count("tokens_partial_dropped", len(part.token_ids))
        refused = [sample for sample, _ in outcome.quarantined if so_far[sample.key] is not None]
        return replace(
            outcome,
            rollouts=tuple(whole for _, whole in wholes if whole is not None),
            partial=partial,
            aborted=tuple(each for each, part in parts if part is None),
            returned=(
                *(sample for sample in outcome.returned if sample.key not in going_on),
                *(sample for sample, whole in wholes if whole is None),
                *refused,
            ),
            quarantined=tuple(pair for pair in outcome.quarantined if so_far[pair[0].key] is None),
        )

    def to_resume(self, most: int) -> list[Sample]:
        """At most so many to be asked now, oldest first. Ends those that are stale or of weights that nobody proves."""
        waiting, self._waiting = self._waiting, deque()
        resumed: list[Sample] = []
        for sample in waiting:
            so_far = self.attempts.of(sample.key).so_far
            confirmed = so_far is None or self.confirms(so_far)
            if so_far is not None and confirmed is False:
                self._end(so_far)
                self.ends.unconfirmed([sample.key])
            elif so_far is not None and not self._is_fresh(so_far.version, self.clock.current):
                self._end(so_far)
                self.ends.dropped([sample.key], ReturnReason.STALE)
            elif confirmed and len(resumed) < most:
                resumed.append(sample)
            else:
                self._waiting.append(sample)
        return resumed

    def _end(self, so_far: Rollout) -> None:
        self.attempts.close([so_far.sample.key])
        self.ends.events.count("tokens_partial_dropped", len(so_far.token_ids))

    def request(self, sample: Sample, request: Mapping[str, Any]) -> dict[str, Any]:
        """``request`` with the ids so far, verbatim; protected if it is to be waited for when new weights come."""
        so_far = self.attempts.of(sample.key).so_far
        prefix = {} if so_far is None else {PREFIX: list(so_far.token_ids)}
        whole = {**request, **prefix}
        return protect_from_abort(whole) if self._must_finish(sample.key, so_far) else whole

    def _must_finish(self, key: SampleKey, so_far: Rollout | None) -> bool:
        if key in self._begun_anew or self.max_resumes is None:
            return key in self._begun_anew
        # Who aborted it brings the next version, and whoever aborts it then the one after.
        current = self.clock.current
        oldest = current if so_far is None else so_far.version
        served = current if so_far is None else max(current, newest_version(so_far) + 1)
        is_worth_it = self._is_fresh(oldest, served + 1)
        return not is_worth_it or self.attempts.of(key).num_cuts >= self.max_resumes

    def _is_fresh(self, version: int, current: int) -> bool:
        return is_fresh(version, current=current, window=self.version_window)

    def give_back(self, next_finished: Callable[[float], BatchOutcome | None]) -> None:
        """The run ends: nothing is resumed, and what servers have in hand comes back, for the client is stopped."""
        keys = [sample.key for sample in self._waiting]
        self._waiting.clear()
        self._end_stopped(keys)
        ends = time.monotonic() + _END_S
        while self.attempts and (left_s := ends - time.monotonic()) > 0:
            outcome = next_finished(left_s)
            if outcome is not None and outcome.settings is None:
                self._end_stopped([sample.key for sample in outcome.samples])

    def _end_stopped(self, keys: Sequence[SampleKey]) -> None:
        self.attempts.close(keys)
        self.ends.source.give_back(keys, ReturnReason.STOPPED)
