"""Channel B's parts as a configuration describes them; a process that encodes otherwise than the learner is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from builders import config_of
from real_model import make_encoder, rollout_of, sample_of
from real_model import make_task as shipped_task

from swift_stage2.channel_b.detection import DetectionTask
from swift_stage2.channel_b.parsing import TrueObjects
from swift_stage2.channel_b.preprocessing import EncodedRollout, Preprocessor, Refusal
from swift_stage2.channel_b.task import TASKS
from swift_stage2.checks.channel_b_parts import compare_preprocessors, make_task
from swift_stage2.checks.packing_isolation import empty_rollout
from swift_stage2.config import Objective, Stage2Config
from swift_stage2.errors import ConfigError, SampleError
from swift_stage2.records import Pack, Rollout, Sample, SampleKey, Segment, Target

BOX = (0, 0, 40, 40)
SHIFTED = (0, 0, 40, 20)  # half of the box


def configured(**stage2_ab: Any) -> Stage2Config:
    without = {"stage2_ab.schedule.b_ratio": 0, "swift": {}}
    return config_of(without, {f"stage2_ab.{key}": value for key, value in stage2_ab.items()})


def corrected(config: Stage2Config, label: str) -> Target:
    """Corrects an answer with half of the one true box, under ``label``."""
    sample = Sample(SampleKey(0, 0, 0), {}, TrueObjects(("cat",), ((0.0, 0.0, 40.0, 40.0),)))
    text = f'[{{"bbox_2d": {list(SHIFTED)}, "label": "{label}"}}]'
    return make_task(config).correct(
        rollout_of(sample, text, ()),
        [("cat", BOX)],
        lambda text: (tuple(map(ord, text)), tuple((at, at + 1) for at in range(len(text)))),
    )


@pytest.mark.parametrize(
    ("matching", "label", "num_pairs"),
    [
        ({}, "dog", 1),
        ({"same_label": True}, "dog", 0),
        ({"same_label": True}, "cat", 1),
        ({"iou_threshold": 0.6}, "cat", 0),
        ({"unmatched_prediction_cost": 0.1, "unmatched_ground_truth_cost": 0.1}, "cat", 0),
    ],
)
def test_the_task_matches_as_it_is_configured(matching: dict[str, Any], label: str, num_pairs: int) -> None:
    quality = corrected(configured(channel_b={"matching": matching}), label).quality
    assert quality.num_pairs == num_pairs


def test_rewards_of_a_users_own_task_that_are_all_0_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scored(DetectionTask):
        reward_terms: ClassVar[dict[str, float]] = {"score": 1.0}

    monkeypatch.setitem(TASKS, "scored", Scored)
    for weight in (0.0, 0.5):
        channel_b = {"reward": {"weights": {"score": weight}}}
        config = replace(
            configured(), stage2_ab=replace(configured(task="scored", channel_b=channel_b).stage2_ab)
        )
        rewarded = replace(config, stage2_ab=replace(config.stage2_ab, objective=Objective.GRPO))
        assert make_task(config).reward_weights == {"score": weight}, "told, and trained by nothing"
        if weight:
            make_task(rewarded)
        else:
            with pytest.raises(ConfigError, match=r"needs rewards that differ, got .* of 0 for all terms"):
                make_task(rewarded)


ROW: dict[str, Any] = {
    "messages": [{"role": "user", "content": "find"}],
    "objects": {"ref": ["box"], "bbox": [[1, 2, 3, 4]]},
}


class Altered(Preprocessor):
    """A thread's work with one difference."""

    alter: Any = dict
    refuses: str | None = None

    def encode(self, rollouts: Sequence[Rollout]) -> Iterator[EncodedRollout | Refusal]:
        refused = [SampleError(self.refuses)] * len(rollouts) if self.refuses else None
        yield from refused or super().encode(rollouts)

    def pack(self, pack_id: str, segments: Sequence[Segment]) -> Pack:
        pack = super().pack(pack_id, segments)
        return replace(pack, batch=self.alter(pack.batch))


@pytest.mark.parametrize(
    ("alter", "refuses", "named"),
    [
        (lambda batch: batch | {"input_ids": batch["input_ids"] + 1}, None, "input_ids"),
        (lambda batch: batch | {"labels": batch["labels"].to(torch.int32)}, None, "labels"),
        (lambda batch: {k: v for k, v in batch.items() if k != "loss_scale"}, None, "loss_scale"),
        (dict, "too long", "labels"),
    ],
)
def test_every_difference_is_named(alter: Any, refuses: str | None, named: str) -> None:
    encoder = make_encoder()
    rollouts = [empty_rollout(sample_of(ROW), encoder)]
    parts: Any = (encoder, shipped_task())
    thread = Preprocessor(*parts)
    altered = Altered(*parts)
    compare_preprocessors(altered, thread, rollouts)
    altered.alter, altered.refuses = alter, refuses
    with pytest.raises(ConfigError, match=f"got another .*{named}.* for the data set's row 0.*: thread"):
        compare_preprocessors(altered, thread, rollouts)


def test_what_both_refuse_alike_is_no_difference() -> None:
    encoder = make_encoder(packing_length=8)
    rollouts = [empty_rollout(sample_of(ROW), encoder)]
    one, other = (Preprocessor(encoder, shipped_task()) for _ in range(2))
    assert isinstance(next(iter(one.encode(rollouts))), SampleError)
    compare_preprocessors(one, other, rollouts)
