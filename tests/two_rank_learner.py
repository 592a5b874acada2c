"""One rank of a real two-process gloo job around the real learner; started by ``test_learner.py``.

Queue, fence, clock, gate, round schedule, control group and sample source are real; production and servers are
stand-ins whose moments the scenario chooses. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from detection_task import make_task
from stand_in_canary import StandInCanary

from swift_stage2 import wire
from swift_stage2.channel_b.ready_queue import ReadyQueue
from swift_stage2.channel_b.sample_source import SampleSource
from swift_stage2.collectives import join_control_group, together
from swift_stage2.errors import ConfigError, ServerFault, Stage2Error
from swift_stage2.evaluation import PinnedEvaluation
from swift_stage2.fence import InferFence
from swift_stage2.learner import ChannelB, Learner
from swift_stage2.records import EvaluationCounts, ServerReport
from swift_stage2.scheduling.evaluation_schedule import EvaluationSchedule
from swift_stage2.scheduling.round_schedule import RoundSchedule
from swift_stage2.scheduling.version_clock import VersionClock
from swift_stage2.scheduling.watches import TruncationGuard
from swift_stage2.servers.probe import JoiningServer, SuspectProbe
from swift_stage2.telemetry.event_log import EventLog
from swift_stage2.weights import push as server_push
from swift_stage2.weights.courier import ThreadCourier
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.sync_round import WeightSync
from swift_stage2.weights.transport import ServerEndpoint, WeightTransport

URL = "http://127.0.0.1:9"  # nothing listens on the discard port
RANK = int(os.environ.get("RANK", "0"))


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
    production_pace: None = None
    standing: None = None

    def start(self) -> None: ...

    def observe(self, view: Any) -> None: ...

    def stop(self, timeout_s: float) -> bool:
        return True


@dataclass
class StandInClient:
    suspects: dict[str, str] = field(default_factory=dict)
    num_unsettled: int = 0
    proven: list[str] = field(default_factory=list)
    chat_models: dict[str, str] = field(default_factory=dict)

    def learn_chat_model(self, base_url: str, chat_model: str) -> None:
        self.chat_models[base_url] = chat_model

    def set_proven(self, servers: Any, *, drained: bool) -> None:
        self.proven = list(servers)
        self.suspects = {}

    def expect(self, version: int) -> None: ...

    def clear_suspicion(self, servers: Any) -> None: ...

    def stop_requests(self, servers: Any) -> None:
        self.proven = [url for url in self.proven if url not in servers]

    def request_stop(self) -> None: ...

    def close(self) -> None: ...


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
        self.in_transfer.append(facts.round_in_transfer)

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


class ProvingSync(WeightSync):
    """Every push is proven, except at the rounds named, where the real push meets a dead server.

    A round ends in the step at which it began, except in the scenario that keeps it.
    """

    dead_rounds: frozenset[int] = frozenset()
    num_rounds = 0
    ends_at_once = True

    def begin(self, version: int, targets: Any, **terms: Any) -> None:
        super().begin(version, targets, **terms)
        if self._round is not None and self.ends_at_once:
            self._courier.wait(20.0)

    def _outcome(self) -> Any:
        round_ = self._round
        outcome = super()._outcome()
        self.num_rounds += 1
        if self.num_rounds in self.dead_rounds or outcome.learner_fault:
            return outcome
        self._kept = round_ if outcome.ended and not outcome.is_catch_up else self._kept
        proven = ServerReport(True, None, "checksums", 0, {}, stamps=True)
        return replace(outcome, reports=dict.fromkeys(outcome.reports, proven))


def build(
    *,
    packs: int,
    window: int = 2,
    continue_on_failure: bool = False,
    sync_every: int = 1000,
    evaluation: tuple[EvaluationSchedule, StandInPart] | None = None,
    transport: Any = None,
    is_staging: bool = False,
    final_evaluation_s: float = 0.0,
    absent: Sequence[str] = (),
    **sync_parts: Any,
) -> Any:
    control = join_control_group(30.0)
    queue: Any = ReadyQueue(16, window)
    for _ in range(packs):
        queue.offer(StandInPack(version=1), current_version=1)
    module = torch.nn.Linear(2, 2)
    sync_parts = {
        "export": WeightExport(module),
        "canary": StandInCanary(),
        "courier": ThreadCourier(
            [ServerEndpoint(url, 10) for url in (URL, *absent)], lambda info: transport or OpenTransport()
        ),
        **sync_parts,
    }
    sync = ProvingSync(
        control=control,
        run_id="run",
        timeout_s=20.0,
        bucket_mib=1,
        **sync_parts,
    )
    events, pinned = Events(), None
    if evaluation is not None:
        schedule, part = evaluation
        pinned = PinnedEvaluation(schedule, part, control=control, record=events.record_evaluation)  # type: ignore[arg-type]
    fence, client, pipeline = InferFence(start_closed=True), StandInClient(), StandInPipeline()
    channel_b = ChannelB(
        source=SampleSource([{}] * 4, make_task(), rank=RANK, world_size=2, seed=0),
        client=client,  # type: ignore[arg-type]
        queue=queue,
        pipeline=pipeline,  # type: ignore[arg-type]
        fence=fence,
        clock=VersionClock(),
        guard=TruncationGuard(1.0),
        rounds=RoundSchedule(
            1 + len(absent),
            sync_every,
            backoff_steps=1,
            max_backoff_steps=64,
            staging=[0] if is_staging else (),
            absent=range(1, 1 + len(absent)),
        ),
        sync=sync,
        probe=SuspectProbe(rank=RANK, api_key=None),
        base_urls=[URL, *absent],
        max_inflight_per_server=8,
        min_ready_tokens=0,
        continue_on_failure=continue_on_failure,
        evaluation=pinned,
        final_evaluation_s=final_evaluation_s,
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
    num_steps: int,
    *,
    sync_every: int,
    delay: int,
    last_step: int = 1000,
    is_staging: bool = False,
    **script: Any,
) -> dict[str, Any]:
    """Evaluations fall due at every fourth step. ``script`` (step → change) happens after that step, on rank 1 only;
    rank 0 has its answers at once. A staged round ends in the step behind the one in which its servers may install."""
    part = StandInPart()
    schedule = EvaluationSchedule(every_steps=4, max_round_delay_steps=delay, last_step=last_step)
    learner, b, events, _ = build(
        packs=0,
        sync_every=sync_every,
        continue_on_failure=True,
        evaluation=(schedule, part),
        is_staging=is_staging,
    )
    b.sync.ends_at_once = not is_staging
    with stock_sessions() if is_staging else nullcontext():
        for step in range(num_steps):
            learner.begin_step(step, 1)
            if RANK == 0 and not part.is_finished:
                part.num_answered, part.is_finished = 4, True
            if RANK == 1:
                script.get(f"after_{step}", lambda learner, b, part: None)(learner, b, part)
            round_ = b.sync._round
            if RANK == 0 and is_staging and round_ is not None and not round_.held:
                b.sync._courier.wait(20.0)
    return {
        "evaluations": events.evaluations,
        "rounds": [step for step, _, _ in events.rounds],
        "in_transfer": [step for step, is_in in enumerate(events.in_transfer) if is_in],
        "versions": part.versions,
        "unfinished": learner.checkpoint(step=num_steps, save_id="s")["unfinished_evaluation"],
    }


def final_evaluation(
    *,
    seconds: float = 20.0,
    num_steps: int = 6,
    dead_rounds: frozenset[int] = frozenset(),
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
    )
    b.sync.dead_rounds = dead_rounds
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
        "rounds": [(step, version) for step, version, _ in events.rounds],
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
    b.client.suspects[URL] = "connection lost"


def stop(learner: Any, b: Any, part: StandInPart) -> None:
    learner.request_stop()


def export_fails() -> dict[str, Any]:
    learner, b, _events, module = build(packs=0)
    if RANK == 0:
        with torch.no_grad():
            module.weight[0, 0] = float("nan")
    return one_round(learner, b)


class StockSession(server_push.ServerSession):
    """A server that answers everything."""

    def info(self, deadline: Any) -> Any:
        return wire.ServerInfo(stock=True)

    def get(self, path: str, deadline: Any, **_: Any) -> Any:
        if path == wire.WEIGHT_SUMS:
            raise ServerFault("no such route", status=404)
        return {"keys": [], "world_size": 1}

    def post(self, path: str, body: Any, deadline: Any) -> Any:
        return {"message": "status: True"}


@contextmanager
def stock_sessions() -> Iterator[None]:
    real_session = server_push.ServerSession
    server_push.ServerSession = StockSession  # type: ignore[misc]
    try:
        yield
    finally:
        server_push.ServerSession = real_session  # type: ignore[misc]


def one_round(learner: Learner, b: ChannelB) -> dict[str, Any]:
    """The first step's round."""
    error = None
    with stock_sessions():
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
    def answer(self) -> None:
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
    return one_round(learner, b) | {"num_gathers": export.num_gathers}


