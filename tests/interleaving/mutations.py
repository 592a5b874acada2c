"""Mistakes that were made before, each as a subclass of the real part: the harness has to find every one.

The numbers are those of the predecessor's failures: 2, a guard held around the whole preparation and taken again per
POST; 3, the version raised after the door has reopened; 4, packs that are counted and not taken. The others show that
further invariants can be broken, too. Some mistakes of rounds cannot be made any more: a version's number is never
used twice, and a server has no install that waits for leave.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from interleaving.scene import Parts, WatchedUpdates
from interleaving.virtual_threading import TimeNames

from swift_stage2.channel_b.groups import Groups
from swift_stage2.channel_b.pipeline import Pipeline
from swift_stage2.channel_b.ready_queue import DropReason, ReadyQueue, Reservation
from swift_stage2.channel_b.rollouts import RolloutClient
from swift_stage2.channel_b.sample_source import SampleSource
from swift_stage2.evaluation import PinnedEvaluation
from swift_stage2.fence import InferFence
from swift_stage2.learner import Learner
from swift_stage2.records import (
    BatchOutcome,
    Pack,
    ReturnReason,
    Rollout,
    SampleKey,
    UnusedReason,
)
from swift_stage2.scheduling.server_life import ServerLife
from swift_stage2.telemetry.events import Drawn
from swift_stage2.weights.updates import UpdateFacts


class GuardedPipeline(Pipeline):
    """Failure 2: a sync asked for between guard and POST waits for the guard, and the POST for the sync."""

    def _ask_for(self, num_samples: int) -> None:
        servers = self.client._servers.values()
        fence = next(iter(servers)).fence
        while fence.enter() is None:
            TimeNames.sleep(0.05)
        super()._ask_for(num_samples)
        while any(server.in_hand for server in servers):
            TimeNames.sleep(0.05)
        fence.leave()


class LateFence(InferFence):
    """Failure 3: rollouts of new weights carry the old number."""

    def reopen(self, version: int) -> None:
        super().reopen(self._version)
        super().reopen(version)


class CountingQueue(ReadyQueue):
    """Failure 4: what a step was promised stays within reach of expiry and overflow."""

    def has_room(self, oldest: int) -> bool:
        """No pack waits, as none did then."""
        return True

    def reserve(self, n: int, *, current_version: int, min_tokens: int = 0) -> Reservation | None:
        reservation = super().reserve(n, current_version=current_version, min_tokens=min_tokens)
        if reservation is None:
            return None
        with self._lock:
            self._ready.extendleft(reversed(reservation._packs))
        return CountedReservation(self, reservation._packs)


class CountedReservation(Reservation):
    """Takes what is there by then."""

    def take(self) -> list[Pack]:
        with self._queue._lock:
            ready = self._queue._ready
            return [ready.popleft() for _ in range(min(len(ready), len(self._packs)))]

    def release(self) -> None:
        """Nothing was taken."""


class ForgetfulClient(RolloutClient):
    """Takes a POST that its deadline ended for one that its server has ended."""

    def busy(self) -> frozenset[str]:
        servers = self._servers.items()
        return frozenset(url for url, server in servers if server.fence.is_open or server.fence.in_flight)


class LosingPipeline(Pipeline):
    """Samples of dropped packs do not return to the stream."""

    def on_drop(self, pack: Pack, reason: DropReason) -> None:
        self.events.dropped(pack, reason)


class ForgettingPipeline(Pipeline):
    """A share that ends without an answer closes its attempts, and that is all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ends.take_back = lambda outcome, is_stopped: None  # type: ignore[method-assign]


class YoungClient(RolloutClient):
    """A rollout under which new weights came is as old as its newest tokens."""

    def next_finished(self, timeout_s: float) -> BatchOutcome | None:
        outcome = super().next_finished(timeout_s)
        if outcome is None:
            return None
        return replace(outcome, rollouts=tuple(map(_as_if_of_its_last_part, outcome.rollouts)))


def _as_if_of_its_last_part(rollout: Rollout) -> Rollout:
    return replace(rollout, spans=(rollout.spans[-1]._replace(start=0),))


class RepeatingClient(RolloutClient):
    """What ends beside other POSTs comes out twice."""

    def put(self, outcome: BatchOutcome) -> None:
        for _ in range(1 + any(server.state._out for server in self._servers.values())):
            super().put(outcome)


