"""A virtual-clock run of the real scheduling modules: queue, fence, clock, gate, versions, servers' lives and pacer.

One thread, no real time. A learner step takes one unit. Each rank asks a server of its own, or all of those that they
share, either by one POST at a time for up to four packs, which ends with its slowest rollout, or through places, one
rollout each. The order
inside a step start is the learner's: a version begins if due and none travels, reserve, what has come of pushes,
all-reduce (MAX), plan, and then what was agreed on: fences, clocks, who is drained. A server that does not stage is
drained before its push, and what is drained is pushed to at the next agreement. Servers that stage install what has
arrived under what they run.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from pacing_setting import Outcome, Setting

from swift_stage2.channel_b.ready_queue import ReadyQueue, Reservation
from swift_stage2.fence import InferFence
from swift_stage2.scheduling.bresenham import wants_channel_b
from swift_stage2.scheduling.feasibility_gate import RankFacts, decide
from swift_stage2.scheduling.horizon import (
    Pacer,
    PacerInputs,
    ProductionMeter,
    max_prompts_in_flight,
    packs_of,
)
from swift_stage2.scheduling.server_life import LifeState, ServerLife
from swift_stage2.scheduling.step_plan import Channel
from swift_stage2.scheduling.version_clock import VersionClock, is_fresh
from swift_stage2.scheduling.version_schedule import VersionSchedule


@dataclass(frozen=True, slots=True)
class SimulatedRollout:
    version: int
    is_long: bool
    group: int
    steps: float = 0.0
    """From its request to its end."""


@dataclass(frozen=True, slots=True)
class SimulatedPack:
    rollouts: tuple[SimulatedRollout, ...]

    @property
    def version(self) -> int:
        return min(rollout.version for rollout in self.rollouts)


@dataclass(slots=True, eq=False)
class Post:
    server: int
    rollouts: tuple[SimulatedRollout, ...]
    start: float
    end: float


class SimulatedRank:
    """One rank's pipeline and learner state."""

    def __init__(self, setting: Setting, index: int, outcome: Outcome) -> None:
        self.setting = setting
        self.outcome = outcome
        self.queue = ReadyQueue(
            setting.queue_limit, setting.window, lambda pack, reason: self._expired(pack.rollouts)
        )
        self.clock = VersionClock(1)
        num_ranks = len(setting.durations)
        self.servers = range(setting.num_servers) if setting.num_servers else (index,)
        self.fences = {server: InferFence() for server in self.servers}
        for fence in self.fences.values():
            fence.reopen(1)
        self.most_posts = setting.places or 1
        if setting.num_servers:
            self.most_posts = max_prompts_in_flight(setting.places, setting.num_servers, num_ranks)
        self.random = random.Random(setting.seed * 1009 + index)
        self.bounds = setting.durations[index]
        self.meter = ProductionMeter()
        self.posts: set[Post] = set()
        self.num_out = Counter(dict.fromkeys(self.servers, 0))
        self.num_drawn = 0
        self.held: list[SimulatedRollout] = []  # that the learner has not heard of
        self.groups: dict[int, list[SimulatedRollout]] = {}
        self.num_ended: Counter[int] = Counter()  # by group: rollouts that wait no more
        self.segments: list[SimulatedRollout] = []
        self.last_call: int | None = None
        self.missed_in_a_row = 0
        self.pacer = Pacer(
            b_ratio=setting.b_ratio,
            version_window=setting.window,
            sync_every_steps=setting.sync_every_steps,
            target_packs=setting.target,
            packs_per_b_step=setting.packs_per_b_step,
        )

    def _expired(self, rollouts: Sequence[SimulatedRollout]) -> None:
        self.outcome.expired += 1
        self.outcome.lost.update(rollout.is_long for rollout in rollouts)

    def state(self, now: float) -> PacerInputs:
        return PacerInputs(
            step=int(now),
            progress=now - int(now),
            current_version=self.clock.current,
            holds_production=not any(fence.is_open for fence in self.fences.values()),
            ready_versions=self.queue.peek_versions(),
            typical_steps=self.meter.typical_steps,
            slow_steps=self.meter.slow_steps if self.setting.num_generations > 1 else None,
            missed_in_a_row=self.missed_in_a_row,
        )

    def facts(self, reservation: Reservation | None) -> RankFacts:
        return RankFacts(not_reserved=reservation is None)

    def num_wanted(self, now: float) -> int:
        """Rollouts to ask for now, as the pipeline finds it."""
        began = time.thread_time()
        per_pack = self.setting.rollouts_per_pack
        state = self.state(now)
        typical = state.typical_steps or 0.0
        are_packs = len(self.segments) > per_pack
        coming = [(rollout.version, now) for rollout in (*self.held, *(self.segments if are_packs else ()))]
        last_of: dict[int, float] = {}
        out = [(rollout, post.start) for post in self.posts for rollout in post.rollouts]
        for rollout, start in out:
            arrival = now + abs(typical - (now - start))
            last_of[rollout.group] = max(arrival, last_of.get(rollout.group, 0.0))
        in_groups = (*(rollout for rollout, _ in out), *chain.from_iterable(self.groups.values()))
        coming += [(rollout.version, last_of.get(rollout.group, now)) for rollout in in_groups]
        in_making, over = packs_of(coming, per_pack)
        num_left = sum(arrival <= now + typical for arrival in over) + (
            0 if are_packs else len(self.segments)
        )
        num_packs = self.pacer.decide(replace(state, in_making=in_making))
        self.outcome.decisions += 1
        self.outcome.decision_s += time.thread_time() - began
        missing = -self.num_drawn % self.setting.num_generations
        return max(missing, num_packs * per_pack - num_left if num_packs else 0)

    def pace(self, now: float, versions: Versions) -> None:
        """Ask the pacer and send POSTs until it says no, no place is free or the door is closed."""
        low, high = self.setting.outage
        size = 1 if self.setting.places else self.setting.packs_per_request * self.setting.rollouts_per_pack
        while len(self.posts) < self.most_posts:
            versions.install(now)
            wanted = self.num_wanted(now)
            if wanted == 0 or low <= now < high:
                return
            for _ in range(math.ceil(wanted / size)):
                if len(self.posts) >= self.most_posts or not self._post(now, min(wanted, size), versions):
                    return

    def _post(self, now: float, num_rollouts: int, versions: Versions) -> bool:
        least = min(self.num_out.values())
        # Ranks begin at different servers, so that few places of each are not all those of the first.
        first = self.num_drawn % len(self.servers)
        order = (*self.servers[first:], *self.servers[:first])
        server = next(each for each in order if self.num_out[each] == least)
        if self.fences[server].enter() is None:
            return False
        share, factor = self.setting.tail
        rollouts, duration = [], 0.0
        # Where one rollout makes a pack, all of a POST take the same time.
        for number in range(num_rollouts):
            if number == 0 or self.setting.rollouts_per_pack > 1:
                is_long = bool(share) and self.random.random() < share
                steps = self.random.uniform(*self.bounds) * (factor if is_long else 1.0)
                duration = max(duration, steps)
            group = self.num_drawn // self.setting.num_generations
            rollouts.append(SimulatedRollout(versions.served[server], is_long, group))
            self.outcome.drawn[is_long] += 1
            self.num_drawn += 1
        duration *= 2 if server < self.setting.num_slow_servers else 1
        post = Post(server, tuple(replace(each, steps=duration) for each in rollouts), now, now + duration)
        self.posts.add(post)
        self.num_out[server] += 1
        if duration == 0:
            self.finish(post)
        else:
            versions.push_end(post, self)
        return True

    def makes_stale(self, version: int) -> bool:
        in_flight = (rollout for post in self.posts for rollout in post.rollouts)
        in_groups = (rollout for members in self.groups.values() for rollout in members)
        here = (*in_flight, *in_groups, *self.held, *self.segments)
        at_hand = (*(rollout.version for rollout in here), *self.queue.peek_versions())
        return version - self.setting.window - 1 in at_hand

    def finish(self, post: Post) -> None:
        self.posts.remove(post)
        self.num_out[post.server] -= 1
        self.fences[post.server].leave()
        if self.setting.num_generations == 1:
            self.meter.observe(post.end - post.start)
        self.held += post.rollouts
        self.offer_heard()

    def offer_heard(self) -> None:
        """Group, pack and offer what is not ahead of the clock."""
        heard = [rollout for rollout in self.held if rollout.version <= self.clock.current]
        self.held = [rollout for rollout in self.held if rollout.version > self.clock.current]
        for rollout in heard:
            self.groups.setdefault(rollout.group, []).append(rollout)
        for number, members in list(self.groups.items()):
            is_whole = len(members) + self.num_ended[number] == self.setting.num_generations
            first = min(each.version for each in members)
            is_called = self.last_call is not None and first < self.last_call - self.setting.window
            if is_whole or (is_called and len(members) > 1):
                del self.groups[number]
                self.num_ended[number] += len(members)
                if is_whole and self.setting.num_generations > 1:
                    self.meter.observe(max(rollout.steps for rollout in members))
                if len(members) == 1 < self.setting.num_generations:  # too small to be compared
                    self.outcome.lost[members[0].is_long] += 1
                else:
                    self.segments += members
        self.pack()

    def pack(self) -> None:
        oldest = self.clock.current - self.setting.window
        if stale := [each for each in self.segments if each.version < oldest]:
            self._expired(stale)
        self.segments = [each for each in self.segments if each.version >= oldest]
        per_pack = self.setting.rollouts_per_pack
        while len(self.segments) >= per_pack:
            youngest = max(rollout.version for rollout in self.segments[:per_pack])
            if not self.queue.has_room(min(youngest, oldest)):
                return
            packed, self.segments = self.segments[:per_pack], self.segments[per_pack:]
            self.outcome.made += 1
            self.queue.offer(SimulatedPack(tuple(packed)), current_version=self.clock.current)


