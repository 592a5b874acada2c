"""A virtual-clock run of the real scheduling modules: queue, fence, clock, gate, versions, servers' lives and pacer.

One thread, no real time. A learner step takes one unit. Per rank one rollout server is asked, either by one POST at
a time for up to four packs, which ends with its slowest rollout, or through places, one rollout each. The order
inside a step start is the learner's: a version begins if due and none travels, reserve, what has come of pushes,
all-reduce (MAX), plan, and then what was agreed on: fences, clocks, who is drained. A server that does not stage is
drained before its push, and what is drained is pushed to at the next agreement. Servers that stage install what has
arrived under what they run.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from swift_stage2.channel_b.ready_queue import ReadyQueue, Reservation
from swift_stage2.fence import InferFence, InferTicket
from swift_stage2.scheduling.bresenham import wants_channel_b
from swift_stage2.scheduling.feasibility_gate import GateOutcome, RankFacts, decide
from swift_stage2.scheduling.horizon import Pacer, PacerInputs, ProductionMeter, packs_of
from swift_stage2.scheduling.server_life import LifeState, ServerLife
from swift_stage2.scheduling.step_plan import Channel
from swift_stage2.scheduling.version_clock import VersionClock, is_fresh
from swift_stage2.scheduling.version_schedule import VersionSchedule


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
    rollouts_per_pack: int = 1
    places: int = 0
    """POSTs of one rollout that may be out at once; 0: a POST at a time carries a whole request."""
    slow_places: int = 0
    """So many of them belong to a server where a rollout takes twice as long; they are taken last."""
    tail: tuple[float, float] = (0.0, 1.0)
    """The share of rollouts that take so many times as long."""
    queue_limit: int = 8
    num_steps: int = 400
    seed: int = 0
    pipeline_delay: float = 1 / 64
    """How long after a step start the pipeline acts; 0 makes whole durations end right at a step start."""
    outage: tuple[int, int] = (0, 0)
    """Steps between which no server answers a new POST."""
    staged: bool = True
    """Whether the servers are asked on while new weights arrive; else they are drained for them."""
    travel_steps: tuple[float, float] = (0.3, 0.3)
    """The shortest and longest time that weights travel to all servers, in steps."""


@dataclass(slots=True)
class Outcome:
    """The counts of one run."""

    steps: int = 0
    wanted: int = 0
    ran: int = 0
    made: int = 0
    expired: int = 0
    versions: int = 0
    stale_trained: int = 0
    longest_gap: int = 0

    @property
    def expired_share(self) -> float:
        return self.expired / max(1, self.made)


@dataclass(frozen=True, slots=True)
class SimulatedPack:
    version: int


@dataclass(slots=True)
class Post:
    ticket: InferTicket
    version: int
    num_rollouts: int
    start: float
    end: float
    is_slow: bool = False


class SimulatedRank:
    """One rank's pipeline and learner state."""

    def __init__(self, setting: Setting, index: int, outcome: Outcome) -> None:
        self.setting = setting
        self.outcome = outcome
        self.queue = ReadyQueue(
            setting.queue_limit, setting.window, lambda pack, reason: self._count_expired(pack)
        )
        self.clock = VersionClock(1)
        self.fence = InferFence()
        self.fence.reopen(1)
        self.random = random.Random(setting.seed * 1009 + index)
        self.bounds = setting.durations[index]
        self.meter = ProductionMeter()
        self.posts: list[Post] = []
        self.served_version = self.clock.current
        self.held: list[int] = []  # versions of rollouts that the learner has not heard of
        self.segments: list[int] = []
        self.missed_in_a_row = 0
        self.gate: GateOutcome | None = None
        self.pacer = Pacer(
            b_ratio=setting.b_ratio,
            version_window=setting.window,
            sync_every_steps=setting.sync_every_steps,
            target_packs=setting.target,
            packs_per_b_step=setting.packs_per_b_step,
        )

    def _count_expired(self, pack: SimulatedPack) -> None:
        self.outcome.expired += 1

    def state(self, now: float, versions: Versions) -> PacerInputs:
        return PacerInputs(
            step=int(now),
            progress=now - int(now),
            current_version=self.clock.current,
            holds_production=not self.fence.is_open,
            ready_versions=self.queue.peek_versions(),
            typical_steps=self.meter.typical_steps,
            missed_in_a_row=self.missed_in_a_row,
        )

    def facts(self, reservation: Reservation | None) -> RankFacts:
        return RankFacts(not_reserved=reservation is None)

    def num_wanted(self, now: float, versions: Versions) -> int:
        """Rollouts to ask for now, as the pipeline finds it."""
        per_pack = self.setting.rollouts_per_pack
        state = self.state(now, versions)
        typical = state.typical_steps or 0.0
        coming = [(version, now) for version in self.held]
        for post in self.posts:
            arrival = now + abs(typical - (now - post.start))
            coming += [(post.version, arrival)] * post.num_rollouts
        in_making, over = packs_of(coming, per_pack)
        num_left = sum(arrival <= now + typical for arrival in over)
        num_packs = self.pacer.decide(replace(state, in_making=in_making))
        if not num_packs:
            return 0
        return max(0, num_packs * per_pack - num_left - len(self.segments))

    def pace(self, now: float, versions: Versions) -> None:
        """Ask the pacer and send POSTs until it says no, no place is free or the door is closed."""
        low, high = self.setting.outage
        most = self.setting.places or 1
        size = 1 if self.setting.places else self.setting.packs_per_request * self.setting.rollouts_per_pack
        while len(self.posts) < most:
            versions.install(now)
            wanted = self.num_wanted(now, versions)
            if wanted == 0 or low <= now < high:
                return
            if (ticket := self.fence.enter()) is None:
                return
            num_rollouts = min(wanted, size)
            num_fast = sum(not post.is_slow for post in self.posts)
            is_slow = num_fast >= most - self.setting.slow_places
            duration = self.duration(num_rollouts) * (2 if is_slow else 1)
            post = Post(ticket, self.served_version, num_rollouts, now, now + duration, is_slow)
            self.posts.append(post)
            if duration == 0:
                self.finish(post)

    def duration(self, num_rollouts: int) -> float:
        """Of a POST: that of its slowest rollout. Where one rollout makes a pack, all of a POST take the same time."""
        share, factor = self.setting.tail
        drawn = [
            self.random.uniform(*self.bounds) * (factor if share and self.random.random() < share else 1.0)
            for _ in range(num_rollouts if self.setting.rollouts_per_pack > 1 else 1)
        ]
        return max(drawn)

    def makes_stale(self, version: int) -> bool:
        posts = (post.version for post in self.posts)
        at_hand = (*posts, *self.held, *self.segments, *self.queue.peek_versions())
        return version - self.setting.window - 1 in at_hand

    def finish(self, post: Post) -> None:
        self.posts.remove(post)
        self.fence.leave()
        self.meter.observe(post.end - post.start)
        self.held += [post.version] * post.num_rollouts
        self.offer_heard()

    def offer_heard(self) -> None:
        """Pack and offer what is not ahead of the clock."""
        self.segments += [version for version in self.held if version <= self.clock.current]
        self.held = [version for version in self.held if version > self.clock.current]
        per_pack = self.setting.rollouts_per_pack
        while len(self.segments) >= per_pack:
            packed, self.segments = self.segments[:per_pack], self.segments[per_pack:]
            self.outcome.made += 1
            pack = SimulatedPack(min(packed))
            self.queue.offer(pack, current_version=self.clock.current)


