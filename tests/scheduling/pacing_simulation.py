"""A virtual-clock run of the real scheduling modules: queue, fence, clock, gate, schedule and pacer.

One thread, no real time. A learner step takes one unit; per rank one serial rollout server answers
four packs per request after a given number of steps. The order inside a step start is the
learner's: round if due or pending and drained, reserve, all-reduce (MAX), plan.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import dataclass, field

from swift_stage2.channel_b.ready_queue import ReadyQueue, Reservation
from swift_stage2.errors import TicketTimeout
from swift_stage2.fence import InferFence, InferTicket
from swift_stage2.scheduling.bresenham import wants_channel_b
from swift_stage2.scheduling.feasibility_gate import GateOutcome, RankFacts, decide
from swift_stage2.scheduling.outlook import INSTANT, PacingState, ProductionMeter
from swift_stage2.scheduling.pacing import Pacer, PacingReason
from swift_stage2.scheduling.step_plan import Channel
from swift_stage2.scheduling.version_clock import VersionClock, is_fresh


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One row: what the configuration says and how slow the servers are."""

    durations: tuple[tuple[float, float], ...] = ((0.0, 0.0),)
    """Per rank, the shortest and longest rollout, in steps."""
    window: int = 2
    target: int = 4
    b_ratio: float = 0.25
    packs_per_b_step: int = 4
    sync_every_steps: int = 1
    packs_per_request: int = 4
    queue_limit: int = 8
    num_steps: int = 400
    seed: int = 0
    pipeline_delay: float = 1 / 64
    """How long after a step start the pipeline acts; 0 makes whole durations end right at a step start."""
    outage: tuple[int, int] = (0, 0)
    """Steps between which no server answers a new POST."""


@dataclass(slots=True)
class Outcome:
    """The counts of one run."""

    steps: int = 0
    wanted: int = 0
    ran: int = 0
    made: int = 0
    expired: int = 0
    rounds: int = 0
    stale_trained: int = 0
    longest_gap: int = 0
    reasons: set[PacingReason] = field(default_factory=set)
    load: float = 0.0

    @property
    def expired_share(self) -> float:
        return self.expired / max(1, self.made)


@dataclass(frozen=True, slots=True)
class SimulatedPack:
    version: int


@dataclass(slots=True)
class Rounds:
    """The learner's side of the sync rounds."""

    last_commit: int = 0
    pending: bool = False


@dataclass(slots=True)
class Post:
    ticket: InferTicket
    ticket_stack: ExitStack
    num_packs: int
    start: float
    end: float


class SimulatedRank:
    """One rank's pipeline and learner state."""

    def __init__(self, setting: Setting, index: int, outcome: Outcome) -> None:
        self.setting = setting
        self.outcome = outcome
        self.queue: ReadyQueue[SimulatedPack] = ReadyQueue(
            setting.queue_limit, setting.window, lambda pack, reason: self._count_expired()
        )
        self.clock = VersionClock()
        self.fence = InferFence()
        self.random = random.Random(setting.seed * 1009 + index)
        self.bounds = setting.durations[index]
        self.meter = ProductionMeter()
        self.post: Post | None = None
        self.missed_in_a_row = 0
        self.gate: GateOutcome | None = None
        self.pacer = Pacer(
            b_ratio=setting.b_ratio,
            version_window=setting.window,
            sync_every_steps=setting.sync_every_steps,
            target_packs=setting.target,
            packs_per_b_step=setting.packs_per_b_step,
        )

    def _count_expired(self) -> None:
        self.outcome.expired += 1

    def state(self, now: float, rounds: Rounds) -> PacingState:
        return PacingState(
            step=int(now),
            progress=now - int(now),
            current_version=self.clock.current,
            last_commit_step=rounds.last_commit,
            round_pending=rounds.pending,
            ready_versions=self.queue.peek_versions(),
            pace=self.meter.pace,
            slowest_pace=self.gate.slowest_pace if self.gate else INSTANT,
            packs_per_production=self.setting.packs_per_request,
            missed_in_a_row=self.missed_in_a_row,
        )

    def facts(self, reservation: Reservation[SimulatedPack] | None) -> RankFacts:
        return RankFacts(not_reserved=reservation is None, pace=self.meter.pace)

    def pace(self, now: float, rounds: Rounds) -> None:
        """Ask the pacer and send POSTs until it says no, the server is busy or the fence is closed."""
        while self.post is None:
            decision = self.pacer.decide(self.state(now, rounds))
            self.outcome.reasons.add(decision.reason)
            low, high = self.setting.outage
            if decision.num_packs == 0 or low <= now < high:
                return
            stack = ExitStack()
            try:
                ticket = stack.enter_context(self.fence.ticket(timeout_s=0))
            except TicketTimeout:
                return
            duration = self.random.uniform(*self.bounds)
            num_packs = min(decision.num_packs, self.setting.packs_per_request)
            self.post = Post(ticket, stack, num_packs, now, now + duration)
            if duration == 0:
                self.finish_post()

    def finish_post(self) -> None:
        assert self.post is not None
        post, self.post = self.post, None
        post.ticket_stack.close()
        self.meter.observe(post.end - post.start)
        self.outcome.made += post.num_packs
        for _ in range(post.num_packs):
            self.queue.offer(SimulatedPack(post.ticket.version), current_version=self.clock.current)


