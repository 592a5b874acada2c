"""One rank of a real two-process gloo job around the real learner; started by ``test_learner.py``.

Queue, rollout client with its fences, clock, gate, schedule, updates, control group and sample source are real;
production, health check and pushes are stand-ins whose moments the scenario chooses. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from detection_task import make_task
from stand_in_canary import StandInCanary

from swift_stage2.channel_b.ready_queue import ReadyQueue
from swift_stage2.channel_b.rollouts import RolloutClient
from swift_stage2.channel_b.sample_source import SampleSource
from swift_stage2.collectives import join_control_group, run_on_all_ranks
from swift_stage2.config import DecodingConfig
from swift_stage2.config.rollout import SyncConfig
from swift_stage2.errors import ConfigError, Stage2Error, WeightSyncError
from swift_stage2.evaluation import PinnedEvaluation
from swift_stage2.fence import InferFence
from swift_stage2.learner import ChannelB, Learner
from swift_stage2.learner.phases import Phases
from swift_stage2.records import EvaluationCounts, ServerReport
from swift_stage2.scheduling.evaluation_schedule import EvaluationSchedule
from swift_stage2.scheduling.phase_schedule import PhaseSchedule
from swift_stage2.scheduling.server_life import LifeState, ServerLife
from swift_stage2.scheduling.version_clock import VersionClock
from swift_stage2.scheduling.version_schedule import VersionSchedule
from swift_stage2.scheduling.watches import TruncationGuard
from swift_stage2.servers.health_check import HealthCheck, JoiningServer, ServerKind
from swift_stage2.telemetry.event_log import EventLog
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.publisher import Publisher
from swift_stage2.weights.snapshots import Snapshots
from swift_stage2.weights.updates import Updates

URL = "http://127.0.0.1:9"  # nothing listens on the discard port
RANK = int(os.environ.get("RANK", "0"))
OURS = ServerKind(is_ours=True)


@dataclass
class StandInPack:
    version: int
    pack_id: str = "p"
    keys: tuple[Any, ...] = ()
    num_tokens: int = 1
    num_supervised_tokens: int = 1
    versions: tuple[int, ...] = ()


@dataclass
class StandInPipeline:
    failure: BaseException | None = None
    current_activity: None = None

    def start(self) -> None: ...

    def observe(self, view: Any) -> None: ...

    def makes_stale(self, version: int) -> bool:
        return False

    def stop(self, timeout_s: float) -> bool:
        return True


class StandInPublisher(Publisher):
    """Every push is proven by rank 0's next look, apart from ``dead`` versions and from those that are held."""

    is_held = False
    lost: tuple[int, ...] = ()

    def __init__(self, dead: Iterable[int] = ()) -> None:
        super().__init__()
        self.dead = dead
        self.pushed: list[tuple[int, int]] = []  # server and version
        self.dropped: list[int] = []
        self.num_looks_late: dict[int, int] = {}  # by server, for its next result

    def push(self, server: int, spec: Any, snapshot: Any) -> None:
        version = spec.identity.version
        self.pushed.append((server, version))
        try:
            snapshot.describe(spec.identity)
            result: Any = ServerReport(version not in self.dead, None, "checksums", 0, {})
        except WeightSyncError as error:
            result = error
        self._results.append((server, result))

    def take_results(self) -> Any:
        found = [] if self.is_held else super().take_results()
        for each in [each for each in found if self.num_looks_late.get(each[0], 0) > 0]:
            self.num_looks_late[each[0]] -= 1
            found.remove(each)
            self._results.append(each)
        return found

    def lost_servers(self) -> tuple[int, ...]:
        return self.lost

    def drop_connection(self, server: int) -> None:
        self.dropped.append(server)


class StandInHealth(HealthCheck):
    """Says what the scenario lets it hear."""

    def start(self) -> None: ...

    def hears(self, server: int, kind: ServerKind) -> None:
        self._joining.append(JoiningServer(server, kind))
        self._answering.add(server)


@dataclass
class StandInPart:
    """This rank's part of an evaluation: it is finished when the scenario says so."""

    versions: list[int] = field(default_factory=list)
    num_answered: int = 0
    is_finished: bool = True

    def begin(self, version: int) -> None:
        self.versions.append(version)
        self.is_finished = False

    def ask_no_more(self) -> None:
        self.is_finished = True

    def end(self) -> EvaluationCounts:
        self.is_finished = True
        return EvaluationCounts(num_wanted=4, num_answered=self.num_answered)


