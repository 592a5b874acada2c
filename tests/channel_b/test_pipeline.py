"""The pipeline with real encoder, task, queue, clock and pacer; only the server side is a stand-in.

Whatever happens to a sample, it ends in exactly one place: trained, quarantined, or outstanding in its source.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from channel_b.test_rank_evaluation import Recorder as EvaluationRecorder
from real_model import PACKING_LENGTH, make_encoder, make_task, rollout_of

from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.pipeline import Pipeline, StepView
from swift_stage2.channel_b.preprocessing import ThreadPreprocessor
from swift_stage2.channel_b.ready_queue import DropReason, ReadyQueue
from swift_stage2.channel_b.rollout_client import Terms
from swift_stage2.channel_b.rollout_client.trust import MANY_GIVEN_UP
from swift_stage2.channel_b.sample_source import RowOrigins, SampleSource
from swift_stage2.config import DecodingConfig
from swift_stage2.errors import FenceShutDown
from swift_stage2.evaluation import RankEvaluation
from swift_stage2.records import (
    BatchOutcome,
    Pack,
    QuarantineReason,
    Rollout,
    RowOrigin,
    Sample,
    SampleKey,
    Segment,
    Target,
)
from swift_stage2.scheduling.outlook import INSTANT
from swift_stage2.scheduling.pacing import Pacer
from swift_stage2.scheduling.version_clock import VersionClock
from swift_stage2.scheduling.watches import TruncationGuard
from swift_stage2.servers.protocol import may_abort
from swift_stage2.telemetry.activity import PipelineActivity
from swift_stage2.telemetry.audit import AuditLog
from swift_stage2.telemetry.ledger import Entry, Ledger
from swift_stage2.telemetry.ledger_account import account_of
from swift_stage2.telemetry.reading import read_ledger

PATIENCE_S = 20.0
WINDOW = 2
MAX_ATTEMPTS = 3

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
    packs: list[Pack] = field(default_factory=list)
    dropped_packs: list[tuple[Pack, str]] = field(default_factory=list)
    stale: list[Segment] = field(default_factory=list)
    quarantines: list[tuple[SampleKey, str, str]] = field(default_factory=list)
    origins: list[RowOrigin] = field(default_factory=list)
    num_batches: int = 0
    activities: list[PipelineActivity] = field(default_factory=list)
    matches: list[tuple[SampleKey, Target, tuple[int, int] | None]] = field(default_factory=list)
    reads: list[tuple[SampleKey, int, int | None]] = field(default_factory=list)
    ledger: Ledger = field(default_factory=lambda: Ledger(AuditLog(None)))

    def __post_init__(self) -> None:
        self._changed = threading.Condition()

    def read(self, keys: Sequence[SampleKey], **traits: Any) -> None:
        self.reads.extend(zip(keys, traits["num_objects"], traits["num_pixels"], strict=True))
        self.ledger.write(Entry.READ, keys, **traits)

    def batch(self, outcome: BatchOutcome, seconds: float) -> None:
        self.num_batches += 1
        self._tell()

    def enter(self, activity: PipelineActivity) -> None:
        self.activities.append(activity)

    def matched(self, rollout: Rollout, target: Target, space: tuple[int, int] | None) -> None:
        self.matches.append((rollout.sample.key, target, space))

    def segment(self, segment: Segment, seconds: float) -> None:
        self.segments.append(segment)
        self.ledger.matched(segment)
        self._tell()

    def pack(self, pack: Pack, seconds: float) -> None:
        self.packs.append(pack)
        self.ledger.packed(pack)
        self._tell()

    def dropped(self, pack: Pack, reason: str) -> None:
        self.dropped_packs.append((pack, reason))
        self._tell()

    def stale_segment(self, segment: Segment) -> None:
        self.stale.append(segment)
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

    def __init__(self, clock: VersionClock, server_encoder: Encoder, ledger: Ledger) -> None:
        self._ledger = ledger
        self._clock = clock
        self._encoder = server_encoder
        self.answer: Answer = self.answer_all
        self.calls: list[tuple[SampleKey, ...]] = []
        self.protected: list[set[SampleKey]] = []  # of each call, the samples that must not be aborted
        self.evaluated: list[tuple[int, ...]] = []  # rows
        self.distrusted: list[str] = []
        self.agreeing: set[str] = set()

    def generate(
        self, samples: Sequence[Sample], requests: Sequence[Mapping[str, Any]], terms: Terms | None = None
    ) -> BatchOutcome:
        assert len(samples) == len(requests) > 0
        if terms is not None:
            self.evaluated.append(tuple(sample.key.index for sample in samples))
            return replace(self.answer_all(samples), num_posts=1)
        self.calls.append(tuple(sample.key for sample in samples))
        pairs = zip(samples, requests, strict=True)
        self.protected.append({sample.key for sample, request in pairs if not may_abort(request)})
        keys = self.calls[-1]
        self._ledger.sent(keys, server="stand-in", seed=1, version=self._clock.current)
        self._ledger.finished(keys, server="stand-in", end="answered", seconds=0.01)
        return self.answer(samples)

    def distrust(self, server: str, reason: str) -> None:
        self.distrusted.append(server)

    def note_agreement(self, servers: Collection[str]) -> set[str]:
        self.agreeing |= set(servers)
        return self.agreeing

    def answer_all(self, samples: Sequence[Sample]) -> BatchOutcome:
        return BatchOutcome(rollouts=tuple(self.rollout(sample) for sample in samples))

    def rollout(self, sample: Sample, *, text: str = "[]") -> Rollout:
        prompt = self._encoder.encode_prompt(sample)
        return rollout_of(sample, text, prompt.token_ids, version=self._clock.current, seconds=0.01)


@dataclass
class Bench:
    """One rank's pipeline and all that it is made of."""

    source: SampleSource
    client: StandInClient
    queue: ReadyQueue[Pack]
    clock: VersionClock
    pipeline: Pipeline
    events: Recorder
    evaluation: RankEvaluation
    trained: list[SampleKey] = field(default_factory=list)

    def observe(self, **changes: Any) -> None:
        view: dict[str, Any] = {
            "step": 0,
            "started_s": time.monotonic(),
            "step_seconds": 10.0,
            "last_commit_step": 0,
            "round_pending": False,
            "slowest_pace": INSTANT,
            "missed_in_a_row": 0,
            "max_prompts": 6,
            "paused": False,
        }
        self.pipeline.observe(StepView(**(view | changes)))

    def train(self, count: int = 1) -> list[Pack]:
        """Takes a step's packs as the learner does."""
        reservation = self.queue.reserve(count, current_version=self.clock.current)
        assert reservation is not None
        packs = reservation.take()
        for pack in packs:
            self.source.settle_trained(pack.keys, pack_id=pack.pack_id, step=0, version=self.clock.current)
            self.trained += pack.keys
        return packs


