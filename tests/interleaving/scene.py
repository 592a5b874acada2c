"""The whole of stage 2 on two or three virtual ranks: every part that decides, waits or counts is the real one.

Stand-ins are the servers, the sockets, the collectives, the encoder and the task. One call runs one seed.
"""

from __future__ import annotations

import gc
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from interleaving.ledger import Ledger
from interleaving.scheduler import Scheduler, Violation, seeded_chooser
from interleaving.setting import REQUEST_TIMEOUT_S, SYNC_TIMEOUT_S, Setting, setting_of
from interleaving.virtual_collectives import MeetingRoom, VirtualControlGroup
from interleaving.virtual_servers import Fate, Network, VirtualServer, VirtualTransport, Watcher, Weights
from interleaving.virtual_threading import TimeNames, active, installed, running

from swift_stage2.channel_b.encoding import PromptEncoding
from swift_stage2.channel_b.pipeline import Pipeline
from swift_stage2.channel_b.preprocessing import ThreadPreprocessor
from swift_stage2.channel_b.ready_queue import ReadyQueue
from swift_stage2.channel_b.rollout_client import RolloutClient
from swift_stage2.channel_b.sample_source import SampleSource
from swift_stage2.channel_b.task import Task
from swift_stage2.config import DecodingConfig
from swift_stage2.errors import PipelineFailed, WeightSyncError, WeightSyncHang
from swift_stage2.evaluation import PinnedEvaluation, RankEvaluation
from swift_stage2.fence import InferFence
from swift_stage2.learner import ChannelB, Learner
from swift_stage2.records import BatchOutcome, MatchQuality, Pack, Rollout, Sample, SampleKey, Segment, Target
from swift_stage2.scheduling.evaluation_schedule import EvaluationSchedule
from swift_stage2.scheduling.pacing import Pacer
from swift_stage2.scheduling.round_schedule import RoundSchedule, ServerState
from swift_stage2.scheduling.version_clock import VersionClock
from swift_stage2.scheduling.watches import TruncationGuard
from swift_stage2.servers.pending_abort import PendingAbort
from swift_stage2.servers.probe import SuspectProbe
from swift_stage2.telemetry.activity import PipelineActivity
from swift_stage2.telemetry.ledger import Entry
from swift_stage2.telemetry.ledger import Ledger as SampleLedger
from swift_stage2.telemetry.ledger_account import account_of
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.sync_round import ServerEndpoint, WeightSync

_HORIZON_S = 150.0
_CONTROL_TIMEOUT_S = 60.0
_NUM_ROWS = 40
_PACKING_LENGTH = 4
_SAVE_STEPS = 2
_BUCKET_MIB = 4 / (1 << 20)  # one of the two tensors per bucket
_ROWS = [{"index": index, "objects": {"ref": ["it"], "bbox": [[0, 0, 1, 1]]}} for index in range(_NUM_ROWS)]
_QUALITY = MatchQuality(0, 1, 0, 0.0, 0, 0)
_NETWORK = Network()


class Parts:
    """Parts that a mutation may replace."""

    fence: type[InferFence] = InferFence
    queue: type[ReadyQueue[Pack]] = ReadyQueue
    pipeline: type[Pipeline] = Pipeline
    client: type[RolloutClient] = RolloutClient
    source: type[SampleSource] = SampleSource
    evaluation: type[PinnedEvaluation] = PinnedEvaluation


class StubEncoder:
    """Looks at every rollout on its way into a segment."""

    def __init__(self, scene: Scene, rank: int) -> None:
        self._scene = scene
        self._rank = rank
        self._num_segments = 0

    def request(self, sample: Sample) -> dict[str, Any]:
        return {"messages": [], "row": sample.row["index"]}

    def encode_prompt(self, sample: Sample) -> PromptEncoding:
        return PromptEncoding({}, (1,), lambda coordinates: ())

    def tokenise(self, text: str) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        return (1,), ((0, 1),)

    def encode_segment(self, rollout: Rollout, prompt: Any, target: Any, **settings: Any) -> Segment:
        self._scene.ledger.rollout(rollout, _NETWORK.servers[rollout.server])
        failing = self._scene.setting.failing_pipeline
        if failing is not None and failing == (self._rank, self._num_segments):
            raise RuntimeError("the disk went away")
        self._num_segments += 1
        num_tokens = 1 + rollout.sample.key.index % 3
        return Segment(rollout.sample.key, "", rollout.version, {}, num_tokens, num_tokens, 1, _QUALITY)

    def collate(self, segments: Sequence[Segment]) -> dict[str, Any]:
        return {}


