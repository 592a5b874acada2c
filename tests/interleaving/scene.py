"""The whole of stage 2 on two or three virtual ranks: every part that decides, waits or counts is the real one.

Stand-ins are the servers, the sockets, the collectives, the encoder and the task. One call runs one seed.
"""

from __future__ import annotations

import gc
import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, cast
from unittest.mock import patch

import torch
from builders import matched_of
from interleaving.ledger import Ledger
from interleaving.scheduler import Scheduler, Violation, seeded_chooser
from interleaving.setting import REQUEST_TIMEOUT_S, SYNC_TIMEOUT_S, Setting, setting_of
from interleaving.virtual_asyncio import VirtualAsyncHttp, VirtualLoop
from interleaving.virtual_collectives import MeetingRoom, VirtualControlGroup
from interleaving.virtual_servers import (
    NUM_TOKENS,
    Fate,
    Network,
    VirtualServer,
    VirtualTransport,
    Watcher,
    Weights,
    log_prob_of,
)
from interleaving.virtual_threading import TimeNames, active, installed, running

from swift_stage2.channel_b import groups
from swift_stage2.channel_b.attempts import AttemptOutcomes, Attempts
from swift_stage2.channel_b.encoding import PromptEncoding
from swift_stage2.channel_b.groups import Groups, GroupSettings
from swift_stage2.channel_b.pipeline import Pipeline
from swift_stage2.channel_b.preprocessing import Preprocessor
from swift_stage2.channel_b.ready_queue import ReadyQueue
from swift_stage2.channel_b.rollouts import RolloutClient
from swift_stage2.channel_b.rollouts.requests import PostEnd
from swift_stage2.channel_b.sample_source import SampleSource
from swift_stage2.channel_b.task import Convert, Task
from swift_stage2.columns import LOG_PROBS
from swift_stage2.config import DecodingConfig, GrpoConfig, PackingConfig, Proof
from swift_stage2.config.rollout import SyncConfig
from swift_stage2.errors import PipelineFailed, WeightSyncError
from swift_stage2.evaluation import PinnedEvaluation, RankEvaluation
from swift_stage2.fence import InferFence
from swift_stage2.learner import ChannelB, Learner
from swift_stage2.records import (
    BatchOutcome,
    MatchQuality,
    Pack,
    Rollout,
    Sample,
    SampleKey,
    Segment,
    ServerReport,
    Target,
)
from swift_stage2.scheduling.evaluation_schedule import EvaluationSchedule
from swift_stage2.scheduling.horizon import Pacer
from swift_stage2.scheduling.server_life import LifeState, ServerLife
from swift_stage2.scheduling.version_clock import VersionClock
from swift_stage2.scheduling.version_schedule import VersionSchedule
from swift_stage2.scheduling.watches import TruncationGuard
from swift_stage2.servers.health_check import HealthCheck, ServerKind
from swift_stage2.telemetry.account import account_of
from swift_stage2.telemetry.event_log import EventLog
from swift_stage2.telemetry.events import AnyEvent, Packed, Start, StreamState
from swift_stage2.telemetry.timing import PipelineActivity
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.proof import CanaryAnswer
from swift_stage2.weights.publisher import ThreadPublisher
from swift_stage2.weights.snapshots import Snapshots
from swift_stage2.weights.updates import Updates

_HORIZON_S = 150.0
_CONTROL_TIMEOUT_S = 60.0
_NUM_ROWS = 40
_PACKING_LENGTH = 4
_SAVE_STEPS = 2
_FINAL_S = 30.0  # for the update and the evaluation after the last step
_BUCKET_MIB = 4 / (1 << 20)  # one of the two tensors per bucket
_ROWS = [{"index": index, "objects": {"ref": ["it"], "bbox": [[0, 0, 1, 1]]}} for index in range(_NUM_ROWS)]
_QUALITY = MatchQuality(0, 1, 0, 0.0, 0, 0)
_NETWORK = Network()
_LOST_TO_THE_BOUND = (
    r"new weights wait for a rollout for at most (\d+) × sync_every_steps = (\d+) steps, and one that has been out for "
    r"about (\d+) steps is lost; write sync_every_steps: (\d+) or more, or lower rollout.decoding.max_new_tokens"
)
_ABANDONED = (PostEnd.TIMED_OUT, PostEnd.STOPPED)


