"""The pipeline of ``pipeline_bench``: whatever happens to a sample, it ends in exactly one place.

That is trained, quarantined, or outstanding in its source.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from channel_b.pipeline_bench import (
    MAX_ATTEMPTS,
    PATIENCE_S,
    WINDOW,
    MakeBench,
    encoder,
    make_bench,
    server_encoder,
)
from data.row_files import write_rows
from real_model import PACKING_LENGTH, Rows, make_task, rollout_of

from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.preprocessing import Preprocessor, make_segment
from swift_stage2.channel_b.ready_queue import DropReason
from swift_stage2.channel_b.sample_source import RowOrigins
from swift_stage2.config import PackingConfig
from swift_stage2.records import (
    BatchOutcome,
    Pack,
    QuarantineReason,
    Rollout,
    Sample,
    SampleKey,
    Segment,
)
from swift_stage2.scheduling.watches import TruncationGuard
from swift_stage2.telemetry.event_log import read_events
from swift_stage2.telemetry.events import Returned

__all__ = ["encoder", "make_bench", "server_encoder"]  # fixtures


# --- the way of a good sample ------------------------------------------------------------------------


def test_rollouts_become_packs(make_bench: MakeBench, encoder: Encoder) -> None:
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
    rollouts = [rollout for rollout in bench.events.rollouts if rollout.sample.key in pack.keys]
    expected = encoder.collate([_segment(encoder, rollout) for rollout in rollouts])
    assert torch.equal(pack.batch["input_ids"], expected["input_ids"])
    assert torch.equal(pack.batch["position_ids"], expected["position_ids"])
    assert bench.pipeline._production._meter.typical_steps


def _segment(encoder: Encoder, rollout: Rollout) -> Segment:
    return make_segment(rollout, encoder.encode_prompt(rollout.sample), encoder, make_task())[0]


def test_a_pack_is_as_old_as_its_oldest_segment(make_bench: MakeBench) -> None:
    bench = make_bench()

    def answer_in_the_middle_of_a_round(samples: Sequence[Sample]) -> BatchOutcome:
        newer = bench.client.rollout(samples[0])
        bench.clock.advance()
        newest = bench.client.rollout(samples[1])
        return BatchOutcome(rollouts=(newest, newer), returned=tuple(samples[2:]))

    bench.clock.advance()
    bench.client.answer = answer_in_the_middle_of_a_round
    bench.observe()
    assert bench.work()
    (pack,) = bench.events.packs
    assert [segment.version for segment in bench.events.segments] == [2, 1]
    assert (len(pack.keys), pack.version) == (2, 1)


def test_the_target_ends_production_and_training_renews_it(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.observe()
    while bench.work():
        assert len(bench.client.calls) < 50
    count = len(bench.client.calls)
    assert bench.queue.depth >= 2
    assert not bench.work()
    bench.train(2)
    bench.observe(step=1)
    assert bench.work()
    assert len(bench.client.calls) == count + 1


# --- what comes back ---------------------------------------------------------------------------------


def test_a_sample_that_never_answers_in_time_is_quarantined_after_its_attempts(
    make_bench: MakeBench,
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
        assert bench.work()
        if bench.queue.depth:
            bench.train()
    assert [keys[0].attempt for keys in bench.client.calls] == [0, 1, 2]
    ((key, reason, message),) = bench.events.quarantines
    assert (key.index, reason) == (slow[0], QuarantineReason.TOO_SLOW)
    assert message == "max_attempts=3 rollouts were lost, the last one did not end in time"


def test_a_segment_that_went_stale_is_asked_again_and_its_attempt_counts(
    make_bench: MakeBench,
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
        assert bench.work()
    assert [[key.attempt for key in keys] for keys in bench.client.calls] == [[0, 0], [1, 1], [2, 2]]
    assert len({tuple((key.epoch, key.position) for key in keys) for keys in bench.client.calls}) == 1
    assert bench.events.counts["segments_dropped_stale"] == 6
    assert bench.events.packs == []
    assert [(reason, key.attempt) for key, reason, _ in bench.events.quarantines] == [("too_slow", 2)] * 2
    assert len(bench.source.state_dict()["outstanding"]) == 0


class LosingPreprocessor(Preprocessor):
    """The first pack ends the process that holds all segments."""

    num_lost = 0

    def pack(self, pack_id: str, segments: Sequence[Segment]) -> Pack | None:
        if not self.num_lost:
            self.num_lost = len(self._held)
            self._held.clear()
            return None
        return super().pack(pack_id, segments)


def test_segments_that_went_with_their_process_are_asked_again_and_their_attempts_do_not_count(
    make_bench: MakeBench, encoder: Encoder
) -> None:
    preprocessor = LosingPreprocessor(encoder, make_task())
    bench = make_bench(preprocessor=preprocessor, redraw_dropped=False)
    bench.observe()
    bench.work()
    assert bench.events.packs == []
    lost = [segment.key for segment in bench.events.segments]
    assert preprocessor.num_lost == len(lost) > 0
    bench.work()
    asked = [key for keys in bench.client.calls for key in keys]
    assert asked[len(lost) : 2 * len(lost)] == lost, "the same attempts, before any new sample"
    assert (bench.queue.depth > 0, bench.events.quarantines) == (True, [])


@pytest.mark.parametrize("redraw", [True, False])
def test_the_samples_of_a_dropped_pack_return_or_are_quarantined(make_bench: MakeBench, redraw: bool) -> None:
    bench = make_bench(redraw_dropped=redraw)
    bench.observe()
    while not bench.queue.depth:
        bench.work()
    num_packs = bench.queue.depth
    for _ in range(WINDOW + 1):
        bench.clock.advance()
    assert bench.queue.reserve(1, current_version=bench.clock.current) is None
    assert [reason for _, reason in bench.events.dropped_packs] == [DropReason.STALE] * num_packs
    keys = [key for pack, _ in bench.events.dropped_packs for key in pack.keys]
    if redraw:
        assert bench.events.quarantines == []
        drawn = bench.source.draw(len(keys))
        assert drawn == [key._replace(attempt=1) for key in keys]
    else:
        assert [(key, reason) for key, reason, _ in bench.events.quarantines] == [
            (key, "too_slow") for key in keys
        ]
        assert len(bench.source.state_dict()["outstanding"]) == len(bench.events.segments) - len(keys)


# --- what is quarantined -----------------------------------------------------------------------------


def test_a_bad_picture_met_while_running_is_quarantined_and_the_run_goes_on(
    make_bench: MakeBench, rows: Rows, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(Path(rows[0]["images"][0]).read_bytes()[:-100])
    spoilt = [
        {**rows[0], "images": [str(tmp_path / "missing.png")]},
        {**rows[1], "images": [str(broken)]},
        {**rows[2], "objects": {"ref": ["x"], "bbox": []}},
        *rows[3:6],
    ]
    file = write_rows(tmp_path / "rows.jsonl", spoilt)
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
        bench.events.wait_until(lambda: bench.queue.depth > 0)
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


def test_a_server_that_agrees_on_no_prompt_is_at_fault_and_no_sample(make_bench: MakeBench) -> None:
    bench = make_bench()
    good, bench.client.answer = bench.client.answer_all, _misread
    bench.observe()
    assert bench.work()
    assert bench.client.distrusted == ["http://127.0.0.1:1"]
    assert (bench.events.quarantines, bench.events.segments, bench.queue.depth) == ([], [], 0)
    bench.client.answer = good  # the server has the learner's processor now
    bench.work()
    assert set(bench.client.calls[0]) < set(bench.client.calls[1]), "asked again first, no attempt counted"
    assert {segment.key for segment in bench.events.segments} == set(bench.client.calls[1])


def test_one_prompt_that_differs_where_others_agree_is_the_samples_fault(make_bench: MakeBench) -> None:
    bench = make_bench()

    def first_is_misread(samples: Sequence[Sample]) -> BatchOutcome:
        others = bench.client.answer_all(samples[1:]).rollouts
        return BatchOutcome(rollouts=_misread(samples[:1]).rollouts + others)

    bench.client.answer = first_is_misread
    bench.observe()
    assert bench.work()
    ((key, reason, message),) = bench.events.quarantines
    assert (key, reason) == (bench.client.calls[0][0], "prompt_mismatch")
    assert re.search(r"num_server_tokens=3 num_learner_tokens=\d+ first_difference=1", message)
    assert bench.client.distrusted == []


@pytest.mark.parametrize("num_bad", [1, 2, 3])
def test_samples_that_alone_condemned_their_server_are_asked_with_another_one(
    make_bench: MakeBench, num_bad: int
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
    assert bench.work()
    assert (bench.client.distrusted, bench.events.quarantines) == (["http://127.0.0.1:1"], [])
    for _ in range(num_bad):
        assert bench.work()
    assert [len(call) for call in bench.client.calls] == list(range(1, num_bad + 2))
    assert [(key, why) for key, why, _ in bench.events.quarantines] == [
        (key, "prompt_mismatch") for key in bad
    ]
    assert len(bench.client.distrusted) == num_bad
    assert len(bench.events.segments) == 1


# --- rollouts that are ahead -------------------------------------------------------------------------


@pytest.mark.parametrize("server_first", [True, False])
def test_a_rollout_that_is_ahead_waits_for_its_servers_proof_and_for_the_clock(
    make_bench: MakeBench, server_first: bool
) -> None:
    """In a rolling round another server's proof may move the clock first."""
    bench = make_bench()
    bench.client.answer = bench.client.answer_ahead
    bench.observe()
    assert bench.work(), "answers came, so that the servers live"
    asked = bench.client.calls[0]

    def prove() -> None:
        bench.client.verdicts[1] = True

    hear, then_hear = (prove, bench.clock.advance) if server_first else (bench.clock.advance, prove)
    hear()
    bench.observe(step=1, max_prompts=0)
    assert not bench.work()
    assert bench.events.segments == []
    assert bench.pipeline._production._meter.typical_steps is None
    then_hear()
    bench.work()  # although no server may be asked
    assert [segment.key for segment in bench.events.segments] == list(asked)
    assert {segment.version for segment in bench.events.segments} == {1}
    assert bench.events.packs
    assert bench.events.counts["rollouts_unconfirmed"] == 0