class Events:
    def __init__(self) -> None:
        self.log = EventLog(None)
        self.evaluations: list[tuple[Any, ...]] = []
        self.steps: list[tuple[Any, ...]] = []
        self.in_transfer: list[bool] = []
        self.rounds: list[tuple[Any, ...]] = []
        self.warnings: list[str] = []

    def activity(self, name: str) -> Any:
        return nullcontext()

    def record_step(self, facts: Any) -> None:
        self.steps.append((facts.step, str(facts.channel), facts.skip_reason, facts.version))
        self.in_transfer.append(facts.version_in_transfer)

    def record_round(self, step: int, outcome: Any, pending_seconds: float) -> None:
        self.rounds.append((step, outcome.version, list(outcome.proven)))

    def record_warning(self, message: str) -> None:
        self.warnings.append(message)

    def record_evaluation(self, record: Any) -> None:
        self.evaluations.append(
            (
                record.due_step,
                record.begun_step,
                record.step,
                record.version,
                record.end,
                record.counts.num_answered,
            )
        )


def build(
    *,
    packs: int,
    window: int = 2,
    continue_on_failure: bool = False,
    sync_every: int = 1000,
    evaluation: tuple[EvaluationSchedule, StandInPart] | None = None,
    is_staging: bool = False,
    final_evaluation_s: float = 0.0,
    absent: Sequence[str] = (),
    dead: Collection[int] = (),
    phases: Phases | None = None,
    **snapshot_parts: Any,
) -> Any:
    """Two ranks' learner before one server, of ours if it ``is_staging``, and ``absent`` ones; a version pushed there
    that is ``dead`` fails."""
    control = join_control_group(30.0)
    queue: Any = ReadyQueue(16, window)
    for _ in range(packs):
        queue.offer(StandInPack(version=1), current_version=1)
    module = torch.nn.Linear(2, 2)
    snapshots = Snapshots(
        control=control,
        run_id="run",
        timeout_s=20.0,
        bucket_mib=1,
        **{"export": WeightExport(module), "canary": StandInCanary(), **snapshot_parts},
    )
    events, pinned = Events(), None
    if evaluation is not None:
        schedule, part = evaluation
        pinned = PinnedEvaluation(schedule, part, control=control, record=events.record_evaluation)  # type: ignore[arg-type]
    urls = [URL, *absent]
    updates = Updates(
        [
            ServerLife(
                1,
                64,
                stages=is_staging and url == URL,
                state=LifeState.AWAY if url in absent else LifeState.READY,
            )
            for url in urls
        ],
        snapshots=snapshots,
        publisher=StandInPublisher(dead),
        health=StandInHealth(base_urls=urls, api_key=None),
        sync=SyncConfig(timeout_s=20.0),
        straggler_s=20.0 if phases is None else 0.0,
        sync_every_steps=sync_every if phases is None else 1,
    )
    channel_b = ChannelB(
        source=SampleSource([{}] * 4, make_task(), rank=RANK, world_size=2, seed=0),
        client=RolloutClient(
            urls,
            decoding=DecodingConfig(),
            request_timeout_s=1.0,
            run_seed=0,
            rank=RANK,
            world_size=2,
            kinds={URL: OURS} if is_staging else {},
        ),
        queue=queue,
        pipeline=StandInPipeline(),  # type: ignore[arg-type]
        clock=VersionClock(),
        guard=TruncationGuard(1.0),
        schedule=VersionSchedule(sync_every) if phases is None else phases.schedule,
        snapshots=snapshots,
        updates=updates if RANK == 0 else None,
        base_urls=urls,
        max_inflight_per_server=8,
        min_ready_tokens=0,
        continue_on_failure=continue_on_failure,
        evaluation=pinned,
        final_evaluation_s=final_evaluation_s,
        phases=phases,
        longest_fill_s=None if phases is None else 20.0,
    )
    learner = Learner(
        b_ratio=1.0,
        control=control,
        events=events,
        starvation=None,
        fail_when_starved=False,
        channel_b=channel_b,
    )
    return learner, channel_b, events, module


def asked(b: ChannelB) -> list[str]:
    """Servers that this rank would ask now."""
    return [url for url, server in b.client._servers.items() if server.is_open]


