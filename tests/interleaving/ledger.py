"""Invariants of every run, whatever the schedule: facts come in from the scene, violations end the run.

Facts are what really happened (the weights that a server computed with, when), never what the code under test says
of itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from interleaving.setting import REQUEST_TIMEOUT_S, Setting
from interleaving.virtual_servers import BASE_WEIGHTS, NUM_TOKENS, VirtualServer, Weights
from interleaving.virtual_threading import active

from swift_stage2.channel_b.groups import Groups, GroupSettings, Member
from swift_stage2.channel_b.ready_queue import ReadyQueue, Reservation
from swift_stage2.channel_b.rollouts.requests import PostResult
from swift_stage2.channel_b.rollouts.server_client import ServerClient
from swift_stage2.channel_b.rollouts.server_state import InFlightRequest
from swift_stage2.channel_b.sample_source import SampleSource
from swift_stage2.records import Pack, Rollout, SampleKey, UnusedReason
from swift_stage2.scheduling.evaluation_schedule import EvaluationSchedule
from swift_stage2.scheduling.server_life import LifeState
from swift_stage2.scheduling.step_plan import Channel
from swift_stage2.scheduling.version_clock import VersionClock

Place = tuple[int, int]  # a sample's epoch and position
_SLACK_S = 1e-6
_LONGEST_TURN_S = 1.0  # of a pipeline that nothing holds up


@dataclass(frozen=True, slots=True)
class Push:
    """A push as it began."""

    number: int
    version: int
    num_starts: int
    """Of its server, until then."""


class RankLedger:
    """One rank's samples and packs."""

    def __init__(self) -> None:
        self.trained: set[Place] = set()
        self.quarantined: set[Place] = set()
        self.unused: set[Place] = set()
        self.compared: set[SampleKey] = set()
        self.last_call: int | None = None  # when groups were looked through last
        self.called_s: dict[Place, float] = {}  # groups that the last call is for, and since when
        self.num_begun = 0  # rollouts
        self.idle: tuple[int, int, float] | None = None
        """Rollouts begun and samples returned when groups waited for nobody, and since when."""
        self.promised: list[Pack] = []  # in a reservation that is neither taken nor released
        self.taken_at = -1  # the clock's version at the moment at which a step took its packs
        self.doubts: dict[str, int] = {}  # by server: how many pushes had begun when it became suspect
        self.version = -1
        self.producing = False
        # The yield point at which the last of the pipeline's turns began that has ended
        self.looked_from = -1
        self.heard_at: dict[int, int] = {}  # yield points at which nothing more could come of these versions
        self.asked: tuple[int, ...] = ()  # versions of servers, after the last step
        self.began_s = 0.0  # the moment at which its last step had been planned
        self.num_held = 0  # steps in a row at which a version that is due has been held back