class Versions:
    """The learner's side of versions and servers' lives, and what is on its way to the servers."""

    def __init__(self, setting: Setting, ranks: list[SimulatedRank], outcome: Outcome) -> None:
        self.setting, self.ranks, self.outcome = setting, ranks, outcome
        self.random = random.Random(setting.seed * 1013)
        self.schedule = VersionSchedule(setting.sync_every_steps)
        self.schedule.begin(0)
        self.lives = [
            ServerLife(1, 1, stages=setting.staged, state=LifeState.PROVEN, version=1) for _ in ranks
        ]
        self.arrives_at = [math.inf] * len(ranks)
        self.installed: set[int] = set()
        self.is_publishing = False
        """By the last agreement: the copy of the weights is in use."""
        self.holds_production = False

    @property
    def is_awaited(self) -> bool:
        """Whether a version is under way that no server has proven."""
        is_under_way = self.is_publishing or any(life.is_closed for life in self.lives)
        return is_under_way and self.schedule.begun > self.ranks[0].clock.current

    def begin_if_due(self, step: int) -> None:
        makes_stale = any(rank.makes_stale(self.schedule.next_version) for rank in self.ranks)
        is_due = self.schedule.is_due(step, any_proven=True, server_waits=False, makes_stale=makes_stale)
        if not is_due or self.is_publishing or self.is_awaited:
            return
        self.schedule.begin(step)
        for index, life in enumerate(self.lives):
            if life.stages:
                self._push(index, step)
            elif life.wants(self.schedule.begun, step):
                life.drain()
                self.ranks[index].fence.close()

    def _push(self, index: int, now: float) -> None:
        self.lives[index].push()
        self.arrives_at[index] = now + self.random.uniform(*self.setting.travel_steps)
        self.install(now)

    def install(self, now: float) -> None:
        """The servers install what has arrived by ``now``."""
        for index, rank in enumerate(self.ranks):
            if now < self.arrives_at[index]:
                continue
            self.arrives_at[index] = math.inf
            self.installed.add(index)
            rank.served_version = self.schedule.begun

    def agree(self, step: int) -> None:
        """Takes in what has come of pushes, pushes to who is drained, and applies what all ranks then know."""
        if self.holds_production:
            self.schedule.hold(step)
        self.outcome.versions += bool(self.installed)
        for index in self.installed:
            self.lives[index].proved(self.schedule.begun)
        self.installed = set()
        busy = [rank.fence.is_open or rank.fence.in_flight > 0 for rank in self.ranks]
        newest = max(life.version for life in self.lives)
        for life, rank in zip(self.lives, self.ranks, strict=True):
            if rank.clock.current < newest:
                rank.clock.advance(newest)
                rank.offer_heard()
            if life.is_closed:
                rank.fence.close()
            elif life.version != rank.fence.version or not rank.fence.is_open:
                rank.fence.reopen(life.version)
        for index, (life, is_busy) in enumerate(zip(self.lives, busy, strict=True)):
            if life.state is LifeState.DRAINING and not is_busy:
                self._push(index, step)
        self.is_publishing = any(life.is_pushing for life in self.lives)
        self.holds_production = all(life.is_closed for life in self.lives)