class Versions:
    """The learner's side of versions and servers' lives, and what is on its way to the servers."""

    def __init__(self, setting: Setting, ranks: list[SimulatedRank], outcome: Outcome) -> None:
        self.setting, self.ranks, self.outcome = setting, ranks, outcome
        self.random = random.Random(setting.seed * 1013)
        self.schedule = VersionSchedule(setting.sync_every_steps)
        self.schedule.begin(0)
        num_servers = setting.num_servers or len(ranks)
        self.lives = [
            ServerLife(1, 1, stages=setting.staged, state=LifeState.PROVEN, version=1)
            for _ in range(num_servers)
        ]
        self.arrives_at = [math.inf] * num_servers
        self.served = [1] * num_servers
        """By server, the version that it holds."""
        self.installed: set[int] = set()
        self.ends: list[tuple[float, int, Post, SimulatedRank]] = []
        """Of POSTs that are out, the soonest first."""
        self._num_posts = 0
        self.is_publishing = False
        """By the last agreement: the copy of the weights is in use."""
        self.holds_production = False

    @property
    def is_awaited(self) -> bool:
        """Whether a version is under way that no server has proven."""
        is_under_way = self.is_publishing or any(life.is_closed for life in self.lives)
        return is_under_way and self.schedule.begun > self.ranks[0].clock.current

    def push_end(self, post: Post, rank: SimulatedRank) -> None:
        self._num_posts += 1
        heapq.heappush(self.ends, (post.end, self._num_posts, post, rank))

    def begin_if_due(self, step: int) -> None:
        makes_stale = any(rank.makes_stale(self.schedule.next_version) for rank in self.ranks)
        is_due = self.schedule.is_due(step, any_proven=True, server_waits=False, makes_stale=makes_stale)
        if not is_due or self.is_publishing or self.is_awaited:
            return
        since = step - (self.schedule.begun_step or 0)
        self.outcome.most_steps_between_versions = max(self.outcome.most_steps_between_versions, since)
        self.schedule.begin(step)
        for index, life in enumerate(self.lives):
            if life.stages:
                self._push(index, step)
            elif life.wants(self.schedule.begun, step):
                life.drain()
                for fence in self._fences(index):
                    fence.close()

    def _push(self, index: int, now: float) -> None:
        self.lives[index].push()
        self.arrives_at[index] = now + self.random.uniform(*self.setting.travel_steps)
        self.install(now)

    def install(self, now: float) -> None:
        """The servers install what has arrived by ``now``."""
        if now < min(self.arrives_at):
            return
        for index, arrives_at in enumerate(self.arrives_at):
            if now < arrives_at:
                continue
            self.arrives_at[index] = math.inf
            self.installed.add(index)
            self.served[index] = self.schedule.begun

    def _last_call(self, step: int) -> int | None:
        lead = max(self.setting.sync_every_steps, math.ceil(1 / self.setting.b_ratio))
        if self.is_awaited:
            return self.schedule.begun
        return self.schedule.next_version if self.schedule.comes_within(lead, step) else None

    def _fences(self, server: int) -> list[InferFence]:
        return [rank.fences[server] for rank in self.ranks if server in rank.fences]

    def agree(self, step: int) -> None:
        """Takes in what has come of pushes, pushes to who is drained, and applies what all ranks then know."""
        if self.holds_production:
            self.schedule.hold(step)
        self.outcome.versions += bool(self.installed)
        for index in self.installed:
            self.lives[index].proved(self.schedule.begun)
        self.installed = set()
        drained = [
            index
            for index, life in enumerate(self.lives)
            if life.state is LifeState.DRAINING
            and not any(fence.is_open or fence.in_flight for fence in self._fences(index))
        ]
        newest = max(life.version for life in self.lives)
        for rank in self.ranks:
            if rank.clock.current < newest:
                rank.clock.advance(newest)
            rank.last_call = self._last_call(step)
            rank.offer_heard()
        for index, life in enumerate(self.lives):
            for fence in self._fences(index):
                if life.is_closed:
                    fence.close()
                elif life.version != fence.version or not fence.is_open:
                    fence.reopen(life.version)
        for index in drained:
            self._push(index, step)
        self.is_publishing = any(life.is_pushing for life in self.lives)
        self.holds_production = all(life.is_closed for life in self.lives)


def simulate(setting: Setting) -> Outcome:
    """Run ``setting.num_steps`` steps on as many ranks as it names durations."""
    outcome = Outcome()
    ranks = [SimulatedRank(setting, index, outcome) for index in range(len(setting.durations))]
    versions, last_b = Versions(setting, ranks, outcome), -1
    for step in range(setting.num_steps):
        _run_background_until(step, versions)
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
            _settle(rank, reservation, plan.channel is Channel.B, wants_b)
        if plan.channel is Channel.B:
            outcome.ran += 1
            last_b = step
        outcome.longest_gap = max(outcome.longest_gap, step - last_b)
        versions.agree(step)
        for rank in ranks:
            rank.pace(step + setting.pipeline_delay, versions)
    return outcome


def _run_background_until(step: int, versions: Versions) -> None:
    """Finish the POSTs that end by the time ``step`` starts, in order of time; each asks the pacer again."""
    while versions.ends and versions.ends[0][0] <= step:
        now, _, post, rank = heapq.heappop(versions.ends)
        versions.install(now)
        rank.finish(post)
        rank.pace(now, versions)
    versions.install(step)


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
