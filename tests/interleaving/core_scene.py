"""The small scene: learner, gate, queue, fence, clock, round schedule and sample source are real, on few yield points.

Production, client and push are the shortest thing that has the same obligations: a POST under one ticket, an abandoned
one that its server goes on computing until an ordered call has answered, a push that takes time. So one core runs
several hundred of its seeds per second.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

from detection_task import make_task
from interleaving.ledger import Ledger
from interleaving.scheduler import Scheduler, Violation, seeded_chooser
from interleaving.setting import REQUEST_TIMEOUT_S, SYNC_TIMEOUT_S, Setting
from interleaving.virtual_collectives import MeetingRoom, VirtualControlGroup
from interleaving.virtual_servers import Computation, VirtualServer, Watcher, Weights
from interleaving.virtual_threading import Event, Lock, Thread, TimeNames, active, running

from swift_stage2.channel_b.attempts import Attempts
from swift_stage2.channel_b.ready_queue import DropReason, ReadyQueue
from swift_stage2.channel_b.sample_source import SampleSource
from swift_stage2.errors import FenceShutDown, PipelineFailed, QueueClosed, TicketTimeout
from swift_stage2.fence import InferFence
from swift_stage2.learner import ChannelB, Learner
from swift_stage2.records import Pack, Rollout, RoundOutcome, Sample, SampleKey, ServerReport, VersionSpan
from swift_stage2.scheduling.round_schedule import RoundSchedule, ServerState
from swift_stage2.scheduling.version_clock import VersionClock
from swift_stage2.scheduling.watches import TruncationGuard
from swift_stage2.telemetry.ledger import ReturnReason

_URL = "http://s0"
_HORIZON_S = 100.0
_CONTROL_TIMEOUT_S = 60.0
_ROWS = [{"index": index, "objects": {"ref": ["it"], "bbox": [[0, 0, 1, 1]]}} for index in range(40)]
_IDLE_S = 0.1
_TICKET_SLICE_S = 0.5


def core_setting_of(rng: random.Random) -> Setting:
    packs_per_step = rng.choice((1, 2))
    window = rng.choice((0, 1, 2))
    setting: dict[str, Any] = {}
    trouble = rng.randrange(6)
    num_steps = rng.randint(3, 6)
    if trouble in (1, 2):
        setting["latencies_s"] = (0.0, 0.1, 0.4, *rng.sample((0.9, 1.0, 1.3, 2.0, 2.5), 2))
        setting["slow_share"] = 1.0
    elif trouble == 3:
        setting["push_fates"] = {(0, rng.randint(1, 3)): "refused"}
    elif trouble == 4:
        setting["stop"] = (rng.randrange(2), rng.uniform(0, 1.5))
    elif trouble == 5:
        setting["failing_pipeline"] = (rng.randrange(2), rng.randint(0, 4))
    return Setting(
        num_ranks=3 if rng.random() < 0.15 else 2,
        num_steps=num_steps,
        step_s=rng.choice((0.1, 0.3)),
        b_ratio=rng.choice((1.0, 1.0, 0.5)),
        packs_per_step=packs_per_step,
        queue_limit=packs_per_step + rng.randint(0, 1),
        version_window=window,
        sync_every_steps=rng.randint(1 if window else 2, 3),
        skews_s=rng.choice(((0.0,), (0.0, 0.05, 0.4))),
        continue_on_failure=rng.random() < 0.5,
        **setting,
    )


class CoreClient:
    """One POST at a time to the only server, and the trust that goes with it."""

    def __init__(self, scene: CoreScene, rank: int, fence: InferFence) -> None:
        self._scene = scene
        self._rank = rank
        self._fence = fence
        self._lock = Lock()
        self._proven = False
        self._settling = False
        self._suspicion: str | None = None
        self.stopped = Event()

    @property
    def suspects(self) -> dict[str, str]:
        with self._lock:
            return {_URL: self._suspicion} if self._suspicion else {}

    @property
    def num_unsettled(self) -> int:
        with self._lock:
            return int(self._settling)

    def set_proven(self, served: dict[str, Any], *, drained: bool) -> None:
        assert drained, "its server is a stock one"
        with self._lock:
            self._proven, self._suspicion, self._settling = bool(served), None, False

    def expect_round(self, round_id: str, version: int) -> None:
        """No server of this scene stages."""

    def withdraw(self, servers: Any) -> None:
        with self._lock:
            self._proven = False

    def request_stop(self) -> None:
        self.stopped.set()

    def close(self) -> None:
        """Nothing is held."""

    def generate(self, sample: Sample) -> Rollout | None:
        """One POST under one ticket. None when it did not answer in time, or must not be sent."""
        while not self.stopped.is_set():
            try:
                with self._fence.ticket(_TICKET_SLICE_S) as ticket:
                    with self._lock:
                        if not self._proven:
                            return None
                    text = self._post()
                    if text is None:  # while the ticket is held
                        self._settling = True
                break
            except TicketTimeout:
                continue
        else:
            return None
        if text is None:
            self._settle()
            return None
        return Rollout(sample, text, (1,), (1,), False, 1, _URL, (VersionSpan(ticket.version, 0, 1),))

    def _post(self) -> str | None:
        server = self._scene.server
        active().point("sends a POST")
        self._scene.ledger.infer_begins(server)
        latency_s = self._scene.draw_latency()
        weights = server.weights
        server.running.append(Computation(active().now, active().now + latency_s, False))
        TimeNames.sleep(min(latency_s, REQUEST_TIMEOUT_S))
        return repr(weights) if latency_s <= REQUEST_TIMEOUT_S else None

    def _settle(self) -> None:
        """The ordered call: answers when the server has ended what was abandoned, or makes it suspect."""
        self._scene.ledger.counts["posts abandoned"] += 1
        ends = max((call.end for call in self._scene.server.computing()), default=active().now)
        by = active().now + REQUEST_TIMEOUT_S
        TimeNames.sleep(min(ends, by) - active().now)
        with self._lock:
            if ends > by:
                self._suspicion = "a POST was abandoned and could not be settled"
                self._proven = False
            self._settling = False
        if ends > by:
            self._scene.ledger.suspicion(self._rank, "not settled")


class CorePipeline:
    """Draws, asks, and offers what is answered, one sample per pack, as long as the queue has room."""

    production_pace = standing = None

    def __init__(
        self, scene: CoreScene, rank: int, client: Any, source: SampleSource, clock: VersionClock
    ) -> None:
        self._scene = scene
        self._rank = rank
        self._client = client
        self._source = source
        self._clock = clock
        self._stop = Event()
        self._thread = Thread(self._run, name="producer")
        self._num_made = 0
        self._segments: list[Any] = []
        self._held: list[Any] = []
        self._groups = None
        self.attempts = Attempts()
        self._partial = SimpleNamespace(_waiting=())  # nothing is resumed here
        self.queue: Any = None
        self.failure: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def observe(self, view: Any) -> None:
        """Paces itself by the queue alone."""

    def stop(self, timeout_s: float) -> bool:
        self._stop.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def on_drop(self, pack: Pack, reason: DropReason) -> None:
        self._scene.ledger.dropped(self._rank, pack, reason)
        self._source.give_back(pack.keys, ReturnReason.OVERFLOW)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                if not self._produce():
                    self._stop.wait(_IDLE_S)
        except (FenceShutDown, QueueClosed):
            return
        except RuntimeError as error:
            self.failure = error

    def _produce(self) -> bool:
        setting, mine = self._scene.setting, self._scene.ledger.ranks[self._rank]
        if len(self.queue.peek_versions()) >= setting.queue_limit + 1:
            return False
        mine.producing = True
        (key,) = self._source.draw(1)
        with self.preparation():
            rollout = self._client.generate(self._source.read(key))
            if rollout is None:
                self._source.give_back([key], ReturnReason.FAILED)
                mine.producing = False
                return False
            self._scene.ledger.rollout(self._rank, rollout, self._scene.server)
            if setting.failing_pipeline == (self._rank, self._num_made):
                raise RuntimeError("the disk went away")
            self._num_made += 1
            pack = Pack(
                str(self._num_made), rollout.version, {}, (key,), 1, 1, 1, versions=(rollout.version,)
            )
            self.queue.offer(pack, current_version=self._clock.current)
        mine.producing = False
        return len(self.queue.peek_versions()) < setting.queue_limit

    def preparation(self) -> AbstractContextManager[Any]:
        """A production holds nothing of its own."""
        return nullcontext()


class CoreParts:
    """Parts that a mutation may replace."""

    fence: type[InferFence] = InferFence
    queue: type[ReadyQueue] = ReadyQueue
    pipeline: type[CorePipeline] = CorePipeline


class CoreSync:
    """A push that takes time beside training, and the broadcast that tells its outcome."""

    def __init__(self, scene: CoreScene, control: VirtualControlGroup, rounds: RoundSchedule) -> None:
        self._scene = scene
        self._control = control
        self._rounds = rounds
        self._outcome: dict[str, Any] | None = None
        self._ended = Event()

    def begin(
        self,
        version: int,
        targets: tuple[int, ...],
        *,
        round_id: str,
        staged: bool,
        held: bool,
        step: int,
    ) -> None:
        if self._control.rank > 0:
            return
        scene, self._outcome = self._scene, None
        proven = self._rounds.states()[0] is ServerState.PROVEN
        scene.ledger.round_begins(
            version, scene.weights, {0: (scene.server, proven)}, round_id=round_id, is_staged=staged
        )
        self._ended.clear()
        Thread(partial(self._push, version, round_id, scene.weights), name="push").start()

    @property
    def has_news(self) -> bool:
        return self._outcome is not None

    def hear(self) -> RoundOutcome:
        if self._control.rank == 0:
            self._ended.wait(SYNC_TIMEOUT_S)
            self._scene.ledger.round_is_heard(self._outcome or {})
        outcome, self._outcome = self._outcome, None
        return RoundOutcome.from_json(self._control.broadcast(outcome))

    def _push(self, version: int, round_id: str, weights: Weights) -> None:
        scene = self._scene
        while scene.server.computing():  # a server that was suspect may still be at it: the ordered call
            TimeNames.sleep(0.05)
        fails = (0, scene.ledger.num_rounds) in scene.setting.push_fates
        for _ in range(2):
            active().point("a bucket")
            if not fails:
                scene.ledger.weights_change(scene.server)
        scene.server.weights = scene.server.weights if fails else weights
        report = ServerReport(not fails, "refused" if fails else None, "checksums", 0, {})
        outcome = RoundOutcome(round_id, version, {0: report}, news=(0,)).to_json()
        self._outcome = outcome
        self._ended.set()

    def distrust(self, servers: Any) -> None:
        """Nothing outlives a round."""

    def close(self) -> None:
        """Nothing is held."""


class CoreProbe:
    """A suspect server always answers again."""

    def __init__(self) -> None:
        self._watched: frozenset[str] = frozenset()

    def start(self) -> None: ...

    def watch(self, urls: list[str]) -> None:
        self._watched = frozenset(urls)

    def answering(self) -> frozenset[str]:
        return self._watched

    def lost(self) -> frozenset[int]:
        return frozenset()

    def pause(self) -> None: ...

    def go_on(self) -> None: ...

    def stop(self) -> None: ...


class CoreAbort:
    """Servers that cannot abort."""

    def ask(self, urls: Any, version: int) -> None: ...

    def stop(self) -> None: ...


class CoreEvents:
    def activity(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def record_step(self, facts: Any) -> None: ...

    def record_round(self, step: int, outcome: Any, pending_seconds: float) -> None: ...

    def record_warning(self, message: str) -> None:
        if "did not end" in message:
            active().fail(message)

    def quarantined(self, key: SampleKey) -> None: ...


class CoreScene:
    """One run of one setting."""

    def __init__(self, setting: Setting, rng: random.Random, parts: type[CoreParts]) -> None:
        self.setting = setting
        self.ledger = Ledger(setting)
        self.weights: Weights = (0.0,)
        self.server = VirtualServer(_URL, True, Watcher(), weights=(-1.0,))
        self._rng = rng
        self._parts = parts
        self._room = MeetingRoom(setting.num_ranks, _CONTROL_TIMEOUT_S)

    def draw_latency(self) -> float:
        return self._rng.choice(self.setting.latencies_s)

    def run(self) -> None:
        run = active()
        learners = [self._make_rank(rank) for rank in range(self.setting.num_ranks)]
        if self.setting.stop is not None:
            rank, moment = self.setting.stop
            run.at(moment, learners[rank][0].request_stop, "signal")
        for rank, (learner, b) in enumerate(learners):
            run.spawn(partial(self._train, rank, learner, b), "learner", f"rank {rank}")

    def _train(self, rank: int, learner: Learner, b: ChannelB) -> None:
        learner.start()
        step = -1
        while (step := step + 1) < self.setting.num_steps or b.rounds.pending:
            began_s, ended = active().now, "well"
            try:
                decision = learner.begin_step(step, self.setting.packs_per_step)
            except PipelineFailed:
                ended = "PipelineFailed"
                if self.setting.failing_pipeline is None or self.setting.continue_on_failure:
                    active().fail("the run ends with PipelineFailed for no reason")
            self.ledger.agree(rank, step, "the end", ended)
            if ended != "well":
                break
            self.ledger.step(rank, step, decision, b, began_s)
            self.ledger.account(rank, b)
            TimeNames.sleep(self.setting.step_s + self._rng.choice(self.setting.skews_s))
            if rank == 0:
                self.weights = (self.weights[0] + 1,)
            if decision.stop:
                break
        learner.close()
        self.ledger.account(rank, b)

    def _make_rank(self, rank: int) -> tuple[Learner, ChannelB]:
        setting, parts = self.setting, self._parts
        control = VirtualControlGroup(rank, self._room)
        fence, clock = parts.fence(start_closed=True), VersionClock()
        source = SampleSource(_ROWS, make_task(), rank=rank, world_size=setting.num_ranks, seed=0)
        client = CoreClient(self, rank, fence)
        pipeline = parts.pipeline(self, rank, client, source, clock)
        queue = parts.queue(setting.queue_limit, setting.version_window, pipeline.on_drop)
        pipeline.queue = queue
        self.ledger.watch_queue(rank, queue, clock)
        rounds = RoundSchedule(1, setting.sync_every_steps, backoff_steps=1, max_backoff_steps=64)
        parts_of_b: dict[str, Any] = {
            "client": client,
            "pipeline": pipeline,
            "sync": CoreSync(self, control, rounds),
            "probe": CoreProbe(),
            "abort": CoreAbort(),
        }
        b = ChannelB(
            source=source,
            queue=queue,
            fence=fence,
            clock=clock,
            guard=TruncationGuard(1.0),
            rounds=rounds,
            run_id="run",
            base_urls=[_URL],
            max_inflight_per_server=2,
            min_ready_tokens=0,
            continue_on_failure=setting.continue_on_failure,
            **parts_of_b,
        )
        learner = Learner(
            b_ratio=setting.b_ratio,
            control=control,
            events=CoreEvents(),
            starvation=None,
            fail_when_starved=False,
            channel_b=b,
        )
        return learner, b


def run_core_seed(
    seed: int, *, parts: type[CoreParts] = CoreParts, traced: bool = False
) -> tuple[Counter[str], Scheduler]:
    """One schedule of one small scene, inside ``virtual_world``.

    Raises:
        Violation: an invariant does not hold; the message names the seed.
    """
    rng = random.Random(seed)
    setting = core_setting_of(rng)
    scheduler = Scheduler(seeded_chooser(rng), horizon_s=_HORIZON_S, traced=traced)
    with running(scheduler):
        scene = CoreScene(setting, rng, parts)
        try:
            scheduler.run(scene.run)
        except Violation as violation:
            violation.scheduler = scheduler
            violation.add_note(f"seed {seed}: {setting}")
            raise
    return scene.ledger.counts, scheduler