class StubTask(Task):
    def read_truth(self, row: Mapping[str, Any]) -> None:
        return None

    def correct(self, *parts: Any) -> Target:
        return Target("", (1,), (1.0,), _QUALITY)

    def check_answer(self, *parts: Any) -> None:
        raise AssertionError("nobody asks")


def _preprocessor(encoder: StubEncoder) -> ThreadPreprocessor:
    return ThreadPreprocessor(encoder, StubTask(), packing_length=_PACKING_LENGTH)


class EvaluationEvents:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def sent(self, keys: Sequence[SampleKey], *, server: str, seed: int, version: int) -> None:
        self._ledger.counts["evaluation posts"] += 1

    def finished(self, keys: Sequence[SampleKey], *, server: str, end: str, seconds: float) -> None: ...

    def matched(self, rollout: Rollout, target: Target, space: tuple[int, int] | None) -> None: ...

    def given_up(self, index: int, message: str) -> None:
        self._ledger.counts["evaluation rows given up"] += 1


class WatchedEvaluation(RankEvaluation):
    """Looks at every answer that is about to be counted."""

    ledger: Ledger

    def begin(self, version: int) -> None:
        self.pinned = version
        super().begin(version)

    def _judge(self, rollouts: Sequence[Rollout], qualities: Any, failed: Any) -> None:
        for rollout in rollouts:
            self.ledger.evaluated(rollout, _NETWORK.servers[rollout.server], self.pinned)
        super()._judge(rollouts, qualities, failed)