class PatientQueue(ReadyQueue):
    """Looks for stale packs when one is offered, and not when a step reserves."""

    def reserve(self, n: int, *, current_version: int, min_tokens: int = 0) -> Reservation | None:
        return super().reserve(n, current_version=0, min_tokens=min_tokens)


class LateTellingSource(SampleSource):
    """Tells the ledger what was drawn once the lock is free again: a checkpoint may be told first."""

    def draw(self, count: int) -> list[SampleKey]:
        with self._lock:
            keys = [self._next_key() for _ in range(count)]
        self.log.write(Drawn(samples=tuple(keys)))
        return keys


class UnpinnedEvaluation(PinnedEvaluation):
    """Versions come as if no evaluation ran."""

    def holds_round(self, step: int) -> bool:
        return False


class StubbornEvaluation(PinnedEvaluation):
    """Versions wait for as long as an evaluation takes."""

    def holds_round(self, step: int) -> bool:
        return self.schedule.running is not None


class HastyPipeline(Pipeline):
    """Goes on with a rollout of new weights before anybody has heard of their proof."""

    def _split_confirmed(self, arrived: Sequence[Rollout] = ()) -> list[Rollout]:
        return list(arrived)


class KeepingPipeline(Pipeline):
    """What no server has proven is held for ever."""

    def _split_confirmed(self, arrived: Sequence[Rollout] = ()) -> list[Rollout]:
        unconfirmed = [rollout for rollout in arrived if self.client.confirms(rollout) is False]
        kept = [each for each in self._awaiting_confirmation if self.client.confirms(each) is False]
        kept += unconfirmed
        self._awaiting_confirmation = [
            rollout for rollout in self._awaiting_confirmation if rollout not in kept
        ]
        heard = super()._split_confirmed([rollout for rollout in arrived if rollout not in kept])
        self._awaiting_confirmation += kept
        return heard


class ForgivingClient(RolloutClient):
    """A proof lifts a suspicion of this rank that nobody has heard of."""

    def update(self, server: str, version: int, *, closed: bool) -> None:
        if version:
            self._servers[server].state.take_suspicion()
        super().update(server, version, closed=closed)


class ForgivingUpdates(WatchedUpdates):
    """A server that is suspected while a push runs to it is proven by that push."""

    def apply_agreement(self, asked: Sequence[int], suspect: Iterable[int], drained: Collection[int]) -> None:
        super().apply_agreement(asked, [each for each in suspect if not self.lives[each].is_pushing], drained)


class UndrainedUpdates(WatchedUpdates):
    """Every server gets its weights while it is asked."""

    def __init__(self, lives: Sequence[ServerLife], **settings: Any) -> None:
        super().__init__([replace(life, stages=True) for life in lives], **settings)


class SecretiveUpdates(WatchedUpdates):
    """The other ranks, and the next snapshot, know of no push."""

    def facts(self, step: int) -> UpdateFacts:
        return replace(super().facts(step), publishing=False)


class VersionReadingClient(RolloutClient):
    """A rollout of a version that nobody proved is taken once a later one is proven."""

    def confirms(self, rollout: Rollout) -> bool | None:
        state = self._servers[rollout.server].state
        return True if state._version >= rollout.version else None


class HastyLearner(Learner):
    """The clock moves before the packs of the step are taken."""

    def _agree(self, step: int, reservation: Any = None, **more: Any) -> Any:
        outcome, news = super()._agree(step, reservation, **more)
        versions = self._versions
        if versions is not None:
            versions.apply(step, outcome, news)
            vars(versions)["apply"] = lambda *facts: vars(versions).pop("apply")  # once
        return outcome, news


class HastyGroups(Groups):
    """Compares a group as soon as it is large enough."""

    def _goes_on(self, group: tuple[int, int], last_call: int | None) -> bool:
        return len(self._waiting[group]) >= self.settings.grpo.min_group


class SilentPipeline(Pipeline):
    """Asks for what the pacer wants, to which rollouts that wait for others are as good as made."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.groups is not None:
            self.groups.num_to_ask = lambda coming: 0  # type: ignore[method-assign]


class UnsettlingPipeline(Pipeline):
    """Nothing is trained of a group whose rewards are equal, and that is all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ends.unused = lambda keys, reason: None  # type: ignore[method-assign]