@pytest.fixture
def make_bench(
    encoder: Encoder, server_encoder: Encoder, rows: list[dict[str, Any]]
) -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(
        data: Any = None,
        *,
        target_packs: int = 2,
        limit: int = 4,
        ledger_path: Path | None = None,
        origins: RowOrigins | None = None,
        **changes: Any,
    ) -> Bench:
        clock = VersionClock()
        events = Recorder(ledger=Ledger(AuditLog(ledger_path)))
        source = SampleSource(
            rows if data is None else data,
            make_task(),
            rank=0,
            world_size=1,
            seed=1,
            events=events.ledger,
            origins=origins,
        )
        client = StandInClient(clock, server_encoder, events.ledger)
        evaluation = RankEvaluation(
            rows,
            make_task(),
            num_samples=5,
            rank=0,
            world_size=1,
            client=client,  # type: ignore[arg-type]
            make_request=encoder.request,
            preprocessor=ThreadPreprocessor(encoder, make_task(), packing_length=PACKING_LENGTH),
            decoding=DecodingConfig(),
            events=EvaluationRecorder(),
        )
        pipelines: list[Pipeline] = []
        queue: ReadyQueue[Pack] = ReadyQueue(limit, WINDOW, lambda pack, why: pipelines[0].on_drop(pack, why))
        settings: dict[str, Any] = {
            "packing_length": PACKING_LENGTH,
            "packing_min_fill_ratio": 0.65,
            "redraw_dropped": True,
            "max_attempts": MAX_ATTEMPTS,
            "guard": TruncationGuard(1.0),
        }
        pipeline = Pipeline(
            source=source,
            client=client,  # type: ignore[arg-type]
            make_request=encoder.request,
            preprocessor=ThreadPreprocessor(encoder, make_task(), packing_length=PACKING_LENGTH),
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
            version_window=WINDOW,
            ask_evaluation=evaluation.ask,
            **(settings | changes),
        )
        pipelines.append(pipeline)
        benches.append(Bench(source, client, queue, clock, pipeline, events, evaluation))
        return benches[-1]

    yield make
    for bench in benches:
        assert bench.pipeline.stop(PATIENCE_S)


def _raise(error: BaseException) -> BatchOutcome:
    raise error


# --- the way of a good sample ------------------------------------------------------------------------


