"""Shows, on the real model at start-up, that packed segments do not see each other.

Without flash attention Hugging Face isolates them only under conditions that are easy to miss, and nothing
complains when it does not; so the packed loss is compared with the sum of the single losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.packing_line import make_segment
from swift_stage2.channel_b.records import Rollout, Sample, Segment, VersionSpan
from swift_stage2.channel_b.task import Task
from swift_stage2.errors import ConfigError, DatasetError, SampleError

# Leaking segments were seen at 1.2e-3 in float32, where isolated ones differ by 1e-7; half precision rounds
# each loss to about 1e-3 by itself.
_TOLERANCE = 5e-4
_HALF_PRECISION_TOLERANCE = 1e-2


def ground_truth_segments(encoder: Encoder, task: Task, samples: Sequence[Sample]) -> list[Segment]:
    """Segments of samples whose rollout said nothing: their targets are the ground truth in its own order.

    A sample that no segment can be made of is left out, as it is while training.
    """
    segments: list[Segment] = []
    for sample in samples:
        with suppress(SampleError):
            segments.append(_segment(encoder, task, sample))
    return segments


@dataclass(frozen=True, slots=True)
class IsolationBatches:
    """Collated batches of the same segments: each alone, and all in one pack."""

    singles: tuple[dict[str, Any], ...]
    packed: dict[str, Any]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each batch. Ranks with other lengths would not run the model alike."""
        return tuple(int(batch["input_ids"].numel()) for batch in (*self.singles, self.packed))


def isolation_batches(encoder: Encoder, task: Task, samples: Sequence[Sample]) -> IsolationBatches:
    """What the check runs the model on; the part of it that only reads this rank's files.

    Raises:
        DatasetError: no segment can be made of any of the samples.
    """
    segments = ground_truth_segments(encoder, task, samples)
    if not segments:
        raise DatasetError(
            f"channel B needs samples that fit a pack, got none among the first num_samples={len(samples)}; "
            "raise stage2_ab.channel_b.packing.packing_length or mend the rows"
        )
    return collate_for_isolation(encoder, segments if len(segments) > 1 else segments * 2)


def collate_for_isolation(encoder: Encoder, segments: Sequence[Segment]) -> IsolationBatches:
    """At least two segments, alone and packed."""
    singles = tuple(encoder.collate([segment]) for segment in segments)
    return IsolationBatches(singles, encoder.collate(segments))


def isolation_error(batches: IsolationBatches, packed_loss: Callable[[dict[str, Any]], float]) -> float:
    """Relative difference between the loss of one pack and the sum of its segments' own losses."""
    singles = sum(packed_loss(batch) for batch in batches.singles)
    packed = packed_loss(batches.packed)
    return abs(singles - packed) / max(abs(singles), 1e-12)


def check_isolation(
    batches: IsolationBatches,
    packed_loss: Callable[[dict[str, Any]], float],
    *,
    half_precision: bool = False,
) -> None:
    """Refuses to train when packed segments see each other. Runs the model: on all ranks alike under ZeRO-3.

    Raises:
        ConfigError: the packed loss is not the sum of the single losses.
    """
    error = isolation_error(batches, packed_loss)
    limit = _HALF_PRECISION_TOLERANCE if half_precision else _TOLERANCE
    if not error <= limit:  # a loss that is not a number shows nothing
        raise ConfigError(
            "packed segments must not see each other, got a packed loss that differs from the sum of single "
            f"losses by {error:.1e} (limit {limit:.0e}); set swift.attn_impl to sdpa, eager or flash_attn"
        )


def empty_rollout(sample: Sample, encoder: Encoder) -> Rollout:
    """What a server that says nothing would answer."""
    return Rollout(
        sample=sample,
        text="",
        token_ids=(),
        prompt_token_ids=encoder.encode_prompt(sample).token_ids,
        truncated=False,
        seed=0,
        server="",
        spans=(VersionSpan(0, 0, 0),),
    )


def _segment(encoder: Encoder, task: Task, sample: Sample) -> Segment:
    return make_segment(empty_rollout(sample, encoder), encoder.encode_prompt(sample), encoder, task)[0]