class RetryingPipeline(Pipeline):
    """What is left alone of its group is asked again, for ever."""

    def __post_init__(self) -> None:
        super().__post_init__()
        unused = self.ends.unused

        def ask_again(keys: Sequence[SampleKey], reason: UnusedReason) -> None:
            if reason is UnusedReason.TOO_SMALL:
                self.source.give_back(keys, ReturnReason.FAILED)
            else:
                unused(keys, reason)

        self.ends.unused = ask_again  # type: ignore[method-assign]


class ComparedTooEarly(Parts):
    groups = HastyGroups


class NobodyAsksForTheRest(Parts):
    pipeline = SilentPipeline


class UnusedNotSettled(Parts):
    pipeline = UnsettlingPipeline


class AskedAloneForEver(Parts):
    pipeline = RetryingPipeline


class AheadUsedAtOnce(Parts):
    pipeline = HastyPipeline


class UnconfirmedKept(Parts):
    pipeline = KeepingPipeline


class ProofLiftsOwnSuspicion(Parts):
    client = ForgivingClient


class ProofLiftsAgreedSuspicion(Parts):
    updates = ForgivingUpdates


class PushedWhileAsked(Parts):
    updates = UndrainedUpdates


class CopiedOverAPush(Parts):
    updates = SecretiveUpdates


class LaterVersionConfirms(Parts):
    client = VersionReadingClient


class ClockBeforePacks(Parts):
    learner = HastyLearner


class VersionsUnderEvaluations(Parts):
    evaluation = UnpinnedEvaluation


class VersionsAfterEvaluations(Parts):
    evaluation = StubbornEvaluation


class ForgottenPosts(Parts):
    client = ForgetfulClient


class LostSamples(Parts):
    pipeline = LosingPipeline


class ForgottenReturns(Parts):
    pipeline = ForgettingPipeline


class NewestSpanCounts(Parts):
    client = YoungClient


class OutTwice(Parts):
    client = RepeatingClient


class UnpurgedQueue(Parts):
    queue = PatientQueue


class LateTelling(Parts):
    source = LateTellingSource


class GuardAroundPreparation(Parts):
    pipeline = GuardedPipeline


class DawdlingFence(LateFence):
    """The same, with time for a request that waited."""

    def reopen(self, version: int) -> None:
        InferFence.reopen(self, self._version)
        TimeNames.sleep(0.1)
        InferFence.reopen(self, version)


class VersionAfterDoor(Parts):
    fence = DawdlingFence


class CountedPacks(Parts):
    queue = CountingQueue


FAILURES: dict[int, type[Parts]] = {2: GuardAroundPreparation, 3: VersionAfterDoor, 4: CountedPacks}
"""The predecessor's failures, put in again."""

OTHERS: tuple[tuple[type[Parts], str], ...] = (
    (ForgottenPosts, "a push begins while|weights change on"),
    (PushedWhileAsked, "an /infer/ reaches|weights change on|a push begins while"),
    (CopiedOverAPush, "is copied over"),
    (LostSamples, "nobody holds them"),
    (ForgottenReturns, "nobody holds them|that nobody gives"),
    (OutTwice, "PipelineFailed for no reason|EvaluationCounts"),
    (NewestSpanCounts, "has the tokens"),
    (UnpurgedQueue, "raised StaleSample"),
    (LateTelling, "the ledger does not balance: a checkpoint holds exactly the samples in hand"),
    (VersionsUnderEvaluations, "under the evaluation of version"),
    (VersionsAfterEvaluations, "a version is held back"),
    (AheadUsedAtOnce, "uses a rollout of version|nobody heard proven there"),
    (UnconfirmedKept, "of which nothing more comes"),
    (ProofLiftsOwnSuspicion, "suspected since, or in, the push that proved it"),
    (ProofLiftsAgreedSuspicion, "suspected since, or in, the push that proved it"),
    (LaterVersionConfirms, "whose version|of which nothing more comes"),
    (ClockBeforePacks, "raised StaleSample"),
    (ComparedTooEarly, "more may still come"),
    (NobodyAsksForTheRest, "groups wait for samples that nobody asks for"),
    (UnusedNotSettled, "nobody holds them"),
    (AskedAloneForEver, "are compared twice"),
)
"""Further mistakes in the full scene, and what the violation says."""