@pytest.mark.parametrize("clock_moves", [True, False])
def test_a_rollout_whose_round_does_not_prove_its_server_is_asked_again(
    make_bench: MakeBench, clock_moves: bool
) -> None:
    bench = make_bench()
    bench.client.answer = bench.client.answer_ahead
    bench.observe()
    assert bench.work()
    bench.client.verdicts[1] = False
    if clock_moves:  # for another server's proof of a later version
        bench.clock.advance(2)
    bench.client.answer = bench.client.answer_all
    bench.observe(step=1)
    assert bench.work()
    first, second = bench.client.calls
    assert second[: len(first)] == first, "asked again first, and no attempt counts"
    assert bench.events.counts["rollouts_unconfirmed"] == len(first)
    assert [segment.key for segment in bench.events.segments] == list(second)
    assert bench.events.quarantines == []


def test_a_stop_gives_back_what_is_held_and_a_checkpoint_has_it(
    make_bench: MakeBench, tmp_path: Path
) -> None:
    bench = make_bench(log_path=tmp_path / "rank0.jsonl")
    bench.client.answer = bench.client.answer_ahead
    bench.pipeline.start()
    bench.observe(max_prompts=2)
    bench.events.wait_until(lambda: bench.events.num_batches > 0)
    assert bench.pipeline.stop(PATIENCE_S)
    asked = [key for keys in bench.client.calls for key in keys]
    assert bench.source.state_dict()["outstanding"] == [list(key) for key in asked]
    (returned,) = [each for each in read_events(tmp_path / "rank0.jsonl") if isinstance(each, Returned)]
    assert returned.samples == tuple(asked)
    assert returned.reason == "stopped"


