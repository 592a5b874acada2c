"""Mistakes that were made before, each as a subclass of the real part: the harness has to find every one.

The numbers are those of the predecessor's failures: 2, a guard held around the whole preparation and taken again per
POST; 3, the version raised after the door has reopened; 4, packs that are counted and not taken. The others show that
further invariants can be broken, too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from interleaving.core_scene import CoreParts, CorePipeline
from interleaving.scene import Parts

from swift_stage2.channel_b.pipeline import Pipeline
from swift_stage2.channel_b.ready_queue import DropReason, ReadyQueue, Reservation
from swift_stage2.channel_b.rollout_client import RolloutClient
from swift_stage2.channel_b.sample_source import SampleSource
from swift_stage2.evaluation import PinnedEvaluation
from swift_stage2.fence import InferFence
from swift_stage2.records import Pack, SampleKey
from swift_stage2.telemetry.ledger import Entry

_FOR_EVER_S = 1000.0


class GuardedPipeline(Pipeline):
    """Failure 2: a sync asked for between guard and POST waits for the guard, and the POST for the sync."""

    def _produce(self, num_samples: int) -> bool:
        lane = next(iter(self.client._lanes.values()))
        with lane._settings.fence.ticket(_FOR_EVER_S):
            return super()._produce(num_samples)


class GuardedCorePipeline(CorePipeline):
    """Failure 2 in the small scene."""

    def preparation(self) -> AbstractContextManager[Any]:
        return self._client._fence.ticket(_FOR_EVER_S)  # type: ignore[no-any-return]


class LateFence(InferFence):
    """Failure 3: rollouts of new weights carry the old number."""

    def reopen(self, version: int) -> None:
        super().reopen(self._version)
        super().reopen(version)


class CountingQueue(ReadyQueue[Pack]):
    """Failure 4: what a step was promised stays within reach of expiry and overflow."""

    def _take_oldest(self, n: int, min_tokens: int) -> Reservation[Pack] | None:
        reservation = super()._take_oldest(n, min_tokens)
        if reservation is None:
            return None
        self._ready.extendleft(reversed(reservation._packs))
        return CountedReservation(self, reservation._packs)


class CountedReservation(Reservation[Pack]):
    """Takes what is there by then."""

    def take(self) -> list[Pack]:
        with self._queue._lock:
            ready = self._queue._ready
            return [ready.popleft() for _ in range(min(len(ready), len(self._packs)))]

    def release(self) -> None:
        """Nothing was taken."""


class ForgetfulClient(RolloutClient):
    """Takes a POST that its deadline ended for one that its server has ended."""

    @property
    def num_unsettled(self) -> int:
        return 0


class LosingPipeline(Pipeline):
    """Samples of dropped packs do not return to the stream."""

    def on_drop(self, pack: Pack, reason: DropReason) -> None:
        self.events.dropped(pack, reason)


class PatientQueue(ReadyQueue[Pack]):
    """Looks for stale packs when one is offered, and not when a step reserves."""

    def reserve(self, n: int, *, current_version: int, min_tokens: int = 0) -> Reservation[Pack] | None:
        return super().reserve(n, current_version=0, min_tokens=min_tokens)


class LateTellingSource(SampleSource):
    """Tells the ledger what was drawn once the lock is free again: a checkpoint may be told first."""

    def draw(self, count: int) -> list[SampleKey]:
        with self._lock:
            keys = [self._next_key() for _ in range(count)]
        self._events.write(Entry.DRAWN, keys)
        return keys


class UnpinnedEvaluation(PinnedEvaluation):
    """Rounds come as if no evaluation ran."""

    def holds_round(self, step: int) -> bool:
        return False


class StubbornEvaluation(PinnedEvaluation):
    """Rounds wait for as long as an evaluation takes."""

    def holds_round(self, step: int) -> bool:
        return self._schedule.running is not None


class RoundsUnderEvaluations(Parts):
    evaluation = UnpinnedEvaluation


class RoundsAfterEvaluations(Parts):
    evaluation = StubbornEvaluation


class ForgottenPosts(Parts):
    client = ForgetfulClient


class LostSamples(Parts):
    pipeline = LosingPipeline


class UnpurgedQueue(Parts):
    queue = PatientQueue


class LateTelling(Parts):
    source = LateTellingSource


class GuardAroundPreparation(Parts):
    pipeline = GuardedPipeline


class VersionAfterDoor(Parts):
    fence = LateFence


class CountedPacks(Parts):
    queue = CountingQueue


class CoreGuardAroundPreparation(CoreParts):
    pipeline = GuardedCorePipeline


class CoreVersionAfterDoor(CoreParts):
    fence = LateFence


class CoreCountedPacks(CoreParts):
    queue = CountingQueue


FAILURES: dict[int, tuple[type[Parts], type[CoreParts]]] = {
    2: (GuardAroundPreparation, CoreGuardAroundPreparation),
    3: (VersionAfterDoor, CoreVersionAfterDoor),
    4: (CountedPacks, CoreCountedPacks),
}
"""The predecessor's failure → the same mistake in the full and in the small scene."""

OTHERS: tuple[tuple[type[Parts], str], ...] = (
    (ForgottenPosts, "a round begins while"),
    (LostSamples, "nobody holds them"),
    (UnpurgedQueue, "trains a pack of version"),
    (LateTelling, "the ledger does not balance: a checkpoint holds exactly the samples in hand"),
    (RoundsUnderEvaluations, "a round comes under the evaluation"),
    (RoundsAfterEvaluations, "a round is held back"),
)
"""Further mistakes in the full scene, and what the violation says."""