def simulate(setting: Setting) -> Outcome:
    """Run ``setting.num_steps`` steps on as many ranks as it names durations."""
    outcome = Outcome()
    ranks = [SimulatedRank(setting, index, outcome) for index in range(len(setting.durations))]
    rounds, last_b = Rounds(), -1
    for step in range(setting.num_steps):
        _run_background_until(step, ranks, rounds)
        if rounds.pending or step >= rounds.last_commit + setting.sync_every_steps:
            _try_round(step, ranks, rounds, outcome)
        wants_b = wants_channel_b(step, setting.b_ratio)
        outcome.steps += 1
        outcome.wanted += wants_b
        reservations = [
            rank.queue.reserve(setting.packs_per_b_step, current_version=rank.clock.current)
            if wants_b
            else None
            for rank in ranks
        ]
        facts = [rank.facts(reservation) for rank, reservation in zip(ranks, reservations, strict=True)]
        gate = decide(
            [max(entries) for entries in zip(*(f.encode() for f in facts), strict=True)], num_servers=0
        )
        plan = gate.plan(wants_b=wants_b)
        for rank, reservation in zip(ranks, reservations, strict=True):
            rank.gate = gate
            _settle(rank, reservation, plan.channel is Channel.B, wants_b)
        if plan.channel is Channel.B:
            outcome.ran += 1
            last_b = step
        outcome.longest_gap = max(outcome.longest_gap, step - last_b)
        for rank in ranks:
            rank.pace(step + setting.pipeline_delay, rounds)
    outcome.load = ranks[0].pacer.load(ranks[0].state(setting.num_steps, rounds))
    return outcome


def _try_round(step: int, ranks: list[SimulatedRank], rounds: Rounds, outcome: Outcome) -> None:
    """Close every fence without waiting; run the round iff all are drained."""
    drained = [rank.fence.close() for rank in ranks]
    rounds.pending = not all(drained)
    if rounds.pending:
        return
    rounds.last_commit = step
    outcome.rounds += 1
    for rank in ranks:
        rank.fence.reopen(rank.clock.advance())


def _run_background_until(step: int, ranks: list[SimulatedRank], rounds: Rounds) -> None:
    """Finish the POSTs that end by the time ``step`` starts, in order of time; each asks the pacer again."""
    while True:
        running = [rank for rank in ranks if rank.post is not None and rank.post.end <= step]
        if not running:
            return
        rank = min(running, key=lambda r: r.post.end if r.post else 0.0)
        assert rank.post is not None
        now = rank.post.end
        rank.finish_post()
        rank.pace(now, rounds)


def _settle(
    rank: SimulatedRank, reservation: Reservation[SimulatedPack] | None, runs_b: bool, wants_b: bool
) -> None:
    if wants_b:
        rank.missed_in_a_row = rank.missed_in_a_row + 1 if reservation is None else 0
    if reservation is None:
        return
    if not runs_b:
        reservation.release()
        return
    rank.outcome.stale_trained += sum(
        not is_fresh(pack.version, current=rank.clock.current, window=rank.setting.window)
        for pack in reservation.take()
    )