class StubEncoder:
    """Looks at every rollout on its way into a segment."""

    closing_token_ids = (2,)
    packing_length = _PACKING_LENGTH

    def __init__(self, scene: Scene, rank: int) -> None:
        self._scene = scene
        self._rank = rank
        self._num_segments = 0

    def require_trainable(self, rollout: Rollout) -> None:
        """One of a group, before it is matched."""
        self._scene.ledger.rollout(self._rank, rollout, _NETWORK.servers[rollout.server])
        self._scene.ledger.tokens(rollout)
        if list(rollout.log_probs or ()) != list(map(log_prob_of, rollout.token_ids)):
            active().fail(f"tokens {rollout.token_ids} have the log-probabilities {rollout.log_probs}")

    def request(self, sample: Sample) -> dict[str, Any]:
        return {"messages": [], "row": sample.row["index"]}

    def encode_prompt(self, sample: Sample) -> PromptEncoding:
        return PromptEncoding({}, (1,), Convert(lambda coordinates: ()))

    def tokenise(self, text: str) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        return (1,), ((0, 1),)

    def encode_segment(self, rollout: Rollout, prompt: Any, sequences: Any, **settings: Any) -> Segment:
        if rollout.advantages is None:
            self._scene.ledger.rollout(self._rank, rollout, _NETWORK.servers[rollout.server])
            self._scene.ledger.tokens(rollout)
        failing = self._scene.setting.failing_pipeline
        if failing is not None and failing == (self._rank, self._num_segments):
            raise RuntimeError("the disk went away")
        self._num_segments += 1
        num_tokens = 1 + rollout.sample.key.index % 3
        return Segment(rollout.sample.key, rollout.version, (), num_tokens, num_tokens, _QUALITY)

    def collate(self, segments: Sequence[Segment]) -> dict[str, Any]:
        return {}


class StubTask(Task):
    reward_terms: ClassVar[Mapping[str, float]] = {"luck": 1.0}

    def read_truth(self, row: Mapping[str, Any]) -> None:
        return None

    def correct(self, *parts: Any) -> Target:
        return Target("", (1,), (1.0,), _QUALITY)

    def reward(self, rollout: Rollout, truth: Any, target: Target) -> Mapping[str, float]:
        """Of two rollouts of a row as often the same as not."""
        key = rollout.sample.key
        return {"luck": float((key.position * 7 + key.attempt * 3 + rollout.version) % 8 < 4)}

    def check_answer(self, *parts: Any) -> None:
        raise AssertionError("nobody asks")


def _preprocessor(encoder: StubEncoder) -> Preprocessor:
    return Preprocessor(encoder, StubTask())


class WatchedEvaluation(RankEvaluation):
    """Looks at every answer that is about to be counted."""

    ledger: Ledger
    rank: int

    def begin(self, version: int) -> None:
        self.pinned = version
        super().begin(version)

    def _score(self, rollouts: Sequence[Rollout], qualities: Any, failed: Any) -> None:
        for rollout in rollouts:
            self.ledger.evaluated(self.rank, rollout, _NETWORK.servers[rollout.server], self.pinned)
        super()._score(rollouts, qualities, failed)
        self.ledger.counts["evaluation rows given up"] += len(failed)