def simulate(setting: Setting) -> Outcome:
    """Run ``setting.num_steps`` steps on as many ranks as it names durations."""
    outcome = Outcome()
    ranks = [SimulatedRank(setting, index, outcome) for index in range(len(setting.durations))]
    versions, last_b = Versions(setting, ranks, outcome), -1
    for step in range(setting.num_steps):
        _run_background_until(step, ranks, versions)
        versions.begin_if_due(step)
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
        versions.agree(step)
        for rank in ranks:
            rank.pace(step + setting.pipeline_delay, versions)
    return outcome


def _run_background_until(step: int, ranks: list[SimulatedRank], versions: Versions) -> None:
    """Finish the POSTs that end by the time ``step`` starts, in order of time; each asks the pacer again."""
    while True:
        running = [(post.end, index) for index, rank in enumerate(ranks) for post in rank.posts]
        if not running or min(running)[0] > step:
            versions.install(step)
            return
        now, index = min(running)
        rank = ranks[index]
        versions.install(now)
        rank.finish(min(rank.posts, key=lambda post: post.end))
        rank.pace(now, versions)


def _settle(rank: SimulatedRank, reservation: Reservation | None, runs_b: bool, wants_b: bool) -> None:
    if wants_b:
        rank.missed_in_a_row = rank.missed_in_a_row + 1 if reservation is None else 0
    if reservation is None:
        return
    if not runs_b:
        reservation.release()
        return
    for pack in reservation.take():
        is_stale = not is_fresh(pack.version, current=rank.clock.current, window=rank.setting.window)
        rank.outcome.stale_trained += is_stale
