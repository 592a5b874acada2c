"""Rollouts that servers aborted for new weights and that go on: what they have, when they are asked again, and how.

A partial rollout is asked for its rest by the same request with the ids so far behind it, on any proven server. Its
attempt stays open meanwhile, so its sample is drawn once. Every part keeps the version that sampled it, and a rollout
is as old as its oldest token: one that another abort would make useless is protected, and waited for instead.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from swift_stage2.channel_b.attempts import AttemptEnds, Attempts, AttemptState
from swift_stage2.records import BatchOutcome, ReturnReason, Rollout, Sample, SampleKey, VersionSpan
from swift_stage2.scheduling.version_clock import VersionClock, is_fresh
from swift_stage2.servers.infer_wire import PREFIX, protect_from_abort

_END_S = 10.0  # places end within their calls' cut


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
    """Those of one rank. Of the pipeline's thread."""

    attempts: Attempts
    ends: AttemptEnds
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

    def take_in(self, outcome: BatchOutcome) -> BatchOutcome:
        """The same with whole rollouts, and without the samples that go on; it closes the attempts of all others."""
        if self.max_resumes is not None:
            outcome = self._sort(outcome)
        done = [rollout.sample.key for rollout in outcome.rollouts]
        ended = [sample.key for sample in outcome.returned]
        quarantined = [sample.key for sample, _ in outcome.quarantined]
        self.attempts.close(done, AttemptState.DONE)
        self.attempts.close([*ended, *quarantined], AttemptState.ENDED)
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
        for sample in unanswered:
            self.attempts.set_aside(sample.key, None)
        self._waiting += [*unanswered, *(each.sample for each in partial)]
        going_on = {sample.key for sample in unanswered} | {each.sample.key for each in partial}
        finished = {sample.key for sample, whole in wholes if whole is not None}
        for key, part in so_far.items():
            if part is not None and key not in going_on | finished:
                self.ends.thrown_away(part)
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
        self.attempts.close([so_far.sample.key], AttemptState.ENDED)
        self.ends.thrown_away(so_far)

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
            if outcome is not None and outcome.terms is None:
                self._end_stopped([sample.key for sample in outcome.samples])

    def _end_stopped(self, keys: Sequence[SampleKey]) -> None:
        self.attempts.close(keys, AttemptState.ENDED)
        self.ends.stopped(keys)