class RankEvents:
    """Pipeline's and learner's events of one rank."""

    def __init__(self, ledger: Ledger, rank: int, log: MemoryLog, client: RolloutClient) -> None:
        self._ledger = ledger
        self._rank = rank
        self.log = log
        self._client = client
        self._suspicions: dict[str, str] = {}  # by server, that were noted

    def batch(self, outcome: BatchOutcome) -> None:
        counts = self._ledger.counts
        counts["posts abandoned"] += sum(each.end in _ABANDONED for each in outcome.failures)
        counts["samples returned"] += len(outcome.returned)
        noted, self._suspicions = self._suspicions, self._client.suspects
        for _, reason in sorted(self._suspicions.items() - noted.items()):
            self._ledger.suspicion(self._rank, reason)

    def count(self, name: str, amount: int = 1) -> None:
        self._ledger.counts[name.replace("_", " ", 1).replace("/", " ")] += amount

    def compared(self, rollouts: Sequence[Rollout], reward_std: float) -> None:
        self._ledger.counts["groups trained"] += 1

    def enter(self, activity: PipelineActivity) -> None: ...

    def matched(self, rollout: Rollout, target: Target, space: tuple[int, int] | None) -> None:
        self.log.write(matched_of(rollout, target.quality))

    def segment(self, segment: Segment, seconds: float) -> None: ...

    def pack(self, pack: Pack, seconds: float) -> None:
        self._ledger.counts["packs"] += 1
        self.log.write(Packed.of(pack, samples=pack.keys))

    def dropped(self, pack: Pack, reason: str) -> None:
        self._ledger.dropped(self._rank, pack, reason)

    def quarantined(self, key: SampleKey, reason: str, message: str, origin: object) -> None:
        self._ledger.quarantined(self._rank, key)

    def activity(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def record_step(self, facts: Any) -> None: ...

    def record_round(self, step: int, outcome: Any, pending_seconds: float) -> None: ...

    def record_warning(self, message: str) -> None:
        if "did not end" in message:
            active().fail(f"rank {self._rank}: {message}")
        if found := re.fullmatch(_LOST_TO_THE_BOUND, message):
            num_cadences, most_steps, num_steps, least = map(int, found.groups())
            self._ledger.counts["rollouts told to be lost"] += 1
            if num_cadences * least <= max(most_steps, num_steps):
                active().fail(f"rank {self._rank}: {message}")


class MemoryLog(EventLog):
    """Keeps what a rank told, in place of a file."""

    def __init__(self) -> None:
        super().__init__(None)
        self.events: list[AnyEvent] = []

    def write(self, event: Any) -> int:
        self.events.append(event)
        return 1


class Canary:
    """The greedy answer is the first weight."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def answer(self) -> CanaryAnswer:
        return CanaryAnswer({"messages": []}, {}, (int(self._scene.weights[0]),) * NUM_TOKENS)


class WatchedSnapshots(Snapshots):
    """Tells when a version begins."""

    scene: Scene

    def take(self, version: int, **settings: Any) -> Any:
        if self._control.rank == 0:
            self.scene.begin_version(version)
        return super().take(version, **settings)


class WatchedUpdates(Updates):
    """Tells when pushes begin and how they end."""

    scene: Scene

    def _push(self, server: int, life: ServerLife, newest: Any) -> None:
        was_drained = life.state is LifeState.DRAINING
        self.scene.ledger.push_begins(self.scene.servers[server], newest.number, was_drained=was_drained)
        super()._push(server, life, newest)

    def _take_result(self, server: int, result: Any) -> None:
        life = self.lives[server]
        counts = life.is_pushing
        super()._take_result(server, result)
        is_proven = counts and life.state is LifeState.PROVEN
        error = result.error if isinstance(result, ServerReport) else str(result)
        self.scene.ledger.push_ends(
            self.scene.servers[server], is_proven=is_proven, error=error, counts=counts
        )


class Parts:
    """Parts that a mutation may replace."""

    fence: type[InferFence] = InferFence
    queue: type[ReadyQueue] = ReadyQueue
    pipeline: type[Pipeline] = Pipeline
    client: type[RolloutClient] = RolloutClient
    source: type[SampleSource] = SampleSource
    groups: type[Groups] = Groups
    evaluation: type[PinnedEvaluation] = PinnedEvaluation
    learner: type[Learner] = Learner
    schedule: type[VersionSchedule] = VersionSchedule
    updates: type[WatchedUpdates] = WatchedUpdates


class Scene:
    """One run of one setting."""

    def __init__(self, setting: Setting, rng: random.Random, parts: type[Parts] = Parts) -> None:
        self.setting = setting
        self.ledger = Ledger(setting)
        self._rng = rng
        self._parts = parts
        self._module = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(1)) for _ in range(2)])
        self.weights: Weights = (0.0, 0.0)
        self._watcher = Watcher(
            fate_of_infer=self._fate_of_infer,
            on_infer=self.ledger.infer_begins,
            on_weights=self.ledger.weights_change,
            fate_of_push=self._fate_of_push,
            delay_of_round=lambda: rng.choice(setting.round_delays_s),
        )
        self.servers = [
            VirtualServer(f"http://s{index}", stock, self._watcher)
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

    def begin_version(self, version: int) -> None:
        self.ledger.version_begins(version, self.weights)
        if self.ledger.num_versions == self.setting.bad_weights_at_version:
            self._set_weights((float("nan"), float("nan")))

    def _train(self, rank: int, learner: Learner, b: ChannelB) -> None:
        learner.start()
        step, is_over = -1, False
        while (step := step + 1) < self.setting.num_steps or any(learner._versions._closed):
            began_s = active().now
            ended = "well"
            try:
                decision = learner.begin_step(step, self.setting.packs_per_step)
            except (WeightSyncError, PipelineFailed) as error:
                ended = type(error).__name__
                self._judge_end(ended, error)
            self.ledger.agree(rank, step, "the end", ended)
            if is_over := ended != "well":
                break
            self.ledger.step(rank, step, decision, learner, began_s)
            self.ledger.account(rank, b)
            self.ledger.check_groups(rank, b)
            if step % _SAVE_STEPS == 0:
                learner.checkpoint(step=step + 1, save_id=f"save {step + 1}")
            TimeNames.sleep(self.setting.step_s + self._rng.choice(self.setting.skews_s))
            if rank == 0:
                self._set_weights((self.weights[0] + 1, self.weights[1] + 1))
            if is_over := decision.stop:
                break
        if not is_over:
            self._evaluate_final(rank, learner, b, step)
        learner.close()
        self.ledger.account(rank, b)
        self._num_over += 1
        # A push that hangs is left behind, and ends with its process.
        if "hangs" in self.setting.push_fates.values() and self._num_over == self.setting.num_ranks:
            active().stop()

    def _evaluate_final(self, rank: int, learner: Learner, b: ChannelB, step: int) -> None:
        """Alike on all ranks, in time, and of no other weights than those of the last version."""
        began_s = active().now
        try:
            learner.evaluate_final(step)
        except WeightSyncError as error:
            self._judge_end("WeightSyncError", error)
        if b.evaluation is None:
            return
        if active().now - began_s > _FINAL_S + _CONTROL_TIMEOUT_S:
            active().fail(f"rank {rank} evaluates the final weights for {active().now - began_s:.1f} s")
        latest = b.evaluation.ended[-1] if b.evaluation.ended else None
        is_final = latest is not None and latest.due_step == step
        told = latest.model_dump(exclude={"time"}) if is_final else None
        self.ledger.agree(rank, step, "the final evaluation", told)
        if is_final and latest.version != b.clock.current:
            active().fail(f"rank {rank} ends with version {b.clock.current}, evaluated is {latest.version}")
        self.ledger.counts[f"final evaluations {latest.end if is_final else 'left out'}"] += 1

    def check_told(self) -> None:
        """Judges the run as ``swift-stage2 report`` would. Raises ``Violation`` unless it balances."""
        account = account_of({rank: log.events for rank, log in enumerate(self._logs)})
        broken = [*account.violations, *(broken for rank in account.ranks for broken in rank.violations)]
        if broken:
            raise Violation(f"the ledger does not balance: {broken[0].rule}: {broken[0].samples}")
        self.ledger.counts["samples told trained"] += sum(rank.trained for rank in account.ranks)

    def _judge_end(self, ended: str, error: Exception) -> None:
        setting = self.setting
        self.ledger.counts[f"runs ended by {ended}"] += 1
        expected = {
            "WeightSyncError": setting.bad_weights_at_version is not None,
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
        return self.setting.push_fates.get(
            (self.servers.index(server), self.ledger.num_pushes_to[server.url]), "arrives"
        )

    def _make_rank(self, rank: int) -> tuple[Learner, ChannelB]:
        setting, ledger, parts = self.setting, self.ledger, self._parts
        control = VirtualControlGroup(rank, self._room)
        urls = [server.url for server in self.servers]
        clock = VersionClock()
        log = self._logs[rank]
        source = parts.source(
            _ROWS,
            StubTask(),
            rank=rank,
            world_size=setting.num_ranks,
            seed=0,
            log=log,
            num_generations=setting.num_generations,
        )
        ledger.watch_source(rank, source)
        log.write(
            Start(
                run_id="run",
                step=0,
                world_size=setting.num_ranks,
                version_window=setting.version_window,
                state=StreamState(**source.state_dict()),
            )
        )
        attempts = Attempts(log)
        client = type("Client", (parts.client,), {"make_fence": parts.fence})(
            urls,
            decoding=DecodingConfig(),
            request_timeout_s=REQUEST_TIMEOUT_S,
            run_seed=0,
            rank=rank,
            world_size=setting.num_ranks,
            run_id="run",
            max_inflight_per_server=setting.max_inflight,
            is_lost=lambda url, version: control.notes.read(_lost(url, version)) is not None,
            observer=attempts,
            kinds={
                url: ServerKind(is_ours=not stock) for url, stock in zip(urls, setting.stock, strict=True)
            },
            columns=(LOG_PROBS,) if setting.num_generations > 1 else (),
        )
        events = RankEvents(ledger, rank, log, client)
        pipelines: list[Pipeline] = []
        queue = parts.queue(
            setting.queue_limit,
            setting.version_window,
            lambda pack, reason: pipelines[0].on_drop(pack, reason),
        )
        ledger.watch_queue(rank, queue, clock)
        for server in client._servers.values():
            ledger.watch_server(rank, server)
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
        ends = AttemptOutcomes(
            source,
            events,  # type: ignore[arg-type]
            redraw_dropped=setting.redraw_dropped,
            max_attempts=setting.max_attempts,
        )
        pipeline = parts.pipeline(
            source=source,
            client=client,
            attempts=attempts,
            make_request=encoder.request,
            preprocessor=_preprocessor(encoder),
            queue=queue,
            clock=clock,
            pacer=pacer,
            guard=guard,
            events=events,
            ends=ends,
            packing=PackingConfig(packing_length=_PACKING_LENGTH),
            groups=self._make_groups(rank, ends, source, clock) if setting.num_generations > 1 else None,
            ask_evaluation=evaluation.part.ask if evaluation is not None else None,
            take_evaluated=evaluation.part.take if evaluation is not None else None,
        )
        pipelines.append(pipeline)
        self._watch_production(rank, pipeline)
        snapshots = WatchedSnapshots(
            control=control,
            export=WeightExport(self._module),
            canary=Canary(self),
            run_id="run",
            timeout_s=SYNC_TIMEOUT_S,
            bucket_mib=_BUCKET_MIB,
        )
        snapshots.scene = self
        b = ChannelB(
            source=source,
            client=client,
            queue=queue,
            pipeline=pipeline,
            clock=clock,
            guard=guard,
            schedule=parts.schedule(setting.sync_every_steps, setting.most_cadences),
            snapshots=snapshots,
            updates=self._make_updates(urls, snapshots, control) if rank == 0 else None,
            base_urls=list(urls),
            max_inflight_per_server=setting.max_inflight,
            min_ready_tokens=0,
            continue_on_failure=setting.continue_on_failure,
            evaluation=evaluation,
            final_evaluation_s=_FINAL_S,
        )
        learner = parts.learner(
            b_ratio=setting.b_ratio,
            control=control,
            events=events,
            starvation=None,
            fail_when_starved=False,
            channel_b=b,
        )
        return learner, b

    def _make_updates(
        self, urls: Sequence[str], snapshots: Snapshots, control: VirtualControlGroup
    ) -> WatchedUpdates:
        setting = self.setting
        updates = self._parts.updates(
            [ServerLife(1, 64, stages=stages) for stages in setting.staging],
            snapshots=snapshots,
            publisher=ThreadPublisher(
                [cast(Any, SimpleNamespace(base_url=url)) for url in urls],
                lambda info: VirtualTransport(_NETWORK.servers),
            ),
            health=HealthCheck(base_urls=urls, api_key=None, interval_s=0.25),
            sync=SyncConfig(
                timeout_s=SYNC_TIMEOUT_S,
                rolling=setting.rolling,
                proof=Proof.CANARY,
            ),
            straggler_s=setting.straggler_s,
            sync_every_steps=setting.sync_every_steps,
            on_lost=lambda server, version: control.notes.write(_lost(urls[server], version), "lost"),
        )
        updates.scene = self
        return updates

    def _make_groups(
        self, rank: int, ends: AttemptOutcomes, source: SampleSource, clock: VersionClock
    ) -> Groups:
        setting = self.setting
        settings = GroupSettings(setting.objective, GrpoConfig())
        groups = self._parts.groups(ends, settings, source, clock, setting.version_window)
        self.ledger.watch_groups(rank, groups, source)
        return groups

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
        )
        part.ledger, part.rank = self.ledger, rank
        schedule = EvaluationSchedule(
            every_steps=setting.evaluate_every_steps,
            max_round_delay_steps=setting.max_round_delay_steps,
            last_step=setting.num_steps - 1,
        )
        if rank == 0:  # who decides when servers install
            self.ledger.evaluations = schedule
        return self._parts.evaluation(
            schedule, part, control=control, record=partial(self.ledger.evaluation_ends, rank)
        )

    def _watch_production(self, rank: int, pipeline: Pipeline) -> None:
        """Samples are in the turn's own hands from the moment at which its wait has ended until it ends."""
        mine = self.ledger.ranks[rank]
        turn, look, await_finished = pipeline._turn, pipeline._split_confirmed, pipeline.client.next_finished
        ask_for = pipeline._ask_for

        def one_turn(timeout_s: float) -> None:
            turn(timeout_s)
            mine.producing = False

        def next_finished(timeout_s: float) -> BatchOutcome | None:
            outcome = await_finished(timeout_s)
            mine.producing |= not pipeline._stop._set  # type: ignore[attr-defined]
            return outcome

        def heard_proven(arrived: Sequence[Rollout] = ()) -> list[Rollout]:
            looked_from = active().num_points
            heard = look(arrived)
            mine.looked_from = looked_from
            return heard

        def counted(num_samples: int) -> None:
            mine.num_begun += num_samples
            ask_for(num_samples)

        pipeline._turn, pipeline._split_confirmed = one_turn, heard_proven  # type: ignore[method-assign]
        pipeline._ask_for = counted  # type: ignore[method-assign]
        pipeline.client.next_finished = next_finished  # type: ignore[method-assign]


def _async_transport(**settings: Any) -> VirtualAsyncHttp:
    return VirtualAsyncHttp(_NETWORK.servers)


def _lost(url: str, version: int) -> str:
    return f"{url} was lost at version {version}"


@contextmanager
def virtual_world() -> Iterator[None]:
    """The package on virtual threads, time and HTTP; silent, because a seed says everything again."""
    logging.disable(logging.CRITICAL)
    gc.collect()
    gc.freeze()  # every collection would look through torch again
    try:
        with installed(_async_transport, VirtualLoop):
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
    scene = Scene(setting, rng, parts)
    watched = scene.ledger.watch_comparisons(groups.compare)
    with running(scheduler), patch.object(groups, "compare", watched):
        try:
            scheduler.run(scene.run)
            scene.check_told()
        except Violation as violation:
            violation.scheduler = scheduler  # type: ignore[attr-defined]
            more = {each.name: getattr(setting, each.name) for each in fields(setting) if not each.repr}
            violation.add_note(f"seed {seed}: {setting} {more}")
            raise
    return scene.ledger.counts, scheduler
