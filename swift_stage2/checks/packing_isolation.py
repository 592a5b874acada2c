"""Shows, on the real model at start-up, that packed segments do not see each other.

Without flash attention Hugging Face isolates them only under conditions that are easy to miss, and nothing complains
when it does not. So what stands before a segment in its pack gets another content of the same lengths: the segment's
own loss must not change. All shapes stay, so that one product of matrices rounds like the other, in every dtype.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from swift_stage2.channel_b.encoding import ALTERNATIVE_TOKENS, IGNORED_LABEL, Encoder
from swift_stage2.channel_b.preprocessing import make_segment
from swift_stage2.channel_b.task import Task
from swift_stage2.columns import stand_ins
from swift_stage2.errors import ConfigError, DatasetError, SampleError
from swift_stage2.records import Rollout, Sample, Segment, VersionSpan

# Experts are given other rows when other tokens stand in the pack, and kernels may add up in any order; so three other
# contents before a segment are compared with three behind it, where the causal mask lets nobody look. By rounding alone
# (normal, equal on both sides) the smallest of the first three changes is eight times the largest of the second three
# once in seven thousand starts. Where every token is computed alike, all six are exactly 0.
_NUM_CONTENTS = 3
_MARGIN = 8.0
# A first token that is isolated sees itself only: nowhere else does what leaks weigh as much.
_NUM_FIRST_TOKENS = 16


def ground_truth_segments(encoder: Encoder, task: Task, samples: Sequence[Sample]) -> list[Segment]:
    """Segments of samples whose rollout said nothing: their targets are the ground truth in its own order.

    A sample that no segment can be made of is left out, as it is while training.
    """
    segments: list[Segment] = []
    for sample in samples:
        with suppress(SampleError):
            rollout, prompt = empty_rollout(sample, encoder), encoder.encode_prompt(sample)
            segments.append(make_segment(rollout, prompt, encoder, task)[0])
    return segments


PackedLoss = Callable[[dict[str, Any]], float]
"""Summed loss of one batch that ``Encoder.collate`` made, which lies on the CPU, in nats; on whatever device."""

Group = Sequence[Callable[[], dict[str, Any]]]
"""Makes packs of the same segments that supervise the same of them, one at a time: images are large.