class Ledger:
    """All ranks' facts of one run. ``counts`` say what it met, so that a batch can be shown not to be empty."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.ranks = [RankLedger() for _ in range(setting.num_ranks)]
        self.counts: Counter[str] = Counter()
        self.committed: dict[int, Weights] = {}
        self.num_versions = 0
        self.num_pushes_to: Counter[str] = Counter()
        self.evaluations: EvaluationSchedule | None = None  # rank 0's
        self._clocks: list[VersionClock] = []
        self._sources: list[SampleSource] = []
        self._versions: dict[int, Weights] = {}
        self._num_pushes = 0
        self._running: dict[str, Push] = {}  # by base URL
        self._proven: set[tuple[str, int]] = set()  # base URL and version
        self._last_proof: dict[str, Push] = {}
        self._drained_since: dict[int, float] = {}
        self._agreed: dict[tuple[int, str], Any] = {}
        self._slowest_step_s = 0.0

    # --- servers and versions ----------------------------------------------------------------------

    def infer_begins(self, server: VirtualServer) -> None:
        self.counts["posts"] += 1
        if server.url in self._running:
            self.counts["posts during a push"] += 1
            if server.stock:
                _fail(f"an /infer/ reaches {server.url} while weights are pushed there")

    def watch_server(self, rank: int, server: ServerClient) -> None:
        """Knows from now on when the rank suspects a server that it asked, and looks whether it asks such a one."""
        url, state, doubts = server.base_url, server.state, self.ranks[rank].doubts
        suspect, call = state.mark_suspect, server._call

        def take_note(reason: str) -> None:
            was_proven, number = state.is_proven, self._num_pushes
            suspect(reason)
            if was_proven:
                doubts[url] = number

        async def look_first(post: InFlightRequest, *asked: Any) -> PostResult:
            proof = self._last_proof.get(url)
            self.counts["posts beside others of their server"] += len(state._out) > 1
            # One that was about to leave when the doubt came is cut, or nothing of it is believed.
            is_meant = state.is_proven and post in state._out
            is_doubted = url in doubts and proof is not None and proof.number <= doubts[url]
            if is_meant and is_doubted:
                _fail(f"rank {rank} asks {url}, suspected since, or in, the push that proved it")
            return await call(post, *asked)

        state.mark_suspect, server._call = take_note, look_first  # type: ignore[method-assign]

    def weights_change(self, server: VirtualServer) -> None:
        if server.stock and server.computing():
            _fail(f"weights change on {server.url} while an /infer/ runs there")
        schedule, push = self.evaluations, self._running.get(server.url)
        if push is None or schedule is None or schedule.running is None or schedule.is_cut:
            return
        if push.version != schedule.running.version:
            _fail(
                f"weights change on {server.url} under the evaluation of version {schedule.running.version}"
            )

    def version_begins(self, version: int, weights: Weights) -> None:
        self.num_versions += 1
        self.counts["versions"] += 1
        if self._running:
            _fail(f"version {version} is copied over the weights that a push carries")
        if version in self._versions:
            _fail(f"version {version} begins twice")
        self._versions[version] = weights

    def push_begins(self, server: VirtualServer, version: int, *, was_drained: bool) -> None:
        self._num_pushes += 1
        self.num_pushes_to[server.url] += 1
        is_first = all(each != server.url for each, _ in self._proven)
        self.counts["pushes"] += 1
        self.counts["pushes after a drain"] += was_drained
        self.counts["pushes again"] += not is_first and server.url not in self._last_proof
        if server.url in self._running:
            _fail(f"two pushes run to {server.url}")
        if server.stock and server.computing() and server.url in self._last_proof:
            _fail(f"a push begins while {server.url} computes an /infer/")
        self._running[server.url] = Push(self._num_pushes, version, server.num_starts)

    def push_ends(self, server: VirtualServer, *, is_proven: bool, error: str | None, counts: bool) -> None:
        """Rank 0 has heard of it; ``counts``: nobody has suspected the server since it began."""
        push = self._running.pop(server.url)
        if not counts:
            self.counts["pushes ignored"] += 1
            return
        if not is_proven:
            self.counts["pushes failed"] += 1
            self._last_proof.pop(server.url, None)
            if self.setting.is_calm and self.setting.bad_weights_at_version is None:
                _fail(f"a push to {server.url} fails for no reason: {error}")
            return
        self.counts["pushes proven"] += 1
        weights = self._versions[push.version]
        if server.weights != weights and server.num_starts == push.num_starts:
            _fail(f"{server.url} is proven to hold version {push.version} but computes with {server.weights}")
        self.committed[push.version] = weights
        self._proven.add((server.url, push.version))
        self._last_proof[server.url] = push

    def rollout(self, rank: int, rollout: Rollout, server: VirtualServer) -> None:
        """The version that a rollout carries is that of the weights that computed it, and a proven one."""
        self.counts["rollouts"] += 1
        newest = max(span.version for span in rollout.spans)
        if newest > self._clocks[rank].current:
            _fail(f"rank {rank} uses a rollout of version {newest} at {self._clocks[rank].current}")
        last = rollout.spans[-1].version
        if (server.url, last) not in self._proven:
            _fail(f"a rollout of {server.url} is used, whose version {last} nobody heard proven there")
        if rollout.text != repr(self.committed.get(last)):
            _fail(f"a rollout says version {last}, but was computed with {rollout.text}")

    def tokens(self, rollout: Rollout) -> None:
        """It is whole, and its spans say of every token which proven weights sampled it."""
        said = [
            int(self.committed.get(span.version, BASE_WEIGHTS)[0])
            for span in rollout.spans
            for _ in range(span.start, span.end)
        ]
        self.counts["rollouts of several versions"] += len(rollout.spans) > 1
        if said != list(rollout.token_ids) or len(said) != NUM_TOKENS:
            _fail(f"a rollout of {rollout.spans} has the tokens {rollout.token_ids}, but should have {said}")

    def evaluated(self, rank: int, rollout: Rollout, server: VirtualServer, version: int) -> None:
        """So is an answer that an evaluation of ``version`` counts, and no other version's."""
        self.rollout(rank, rollout, server)
        self.counts["evaluation answers"] += 1
        if rollout.version != version:
            _fail(f"an evaluation of version {version} counts an answer of version {rollout.version}")

    def evaluation_ends(self, rank: int, record: Any) -> None:
        counts = record.counts
        told = record.model_dump(exclude={"time"})
        self.agree(rank, record.step, "an evaluation that ended", told)
        self.counts[f"evaluations {record.end}"] += rank == 0
        is_whole = counts.num_answered + counts.num_failed == counts.num_wanted
        if not is_whole if record.end == "complete" else counts.num_answered > counts.num_wanted:
            _fail(f"rank {rank}: an evaluation that ended {record.end} has {counts}")

    def suspicion(self, rank: int, reason: str) -> None:
        self.counts["suspicions"] += 1
        if self.setting.is_calm:
            _fail(f"rank {rank} suspects a server that nothing is wrong with: {reason}")

    # --- queue and samples -------------------------------------------------------------------------

    def watch_queue(self, rank: int, queue: ReadyQueue, clock: VersionClock) -> None:
        """Knows from now on which packs are promised to a step, and under which version it takes them."""
        self._clocks.append(clock)
        real = queue.reserve

        def reserve(n: int, **settings: Any) -> Reservation | None:
            reservation = real(n, **settings)
            if reservation is not None:
                self._promise(rank, reservation, clock)
            return reservation

        queue.reserve = reserve  # type: ignore[method-assign]

    def _promise(self, rank: int, reservation: Reservation, clock: VersionClock) -> None:
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
            mine.promised, mine.taken_at = [], clock.current
            return packs

        reservation.release, reservation.take = take_back, take_all  # type: ignore[method-assign]

    def dropped(self, rank: int, pack: Pack, reason: str) -> None:
        self.counts[f"packs {reason}"] += 1
        if any(pack is promised for promised in self.ranks[rank].promised):
            _fail(f"rank {rank} loses a pack that is reserved: {reason}")

    def quarantined(self, rank: int, key: SampleKey) -> None:
        self.counts["quarantined"] += 1
        self._end(rank, key, self.ranks[rank].quarantined, "quarantined")

    def _end(self, rank: int, key: SampleKey, ended: set[Place], how: str) -> None:
        mine, place = self.ranks[rank], _place(key)
        if place in mine.trained | mine.quarantined | mine.unused:
            _fail(f"rank {rank}: sample {place} is {how} after its end")
        ended.add(place)

    # --- groups ------------------------------------------------------------------------------------

    def watch_source(self, rank: int, source: SampleSource) -> None:
        """Knows from now on which samples are settled as unused."""
        self._sources.append(source)
        settle = source.settle_unused

        def settle_unused(keys: Sequence[SampleKey], reason: UnusedReason) -> None:
            settle(keys, reason)
            for key in keys:
                self._end(rank, key, self.ranks[rank].unused, "unused")

        source.settle_unused = settle_unused  # type: ignore[method-assign]

    def watch_groups(self, rank: int, groups: Groups, source: SampleSource) -> None:
        """Looks from now on how many samples it says that nobody gives: no more and no fewer than there are."""
        num_to_ask, take, again = groups.num_to_ask, groups.take, source._again
        mine = self.ranks[rank]

        def take_and_know(*, last_call: int | None) -> Any:
            mine.last_call = last_call
            return take(last_call=last_call)

        def num_missing() -> int:
            returned = sum(source.group_of(key) in groups._waiting for key in again)
            return returned + (-source._position) % self.setting.num_generations

        def look(coming: Any) -> int:
            least, said, most = num_missing(), num_to_ask(coming), num_missing()
            if not least <= said <= most:
                _fail(
                    f"rank {rank}: groups wait for {said} samples that nobody gives, but {most} are to be drawn"
                )
            return said

        groups.num_to_ask, groups.take = look, take_and_know  # type: ignore[method-assign]

    def watch_comparisons(self, compare: Callable[..., Any]) -> Callable[..., Any]:
        """``compare`` that looks first: once per rollout, all of a row, and none that may still come in time."""

        def look_first(members: Sequence[Member], settings: GroupSettings, **more: bool) -> Any:
            self._compares([member.rollout for member in members])
            return compare(members, settings, **more)

        return look_first

    def _compares(self, rollouts: Sequence[Rollout]) -> None:
        keys = [rollout.sample.key for rollout in rollouts]
        rank = next(
            n for n, source in enumerate(self._sources) if source._outstanding.get(_place(keys[0])) == keys[0]
        )
        mine, source = self.ranks[rank], self._sources[rank]
        self.counts["groups compared"] += 1
        if twice := mine.compared.intersection(keys):
            _fail(f"rank {rank}: rollouts are compared twice: {twice}")
        if len({(self._group(key), key.index) for key in keys}) > 1:
            _fail(f"rank {rank}: rollouts of several rows are compared: {keys}")
        mine.compared.update(keys)
        (epoch, first), num = self._group(keys[0]), self.setting.num_generations
        places = [(epoch, first + each) for each in range(num)]
        # Those of a pack that was dropped just now, on another thread, may be missed.
        dropped = {
            _place(key) for key in source._again if key._replace(attempt=key.attempt - 1) in mine.compared
        }
        to_come = [
            place
            for place in places
            if place >= (source._epoch, source._position)
            or (source._outstanding.get(place, keys[0]) not in mine.compared and place not in dropped)
        ]
        self.counts["groups compared at the last call"] += bool(to_come)
        if to_come and not self._is_called(mine.last_call, rollouts):
            _fail(
                f"rank {rank}: {len(keys)} rollouts of a row are compared, and {len(to_come)} more may still come"
            )

    def _is_called(self, version: int | None, rollouts: Sequence[Rollout]) -> bool:
        """Whether ``version`` is forced and makes one of ``rollouts`` too old."""
        oldest = min(rollout.version for rollout in rollouts)
        return version is not None and oldest < version - self.setting.version_window

    def _group(self, key: SampleKey) -> Place:
        """Named by its first place."""
        return key.epoch, key.position - key.position % self.setting.num_generations

    def check_groups(self, rank: int, b: Any) -> None:
        """None waits for ever: not for samples that nobody asks for, nor for late ones."""
        mine, pipeline, groups = self.ranks[rank], b.pipeline, b.pipeline.groups
        if groups is None or pipeline.failure is not None or mine.producing or pipeline._stop._set:
            mine.idle = None
            return
        self.counts["steps with groups waiting"] += bool(groups._waiting)
        longest_turn_s = _LONGEST_TURN_S + (3.0 if self.setting.stall_share else 0.0)
        called = {
            place
            for place, members in groups._waiting.items()
            if len(members) >= 2
            and self._is_called(pipeline._view.last_call, [member.rollout for member in members])
        }
        mine.called_s = {place: mine.called_s.get(place, active().now) for place in called}
        waited_s = active().now - min(mine.called_s.values(), default=active().now)
        if waited_s > 2 * longest_turn_s:
            _fail(f"rank {rank}: a group waits {waited_s:.1f} s for its last rollouts at the last call")
        can_ask = b.client.proven and b.client.free_places
        if not groups._waiting or not can_ask or pipeline.attempts._open or pipeline._awaiting_confirmation:
            mine.idle = None
        elif mine.idle is None or mine.idle[:2] != (mine.num_begun, len(self._sources[rank]._again)):
            mine.idle = (mine.num_begun, len(self._sources[rank]._again), active().now)
        elif active().now - mine.idle[2] > longest_turn_s:
            _fail(f"rank {rank}: groups wait for samples that nobody asks for: {groups._waiting}")

    # --- steps -------------------------------------------------------------------------------------

    def agree(self, rank: int, step: int, what: str, facts: Any) -> None:
        """``facts`` must be equal on all ranks."""
        first = self._agreed.setdefault((step, what), facts)
        if first != facts:
            _fail(f"ranks disagree at step {step} on {what}: rank {rank} has {facts}, another rank {first}")

    def step(self, rank: int, step: int, decision: Any, learner: Any, began_s: float) -> None:
        setting, mine, b, versions = self.setting, self.ranks[rank], learner.channel_b, learner._versions
        facts = (
            decision.plan,
            decision.stop,
            len(decision.packs),
            b.clock.current,
            versions.asked,
            versions._closed,
            versions._is_publishing,
            b.schedule.begun,
            b.schedule.pending_step,
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
            self._train(rank, pack)
        self.counts["steps with a push"] += versions._is_publishing
        self.counts["steps with a drain"] += any(versions._closed)
        if not versions._is_publishing:
            for version in range(1, b.schedule.begun + 1):
                mine.heard_at.setdefault(version, active().num_points)
        for url, before, now in zip(b.base_urls, mine.asked, versions.asked, strict=False):
            if before and not now:
                mine.doubts[url] = max(mine.doubts.get(url, 0), self._last_number(url))
        mine.asked = versions.asked
        self._check_held(rank, step, b, versions)
        if rank == 0:
            self._check_drains(b.updates.lives, began_s)
        self._slowest_step_s = max(self._slowest_step_s, active().now - mine.began_s)
        mine.began_s = active().now

    def _last_number(self, url: str) -> int:
        proof = self._last_proof.get(url)
        return proof.number if proof is not None else 0

    def _train(self, rank: int, pack: Pack) -> None:
        mine = self.ranks[rank]
        version = mine.taken_at
        if pack.version not in self.committed:
            _fail(f"rank {rank} trains a pack of version {pack.version}, which nobody has heard proven")
        if pack.version < version - self.setting.version_window:
            _fail(f"rank {rank} trains a pack of version {pack.version} at version {version}")
        for key in pack.keys:
            self._end(rank, key, mine.trained, "trained")
            if self.setting.num_generations > 1 and key not in mine.compared:
                _fail(f"rank {rank}: sample {key} is trained, but was never compared")

    def _check_drains(self, lives: Sequence[Any], began_s: float) -> None:
        """No server is drained for longer than its requests may take."""
        limit_s = 2 * (
            REQUEST_TIMEOUT_S + max(self._slowest_step_s, self.setting.step_s + max(self.setting.skews_s))
        )
        for server, life in enumerate(lives):
            if life.state is not LifeState.DRAINING:
                self._drained_since.pop(server, None)
                continue
            since = self._drained_since.setdefault(server, began_s)
            if not self.setting.stall_share and active().now - since > limit_s + _SLACK_S:
                _fail(f"server {server} is drained for {active().now - since:.3f} s, limit {limit_s:.3f} s")

    def _check_held(self, rank: int, step: int, b: Any, versions: Any) -> None:
        """A version is held back by one that is under way and by an evaluation alone, and by that one not for long."""
        setting, mine = self.setting, self.ranks[rank]
        running = b.evaluation.schedule.running if b.evaluation is not None else None
        if b.evaluation is not None:
            self.agree(rank, step, "the evaluation that runs", running)
        asks = running is not None and not b.evaluation.schedule.is_cut
        if asks and (b.schedule.begun_step > running.begun_step or running.version != b.clock.current):
            _fail(f"rank {rank}: a version comes under the evaluation of version {running.version}")
        is_under_way = versions._is_publishing or versions.awaits_version
        is_held = b.schedule.pending_step is not None and not is_under_way
        mine.num_held = mine.num_held + 1 if is_held else 0
        self.counts["steps with a version held"] += asks and is_held
        most = 1 + (setting.max_round_delay_steps if b.evaluation is not None else 0)
        if mine.num_held > most:
            _fail(f"rank {rank}: a version is held back, {mine.num_held} steps after it was due")

    def account(self, rank: int, b: Any) -> None:
        """Every sample that was drawn is in one place: drawn = to be drawn again + pending + in flight + held +
        waiting for its group + prepared + packed + trained + quarantined + unused. Nothing may run between the looks:
        no yield point in here."""
        mine = self.ranks[rank]
        source, queue, pipeline = b.source, b.queue, b.pipeline
        outstanding = set(source._outstanding)
        drawn = {(source._epoch, position) for position in range(source._position)}
        drawn |= {
            (epoch, position) for epoch in range(source._epoch) for position in range(len(source._shard))
        }
        ended = mine.trained | mine.quarantined | mine.unused
        if ended & outstanding:
            _fail(f"rank {rank}: samples go on after their end: {ended & outstanding}")
        if pipeline.failure is not None or mine.producing:
            return  # some are in the hands of the pipeline
        if missing := drawn - ended - outstanding:
            _fail(f"rank {rank}: samples are nowhere: {sorted(missing)}")
        held = [
            *((key.epoch, key.position) for key in source._again),
            *((key.epoch, key.position) for pack in queue._ready for key in pack.keys),
            *((segment.key.epoch, segment.key.position) for segment in pipeline._segments),
            *(
                (rollout.sample.key.epoch, rollout.sample.key.position)
                for rollout in pipeline._awaiting_confirmation
            ),
            *((key.epoch, key.position) for key in pipeline.attempts._open),
            *(
                _place(rollout.sample.key)
                for rollout in (pipeline.groups.rollouts if pipeline.groups else ())
            ),
        ]
        self.counts["steps with rollouts held"] += bool(pipeline._awaiting_confirmation)
        for rollout in pipeline._awaiting_confirmation:
            version = rollout.spans[-1].version
            if mine.heard_at.get(version, math.inf) < mine.looked_from:
                _fail(f"rank {rank} holds a rollout of version {version}, of which nothing more comes")
        if len(held) != len(set(held)):
            _fail(f"rank {rank}: samples are in two places: {[k for k, n in Counter(held).items() if n > 1]}")
        if set(held) != outstanding:
            _fail(f"rank {rank}: samples are outstanding but nobody holds them: {outstanding ^ set(held)}")


def _place(key: SampleKey) -> Place:
    return key.epoch, key.position


def _fail(message: str) -> None:
    active().fail(message)