def uneven_queues() -> dict[str, Any]:
    learner, b, events, _ = build(packs=5 if RANK == 0 else 3)
    skipped = learner.begin_step(0, 4)
    depths = [b.queue.depth]
    if RANK == 1:
        b.queue.offer(StandInPack(version=1), current_version=1)
    trained = learner.begin_step(1, 4)
    depths.append(b.queue.depth)
    return {"steps": events.steps, "packs": [len(skipped.packs), len(trained.packs)], "depths": depths}


def pipeline_dies(continue_on_failure: bool) -> dict[str, Any]:
    learner, b, events, _ = build(packs=0, continue_on_failure=continue_on_failure)
    error = None
    for step in range(45):
        try:
            learner.begin_step(step, 4)
        except Stage2Error as raised:
            error = f"{type(raised).__name__} at step {step}: {raised}"
            break
        if step == 40 and RANK == 1:  # after this step's all-reduce
            b.pipeline.failure = RuntimeError("the disk went away")
    return {"steps": events.steps, "error": error}


def log_fails() -> dict[str, Any]:
    """After the first step's all-reduce the disk of rank 1 takes no more; both have packs ready."""
    learner, b, events, _ = build(packs=8)
    learner.begin_step(0, 4)
    if RANK == 1:
        events.log.failure = "events/rank1.jsonl: No space left on device"
    try:
        learner.begin_step(1, 4)
        error = None
    except Stage2Error as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {"steps": events.steps, "error": error, "depth": b.queue.depth}


def evaluating(
    num_steps: int, *, sync_every: int, delay: int, last_step: int = 1000, **script: Any
) -> dict[str, Any]:
    """Evaluations fall due at every fourth step. ``script`` (step → change) happens after that step, on rank 1 only;
    rank 0 has its answers at once."""
    part = StandInPart()
    schedule = EvaluationSchedule(every_steps=4, max_round_delay_steps=delay, last_step=last_step)
    learner, b, events, _ = build(
        packs=0,
        sync_every=sync_every,
        continue_on_failure=True,
        evaluation=(schedule, part),
        is_staging=True,
    )
    begun = []
    for step in range(num_steps):
        learner.begin_step(step, 1)
        begun.append(b.schedule.begun_step)
        if RANK == 0 and not part.is_finished:
            part.num_answered, part.is_finished = 4, True
        if RANK == 1:
            script.get(f"after_{step}", lambda learner, b, part: None)(learner, b, part)
    return {
        "evaluations": events.evaluations,
        "begun": sorted(set(begun)),
        "versions": part.versions,
        "unfinished": learner.checkpoint(step=num_steps, save_id="s")["unfinished_evaluation"],
    }


def final_evaluation(
    *,
    seconds: float = 20.0,
    num_steps: int = 6,
    dead: Collection[int] = (),
    after_agreement: Any = None,
) -> dict[str, Any]:
    """After six steps, or fewer, of which the last one trains at 5. Rank 0 has its answers at once; rank 1 after five
    agreements, or what ``after_agreement`` does at each."""
    part, demanded = StandInPart(), set()
    learner, b, events, _ = build(
        packs=0,
        sync_every=3,
        evaluation=(EvaluationSchedule(every_steps=4, max_round_delay_steps=2, last_step=5), part),
        final_evaluation_s=seconds,
        is_staging=True,
        dead=dead,
    )
    agreements = iter(range(1_000_000))

    def observe(view: Any) -> None:
        demanded.add(view.num_demanded)
        number = next(agreements)
        if RANK == 1 and after_agreement is not None:
            after_agreement(learner, b, part)
        elif RANK == 0 or number > 4:
            part.num_answered, part.is_finished = 4, True

    for step in range(num_steps):
        learner.begin_step(step, 1)
    b.pipeline.observe = observe
    learner.evaluate_final(num_steps)
    num_agreements = next(agreements)
    learner.evaluate_final(num_steps)
    return {
        "evaluations": events.evaluations,
        "begun": [b.schedule.begun_step, b.schedule.begun],
        "versions": part.versions,
        "warnings": events.warnings,
        "demanded": sorted(demanded),
        "was_once": next(agreements) == num_agreements + 1,
    }


def finish(learner: Any, b: Any, part: StandInPart) -> None:
    part.num_answered, part.is_finished = 3, True


def answer_one(learner: Any, b: Any, part: StandInPart) -> None:
    part.num_answered = 1


def lose_the_server(learner: Any, b: Any, part: StandInPart) -> None:
    b.client.mark_suspect(URL, "connection lost")


def stop(learner: Any, b: Any, part: StandInPart) -> None:
    learner.request_stop()


