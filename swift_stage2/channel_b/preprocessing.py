"""Everything between an answer and a pack, on the caller's own thread: parse, match, target, encode, collate.

``Preprocessor`` is what pipeline and evaluation ask; ``preprocessing_process`` does the same work in a process beside
them. Not thread-safe: one thread asks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from swift_stage2.channel_b.encoding import Encoder, PromptEncoding
from swift_stage2.channel_b.packing_line import make_pack, make_segment, make_target
from swift_stage2.channel_b.task import Task
from swift_stage2.errors import MatchingError, PromptMismatch, SampleError
from swift_stage2.records import Pack, Rollout, Segment, Target

Refusal = SampleError | MatchingError


@dataclass(frozen=True, slots=True)
class Prepared:
    """A rollout that can be packed."""

    segment: Segment
    target: Target
    space: tuple[int, int] | None
    """Width and height of what boxes are written in."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Judged:
    """A rollout matched to its ground truth, and no more."""

    target: Target
    space: tuple[int, int] | None


class Preprocessor(Protocol):
    """Turns rollouts into segments and segments into packs."""

    def prepare(self, rollouts: Sequence[Rollout]) -> Iterator[Prepared | Refusal]:
        """What becomes of each rollout, in their order. Segments wait here until ``pack`` or ``forget``."""
        ...

    def judge(self, rollouts: Sequence[Rollout]) -> Iterator[Judged | Refusal]:
        """Each rollout against its ground truth, in their order; nothing is kept."""
        ...

    def pack(self, pack_id: str, segments: Sequence[Segment]) -> Pack:
        """Prepared segments as one batch, in the order given."""
        ...

    def forget(self, segments: Sequence[Segment]) -> None:
        """These will not be packed."""
        ...

    def interrupt(self) -> None:
        """Whatever is asked now, or later, need not be answered; from any thread."""
        ...

    def close(self) -> None:
        """Gives everything back; nobody asks any more. May be called again."""
        ...


class ThreadPreprocessor:
    """Works when it is asked, on the thread that asks."""

    def __init__(self, encoder: Encoder, task: Task, *, packing_length: int) -> None:
        self._encoder = encoder
        self._task = task
        self._packing_length = packing_length

    def prepare(self, rollouts: Sequence[Rollout]) -> Iterator[Prepared | Refusal]:
        for rollout in rollouts:
            yield self._prepare(rollout)

    def judge(self, rollouts: Sequence[Rollout]) -> Iterator[Judged | Refusal]:
        for rollout in rollouts:
            yield self._judge(rollout)

    def pack(self, pack_id: str, segments: Sequence[Segment]) -> Pack:
        return make_pack(pack_id, segments, self._encoder, self._packing_length)

    def forget(self, segments: Sequence[Segment]) -> None:
        """Each segment carries its own encoding here; nothing else is kept."""

    def interrupt(self) -> None:
        """What is asked takes milliseconds."""

    def close(self) -> None:
        """Holds nothing."""

    def _prepare(self, rollout: Rollout) -> Prepared | Refusal:
        started = time.monotonic()
        try:
            prompt = self._encoder.encode_prompt(rollout.sample)
            segment, target = make_segment(rollout, prompt, self._encoder, self._task)
        except (SampleError, MatchingError) as refusal:
            return refusal
        return Prepared(segment, target, prompt.space, time.monotonic() - started)

    def _judge(self, rollout: Rollout) -> Judged | Refusal:
        try:
            prompt = self._encoder.encode_prompt(rollout.sample)
            _check_prompt(rollout, prompt)
            target = make_target(rollout, prompt, self._encoder, self._task)
        except (SampleError, MatchingError) as refusal:
            return refusal
        return Judged(target, prompt.space)


def _check_prompt(rollout: Rollout, prompt: PromptEncoding) -> None:
    if rollout.prompt_token_ids != prompt.token_ids:
        raise PromptMismatch("the server was asked another prompt than the learner's", prompt.token_ids)
