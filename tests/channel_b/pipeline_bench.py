"""One rank's pipeline with real encoder, task, queue, clock and pacer; only the server side is a stand-in."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest
from builders import matched_of
from real_model import PACKING_LENGTH, Rows, make_encoder, make_task, rollout_of
from rollout_batch import Requests

from swift_stage2.channel_b.attempts import AttemptOutcomes, Attempts
from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.groups import Groups, GroupSettings
from swift_stage2.channel_b.pipeline import Pipeline
from swift_stage2.channel_b.preprocessing import Preprocessor
from swift_stage2.channel_b.ready_queue import ReadyQueue
from swift_stage2.channel_b.rollouts import RequestSettings
from swift_stage2.channel_b.sample_source import RowOrigins, SampleSource
from swift_stage2.config import DecodingConfig, PackingConfig
from swift_stage2.evaluation import RankEvaluation
from swift_stage2.records import (
    BatchOutcome,
    Pack,
    Rollout,
    RowOrigin,
    Sample,
    SampleKey,
    Segment,
    Target,
    VersionSpan,
)
from swift_stage2.scheduling.horizon import Pacer, PacerInputs, StepView
from swift_stage2.scheduling.version_clock import VersionClock
from swift_stage2.scheduling.watches import TruncationGuard
from swift_stage2.telemetry.event_log import EventLog
from swift_stage2.telemetry.events import Packed, Start, StreamState
from swift_stage2.telemetry.timing import PipelineActivity

PATIENCE_S = 60.0
WINDOW = 2
MAX_ATTEMPTS = 3
PACKING = PackingConfig(packing_length=PACKING_LENGTH)

Answer = Callable[[Sequence[Sample]], BatchOutcome]


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return make_encoder()


@pytest.fixture(scope="module")
def server_encoder() -> Encoder:
    """The server's side of the prompt; it runs on another thread than the pipeline's encoder."""
    return make_encoder()


@dataclass
class Recorder:
    """Everything that the pipeline told, and a way to wait for it."""

    segments: list[Segment] = field(default_factory=list)
    compared_groups: list[tuple[Rollout, ...]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    packs: list[Pack] = field(default_factory=list)
    dropped_packs: list[tuple[Pack, str]] = field(default_factory=list)
    quarantines: list[tuple[SampleKey, str, str]] = field(default_factory=list)
    origins: list[RowOrigin] = field(default_factory=list)
    num_batches: int = 0
    rollouts: list[Rollout] = field(default_factory=list)  # that were matched
    log: EventLog = field(default_factory=lambda: EventLog(None))

    def __post_init__(self) -> None:
        self._changed = threading.Condition()

    def batch(self, outcome: BatchOutcome) -> None:
        self.num_batches += 1
        self._tell()

    def count(self, name: str, amount: int = 1) -> None:
        self.counts[name] += amount
        self._tell()

    def enter(self, activity: PipelineActivity) -> None:
        """What the thread does is for the telemetry's tests."""

    def matched(self, rollout: Rollout, target: Target, space: tuple[int, int] | None) -> None:
        self.rollouts.append(rollout)
        self.log.write(matched_of(rollout, target.quality))
        self._tell()

    def compared(self, rollouts: Sequence[Rollout], reward_std: float) -> None:
        self.compared_groups.append(tuple(rollouts))

    def segment(self, segment: Segment, seconds: float) -> None:
        self.segments.append(segment)
        self._tell()

    def pack(self, pack: Pack, seconds: float) -> None:
        self.packs.append(pack)
        self.log.write(Packed.of(pack, samples=pack.keys))
        self._tell()

    def dropped(self, pack: Pack, reason: str) -> None:
        self.dropped_packs.append((pack, reason))
        self._tell()

    def quarantined(self, key: SampleKey, reason: str, message: str, origin: RowOrigin) -> None:
        self.quarantines.append((key, reason, message))
        self.origins.append(origin)
        self._tell()

    def wait_until(self, holds: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(holds, PATIENCE_S), "it never happened"

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()


class StandInClient:
    """Answers as told; by default every sample with nothing, sampled under the current version."""

    def __init__(self, clock: VersionClock, server_encoder: Encoder, events: Attempts) -> None:
        self._events = events
        self._changed = threading.Condition()
        self._is_woken = False
        self.max_prompts = 6
        self.is_closed = False
        self.in_hand: deque[tuple[tuple[Sample, ...], RequestSettings | None]] = deque()
        self.num_fruitful = 0
        self._clock = clock
        self._encoder = server_encoder
        self.answer: Answer = self.answer_all
        self.calls: list[tuple[SampleKey, ...]] = []
        self.evaluated: list[tuple[int, ...]] = []  # rows
        self.distrusted: list[str] = []
        self.agreeing: set[str] = set()
        self.proven: tuple[str, ...] = ("http://server",)
        self.verdicts: dict[int, bool | None] = {}  # by version; of any other: proven

    @property
    def free_places(self) -> int:
        return (
            0
            if self.is_closed
            else max(0, self.max_prompts - sum(len(samples) for samples, _ in self.in_hand))
        )

    def submit(
        self, samples: Sequence[Sample], requests: Requests, settings: RequestSettings | None = None
    ) -> None:
        assert len(samples) == len(requests) > 0
        self.in_hand.append((tuple(samples), settings))
        if settings is not None:
            self.evaluated.append(tuple(sample.key.index for sample in samples))
            return
        self.calls.append(tuple(sample.key for sample in samples))

    def next_finished(self, timeout_s: float) -> BatchOutcome | None:
        """Answers what was submitted first."""
        if not self.in_hand:
            with self._changed:
                self._changed.wait_for(lambda: self._is_woken, timeout_s)
                self._is_woken = False
            return None
        samples, settings = self.in_hand[0]
        if settings is not None:
            outcome = replace(self.answer_all(samples), num_posts=1, settings=settings)
        else:
            keys = tuple(sample.key for sample in samples)
            self._events.sent(keys, server="stand-in", seed=1, version=self._clock.current)
            outcome = self.answer(samples)
            end = "answered" if outcome.rollouts else "lost"
            self._events.finished(keys, server="stand-in", end=end, seconds=0.01)
        self.in_hand.popleft()
        self.num_fruitful += bool(outcome.rollouts or outcome.quarantined)
        return outcome

    def wake(self) -> None:
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def confirms(self, rollout: Rollout) -> bool | None:
        return self.verdicts.get(rollout.spans[-1].version, True)

    def mark_suspect(self, server: str, reason: str) -> None:
        self.distrusted.append(server)

    def note_agreement(self, servers: Collection[str]) -> set[str]:
        self.agreeing |= set(servers)
        return self.agreeing

    def answer_all(self, samples: Sequence[Sample]) -> BatchOutcome:
        return BatchOutcome(rollouts=tuple(self.rollout(sample) for sample in samples))

    def answer_ahead(self, samples: Sequence[Sample]) -> BatchOutcome:
        """With weights that are on their way to servers."""
        version = self._clock.current + 1
        self.verdicts.setdefault(version, None)
        spans = (VersionSpan(version, 0, 0),)
        rollouts = (replace(self.rollout(each), spans=spans) for each in samples)
        return BatchOutcome(rollouts=tuple(rollouts))

    def rollout(self, sample: Sample, *, text: str = "[]") -> Rollout:
        prompt = self._encoder.encode_prompt(sample)
        return rollout_of(sample, text, prompt.token_ids, version=self._clock.current, seconds=0.01)


@dataclass
class Bench:
    """One rank's pipeline and all that it is made of."""

    source: SampleSource
    client: StandInClient
    queue: ReadyQueue
    clock: VersionClock
    pipeline: Pipeline
    events: Recorder
    evaluation: RankEvaluation
    trained: list[SampleKey] = field(default_factory=list)

    def observe(self, **changes: Any) -> None:
        pacing = {"step": 0, "current_version": self.clock.current}
        known = {each.name for each in fields(PacerInputs)}
        pacing |= {name: value for name, value in changes.items() if name in known}
        view: dict[str, Any] = {
            "pacing": PacerInputs(**pacing),
            "started_s": time.monotonic(),
            "step_seconds": 10.0,
            "max_prompts": 6,
            "paused": False,
        }
        view |= {name: value for name, value in changes.items() if name not in known}
        self.client.max_prompts = view["max_prompts"]
        self.pipeline.observe(StepView(**view))

    def fill(self, num_packs: int, **changes: Any) -> None:
        """A step's wait; one that nothing ends fails the test."""
        self.client.max_prompts = changes.get("max_prompts", 6)
        step = changes.get("step", 0)
        pacing = PacerInputs(step=step, current_version=self.clock.current)
        view = StepView(
            pacing, time.monotonic(), 10.0, self.client.max_prompts, changes.get("paused", False), num_packs
        )
        began = time.monotonic()
        self.pipeline.fill(view, PATIENCE_S)
        assert time.monotonic() - began < PATIENCE_S

    def begin_log(self) -> None:
        """As a run does, so that its account can be taken."""
        state = StreamState(**self.source.state_dict())
        self.events.log.write(Start(run_id="run", step=0, world_size=1, version_window=WINDOW, state=state))

    def work(self) -> bool:
        """Asks, and goes on with what came of it, asking no more meanwhile; False when nothing came."""
        before = self.client.num_fruitful
        self.pipeline._turn(0.0)
        self.client.is_closed = True
        self.pipeline._turn(0.0)
        self.client.is_closed = False
        return self.client.num_fruitful > before

    def train(self, count: int = 1) -> list[Pack]:
        """Takes a step's packs as the learner does."""
        reservation = self.queue.reserve(count, current_version=self.clock.current)
        assert reservation is not None
        packs = reservation.take()
        for pack in packs:
            self.source.settle_trained(pack.keys, pack_id=pack.pack_id, step=0, version=self.clock.current)
            self.trained += pack.keys
        return packs


MakeBench = Callable[..., Bench]


@pytest.fixture
def make_bench(encoder: Encoder, server_encoder: Encoder, rows: Rows) -> Iterator[MakeBench]:
    benches: list[Bench] = []

    def make(
        data: Any = None,
        *,
        target_packs: int = 2,
        limit: int = 4,
        log_path: Path | None = None,
        origins: RowOrigins | None = None,
        num_generations: int = 1,
        groups: GroupSettings | None = None,
        redraw_dropped: bool = True,
        **changes: Any,
    ) -> Bench:
        clock = VersionClock()
        events = Recorder(log=EventLog(log_path))
        source = SampleSource(
            rows if data is None else data,
            make_task(),
            rank=0,
            world_size=1,
            seed=1,
            log=events.log,
            origins=origins or RowOrigins(),
            num_generations=num_generations,
        )

        attempts = Attempts(events.log)
        client = StandInClient(clock, server_encoder, attempts)
        evaluation = RankEvaluation(
            rows,
            make_task(),
            num_samples=5,
            rank=0,
            world_size=1,
            client=client,  # type: ignore[arg-type]
            make_request=encoder.request,
            preprocessor=Preprocessor(encoder, make_task()),
            decoding=DecodingConfig(),
        )
        pipelines: list[Pipeline] = []
        queue = ReadyQueue(limit, WINDOW, lambda pack, why: pipelines[0].on_drop(pack, why))
        ends = AttemptOutcomes(source, events, redraw_dropped=redraw_dropped, max_attempts=MAX_ATTEMPTS)  # type: ignore[arg-type]
        settings: dict[str, Any] = {
            "guard": TruncationGuard(1.0),
            "packing": PACKING,
            "preprocessor": Preprocessor(encoder, make_task()),
        }
        if groups is not None:
            settings["groups"] = Groups(ends, groups, source, clock, WINDOW)
        pipeline = Pipeline(
            source=source,
            client=client,  # type: ignore[arg-type]
            attempts=attempts,
            make_request=encoder.request,
            queue=queue,
            clock=clock,
            pacer=Pacer(
                b_ratio=1.0,
                version_window=WINDOW,
                sync_every_steps=4,
                target_packs=target_packs,
                packs_per_b_step=1,
            ),
            events=events,
            ends=ends,
            ask_evaluation=evaluation.ask,
            take_evaluated=evaluation.take,
            **(settings | changes),
        )
        pipelines.append(pipeline)
        benches.append(Bench(source, client, queue, clock, pipeline, events, evaluation))
        return benches[-1]

    yield make
    for bench in benches:
        assert bench.pipeline.stop(PATIENCE_S)