def export_fails() -> dict[str, Any]:
    learner, b, _events, module = build(packs=0)
    if RANK == 0:
        with torch.no_grad():
            module.weight[0, 0] = float("nan")
    return first_version(learner, b)


def first_version(learner: Learner, b: ChannelB) -> dict[str, Any]:
    """The first step, which waits for the first version."""
    error = None
    try:
        learner.begin_step(0, 1)
    except Stage2Error as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {"error": error, "version": b.clock.current}


class GatheredExport(WeightExport):
    """As under ZeRO-3: every read is a collective of the training group, which waits for a rank that is missing."""

    partitioned = True  # type: ignore[assignment]

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.num_gathers = 0
        self.fails_at: list[str] | None = None

    def _gathered(self, own: Any) -> Any:
        dist.all_reduce(torch.ones(1))
        self.num_gathers += 1
        return super()._gathered(own)

    def read(self, names: Any) -> Any:
        tensors = super().read(names)
        if list(names) == self.fails_at:
            raise RuntimeError("no memory to merge")
        return tensors


class BrokenCanary(StandInCanary):
    def answer(self) -> Any:
        raise RuntimeError("no memory")


def gathered(
    *, bad: int | None = None, fails_at: int | None = None, broken_canary: bool = False
) -> dict[str, Any]:
    """Four buckets that all ranks gather together; rank 0 alone copies them."""
    module = torch.nn.ParameterList([torch.ones(512, 512) for _ in range(4)])
    if RANK == 0 and bad is not None:
        with torch.no_grad():
            module[bad][0, 0] = float("nan")
    export = GatheredExport(module)
    export.fails_at = [str(fails_at)]
    canary = BrokenCanary() if broken_canary and RANK == 1 else StandInCanary()
    learner, b, _events, _ = build(packs=0, export=export, canary=canary)
    return first_version(learner, b) | {"num_gathers": export.num_gathers}


def server_dies() -> dict[str, Any]:
    learner, b, events, _ = build(packs=0, sync_every=3, is_staging=True, dead=[2])
    versions = []
    for step in range(10):
        learner.begin_step(step, 1)
        versions.append(list(learner._versions.asked))
    return {"steps": events.steps, "rounds": events.rounds, "versions": versions, "asked": asked(b)}


def one_rank_suspects() -> dict[str, Any]:
    learner, b, _events, _ = build(packs=0)
    found = []
    for step in range(4):
        learner.begin_step(step, 1)
        found.append(asked(b))
        if step == 1 and RANK == 1:
            b.client.mark_suspect(URL, "connection lost")
    return {"asked": found}


def a_loss_is_found() -> dict[str, Any]:
    """The connection of rank 0 to the server breaks after step 1; no rollout client has noticed."""
    learner, b, _events, _ = build(packs=0)
    found = []
    for step in range(4):
        learner.begin_step(step, 1)
        found.append(asked(b))
        if step == 1 and b.updates is not None:
            b.updates.publisher.lost = (0,)
    publisher = b.updates.publisher if b.updates is not None else StandInPublisher()
    return {"asked": found, "distrusted": publisher.dropped, "pushed": publisher.pushed}


def start_fails_on_one_rank() -> dict[str, Any]:
    control = join_control_group(30.0)
    results = [run_on_all_ranks(control, lambda: RANK)]

    def check() -> int:
        if RANK == 1:
            raise ConfigError("a picture cannot be read: \udce4.png")
        return 0

    try:
        run_on_all_ranks(control, check)
    except Stage2Error as raised:
        return {"results": results, "error": f"{type(raised).__name__}: {raised}"}
    return {"results": results, "error": None}


@contextmanager
def held(fence: InferFence) -> Iterator[None]:
    """A ticket of the fence, for as long as the context lasts."""
    fence.enter()
    yield
    fence.leave()


def busy_rank() -> dict[str, Any]:
    """A server that must be drained; rank 1 has a rollout in flight there through steps 2 to 5."""
    learner, b, events, _ = build(packs=0, sync_every=2)
    found = []
    fence = b.client._servers[URL].fence
    for step in range(9):
        if step == 2 and RANK == 1:
            fence.enter()
        if step == 6:
            b.schedule.sync_every_steps = 1000  # no version after the third
        if step == 6 and RANK == 1:
            fence.leave()
        learner.begin_step(step, 1)
        found.append(asked(b))
    return {"steps": events.steps, "rounds": events.rounds, "asked": found, "begun": b.schedule.begun}


