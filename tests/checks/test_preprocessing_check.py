"""The check that a process encodes as the learner does: it must see every difference, and only differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from real_model import PACKING_LENGTH, make_encoder, make_task, sample_of

from swift_stage2.channel_b.preprocessing import EncodedRollout, Preprocessor, Refusal
from swift_stage2.checks.channel_b_parts import compare_preprocessors
from swift_stage2.checks.packing_isolation import empty_rollout
from swift_stage2.errors import ConfigError, SampleError
from swift_stage2.records import Pack, Rollout, Segment

ROW: dict[str, Any] = {
    "messages": [{"role": "user", "content": "find"}],
    "objects": {"ref": ["box"], "bbox": [[1, 2, 3, 4]]},
}


class Altered(Preprocessor):
    """A thread's work with one difference."""

    def __init__(
        self,
        *parts: Any,
        alter: Any = dict,
        refuses: str | None = None,
        text: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(*parts, **settings)
        self._alter, self._refuses, self._text = alter, refuses, text

    def encode(self, rollouts: Sequence[Rollout]) -> Iterator[EncodedRollout | Refusal]:
        if self._refuses is None:
            yield from super().encode(
                [rollout if self._text is None else replace(rollout, text=self._text) for rollout in rollouts]
            )
        else:
            yield from (SampleError(self._refuses) for _ in rollouts)

    def pack(self, pack_id: str, segments: Sequence[Segment]) -> Pack:
        pack = super().pack(pack_id, segments)
        return replace(pack, batch=self._alter(pack.batch))


@pytest.mark.parametrize(
    ("difference", "named"),
    [
        ({"alter": lambda batch: batch | {"input_ids": batch["input_ids"] + 1}}, "input_ids"),
        ({"alter": lambda batch: batch | {"labels": batch["labels"].to(torch.int32)}}, "labels"),
        ({"alter": lambda batch: batch | {"extra": 1}}, "extra"),
        ({"alter": lambda batch: {k: v for k, v in batch.items() if k != "loss_scale"}}, "loss_scale"),
        ({"refuses": "too long"}, "refusal"),
        ({"text": "[]"}, "target"),
    ],
)
def test_every_difference_is_named(difference: dict[str, Any], named: str) -> None:
    encoder = make_encoder()
    rollouts = [empty_rollout(sample_of(ROW), encoder)]
    parts: Any = (encoder, make_task())
    thread = Preprocessor(*parts, packing_length=PACKING_LENGTH)
    compare_preprocessors(Altered(*parts, packing_length=PACKING_LENGTH), thread, rollouts)
    altered = Altered(*parts, packing_length=PACKING_LENGTH, **difference)
    with pytest.raises(ConfigError, match=f"got another .*{named}.* for the data set's row 0.*: thread"):
        compare_preprocessors(altered, thread, rollouts)


def test_what_both_refuse_alike_is_no_difference() -> None:
    encoder = make_encoder(packing_length=8)
    rollouts = [empty_rollout(sample_of(ROW), encoder)]
    one, other = (Preprocessor(encoder, make_task(), packing_length=8) for _ in range(2))
    assert isinstance(one.encode(rollouts)[0], SampleError)
    compare_preprocessors(one, other, rollouts)