class RankEvents:
    """Pipeline's and learner's events of one rank."""

    def __init__(self, ledger: Ledger, rank: int, told: SampleLedger) -> None:
        self._ledger = ledger
        self._rank = rank
        self._told = told

    def read(self, keys: Sequence[SampleKey], **traits: Any) -> None:
        self._told.write(Entry.READ, keys, **traits)

    def batch(self, outcome: BatchOutcome, seconds: float) -> None:
        counts = self._ledger.counts
        counts["posts abandoned"] += sum(outcome.abandoned.values())
        counts["rollouts aborted"] += len(outcome.aborted)
        counts["samples returned"] += len(outcome.returned)
        for reason in outcome.suspects.values():
            self._ledger.suspicion(self._rank, reason)

    def enter(self, activity: PipelineActivity) -> None: ...

    def matched(self, rollout: Rollout, target: Target, space: tuple[int, int] | None) -> None: ...

    def segment(self, segment: Segment, seconds: float) -> None:
        self._told.matched(segment)

    def pack(self, pack: Pack, seconds: float) -> None:
        self._ledger.counts["packs"] += 1
        self._told.packed(pack)

    def dropped(self, pack: Pack, reason: str) -> None:
        self._ledger.dropped(self._rank, pack, reason)

    def stale_segment(self, segment: Segment) -> None:
        self._ledger.counts["segments stale"] += 1

    def quarantined(self, key: SampleKey, reason: str, message: str, origin: object) -> None:
        self._ledger.quarantined(self._rank, key)

    def activity(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def record_step(self, facts: Any) -> None: ...

    def record_round(self, step: int, outcome: Any, pending_seconds: float) -> None: ...

    def record_warning(self, message: str) -> None:
        if "did not end" in message:
            active().fail(f"rank {self._rank}: {message}")


class MemoryLog:
    """Keeps what the package's own ledger of samples was told, in place of a file."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def write(self, kind: str, **values: Any) -> None:
        self.records.append({"kind": str(kind), **values})


class Canary:
    """The greedy answer is the first weight."""

    def __init__(self, scene: Scene) -> None:
        self.request: dict[str, Any] = {"messages": []}
        self.config: dict[str, Any] = {}
        self._scene = scene
        self._answer = 0

    def answer(self) -> None:
        self._answer = int(self._scene.weights[0])

    def agrees(self, token_ids: Sequence[int]) -> bool:
        return list(token_ids) == [self._answer]


class RoundControl(VirtualControlGroup):
    """Rank 0's: the moment at which a round's outcome is told is its end for everybody."""

    scene: Scene

    def broadcast(self, message: Any) -> Any:
        if isinstance(message, dict) and "outcome" in message:
            self.scene.ledger.round_ends(message["outcome"], self.scene.targets)
        return super().broadcast(message)


class RoundSync(WeightSync):
    """Tells when a round begins."""

    scene: Scene
    rounds: RoundSchedule

    def begin(self, version: int, targets: Sequence[int]) -> None:
        if self._control.rank == 0:
            self.scene.begin_round(version, targets, self.rounds)
        super().begin(version, targets)


class Scene:
    """One run of one setting."""

    def __init__(self, setting: Setting, rng: random.Random, parts: type[Parts] = Parts) -> None:
        self.setting = setting
        self.ledger = Ledger(setting)
        self.targets: tuple[int, ...] = ()
        self._rng = rng
        self._parts = parts
        self._module = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(1)) for _ in range(2)])
        self.weights: Weights = (0.0, 0.0)
        self._watcher = Watcher(
            fate_of_infer=self._fate_of_infer,
            on_infer=self.ledger.infer_begins,
            on_weights=self.ledger.weights_change,
            fate_of_push=self._fate_of_push,
        )
        self.servers = [
            VirtualServer(f"http://s{index}", stock, self._watcher, can_abort=not stock)
            for index, stock in enumerate(setting.stock)
        ]
        _NETWORK.servers = {server.url: server for server in self.servers}
        self._room = MeetingRoom(setting.num_ranks, _CONTROL_TIMEOUT_S)
        self._num_over = 0
        self._logs = [MemoryLog() for _ in range(setting.num_ranks)]

    def run(self) -> None:
        """The first strand's work: makes the ranks and what goes wrong, and lets them run."""
        run = active()
        learners = [self._make_rank(rank) for rank in range(self.setting.num_ranks)]
        for death in self.setting.deaths:
            server = self.servers[death.server]
            run.at(death.at_s, server.die, "death")
            if death.back_after_s is not None:
                run.at(death.at_s + death.back_after_s, server.start_again, "a new server process")
        if self.setting.stop is not None:
            rank, moment = self.setting.stop
            run.at(moment, learners[rank][0].request_stop, "signal")
        for rank, (learner, b) in enumerate(learners):
            run.spawn(partial(self._train, rank, learner, b), "learner", f"rank {rank}")

    def begin_round(self, version: int, targets: Sequence[int], rounds: RoundSchedule) -> None:
        self.targets = tuple(targets)
        proven = [rounds.states()[index] is ServerState.PROVEN for index in targets]
        servers = [self.servers[index] for index in targets]
        self.ledger.round_begins(version, self.weights, list(zip(servers, proven, strict=True)))
        if self.ledger.num_rounds == self.setting.bad_weights_at_round:
            self._set_weights((float("nan"), float("nan")))

    def _train(self, rank: int, learner: Learner, b: ChannelB) -> None:
        learner.start()
        hung, step = False, -1
        while (step := step + 1) < self.setting.num_steps or b.rounds.pending:
            began_s, began_version = active().now, b.clock.current
            ended = "well"
            try:
                decision = learner.begin_step(step, self.setting.packs_per_step)
            except (WeightSyncError, WeightSyncHang, PipelineFailed) as error:
                ended, hung = type(error).__name__, isinstance(error, WeightSyncHang)
                self._judge_end(ended, error)
            self.ledger.agree(rank, step, "the end", ended)
            if ended != "well":
                break
            self.ledger.step(rank, step, decision, b, began_s, began_version)
            self.ledger.account(rank, b)
            if step % _SAVE_STEPS == 0:
                learner.checkpoint(step=step + 1, save_id=f"save {step + 1}")
            TimeNames.sleep(self.setting.step_s + self._rng.choice(self.setting.skews_s))
            if rank == 0:
                self._set_weights((self.weights[0] + 1, self.weights[1] + 1))
            if decision.stop:
                break
        if not hung:  # a process that met a hang exits without
            learner.close()
            self.ledger.account(rank, b)
        # A push that hangs when training ends is left behind, and the process ends with it.
        hung |= b.rounds.in_transfer and "hangs" in self.setting.push_fates.values()
        self._num_over += 1
        if hung and self._num_over == self.setting.num_ranks:
            active().stop()

    def check_told(self) -> None:
        """Judges the run as ``swift-stage2 report`` would. Raises ``Violation`` unless it balances."""
        account = account_of({rank: log.records for rank, log in enumerate(self._logs)})
        broken = [*account.violations, *(broken for rank in account.ranks for broken in rank.violations)]
        if broken:
            raise Violation(f"the ledger does not balance: {broken[0].rule}: {broken[0].samples}")
        self.ledger.counts["samples told trained"] += sum(rank.trained for rank in account.ranks)

    def _judge_end(self, ended: str, error: Exception) -> None:
        setting = self.setting
        self.ledger.counts[f"runs ended by {ended}"] += 1
        expected = {
            "WeightSyncHang": "hangs" in setting.push_fates.values() or bool(setting.stall_share),
            "WeightSyncError": setting.bad_weights_at_round is not None,
            "PipelineFailed": setting.failing_pipeline is not None and not setting.continue_on_failure,
        }
        if not expected[ended]:
            active().fail(f"the run ends with {ended} for no reason: {error}")

    def _set_weights(self, weights: Weights) -> None:
        self.weights = weights
        with torch.no_grad():
            for parameter, value in zip(self._module, weights, strict=True):
                parameter.fill_(value)

    def _fate_of_infer(self, server: VirtualServer, body: Any) -> Fate:
        setting, rng = self.setting, self._rng
        latency_s = rng.choice(setting.latencies_s[:4])
        if rng.random() < setting.slow_share:
            latency_s = rng.choice(setting.latencies_s)
        rows = [request.get("row") for request in body["infer_requests"]]
        poisonous = tuple(place for place, row in enumerate(rows) if row == setting.poison_row)
        if poisonous or rng.random() < setting.error_share:
            return Fate(latency_s, status=500, failed=poisonous or (rng.randrange(len(rows)),))
        return Fate(latency_s, lose_connection=rng.random() < setting.lost_share)

    def _fate_of_push(self, server: VirtualServer) -> str:
        return self.setting.push_fates.get((self.servers.index(server), self.ledger.num_rounds), "arrives")

    def _make_rank(self, rank: int) -> tuple[Learner, ChannelB]:
        setting, ledger, parts = self.setting, self.ledger, self._parts
        control: VirtualControlGroup = (RoundControl if rank == 0 else VirtualControlGroup)(rank, self._room)
        control.scene = self  # type: ignore[attr-defined]
        urls = [server.url for server in self.servers]
        fence = parts.fence(start_closed=True)
        clock = VersionClock()
        told = SampleLedger(self._logs[rank])  # type: ignore[arg-type]
        source = parts.source(_ROWS, StubTask(), rank=rank, world_size=setting.num_ranks, seed=0, events=told)
        told.write(
            Entry.START,
            run_id="run",
            step=0,
            world_size=setting.num_ranks,
            version_window=setting.version_window,
            save_id=None,
            state=source.state_dict(),
        )
        client = parts.client(
            urls,
            fence=fence,
            decoding=DecodingConfig(),
            request_timeout_s=REQUEST_TIMEOUT_S,
            run_seed=0,
            rank=rank,
            world_size=setting.num_ranks,
            ticket_timeout_s=0.5,
            run_id="run",
            canary={"messages": []},
            full_share=setting.max_inflight,
            is_lost=lambda url, version: control.notes.read(_lost(url, version)) is not None,
            events=told,
        )
        events = RankEvents(ledger, rank, told)
        pipelines: list[Pipeline] = []
        queue = parts.queue(
            setting.queue_limit,
            setting.version_window,
            lambda pack, reason: pipelines[0].on_drop(pack, reason),
        )
        ledger.watch_queue(rank, queue)
        pacer = Pacer(
            b_ratio=setting.b_ratio,
            version_window=setting.version_window,
            sync_every_steps=setting.sync_every_steps,
            target_packs=setting.target_packs,
            packs_per_b_step=setting.packs_per_step,
        )
        guard = TruncationGuard(1.0)
        encoder = StubEncoder(self, rank)
        evaluation = self._make_evaluation(rank, control, client) if setting.evaluate_every_steps else None
        pipeline = parts.pipeline(
            source=source,
            client=client,
            make_request=encoder.request,
            preprocessor=_preprocessor(encoder),
            queue=queue,
            clock=clock,
            pacer=pacer,
            guard=guard,
            events=events,
            packing_length=_PACKING_LENGTH,
            packing_min_fill_ratio=0.65,
            redraw_dropped=setting.redraw_dropped,
            max_attempts=setting.max_attempts,
            version_window=setting.version_window,
            ask_evaluation=evaluation.part.ask if evaluation is not None else None,
        )
        pipelines.append(pipeline)
        self._watch_production(rank, pipeline)
        sync = RoundSync(
            [ServerEndpoint(url, 1) for url in urls],
            control=control,
            export=WeightExport(self._module),
            canary=Canary(self),
            make_transport=lambda info: VirtualTransport(_NETWORK.servers),  # type: ignore[arg-type,return-value]
            run_id="run",
            timeout_s=SYNC_TIMEOUT_S,
            bucket_mib=_BUCKET_MIB,  # type: ignore[arg-type]
            canary_every_rounds=2,
        )
        rounds = RoundSchedule(len(urls), setting.sync_every_steps, backoff_steps=1, max_backoff_steps=64)
        sync.scene, sync.rounds = self, rounds
        b = ChannelB(
            source=source,
            client=client,
            queue=queue,
            pipeline=pipeline,
            fence=fence,
            clock=clock,
            pacer=pacer,
            guard=guard,
            rounds=rounds,
            sync=sync,
            probe=SuspectProbe(
                rank=rank,
                api_key=None,
                interval_s=0.25,
                find_lost=sync.lost_servers,
                on_lost=lambda server: control.notes.write(_lost(urls[server], clock.current), "lost"),
            ),
            abort=PendingAbort(enabled=setting.abort_when_pending, rank=rank, api_key=None, run_id="run"),
            base_urls=tuple(urls),
            max_inflight_per_server=setting.max_inflight,
            min_ready_tokens=0,
            continue_on_failure=setting.continue_on_failure,
            evaluation=evaluation,
        )
        learner = Learner(
            b_ratio=setting.b_ratio,
            control=control,
            events=events,
            starvation=None,
            fail_when_starved=False,
            channel_b=b,
        )
        return learner, b

    def _make_evaluation(self, rank: int, control: Any, client: RolloutClient) -> PinnedEvaluation:
        setting = self.setting
        encoder = StubEncoder(self, rank)
        part = WatchedEvaluation(
            _ROWS,
            StubTask(),
            num_samples=setting.evaluation_samples,
            rank=rank,
            world_size=setting.num_ranks,
            client=client,
            make_request=encoder.request,
            preprocessor=_preprocessor(encoder),
            decoding=DecodingConfig(),
            events=EvaluationEvents(self.ledger),
        )
        part.ledger = self.ledger
        schedule = EvaluationSchedule(
            every_steps=setting.evaluate_every_steps,
            max_round_delay_steps=setting.max_round_delay_steps,
            last_step=setting.num_steps - 1,
        )
        return self._parts.evaluation(
            schedule, part, control=control, record=partial(self.ledger.evaluation_ends, rank)
        )

    def _watch_production(self, rank: int, pipeline: Pipeline) -> None:
        mine, real = self.ledger.ranks[rank], pipeline._produce

        def produce(num_samples: int) -> bool:
            mine.producing = True
            done = real(num_samples)
            mine.producing = False
            return done

        pipeline._produce = produce  # type: ignore[method-assign]


def _lost(url: str, version: int) -> str:
    return f"{url} was lost at version {version}"


@contextmanager
def virtual_world() -> Iterator[None]:
    """The package on virtual threads, time and HTTP; silent, because a seed says everything again."""
    logging.disable(logging.CRITICAL)
    gc.collect()
    gc.freeze()  # every collection would look through torch again
    try:
        with installed(_NETWORK.http_transport):
            yield
    finally:
        gc.unfreeze()
        logging.disable(logging.NOTSET)


def run_seed(
    seed: int,
    *,
    parts: type[Parts] = Parts,
    change: Callable[[Setting], Setting] = lambda setting: setting,
    traced: bool = False,
) -> tuple[Counter[str], Scheduler]:
    """One schedule of one setting, inside ``virtual_world``. Returns what it met.

    Raises:
        Violation: an invariant does not hold; the message names the seed.
    """
    rng = random.Random(seed)
    setting = change(setting_of(rng))
    chooser = seeded_chooser(rng, stall=setting.stall_share)
    scheduler = Scheduler(chooser, horizon_s=_HORIZON_S, traced=traced)
    with running(scheduler):
        scene = Scene(setting, rng, parts)
        try:
            scheduler.run(scene.run)
            scene.check_told()
        except Violation as violation:
            violation.scheduler = scheduler  # type: ignore[attr-defined]
            violation.add_note(f"seed {seed}: {setting}")
            raise
    return scene.ledger.counts, scheduler