def push_beside_training() -> dict[str, Any]:
    """The push of the second version goes on through steps 2, 3 and 4, while packs of the first version train."""
    learner, b, events, _ = build(packs=0, window=0, sync_every=2, is_staging=True)
    learner.begin_step(0, 1)
    learner.begin_step(1, 1)
    versions, found = [], []
    for step in range(2, 8):
        b.queue.offer(StandInPack(version=1), current_version=b.clock.current)
        if b.updates is not None:
            b.updates.publisher.is_held = step < 5
        with held(b.client._servers[URL].fence) if RANK == 1 else nullcontext():
            learner.begin_step(step, 1)
        versions.append(b.clock.current)
        found.append(asked(b))
        b.schedule.sync_every_steps = 1000  # no third version
    return {
        "steps": events.steps,
        "rounds": events.rounds,
        "in_transfer": events.in_transfer,
        "asked": found,
        "versions": versions,
    }


def server_joins() -> dict[str, Any]:
    """Two servers were absent at the start. Rank 0 hears of both before step 2; nobody else knows of it."""
    ours, plain = "http://127.0.0.1:8", "http://127.0.0.1:7"
    learner, b, events, _ = build(packs=0, is_staging=True, absent=[ours, plain])
    versions = []
    for step in range(7):
        if step == 2 and b.updates is not None:
            b.updates.health.hears(1, OURS)
            b.updates.health.hears(2, ServerKind(chat_model="tiny"))
        learner.begin_step(step, 1)
        versions.append(list(learner._versions.asked))
    return {
        "versions": versions,
        "kinds": {url: [b.client.stages(url), kind.chat_model] for url, kind in b.client._kinds.items()},
        "asked": asked(b),
        "rounds": events.rounds,
        "watched": sorted(b.updates.health._watched) if b.updates is not None else [],
    }


class StandInMemory:
    """Notes when the device changes hands; taking it back on rank 1 would be early if rank 0 were not waited for."""

    def __init__(self, note: Any) -> None:
        self.note = note

    def release(self) -> None:
        time.sleep(0.1 * RANK)
        self.note("release")

    def take_back(self) -> None:
        self.note("take back")


def phases(
    num_steps: int = 9,
    *,
    dead: Collection[int] = (),
    does_not_sleep_at: int = -1,
    hold: bool = False,
    joins: Sequence[str] = (),
    script: Any = lambda learner, b, step: None,
    evaluation: tuple[EvaluationSchedule, StandInPart] | None = None,
    final: bool = False,
) -> dict[str, Any]:
    """Phases of three B steps with two packs each. What happens is noted by its moment on the clock of both ranks."""
    notes: list[tuple[float, str]] = []
    schedule = PhaseSchedule(1, b_ratio=1.0, phase_steps=3, num_steps=1000)

    def note(what: str) -> None:
        notes.append((time.monotonic(), what))

    def put_to_sleep() -> Sequence[str | None]:
        if RANK != 0:
            return ()
        note("sleep")
        time.sleep(0.1)
        note("asleep")
        if joins and b.schedule.begun == 1:  # it answers when the others sleep already
            b.updates.health.hears(1, OURS)
            b.updates.publisher.num_looks_late[1] = 3  # it loads only when it is woken
        return ["it said nothing" if b.schedule.begun == does_not_sleep_at else None, *[None for _ in joins]]

    parts: Any = Phases(
        schedule=schedule, packs_per_step=2, memory=StandInMemory(note), put_to_sleep=put_to_sleep
    )
    learner, b, events, _ = build(
        packs=0,
        phases=parts,
        is_staging=True,
        absent=joins,
        dead=dead,
        evaluation=evaluation,
        final_evaluation_s=20.0 * final,
    )
    ticket: list[Any] = []

    def fill(view: Any, timeout_s: float, is_stopping: Any) -> None:
        note(f"fill {view.num_demanded}")
        for _ in range(view.num_demanded if asked(b) else 0):
            b.queue.offer(StandInPack(version=b.clock.current), current_version=b.clock.current)
        if hold and RANK == 1:  # a rollout is still out
            fence = b.client._servers[URL].fence
            fence.enter()
            ticket.append(fence)

    def observe(view: Any) -> None:
        if evaluation is not None and not evaluation[1].is_finished:
            note("evaluate")
            evaluation[1].num_answered, evaluation[1].is_finished = 4, True
        if ticket:  # an agreement was made meanwhile
            note("rollout ends")
            ticket.pop().leave()

    b.pipeline.fill, b.pipeline.observe = fill, observe
    agree = learner._agree

    def agreed(*args: Any, **kwargs: Any) -> Any:
        found = agree(*args, **kwargs)
        if ticket and any(found[0].servers_closed):
            observe(None)
        return found

    learner._versions._agree = agreed
    publisher = b.updates.publisher if b.updates is not None else None
    if publisher is not None:
        push = publisher.push
        publisher.push = lambda *words: (note("push"), push(*words))
    open_at_steps = []
    for step in range(num_steps):
        script(learner, b, step)
        learner.begin_step(step, 2)
        open_at_steps.append(asked(b))
        note(f"train {step}")
    if final:
        learner.evaluate_final(num_steps)
    return {
        "notes": notes,
        "steps": events.steps,
        "rounds": events.rounds,
        "open": open_at_steps,
        "evaluations": events.evaluations,
        "warnings": events.warnings,
        "asleep": learner._versions.is_asleep,
        "depth": b.queue.depth,
    }