They differ in the content of the other segments only; the first one has the samples' own.
"""


@dataclass(frozen=True, slots=True)
class IsolationBatches:
    """The batches that the model is run on."""

    before: tuple[Group, ...]
    """Content stands before what is supervised: tokens and images."""
    behind: Group
    """It stands behind: tokens only, which a causal mask hides."""
    lengths: tuple[int, ...]
    """Tokens of each segment. Ranks with other lengths would not run the model alike."""


def isolation_batches(encoder: Encoder, task: Task, samples: Sequence[Sample]) -> IsolationBatches:
    """Makes what the check runs the model on; the part of it that only reads this rank's files.

    Raises:
        DatasetError: no segment can be made of any of the samples.
    """
    segments = ground_truth_segments(encoder, task, samples)
    if not segments:
        raise DatasetError(
            "channel B needs samples that fit a pack",
            got=f"none among the first num_samples={len(samples)}",
            remedy="raise stage2_ab.channel_b.packing.packing_length or mend the rows",
        )
    return collate_for_isolation(encoder, segments if len(segments) > 1 else segments * 2)


def collate_for_isolation(encoder: Encoder, segments: Sequence[Segment]) -> IsolationBatches:
    """Of at least two segments."""
    group = partial(_group, encoder, segments, encoder.plain_token_ids)
    even, odd = range(0, len(segments), 2), range(1, len(segments), 2)
    before = [group(odd, even)]
    if len(segments) > 2:  # every border between two segments is looked at from behind it
        before.append(group(even[1:], odd))
    behind = group((0,), range(1, len(segments)), images=False)
    return IsolationBatches(tuple(before), behind, tuple(segment.num_tokens for segment in segments))


@dataclass(frozen=True, slots=True)
class IsolationChange:
    """Summed losses that changed because other segments got another content, in nats."""

    seen: float
    """The smallest change by content before the supervised segments, in the worst group; 0 if nothing is seen."""
    rounding: float
    """The largest change by content behind them; 0 in models whose tokens are computed alike wherever they stand."""

    @property
    def is_isolated(self) -> bool:
        """Whether rounding explains what was seen. A loss that is not a number shows nothing."""
        return self.seen <= _MARGIN * self.rounding


def measure_isolation(batches: IsolationBatches, packed_loss: PackedLoss) -> IsolationChange:
    """Runs the model on every batch, as often on every rank; on any device and in any dtype."""
    packed_loss(batches.behind[0]())  # kernels that are chosen by trying must not change between two losses
    return IsolationChange(
        # numpy's keep what is not a number
        float(np.max([np.min(_changes(group, packed_loss)) for group in batches.before])),
        float(np.max(_changes(batches.behind, packed_loss))),
    )


def check_isolation(batches: IsolationBatches, packed_loss: PackedLoss) -> None:
    """Refuses to train when packed segments see each other; as ``measure_isolation``.

    Raises:
        ConfigError: a segment's loss depends on what stands before it in its pack.
    """
    change = measure_isolation(batches, packed_loss)
    if not change.is_isolated:
        raise ConfigError(
            "packed segments must not see each other",
            got=f"a segment whose loss changes by {change.seen:.1e} with what stands before it (by "
            f"{change.rounding:.1e} with what stands behind it)",
            remedy="set swift.attn_impl to sdpa, eager or flash_attn",
        )


def empty_rollout(sample: Sample, encoder: Encoder) -> Rollout:
    """The answer of a server that says nothing."""
    return Rollout(
        sample=sample,
        text="",
        token_ids=(),
        prompt_token_ids=encoder.encode_prompt(sample).token_ids,
        truncated=False,
        seed=0,
        server="",
        spans=(VersionSpan(0, 0, 0),),
        **stand_ins(0),
    )


def _changes(group: Group, packed_loss: PackedLoss) -> list[float]:
    """How far each loss is from the first one; all of them not a number if one is."""
    losses = [packed_loss(make()) for make in group]
    if not all(map(math.isfinite, losses)):
        return [math.nan] * (len(losses) - 1)
    return [abs(loss - losses[0]) for loss in losses[1:]]


def _group(
    encoder: Encoder,
    segments: Sequence[Segment],
    plain: Sequence[int],
    supervised: Collection[int],
    exchanged: Collection[int],
    *,
    images: bool = True,
) -> Group:
    own = [_supervise(segment, number in supervised) for number, segment in enumerate(segments)]

    def other(content: int) -> dict[str, Any]:
        return encoder.collate(
            [
                _exchange(segment, plain, seed=f"{number} {content}", images=images)
                if number in exchanged
                else segment
                for number, segment in enumerate(own)
            ]
        )

    return [partial(encoder.collate, own), *(partial(other, content) for content in range(_NUM_CONTENTS))]


def _supervise(segment: Segment, looked_at: bool) -> Segment:
    """Its first tokens and its target, or nothing at all. The very first token is told by what stands before it."""
    (encoding,) = segment.encodings
    tokens, labels = encoding["input_ids"], encoding["labels"]
    chosen = [
        looked_at and number > 0 and (number <= _NUM_FIRST_TOKENS or label != IGNORED_LABEL)
        for number, label in enumerate(labels)
    ]
    labels = [token if own else IGNORED_LABEL for token, own in zip(tokens, chosen, strict=True)]
    # Other tokens at places that are supervised no more would have a loss of no label.
    kept = {name: value for name, value in encoding.items() if name not in ALTERNATIVE_TOKENS}
    weights = list(map(float, chosen))
    return replace(segment, encodings=({**kept, "labels": labels, "loss_scale": weights},))


def _exchange(segment: Segment, plain: Sequence[int], *, seed: str, images: bool) -> Segment:
    """Other text of the same length around the same special tokens, and other images of the same size."""
    numbers = random.Random(seed)
    text = frozenset(plain)
    encoding = dict(segment.encodings[0])
    encoding["input_ids"] = [
        numbers.choice(plain) if token in text else token for token in encoding["input_ids"]
    ]
    if images:
        noise = torch.Generator().manual_seed(numbers.getrandbits(32))
        for name, value in encoding.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                encoding[name] = torch.randn(value.shape, generator=noise).to(value.dtype)
    return replace(segment, encodings=(encoding,))