class OpenTransport(WeightTransport):
    def open(self, *_: object) -> str:
        return "test"

    def carry(self, *_: object) -> None: ...

    def is_lost(self) -> bool:
        return False

    def close(self, deadline: Any) -> None: ...


def server_dies() -> dict[str, Any]:
    learner, b, events, _ = build(packs=0, sync_every=3)
    b.sync.dead_rounds = frozenset({2})
    opens = []
    for step in range(10):
        learner.begin_step(step, 1)
        opens.append(b.fence.is_open)
    return {"steps": events.steps, "rounds": events.rounds, "open": opens, "proven": b.client.proven}


def one_rank_suspects() -> dict[str, Any]:
    learner, b, _events, _ = build(packs=0)
    opens, proven = [], []
    for step in range(4):
        learner.begin_step(step, 1)
        opens.append(b.fence.is_open)
        proven.append(list(b.client.proven))
        if step == 1 and RANK == 1:
            b.client.suspects[URL] = "connection lost"
    return {"open": opens, "proven": proven}


def probe_finds_a_loss() -> dict[str, Any]:
    """The connection of rank 0 to the server breaks after step 1; no rollout client has noticed."""
    learner, b, _events, _ = build(packs=0)
    opens, proven, distrusted = [], [], []
    b.sync.distrust = distrusted.extend
    for step in range(4):
        learner.begin_step(step, 1)
        opens.append(b.fence.is_open)
        proven.append(list(b.client.proven))
        if step == 1 and RANK == 0:
            b.probe.find_lost = lambda: (0,)
            b.probe._look_for_lost()
    return {"open": opens, "proven": proven, "distrusted": distrusted, "targets": b.rounds.targets(4)}