def test_rollouts_whose_preparation_a_stop_interrupts_return(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench()
    prepares, is_interrupted = threading.Event(), threading.Event()

    def interrupted(rollouts: Sequence[Rollout]) -> Any:
        prepares.set()
        assert is_interrupted.wait(PATIENCE_S)
        raise RuntimeError("interrupted")

    monkeypatch.setattr(bench.pipeline.preprocessor, "encode", interrupted)
    monkeypatch.setattr(bench.pipeline.preprocessor, "interrupt", is_interrupted.set)
    bench.pipeline.start()
    bench.observe(max_prompts=1)
    assert prepares.wait(PATIENCE_S)
    assert bench.pipeline.stop(PATIENCE_S)
    assert bench.pipeline.failure is None
    assert bench.source.draw(1) == list(bench.client.calls[0])


# --- evaluation --------------------------------------------------------------------------------------


def test_an_evaluation_has_only_what_production_leaves(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.evaluation.begin(0)
    bench.observe(max_prompts=2)
    assert bench.work()
    assert bench.client.evaluated == [], "training has both places"
    while not bench.client.evaluated:
        assert bench.work()
    bench.train(bench.queue.depth)
    num_calls, num_evaluated = len(bench.client.calls), len(bench.client.evaluated)
    bench.observe(step=1, max_prompts=2)
    assert bench.work()
    assert (len(bench.client.calls), len(bench.client.evaluated)) == (num_calls + 1, num_evaluated), (
        "training comes first"
    )
    while bench.work():
        assert len(bench.client.evaluated) < 10
    assert [row for rows in bench.client.evaluated for row in rows] == [0, 1, 2, 3, 4]
    assert bench.evaluation.is_finished
    assert bench.evaluation.end().num_answered == 5


def test_nothing_of_an_evaluation_reaches_what_trains(make_bench: MakeBench) -> None:
    guard = TruncationGuard(0.0)
    bench = make_bench(guard=guard)
    bench.observe()
    while bench.work():
        assert len(bench.client.calls) < 50
    drawn, segments = bench.source.state_dict(), len(bench.events.segments)
    meter = bench.pipeline._production._meter
    batches, pace = bench.events.num_batches, meter.typical_steps
    answer = bench.client.rollout
    bench.client.rollout = lambda sample, **_: replace(answer(sample), truncated=True)  # type: ignore[method-assign]
    bench.evaluation.begin(0)
    while bench.work():
        assert len(bench.client.evaluated) < 10
    assert bench.evaluation.end().ratios["truncated_ratio"] == 1.0
    assert guard.truncated_ratio == 0.0
    assert (bench.source.state_dict(), len(bench.events.segments)) == (drawn, segments)
    assert (bench.events.num_batches, meter.typical_steps) == (batches, pace)


# --- pausing and ending ------------------------------------------------------------------------------


def test_an_exception_in_the_source_becomes_the_pipelines_failure(make_bench: MakeBench) -> None:
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


def test_a_step_that_waits_gets_its_packs_and_leaves_nothing_out(make_bench: MakeBench) -> None:
    bench = make_bench(target_packs=1)
    bench.pipeline.start()
    bench.fill(3)
    assert bench.queue.num_fresh(bench.clock.current) >= 3
    assert not bench.client.in_hand
    bench.train(3)
    num_asked = bench.client.num_fruitful
    bench.observe(step=1, num_demanded=0)
    bench.fill(0)
    assert bench.client.num_fruitful == num_asked, "nothing is made that no step demands"


def test_a_step_that_waits_trains_a_pack_that_expires_after_it(make_bench: MakeBench) -> None:
    """A round is due before the next step. What is made beyond this step's need pushes out nothing that it trains."""
    bench = make_bench(
        limit=3, packing=PackingConfig(packing_length=80, packing_min_fill_ratio=0.1)
    )  # one row each
    bench.pipeline.start()
    bench.fill(1)
    bench.train(1)
    assert bench.queue.peek_versions() == (0,)
    for _ in range(WINDOW):
        bench.clock.advance()
    bench.fill(3, step=3)
    assert bench.events.dropped_packs == []
    assert [pack.version for pack in bench.train(3)] == [0, WINDOW, WINDOW]


def test_stopping_waits_for_the_client_only_as_long_as_told(make_bench: MakeBench) -> None:
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
