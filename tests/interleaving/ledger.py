"""Invariants of every run, whatever the schedule: facts come in from the scene, violations end the run.

Facts are what really happened (the weights that a server computed with, when), never what the code under test says
of itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from interleaving.setting import REQUEST_TIMEOUT_S, Setting
from interleaving.virtual_servers import VirtualServer, Weights
from interleaving.virtual_threading import active

from swift_stage2.channel_b.ready_queue import ReadyQueue, Reservation
from swift_stage2.records import Pack, Rollout, SampleKey
from swift_stage2.scheduling.step_plan import Channel

Place = tuple[int, int]  # a sample's epoch and position
_SLACK_S = 1e-6


class RankLedger:
    """One rank's samples and packs."""

    def __init__(self) -> None:
        self.trained: set[Place] = set()
        self.quarantined: set[Place] = set()
        self.promised: list[Pack] = []  # in a reservation that is neither taken nor released
        self.version = -1
        self.producing = False
        self.began_s = 0.0  # the moment at which its last step had been planned
        self.pending_since: float | None = None
        self.transfer_ended = -1  # the step at which the last round did
        self.in_transfer = False


class Ledger:
    """All ranks' facts of one run. ``counts`` say what it met, so that a batch can be shown not to be empty."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.ranks = [RankLedger() for _ in range(setting.num_ranks)]
        self.counts: Counter[str] = Counter()
        self.committed: dict[int, Weights] = {}
        self.num_rounds = 0
        self._round: tuple[int, Weights] | None = None
        self._targets: list[tuple[VirtualServer, int]] = []
        self._agreed: dict[tuple[int, str], Any] = {}
        self._slowest_step_s = 0.0

    # --- servers and rounds ------------------------------------------------------------------------

    def infer_begins(self, server: VirtualServer) -> None:
        self.counts["posts"] += 1
        if self._round is not None:
            _fail(f"an /infer/ reaches {server.url} while a sync round runs")

    def weights_change(self, server: VirtualServer) -> None:
        if server.computing():
            _fail(f"weights change on {server.url} while an /infer/ runs there")

    def round_begins(
        self, version: int, weights: Weights, targets: Sequence[tuple[VirtualServer, bool]]
    ) -> None:
        """``targets``: each server of the round, and whether it was proven until now."""
        self.num_rounds += 1
        self.counts["rounds"] += 1
        self._round = (version, weights)
        self._targets = [(server, server.num_starts) for server, _ in targets]
        for server, was_proven in targets:
            if was_proven and server.computing():
                _fail(f"a round begins while {server.url} computes an /infer/")

    def round_ends(self, outcome: dict[str, Any], indices: Sequence[int]) -> None:
        assert self._round is not None
        version, weights = self._round
        self._round = None
        for index, (server, num_starts) in zip(indices, self._targets, strict=True):
            report = outcome["reports"].get(index, outcome["reports"].get(str(index)))
            if report is None or not report["proven"]:
                self.counts["pushes failed"] += 1
                if self.setting.is_calm and self.setting.bad_weights_at_round is None:
                    _fail(f"a push to {server.url} fails for no reason: {report and report['error']}")
                continue
            self.counts["pushes proven"] += 1
            if server.weights != weights and server.num_starts == num_starts:
                _fail(f"{server.url} is proven to hold version {version} but computes with {server.weights}")
            if version in self.committed and self.committed[version] != weights:
                _fail(f"version {version} is committed twice, with different weights")
            self.committed[version] = weights

    def rollout(self, rollout: Rollout, server: VirtualServer) -> None:
        """The version that a rollout carries is that of the weights that computed it."""
        self.counts["rollouts"] += 1
        if rollout.text == repr(self.committed.get(rollout.version)):
            return
        _fail(f"a rollout says version {rollout.version}, but was computed with {rollout.text}")

    def evaluated(self, rollout: Rollout, server: VirtualServer, version: int) -> None:
        """So is an answer that an evaluation of ``version`` counts, and no other version's."""
        self.rollout(rollout, server)
        self.counts["evaluation answers"] += 1
        if rollout.version != version:
            _fail(f"an evaluation of version {version} counts an answer of version {rollout.version}")

    def evaluation_ends(self, rank: int, record: Any) -> None:
        counts = record.counts
        self.agree(rank, record.ended_step, "an evaluation that ended", record)
        self.counts[f"evaluations {record.end}"] += rank == 0
        is_whole = counts.num_answered + counts.num_failed == counts.num_wanted
        if not is_whole if record.end == "complete" else counts.num_answered > counts.num_wanted:
            _fail(f"rank {rank}: an evaluation that ended {record.end} has {counts}")

    def suspicion(self, rank: int, reason: str) -> None:
        self.counts["suspicions"] += 1
        if self.setting.is_calm:
            _fail(f"rank {rank} suspects a server that nothing is wrong with: {reason}")

    # --- queue and samples -------------------------------------------------------------------------

    def watch_queue(self, rank: int, queue: ReadyQueue[Pack]) -> None:
        """Knows from now on which packs are promised to a step."""
        real = queue.reserve

        def reserve(n: int, **settings: Any) -> Reservation[Pack] | None:
            reservation = real(n, **settings)
            if reservation is not None:
                self._promise(rank, reservation)
            return reservation

        queue.reserve = reserve  # type: ignore[method-assign]

    def _promise(self, rank: int, reservation: Reservation[Pack]) -> None:
        mine = self.ranks[rank]
        mine.promised = list(reservation._packs)
        take, release = reservation.take, reservation.release

        def take_back() -> None:
            self.counts["reservations released"] += 1
            mine.promised = []
            release()

        def take_all() -> list[Pack]:
            promised, packs = mine.promised, take()
            if packs != promised:
                _fail(f"rank {rank} was promised {len(promised)} packs and gets {len(packs)}, or others")
            mine.promised = []
            return packs

        reservation.release, reservation.take = take_back, take_all  # type: ignore[method-assign]

    def dropped(self, rank: int, pack: Pack, reason: str) -> None:
        self.counts[f"packs {reason}"] += 1
        if any(pack is promised for promised in self.ranks[rank].promised):
            _fail(f"rank {rank} loses a pack that is reserved: {reason}")

    def quarantined(self, rank: int, key: SampleKey) -> None:
        self.counts["quarantined"] += 1
        place = (key.epoch, key.position)
        if place in self.ranks[rank].trained or place in self.ranks[rank].quarantined:
            _fail(f"rank {rank}: sample {place} is quarantined after its end")
        self.ranks[rank].quarantined.add(place)

    # --- steps -------------------------------------------------------------------------------------

    def agree(self, rank: int, step: int, what: str, facts: Any) -> None:
        """``facts`` must be equal on all ranks."""
        first = self._agreed.setdefault((step, what), facts)
        if first != facts:
            _fail(f"ranks disagree at step {step} on {what}: rank {rank} has {facts}, another rank {first}")

    def step(self, rank: int, step: int, decision: Any, b: Any, began_s: float, began_version: int) -> None:
        """``began_version``: before the step, which a round may have ended after its packs were taken."""
        setting, mine = self.setting, self.ranks[rank]
        facts = (
            decision.plan,
            decision.stop,
            len(decision.packs),
            b.clock.current,
            b.rounds.states(),
            b.rounds.pending,
            b.rounds.in_transfer,
        )
        self.agree(rank, step, "the plan", facts)
        self.counts[f"steps {decision.plan.channel}"] += 1
        if b.clock.current < mine.version:
            _fail(f"rank {rank} goes back from version {mine.version} to {b.clock.current}")
        mine.version = b.clock.current
        if mine.version and mine.version not in self.committed:
            _fail(f"rank {rank} is at version {mine.version}, which no server was ever proven to hold")
        if decision.plan.channel is Channel.B and len(decision.packs) != setting.packs_per_step:
            _fail(f"rank {rank} trains {len(decision.packs)} packs, planned are {setting.packs_per_step}")
        for pack in decision.packs:
            self._train(rank, pack, began_version)
        if mine.in_transfer and not b.rounds.in_transfer:
            mine.transfer_ended = step
        mine.in_transfer = b.rounds.in_transfer
        self.counts["steps with a round in transfer"] += mine.in_transfer
        if b.evaluation is not None:
            self._check_evaluation(rank, step, b)
        self._check_pending(rank, b, began_s)
        self._slowest_step_s = max(self._slowest_step_s, active().now - mine.began_s)
        mine.began_s = active().now

    def _train(self, rank: int, pack: Pack, version: int) -> None:
        mine = self.ranks[rank]
        if pack.version < version - self.setting.version_window:
            _fail(f"rank {rank} trains a pack of version {pack.version} at version {version}")
        for key in pack.keys:
            place = (key.epoch, key.position)
            if place in mine.trained or place in mine.quarantined:
                _fail(f"rank {rank}: sample {place} is trained after its end")
            mine.trained.add(place)

    def _check_pending(self, rank: int, b: Any, began_s: float) -> None:
        mine = self.ranks[rank]
        if not b.rounds.pending:
            mine.pending_since = None
            return
        self.counts["steps with a round pending"] += 1
        if mine.pending_since is None:
            mine.pending_since = began_s
        limit_s = 2 * (
            REQUEST_TIMEOUT_S + max(self._slowest_step_s, self.setting.step_s + max(self.setting.skews_s))
        )
        if not self.setting.stall_share and active().now - mine.pending_since > limit_s + _SLACK_S:
            _fail(
                f"rank {rank} waits for a drain for {active().now - mine.pending_since:.3f} s, limit {limit_s:.3f} s"
            )

    def _check_evaluation(self, rank: int, step: int, b: Any) -> None:
        setting, running = self.setting, b.evaluation._schedule.running
        self.agree(rank, step, "the evaluation that runs", running)
        asks = running is not None and not b.evaluation._schedule.is_cut
        rounds_come = b.rounds.pending or b.rounds.in_transfer
        if asks and (rounds_come or running.version != b.clock.current):
            _fail(f"rank {rank}: a round comes under the evaluation of version {running.version}")
        if not b.rounds.proven or rounds_come:
            return
        due_step = max(
            b.rounds.last_commit_step + setting.sync_every_steps, self.ranks[rank].transfer_ended + 1
        )
        self.counts["steps with a round held"] += step >= due_step
        if step - due_step >= setting.max_round_delay_steps:
            _fail(f"rank {rank}: a round is held back, {step - due_step} steps after it was due")

    def account(self, rank: int, b: Any) -> None:
        """Every sample that was drawn is in one place. Nothing may run between the looks: no yield point in here."""
        mine = self.ranks[rank]
        source, queue, pipeline = b.source, b.queue, b.pipeline
        outstanding = set(source._outstanding)
        drawn = {(source._epoch, position) for position in range(source._position)}
        share = range(rank, len(source._rows), self.setting.num_ranks)
        drawn |= {(epoch, position) for epoch in range(source._epoch) for position in range(len(share))}
        if mine.trained & outstanding or mine.quarantined & outstanding:
            _fail(
                f"rank {rank}: samples go on after their end: {(mine.trained | mine.quarantined) & outstanding}"
            )
        if pipeline.failure is not None or mine.producing:
            return  # some are in the hands of the pipeline
        if missing := drawn - mine.trained - mine.quarantined - outstanding:
            _fail(f"rank {rank}: samples are nowhere: {sorted(missing)}")
        held = [
            *((key.epoch, key.position) for key in source._again),
            *((key.epoch, key.position) for pack in queue._ready for key in pack.keys),
            *((segment.key.epoch, segment.key.position) for segment in pipeline._segments),
        ]
        if len(held) != len(set(held)):
            _fail(f"rank {rank}: samples are in two places: {[k for k, n in Counter(held).items() if n > 1]}")
        if set(held) != outstanding:
            _fail(f"rank {rank}: samples are outstanding but nobody holds them: {outstanding ^ set(held)}")


def _fail(message: str) -> None:
    active().fail(message)