def start_fails_on_one_rank() -> dict[str, Any]:
    control = join_control_group(30.0)
    results = [together(control, lambda: RANK)]

    def check() -> int:
        if RANK == 1:
            raise ConfigError("a picture cannot be read: \udce4.png")
        return 0

    try:
        together(control, check)
    except Stage2Error as raised:
        return {"results": results, "error": f"{type(raised).__name__}: {raised}"}
    return {"results": results, "error": None}


@contextmanager
def held(fence: InferFence) -> Iterator[None]:
    """A ticket of the fence, for as long as the context lasts."""
    fence.enter()
    yield
    fence.leave()


def busy_rank_delays_only_the_round() -> dict[str, Any]:
    learner, b, events, _ = build(packs=0, sync_every=2)
    learner.begin_step(0, 1)
    learner.begin_step(1, 1)
    holder = held(b.fence) if RANK == 1 else nullcontext()
    with holder:
        for step in range(2, 6):
            learner.begin_step(step, 1)
    learner.begin_step(6, 1)
    return {"steps": events.steps, "rounds": events.rounds}


class HeldTransport(OpenTransport):
    def __init__(self, let_go: threading.Event) -> None:
        self._let_go = let_go

    def carry(self, *_: object) -> None:
        if not self._let_go.wait(20.0):
            raise ServerFault("nobody let go")


def round_beside_training() -> dict[str, Any]:
    """Rank 0's push of the second round is held through steps 2, 3 and 4, while packs of the first version train."""
    let_go = threading.Event()
    let_go.set()
    learner, b, events, _ = build(packs=0, window=0, sync_every=2, transport=HeldTransport(let_go))
    with stock_sessions():
        learner.begin_step(0, 1)
        learner.begin_step(1, 1)
        let_go.clear()
        b.sync.ends_at_once = False
        opens, versions = [], []
        for step in range(2, 8):
            b.queue.offer(StandInPack(version=1), current_version=b.clock.current)
            if step == 5 and RANK == 0:
                let_go.set()
                b.sync._courier.wait(20.0)
            learner.begin_step(step, 1)
            opens.append(b.fence.is_open)
            versions.append(b.clock.current)
            if step == 5:
                b.rounds._sync_every_steps = 1000  # no third round
    return {
        "steps": events.steps,
        "rounds": events.rounds,
        "in_transfer": events.in_transfer,
        "open": opens,
        "versions": versions,
    }