def test_rollouts_become_packs(make_bench: Callable[..., Bench], encoder: Encoder) -> None:
    bench = make_bench()
    bench.pipeline.start()
    bench.clock.advance()
    bench.observe()
    bench.events.wait_until(lambda: len(bench.events.packs) >= 2)
    (pack,) = bench.train()
    segments = [segment for segment in bench.events.segments if segment.key in pack.keys]
    assert pack.keys == tuple(segment.key for segment in segments) == bench.client.calls[0][: len(segments)]
    assert pack.version == 1
    assert pack.num_tokens == sum(segment.num_tokens for segment in segments) <= PACKING_LENGTH
    assert pack.capacity_tokens == PACKING_LENGTH
    assert pack.num_supervised_tokens == sum(segment.num_supervised_tokens for segment in segments)
    assert pack.quality == tuple(segment.quality for segment in segments)
    read = {key: (num_objects, num_pixels) for key, num_objects, num_pixels in bench.events.reads}
    for segment in segments:
        assert read[segment.key] == (segment.quality.num_ground_truth, 150 * 100)
    expected = encoder.collate(segments)
    assert torch.equal(pack.batch["input_ids"], expected["input_ids"])
    assert torch.equal(pack.batch["position_ids"], expected["position_ids"])
    assert bench.pipeline.production_pace is not None
    assert bench.pipeline.production_pace.typical_steps > 0