def lost_asleep(learner: Any, b: Any, step: int) -> None:
    """The server is killed before step 5 while it sleeps, and answers again before step 6."""
    if b.updates is not None:
        b.updates.publisher.lost = (0,) if step == 5 else ()
        if step == 6:
            b.updates.health.hears(0, OURS)


def stop_in_phase(learner: Any, b: Any, step: int) -> None:
    if step == 3 and RANK == 1:
        learner.request_stop()


def evaluated_phases() -> dict[str, Any]:
    schedule = EvaluationSchedule(every_steps=4, max_round_delay_steps=2, last_step=7)
    return phases(8, evaluation=(schedule, StandInPart()), final=True)


def stop_is_agreed() -> dict[str, Any]:
    learner, _, _, _ = build(packs=0)
    stops = []
    for step in range(4):
        if step == 2 and RANK == 1:
            learner.request_stop()
        stops.append(learner.begin_step(step, 1).stop)
    return {"stops": stops}


SCENARIOS = {
    "uneven_queues": uneven_queues,
    "pipeline_dies_raise": lambda: pipeline_dies(False),
    "pipeline_dies_continue": lambda: pipeline_dies(True),
    "log_fails": log_fails,
    "export_fails": export_fails,
    "gathered": gathered,
    "gathered_nan": lambda: gathered(bad=2),
    "gather_fails": lambda: gathered(fails_at=2),
    "canary_fails": lambda: gathered(broken_canary=True),
    "server_dies": server_dies,
    "one_rank_suspects": one_rank_suspects,
    "a_loss_is_found": a_loss_is_found,
    "start_fails": start_fails_on_one_rank,
    "busy_rank": busy_rank,
    "push_beside_training": push_beside_training,
    "server_joins": server_joins,
    "stop": stop_is_agreed,
    "phases": phases,
    "phases_with_a_late_rollout": lambda: phases(4, hold=True),
    "phases_without_proof": lambda: phases(5, dead=[2]),
    "phases_without_sleep": lambda: phases(5, does_not_sleep_at=1),
    "phases_lose_a_server": lambda: phases(9, script=lost_asleep),
    "phases_joined": lambda: phases(4, joins=["http://127.0.0.1:8"]),
    "phases_stopped": lambda: phases(4, hold=True, script=stop_in_phase),
    "phases_evaluated": evaluated_phases,
    "evaluation_ends": lambda: evaluating(10, sync_every=5, delay=4, after_6=finish),
    "evaluation_is_cut": lambda: evaluating(12, sync_every=5, delay=2, after_5=answer_one),
    "evaluation_without_server": lambda: evaluating(12, sync_every=50, delay=2, after_5=lose_the_server),
    "evaluation_stopped": lambda: evaluating(7, sync_every=50, delay=2, after_5=stop),
    "evaluation_at_the_end": lambda: evaluating(9, sync_every=50, delay=2, last_step=8),
    "final": final_evaluation,
    "final_after_an_early_end": lambda: final_evaluation(num_steps=5),
    "final_without_server": lambda: final_evaluation(dead=[3]),
    "final_too_slow": lambda: final_evaluation(seconds=0.5, after_agreement=answer_one),
    "final_stopped": lambda: final_evaluation(after_agreement=stop),
}


def main() -> None:
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}", rank=RANK, world_size=2
    )
    results = {name: SCENARIOS[name]() for name in sys.argv[1:]}
    print(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