def staged_round_beside_a_rollout() -> dict[str, Any]:
    """Rank 1 has a rollout in flight from before the round until after its end; the push is held through two steps."""
    let_go = threading.Event()
    let_go.set()
    learner, b, events, _ = build(packs=0, sync_every=2, transport=HeldTransport(let_go), is_staging=True)
    opens, versions = [], []
    with stock_sessions():
        learner.begin_step(0, 1)
        learner.begin_step(1, 1)
        let_go.clear()
        b.sync.ends_at_once = False
        with held(b.fence) if RANK == 1 else nullcontext():
            for step in range(2, 6):
                if step == 4 and RANK == 0:
                    let_go.set()
                    b.sync._courier.wait(20.0)
                learner.begin_step(step, 1)
                b.rounds._sync_every_steps = 1000  # no third round
                opens.append(b.fence.is_open)
                versions.append(b.clock.current)
    return {"rounds": events.rounds, "in_transfer": events.in_transfer, "open": opens, "versions": versions}


def server_joins() -> dict[str, Any]:
    """Two servers were absent at the start. Rank 0 finds before step 2 that both answer; nobody else knows of it."""
    ours, plain = "http://127.0.0.1:8", "http://127.0.0.1:7"
    let_go = threading.Event()
    let_go.set()
    learner, b, events, _ = build(
        packs=0, is_staging=True, transport=HeldTransport(let_go), absent=[ours, plain]
    )
    states, watched, catching_up = [], [], []
    with stock_sessions():
        for step in range(6):
            if step == 2 and RANK == 0:
                let_go.clear()
                b.probe._joining = [JoiningServer(ours, True, None), JoiningServer(plain, False, "tiny")]
                b.probe._answering = frozenset([ours])
            if step == 4 and RANK == 0:
                let_go.set()
                b.sync._courier.wait(20.0)
                b.probe._answering = frozenset([plain])
            learner.begin_step(step, 1)
            states.append([str(state) for state in b.rounds.states()])
            watched.append(list(b.probe._watched))
            catching_up.append(b.rounds.catching_up)
    return {
        "states": states,
        "watched": watched,
        "catching_up": catching_up,
        "chat_models": b.client.chat_models,
        "proven": b.client.proven,
        "rounds": events.rounds,
        "can_stage": [b.rounds.are_staging([server]) for server in range(3)],
    }


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
    "probe_finds_a_loss": probe_finds_a_loss,
    "start_fails": start_fails_on_one_rank,
    "busy_rank": busy_rank_delays_only_the_round,
    "round_beside_training": round_beside_training,
    "staged_round": staged_round_beside_a_rollout,
    "server_joins": server_joins,
    "stop": stop_is_agreed,
    "evaluation_ends": lambda: evaluating(10, sync_every=5, delay=4, after_6=finish),
    "evaluation_is_cut": lambda: evaluating(12, sync_every=5, delay=2, after_5=answer_one),
    "evaluation_beside_a_round": lambda: evaluating(
        10, sync_every=5, delay=4, is_staging=True, after_6=finish
    ),
    "evaluation_without_server": lambda: evaluating(12, sync_every=50, delay=2, after_5=lose_the_server),
    "evaluation_stopped": lambda: evaluating(7, sync_every=50, delay=2, after_5=stop),
    "evaluation_at_the_end": lambda: evaluating(9, sync_every=50, delay=2, last_step=8),
    "final": final_evaluation,
    "final_after_an_early_end": lambda: final_evaluation(num_steps=5),
    "final_without_server": lambda: final_evaluation(dead_rounds=frozenset({3})),
    "final_too_slow": lambda: final_evaluation(seconds=0.5, after_agreement=answer_one),
    "final_stopped": lambda: final_evaluation(after_agreement=stop),
}


def main() -> None:
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{os.environ['PORT']}", rank=RANK, world_size=2
    )
    results = {name: SCENARIOS[name]() for name in sys.argv[1:]}
    print(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