def test_a_pack_is_as_old_as_its_oldest_segment(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()

    def answer_in_the_middle_of_a_round(samples: Sequence[Sample]) -> BatchOutcome:
        newer = bench.client.rollout(samples[0])
        bench.clock.advance()
        newest = bench.client.rollout(samples[1])
        return BatchOutcome(rollouts=(newest, newer), returned=tuple(samples[2:]))

    bench.clock.advance()
    bench.client.answer = answer_in_the_middle_of_a_round
    bench.observe()
    assert bench.pipeline._work_once()
    (pack,) = bench.events.packs
    assert [segment.version for segment in bench.events.segments] == [2, 1]
    assert (len(pack.keys), pack.version) == (2, 1)


def test_nothing_is_asked_before_the_first_step_nor_without_a_server(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench()
    assert not bench.pipeline._work_once()
    bench.observe(max_prompts=0)
    assert not bench.pipeline._work_once()
    assert bench.client.calls == []
    bench.observe(max_prompts=1)
    assert bench.pipeline._work_once()
    assert [len(keys) for keys in bench.client.calls] == [1]


def test_the_target_ends_production_and_training_renews_it(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    bench.observe()
    while bench.pipeline._work_once():
        assert len(bench.client.calls) < 50
    count = len(bench.client.calls)
    assert bench.queue.statistics().depth >= 2
    assert not bench.pipeline._work_once()
    bench.train(2)
    bench.observe(step=1)
    assert bench.pipeline._work_once()
    assert len(bench.client.calls) == count + 1


def test_segments_wait_for_a_fuller_pack_while_the_queue_is_not_starving(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(packing_min_fill_ratio=1.0, target_packs=3)
    bench.observe(max_prompts=1)
    assert bench.pipeline._work_once()
    assert len(bench.events.packs) == 1, "a starving queue takes what there is"
    while len(bench.client.calls) < 3:
        assert bench.pipeline._work_once()
    assert len(bench.events.packs) == 1
    assert len(bench.events.segments) == 3
    assert bench.source.num_outstanding == 3, "what waits is not lost"


# --- what comes back ---------------------------------------------------------------------------------


def test_returned_samples_are_asked_first_and_their_attempts_do_not_count(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench()
    bench.client.answer = lambda samples: BatchOutcome(returned=tuple(samples))
    bench.observe()
    assert not bench.pipeline._work_once(), "a server that returns everything is not asked without a pause"
    assert not bench.pipeline._work_once()
    first, second = bench.client.calls
    assert first == second
    assert {key.attempt for key in second} == {0}
    assert bench.events.quarantines == []


def test_an_aborted_sample_is_asked_again_first_and_is_not_aborted_twice(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(target_packs=4)

    def abort_all_but_the_first(samples: Sequence[Sample]) -> BatchOutcome:
        done, *cut = (bench.client.rollout(sample) for sample in samples)
        return BatchOutcome(
            rollouts=(done,), returned=tuple(rollout.sample for rollout in cut), aborted=tuple(cut)
        )

    bench.client.answer = abort_all_but_the_first
    bench.observe(max_prompts=3)
    assert bench.pipeline._work_once()
    cut = bench.client.calls[0][1:]
    bench.client.answer = bench.client.answer_all
    bench.observe(step=1, max_prompts=1)
    assert bench.pipeline._work_once()  # one of the two alone, and then the other
    assert bench.pipeline._work_once()
    assert bench.client.calls[1:] == [cut[:1], cut[1:]]  # the same attempts: an abort is none
    bench.pipeline._work_once()
    assert bench.client.protected[:3] == [set(), set(cut[:1]), set(cut[1:])]
    assert not any(bench.client.protected[3:])


def test_a_sample_that_never_answers_in_time_is_quarantined_after_its_attempts(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(redraw_dropped=False)
    slow: list[int] = []

    def hang_on_the_first(samples: Sequence[Sample]) -> BatchOutcome:
        slow.append(samples[0].key.index) if not slow else None
        late = tuple(sample for sample in samples if sample.key.index == slow[0])
        good = tuple(bench.client.rollout(sample) for sample in samples if sample not in late)
        return BatchOutcome(rollouts=good, returned=late, timed_out=late)

    bench.client.answer = hang_on_the_first
    for step in range(MAX_ATTEMPTS):
        bench.observe(step=step, max_prompts=2)
        assert bench.events.quarantines == []
        assert bench.pipeline._work_once()
        if bench.queue.statistics().depth:
            bench.train()
    assert [keys[0].attempt for keys in bench.client.calls] == [0, 1, 2]
    ((key, reason, message),) = bench.events.quarantines
    assert (key.index, reason) == (slow[0], QuarantineReason.TOO_SLOW)
    assert message == "max_attempts=3 rollouts were lost, the last one did not end in time"


def test_a_segment_that_went_stale_is_asked_again_and_its_attempt_counts(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench()
    made_stale: list[int] = []

    def answer_too_late(samples: Sequence[Sample]) -> BatchOutcome:
        outcome = bench.client.answer_all(samples)
        for _ in range(WINDOW + 1):
            bench.clock.advance()
        made_stale.append(len(samples))
        return outcome

    bench.client.answer = answer_too_late
    for _ in range(MAX_ATTEMPTS):
        bench.observe(max_prompts=2)
        assert bench.pipeline._work_once()
    assert [[key.attempt for key in keys] for keys in bench.client.calls] == [[0, 0], [1, 1], [2, 2]]
    assert len({tuple((key.epoch, key.position) for key in keys) for keys in bench.client.calls}) == 1
    assert len(bench.events.stale) == 6
    assert bench.events.packs == []
    assert [(reason, key.attempt) for key, reason, _ in bench.events.quarantines] == [("too_slow", 2)] * 2
    assert bench.source.num_outstanding == 0


def test_a_segment_at_the_edge_of_the_window_is_packed(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()

    def answer_late(samples: Sequence[Sample]) -> BatchOutcome:
        outcome = bench.client.answer_all(samples)
        for _ in range(WINDOW):
            bench.clock.advance()
        return outcome

    bench.client.answer = answer_late
    bench.observe()
    assert bench.pipeline._work_once()
    assert {pack.version for pack in bench.events.packs} == {0}
    assert bench.events.stale == []


@pytest.mark.parametrize("redraw", [True, False])
def test_the_samples_of_a_dropped_pack_return_or_are_quarantined(
    make_bench: Callable[..., Bench], redraw: bool
) -> None:
    bench = make_bench(redraw_dropped=redraw)
    bench.observe()
    while not bench.queue.statistics().depth:
        bench.pipeline._work_once()
    num_packs = bench.queue.statistics().depth
    for _ in range(WINDOW + 1):
        bench.clock.advance()
    assert bench.queue.reserve(1, current_version=bench.clock.current) is None
    assert [reason for _, reason in bench.events.dropped_packs] == [DropReason.STALE] * num_packs
    keys = [key for pack, _ in bench.events.dropped_packs for key in pack.keys]
    if redraw:
        assert bench.events.quarantines == []
        drawn = bench.source.draw(len(keys))
        assert drawn == [replace(key, attempt=1) for key in keys]
    else:
        assert [(key, reason) for key, reason, _ in bench.events.quarantines] == [
            (key, "too_slow") for key in keys
        ]
        assert bench.source.num_outstanding == len(bench.events.segments) - len(keys)


# --- what is quarantined -----------------------------------------------------------------------------


def test_a_poisonous_request_is_quarantined_and_the_others_train(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()

    def poison_the_second(samples: Sequence[Sample]) -> BatchOutcome:
        good = bench.client.answer_all([*samples[:1], *samples[2:]])
        return replace(good, quarantined=((samples[1], "the server refuses it"),))

    bench.client.answer = poison_the_second
    bench.observe()
    assert bench.pipeline._work_once()
    asked = bench.client.calls[0]
    assert bench.events.quarantines == [(asked[1], QuarantineReason.ROLLOUT, "the server refuses it")]
    assert {segment.key for segment in bench.events.segments} == {asked[0], *asked[2:]}


def test_a_bad_picture_met_while_running_is_quarantined_and_the_run_goes_on(
    make_bench: Callable[..., Bench], rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(Path(rows[0]["images"][0]).read_bytes()[:-100])
    spoilt = [
        {**rows[0], "images": [str(tmp_path / "missing.png")]},
        {**rows[1], "images": [str(broken)]},
        {**rows[2], "objects": {"ref": ["x"], "bbox": []}},
        *rows[3:6],
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in spoilt), encoding="utf-8")
    bench = make_bench(spoilt, origins=RowOrigins([file]))
    good_only = bench.client.answer_all

    def server(samples: Sequence[Sample]) -> BatchOutcome:
        """It could read every picture, so only the learner finds out."""
        readable = [sample for sample in samples if sample.key.index != 1]
        unreadable = [sample for sample in samples if sample.key.index == 1]
        outcome = good_only(readable)
        return replace(
            outcome, rollouts=(*outcome.rollouts, *(rollout_of(s, "[]", (1,)) for s in unreadable))
        )

    bench.client.answer = server
    bench.pipeline.start()
    for step in range(6):
        bench.observe(step=step)
        bench.events.wait_until(lambda: bench.queue.statistics().depth > 0)
        bench.train()
    assert bench.pipeline.failure is None
    reasons: dict[int, set[str]] = {}
    for (key, reason, message), origin in zip(bench.events.quarantines, bench.events.origins, strict=True):
        assert (origin.file, origin.line) == (str(file), key.index + 1)
        assert origin.images == (spoilt[key.index]["images"][0],)
        reasons.setdefault(key.index, set()).add(f"{reason}: {message}")
    assert reasons.keys() == {0, 1, 2}
    assert all("bad_sample: an image must be a readable file" in text for text in reasons[0])
    assert all("bad_sample: the template cannot encode the row" in text for text in reasons[1])
    assert all("bad_sample: every object needs one label and one box" in text for text in reasons[2])


def _misread(samples: Sequence[Sample]) -> BatchOutcome:
    """As a server with another processor answers."""
    return BatchOutcome(rollouts=tuple(rollout_of(sample, "[]", (1, 2, 3)) for sample in samples))


def test_a_server_that_agrees_on_no_prompt_is_at_fault_and_no_sample(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench()
    bench.client.answer = _misread
    bench.observe()
    assert bench.pipeline._work_once()
    assert bench.events.quarantines == []
    assert bench.client.distrusted == ["http://127.0.0.1:1"]
    bench.client.answer = bench.client.answer_all  # the server has the learner's processor now
    bench.pipeline._work_once()
    assert set(bench.client.calls[0]) < set(bench.client.calls[1]), "asked again first, no attempt counted"
    assert {segment.key for segment in bench.events.segments} == set(bench.client.calls[1])


def test_one_prompt_that_differs_where_others_agree_is_the_samples_fault(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench()

    def first_is_misread(samples: Sequence[Sample]) -> BatchOutcome:
        others = bench.client.answer_all(samples[1:]).rollouts
        return BatchOutcome(rollouts=_misread(samples[:1]).rollouts + others)

    bench.client.answer = first_is_misread
    bench.observe()
    assert bench.pipeline._work_once()
    ((key, reason, message),) = bench.events.quarantines
    assert (key, reason) == (bench.client.calls[0][0], "prompt_mismatch")
    assert "num_server_tokens=3" in message
    assert bench.client.distrusted == []


def test_a_server_that_misreads_many_samples_beside_others_is_told_once(
    make_bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    """As with other pixel limits, which differ on large images only."""
    bench = make_bench()

    bench.client.agreeing = {"http://127.0.0.1:1"}
    bench.client.answer = _misread
    bench.observe()
    while len(bench.events.quarantines) < 2 * MANY_GIVEN_UP:
        assert bench.pipeline._work_once()
    (told,) = [r.getMessage() for r in caplog.records if "compare max_pixels" in r.getMessage()]
    assert told.startswith("http://127.0.0.1:1: ")
    assert "num_server_tokens=3 num_learner_tokens=" in told


@pytest.mark.parametrize("num_bad", [1, 2, 3])
def test_samples_that_alone_condemned_their_server_are_asked_with_another_one(
    make_bench: Callable[..., Bench], num_bad: int
) -> None:
    """Otherwise they would come back first, alone, and condemn a sound server for ever."""
    bench = make_bench()
    bad: list[SampleKey] = []

    def misreads_the_first(samples: Sequence[Sample]) -> BatchOutcome:
        bad.extend([s.key for s in samples if s.key not in bad][: num_bad - len(bad)])
        answers = [(_misread if s.key in bad else bench.client.answer_all)([s]) for s in samples]
        return BatchOutcome(rollouts=tuple(rollout for answer in answers for rollout in answer.rollouts))

    bench.client.answer = misreads_the_first
    bench.observe(max_prompts=1)
    assert bench.pipeline._work_once()
    assert (bench.client.distrusted, bench.events.quarantines) == (["http://127.0.0.1:1"], [])
    for _ in range(num_bad):
        assert bench.pipeline._work_once()
    assert [len(call) for call in bench.client.calls] == list(range(1, num_bad + 2))
    assert [(key, why) for key, why, _ in bench.events.quarantines] == [
        (key, "prompt_mismatch") for key in bad
    ]
    assert len(bench.client.distrusted) == num_bad
    assert len(bench.events.segments) == 1


def test_answers_permuted_among_requests_are_the_servers_fault_and_no_samples(
    make_bench: Callable[..., Bench], rows: list[dict[str, Any]]
) -> None:
    """Any four rows ask several questions; answers to equal prompts may have been mixed up as well."""
    asked = [
        {**row, "messages": [{"role": "user", "content": f"<image>{number % 5}"}, *row["messages"][1:]]}
        for number, row in enumerate(rows)
    ]
    bench = make_bench(asked)

    def permuted(samples: Sequence[Sample]) -> BatchOutcome:
        answers = [bench.client.rollout(sample) for sample in samples]
        return BatchOutcome(
            rollouts=tuple(
                replace(rollout, sample=sample)
                for sample, rollout in zip(samples, answers[1:] + answers[:1], strict=True)
            )
        )

    bench.client.answer = permuted
    bench.observe()
    assert bench.pipeline._work_once()
    (server,) = bench.client.distrusted
    assert server == "http://127.0.0.1:1"
    assert (bench.events.quarantines, bench.events.segments, bench.queue.statistics().depth) == ([], [], 0)
    bench.client.answer = bench.client.answer_all
    bench.pipeline._work_once()
    assert set(bench.client.calls[0]) <= set(bench.client.calls[1]), "asked again first, no attempt counted"


# --- evaluation --------------------------------------------------------------------------------------


def test_an_evaluation_has_only_what_production_leaves(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    bench.evaluation.begin(0)
    bench.observe(max_prompts=2)
    while not bench.client.evaluated:
        assert bench.pipeline._work_once()
    num_calls = len(bench.client.calls)
    assert bench.queue.statistics().depth >= 2, "asked for although packs were lacking"
    bench.train(2)
    bench.observe(step=1, max_prompts=2)
    assert bench.pipeline._work_once()
    assert (len(bench.client.calls), bench.client.evaluated) == (num_calls + 1, [(0, 1)]), (
        "training comes first"
    )
    while bench.pipeline._work_once():
        assert len(bench.client.evaluated) < 10
    assert bench.client.evaluated == [(0, 1), (2, 3), (4,)]
    assert bench.evaluation.is_finished
    assert bench.evaluation.end().num_answered == 5


def test_nothing_of_an_evaluation_reaches_what_trains(make_bench: Callable[..., Bench]) -> None:
    guard = TruncationGuard(0.0)
    bench = make_bench(guard=guard)
    bench.observe()
    while bench.pipeline._work_once():
        assert len(bench.client.calls) < 50
    drawn, segments = bench.source.state_dict(), len(bench.events.segments)
    batches, pace = bench.events.num_batches, bench.pipeline.production_pace
    answer = bench.client.rollout
    bench.client.rollout = lambda sample, **_: replace(answer(sample), truncated=True)  # type: ignore[method-assign]
    bench.evaluation.begin(0)
    while bench.pipeline._work_once():
        assert len(bench.client.evaluated) < 10
    assert bench.evaluation.end().ratios["truncated_ratio"] == 1.0
    assert guard.truncated_ratio == 0.0
    assert (bench.source.state_dict(), len(bench.events.segments)) == (drawn, segments)
    assert (bench.events.num_batches, bench.pipeline.production_pace) == (batches, pace)


def test_an_evaluation_goes_on_while_channel_b_pauses_and_not_without_a_server(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench()
    bench.observe(paused=True, max_prompts=3)
    assert bench.pipeline._work_once(), "one batch of each version shows whether it is over"
    bench.evaluation.begin(0)
    bench.observe(paused=True, max_prompts=0)
    assert not bench.pipeline._work_once()
    bench.observe(paused=True, max_prompts=3)
    assert bench.pipeline._work_once()
    assert (len(bench.client.calls), bench.client.evaluated) == (1, [(0, 1, 2)])


# --- pausing and ending ------------------------------------------------------------------------------


def test_while_paused_each_version_is_asked_once(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    bench.client.answer = lambda samples: BatchOutcome(
        rollouts=tuple(replace(bench.client.rollout(sample), truncated=True) for sample in samples[:1]),
        returned=tuple(samples[1:]),
    )
    for version in range(1, 4):
        bench.observe(paused=True, max_prompts=2)
        bench.pipeline._work_once()
        assert len(bench.client.calls) == version
        for _ in range(3):
            bench.observe(paused=True, max_prompts=2)
            assert not bench.pipeline._work_once()
        assert len(bench.client.calls) == version
        bench.clock.advance()


def test_truncated_rollouts_reach_the_guard(make_bench: Callable[..., Bench]) -> None:
    guard = TruncationGuard(0.0)
    bench = make_bench(guard=guard, target_packs=4, limit=8)
    bench.client.answer = lambda samples: BatchOutcome(
        rollouts=tuple(replace(bench.client.rollout(sample), truncated=True) for sample in samples)
    )
    for step in range(40):
        bench.observe(step=step)
        bench.pipeline._work_once()
        if guard.paused:
            break
        if bench.queue.statistics().depth:
            bench.train()
    assert guard.paused
    assert guard.truncated_ratio == 1.0


def test_an_exception_in_the_source_becomes_the_pipelines_failure(make_bench: Callable[..., Bench]) -> None:
    class Torn(list[dict[str, Any]]):
        def __getitem__(self, index: Any) -> Any:
            raise RuntimeError("the data set's file is torn")

    bench = make_bench(Torn([{}, {}]))
    bench.pipeline.start()
    bench.observe()
    bench.pipeline._thread.join(PATIENCE_S)
    assert not bench.pipeline._thread.is_alive()
    assert isinstance(bench.pipeline.failure, RuntimeError)
    assert "torn" in str(bench.pipeline.failure)


def test_the_end_of_the_fence_or_the_queue_is_no_failure(make_bench: Callable[..., Bench]) -> None:
    fenced, queued = make_bench(), make_bench()
    fenced.client.answer = lambda samples: _raise(FenceShutDown("over"))
    queued.queue.close()
    for bench in (fenced, queued):
        bench.pipeline.start()
        bench.observe()
        bench.pipeline._thread.join(PATIENCE_S)
        assert not bench.pipeline._thread.is_alive()
        assert bench.pipeline.failure is None
        asked = {(key.epoch, key.position) for keys in bench.client.calls for key in keys}
        left = {(epoch, position) for epoch, position, *_ in bench.source.state_dict()["outstanding"]}
        assert left == asked, "a resumed run asks them again"


def test_stopping_waits_for_the_client_only_as_long_as_told(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    asked, answer_now = threading.Event(), threading.Event()

    def wait(samples: Sequence[Sample]) -> BatchOutcome:
        asked.set()
        assert answer_now.wait(PATIENCE_S)
        return bench.client.answer_all(samples)

    bench.client.answer = wait
    bench.pipeline.start()
    bench.observe()
    assert asked.wait(PATIENCE_S)
    assert not bench.pipeline.stop(0.01)
    answer_now.set()
    assert bench.pipeline.stop(PATIENCE_S)
    assert len(bench.client.calls) == 1
    assert bench.pipeline.stop(0.0), "it may be asked again"


def test_a_pipeline_that_never_started_stops(make_bench: Callable[..., Bench]) -> None:
    assert make_bench().pipeline.stop(0.0)


def test_the_thread_wakes_for_a_new_step_at_once(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    bench.pipeline.start()
    bench.observe(max_prompts=0)
    bench.observe()
    bench.events.wait_until(lambda: bench.events.num_batches > 0)


def test_where_the_thread_stands_is_known_while_it_works(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    asking: list[str] = []

    def look_around(samples: Sequence[Sample]) -> BatchOutcome:
        assert bench.pipeline.standing is not None
        asking.append(bench.pipeline.standing.what)
        return bench.client.answer_all(samples)

    bench.client.answer = look_around
    assert bench.pipeline.standing is None
    bench.observe()
    bench.pipeline.start()
    bench.events.wait_until(lambda: bench.events.num_batches > 0)
    bench.observe(max_prompts=0)
    assert bench.pipeline.stop(30.0)
    assert asking[0] == f"channel B's pipeline asks servers for {len(bench.client.calls[0])} rollouts"
    assert bench.pipeline.standing is None


# --- nothing is lost ---------------------------------------------------------------------------------


def test_every_sample_that_was_drawn_ends_in_exactly_one_place(
    make_bench: Callable[..., Bench], tmp_path: Path
) -> None:
    """Faults of every kind in turn, versions that pass, packs that expire, a stop in the middle.

    A checkpoint is taken at every step, while the thread draws: the ledger must agree with each.
    """
    bench = make_bench(target_packs=3, limit=3, ledger_path=tmp_path / "rank0.jsonl")
    bench.events.ledger.write(
        Entry.START,
        run_id="run",
        step=0,
        world_size=1,
        version_window=WINDOW,
        save_id=None,
        state=bench.source.state_dict(),
    )

    def misbehave(samples: Sequence[Sample]) -> BatchOutcome:
        turn = len(bench.client.calls) % 5
        if turn == 0:
            return BatchOutcome(returned=tuple(samples))
        bad, rest = samples[:1], samples[1:]
        good = bench.client.answer_all(rest)
        if turn == 1:
            return replace(good, quarantined=((bad[0], "poison"),))
        if turn == 2:
            return replace(good, returned=tuple(bad), timed_out=tuple(bad))
        if turn == 3:
            return replace(good, rollouts=(*good.rollouts, rollout_of(bad[0], "[]", (7,))))
        bench.clock.advance()  # what is in the making ages
        return bench.client.answer_all(samples)

    bench.client.answer = misbehave
    drawn: dict[tuple[int, int], SampleKey] = {}
    draw = bench.source.draw

    def remember(count: int) -> Any:
        keys = draw(count)
        drawn.update({(key.epoch, key.position): key for key in keys})
        return keys

    bench.source.draw = remember  # type: ignore[method-assign]
    bench.pipeline.start()
    for step in range(12):
        bench.observe(step=step, last_commit_step=step)
        num_batches = bench.events.num_batches
        bench.events.wait_until(
            lambda n=num_batches: bench.events.num_batches > n or bench.queue.statistics().depth >= 3
        )
        if step % 4 == 3:
            bench.clock.advance()
        if bench.queue.statistics().depth and step % 2:
            reservation = bench.queue.reserve(1, current_version=bench.clock.current)
            if reservation is not None:
                for pack in reservation.take():
                    bench.source.settle_trained(
                        pack.keys, pack_id=pack.pack_id, step=step, version=bench.clock.current
                    )
                    bench.trained += pack.keys
        bench.source.checkpoint(step=step + 1, save_id=f"save {step}")
    assert bench.pipeline.stop(PATIENCE_S)
    assert bench.pipeline.failure is None
    ends = Counter((key.epoch, key.position) for key in bench.trained)
    ends.update((key.epoch, key.position) for key, _, _ in bench.events.quarantines)
    ends.update((epoch, position) for epoch, position, *_ in bench.source.state_dict()["outstanding"])
    assert bench.trained
    assert bench.events.quarantines
    assert set(ends) == set(drawn)
    assert all(count == 1 for count in ends.values()), [place for place, count in ends.items() if count > 1]
    account = account_of({0: read_ledger(tmp_path / "rank0.jsonl")})
    assert account.is_balanced, account
    (rank,) = account.ranks
    assert (rank.drawn, rank.trained) == (len(drawn), len(bench.trained))
    assert sum(rank.quarantined.values()) == len(bench.events.quarantines)
    assert {"stale", "failed", "timed_out"} <= rank.returned.keys()


def test_no_segment_falls_between_two_versions(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    class RacingClock:
        """The main thread commits a version whenever the pipeline looks."""

        def __init__(self) -> None:
            self._version = WINDOW + 2

        @property
        def current(self) -> int:
            self._version += 1
            return self._version

        def is_fresh(self, version: int, window: int) -> bool:
            return version >= self.current - window

    bench = make_bench()
    returned: list[SampleKey] = []
    segments: Any = [SimpleNamespace(key=SampleKey(0, number, number), version=number) for number in range(9)]
    monkeypatch.setattr(bench.pipeline, "clock", RacingClock())
    monkeypatch.setattr(bench.pipeline, "_segments", segments)
    monkeypatch.setattr(bench.pipeline, "_return_for_redraw", lambda keys, _: returned.extend(keys))
    monkeypatch.setattr(bench.events, "stale_segment", lambda segment: None)
    bench.pipeline._drop_stale_segments()
    kept = [segment.key for segment in bench.pipeline._segments]
    assert returned
    assert sorted([*returned, *kept], key=lambda key: key.index) == [segment.key for segment in segments]
