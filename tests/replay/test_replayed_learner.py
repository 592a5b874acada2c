"""Recorded steps taken again with the real encoder, task and rows: what is the same, and what is found to differ."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from as_sampled import AsSampled
from real_model import Rows, make_encoder, make_task, sample_of

from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.preprocessing import make_pack, make_segment
from swift_stage2.channel_b.task import Task
from swift_stage2.collectives import SingleRank
from swift_stage2.errors import ReplayDiffers, UserError
from swift_stage2.records import Pack, Rollout, Sample, SampleKey, VersionSpan
from swift_stage2.replay.rank import PackMaker, ReplayedLearner
from swift_stage2.replay.recorded_run import RecordedPack, RecordedStep
from swift_stage2.scheduling.step_plan import Channel
from swift_stage2.telemetry.facade import Telemetry

LOSSES = ((0.1).hex(), (0.2).hex())
TASK = make_task()
SILENT = Telemetry(Path(), 0, 1, tensorboard=False, events=False)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return make_encoder()


def _completion(position: int, text: str) -> Rollout:
    spans = (VersionSpan(2, 0, 1), VersionSpan(3, 1, 2))
    sample = Sample(SampleKey(0, position, position), {})
    return Rollout(sample, text, (1, 2), (), False, 0, "s", spans)


def _trained(
    encoder: Encoder, rows: Sequence[Mapping[str, Any]], completions: Sequence[Rollout], task: Task = TASK
) -> Pack:
    """As the pipeline makes it from a server's answers."""
    segments = []
    for completion in completions:
        key = completion.sample.key
        sample = sample_of(rows[key.index], key.position)
        prompt = encoder.encode_prompt(sample)
        rollout = replace(
            completion, sample=sample, prompt_token_ids=prompt.token_ids, seed=9, server="http://s"
        )
        segments.append(make_segment(rollout, prompt, encoder, task)[0])
    return make_pack("p", segments, encoder)


def _step(step: int, *packs: RecordedPack, losses: tuple[str, ...] | None = LOSSES) -> RecordedStep:
    return RecordedStep(step, Channel.B if packs else Channel.A, 3, packs, losses)


def _learner(*steps: RecordedStep, maker: PackMaker | None = None) -> ReplayedLearner:
    return ReplayedLearner(steps, maker=maker, control=SingleRank(), events=SILENT)


def test_a_pack_is_made_again_bit_by_bit_and_without_a_thread(encoder: Encoder, rows: Rows) -> None:
    completions = (_completion(0, "[]"), _completion(1, "nothing that parses"))
    before = _trained(encoder, rows, completions)
    maker = PackMaker(rows, encoder, TASK)
    learner = _learner(_step(5, RecordedPack("p", before.num_tokens, completions)), maker=maker)
    num_threads = threading.active_count()
    learner.start()
    decision = learner.begin_step(5, 1)
    assert threading.active_count() == num_threads
    assert decision.stop  # it is the last one
    (pack,) = decision.packs
    assert replace(pack, batch={}) == replace(before, batch={})
    assert pack.version == 2
    assert pack.batch.keys() == before.batch.keys()
    for name, value in before.batch.items():
        same = torch.equal(pack.batch[name], value) if hasattr(value, "shape") else pack.batch[name] == value
        assert same, name


def test_columns_of_a_pack_are_made_again_bit_by_bit_and_a_record_without_them_is_refused(
    encoder: Encoder, rows: Rows
) -> None:
    task = AsSampled()
    completion = replace(_completion(0, "[]"), token_ids=(300, 301), log_probs=(-0.1, -1e-38))
    before = _trained(encoder, rows, [completion], task)
    maker = PackMaker(rows, encoder, task)
    pack = maker.make(RecordedPack("p", before.num_tokens, (completion,)))
    assert torch.equal(pack.batch["log_probs"], before.batch["log_probs"])
    assert pack.batch["log_probs"].count_nonzero() == 2
    lacking = replace(completion, log_probs=None)
    with pytest.raises(
        UserError, match=r"row 0 could be trained .* needs a rollout's log_probs, got one without"
    ):
        maker.make(RecordedPack("p", before.num_tokens, (lacking,)))


def test_the_first_loss_that_differs_in_its_last_bit_is_told() -> None:
    learner = _learner(_step(7), _step(8))
    learner.begin_step(7, 2)
    learner.end_step(7, LOSSES)
    assert learner.num_compared == 1
    other = torch.nextafter(torch.tensor(0.2, dtype=torch.float64), torch.tensor(1.0)).item()
    assert not learner.begin_step(8, 2).packs
    with pytest.raises(ReplayDiffers, match=r"step 8 \(channel A\) .* rank 0: micro_step 1 has loss 0\.2000"):
        learner.end_step(8, [LOSSES[0], other.hex()])
    assert learner.num_compared == 1


def test_a_loss_that_is_no_number_equals_itself_and_a_micro_step_less_differs() -> None:
    nan = (float("nan").hex(),)
    learner = _learner(_step(0, losses=nan))
    learner.end_step(0, nan)
    assert learner.num_compared == 1
    with pytest.raises(ReplayDiffers, match="it has 1 micro_steps, recorded 2"):
        _learner(_step(0)).end_step(0, LOSSES[:1])


@pytest.mark.parametrize(
    ("num_rows", "images", "told"),
    [
        (2, {}, r"pack p must have the recorded num_tokens=7, got \d+; give"),
        (1, {}, "got num_rows=1, the record names row 1"),
        (2, {"images": ["gone.png"]}, "row 1 could be trained in the run and cannot now"),
    ],
)
def test_what_is_not_the_runs_own_is_refused(
    encoder: Encoder, rows: Rows, num_rows: int, images: dict[str, Any], told: str
) -> None:
    changed = [row | images for row in rows[:num_rows]]
    maker = PackMaker(changed, encoder, TASK)
    with pytest.raises(UserError, match=told):
        maker.make(RecordedPack("p", 7, (_completion(1, "[]"),)))


def test_a_stop_request_ends_a_replay_early() -> None:
    learner = _learner(_step(0), _step(1))
    learner.request_stop()
    assert learner.begin_step(0, 2).stop
