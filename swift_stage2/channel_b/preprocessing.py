"""From rollouts to packs: parse, match, correct, encode, collate.

``make_target``, ``make_segment`` and ``make_pack`` are functions of nothing but what they are given: a replay calls
them with recorded rollouts, and the same packs come out. Pipeline and evaluation ask a ``Preprocessor``, from one
thread: it works there, or, as ``ProcessPreprocessor``, has its work done in a process beside the rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from swift_stage2.channel_b.encoding import Encoder, PromptEncoding, require_same_prompt
from swift_stage2.channel_b.object_scores import ObjectLogProbs, object_log_probs
from swift_stage2.channel_b.task import TOTAL, Task, correct_by
from swift_stage2.columns import ADVANTAGES, BEHAVIOUR, COLUMNS, stand_ins
from swift_stage2.errors import MatchingError, SampleError
from swift_stage2.records import MatchQuality, Pack, Rollout, SampleKey, Segment, Target
from swift_stage2.servers.turns import spread

Refusal = SampleError | MatchingError
_FoundT = TypeVar("_FoundT")


@dataclass(frozen=True, slots=True)
class EncodedRollout:
    """A rollout that can be packed."""

    segment: Segment
    target: Target
    space: tuple[int, int] | None
    """Width and height of what boxes are written in."""
    seconds: float


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """A rollout matched to its ground truth, and no more."""

    target: Target
    space: tuple[int, int] | None
    target_reward: float | None = None
    """The reward of the corrected answer; None unless ``score`` was asked for it."""
    log_probs: tuple[ObjectLogProbs, ...] | None = None
    """Of each object that was predicted; None in a group, too."""


def make_target(rollout: Rollout, prompt: PromptEncoding, encoder: Encoder, task: Task) -> Target:
    """One rollout corrected.

    Raises:
        SampleError, MatchingError: the sample cannot be used.
        TaskError: as ``correct_by`` does.
    """
    if rollout.turns:
        earlier = (rollout.token_ids[start:end] for start, end in rollout.turns[:-1])
        rollout = replace(rollout, earlier_texts=tuple(map(encoder.decode, earlier)))
    return correct_by(task, rollout, task.to_space(rollout.sample.truth, prompt.convert), encoder.tokenise)


def make_segment(
    rollout: Rollout, prompt: PromptEncoding, encoder: Encoder, task: Task
) -> tuple[Segment, Target]:
    """One rollout parsed, matched, corrected and encoded; and its corrected answer.

    The segment carries that answer, or, of a rollout with advantages, its tokens as they were sampled; the corrected
    answer beside them where it has an advantage, too, and a pack holds both. Tokens whose advantage is 0 are left out
    where something is left. Of several turns the last one is corrected, behind all that was said before it.

    Raises:
        SampleError, MatchingError: the sample cannot be used.
    """
    target = make_target(rollout, prompt, encoder, task)
    corrected = target
    if rollout.turns:
        encoder.require_trainable(rollout)
        corrected = _behind(rollout.token_ids[: rollout.last_turn], target)
    sequences: list[tuple[Target, float | None]] = [(corrected, task.closing_weight)]
    if rollout.advantages is not None:
        of_tokens, *of_target = rollout.advantages
        closing = encoder.closing_token_ids, task.closing_weight
        sequences = [(_as_trained(corrected, advantage, *closing), None) for advantage in of_target]
        if of_tokens or not sequences:
            sequences.insert(0, (as_sampled(rollout, of_tokens, target.quality), None))
    return encoder.encode_segment(rollout, prompt, sequences), target


def as_sampled(rollout: Rollout, advantage: float, quality: MatchQuality) -> Target:
    """A rollout's own tokens as a target; those that the model did not sample have no weight."""
    assert rollout.log_probs is not None
    num_tokens = len(rollout.token_ids)
    weights = spread((1.0,) * num_tokens, rollout.turns or ((0, num_tokens),), num_tokens, 0.0)
    pairs = zip(rollout.log_probs, weights, strict=True)
    behaviour = tuple(log_prob if weight else BEHAVIOUR.filler for log_prob, weight in pairs)
    return Target(
        text=rollout.text,
        token_ids=rollout.token_ids,
        weights=weights,
        quality=quality,
        columns={ADVANTAGES.name: (advantage,) * num_tokens, BEHAVIOUR.name: behaviour},
    )


def _behind(context: tuple[int, ...], target: Target) -> Target:
    """A corrected answer behind what was said before it, which has no weight."""
    num = len(context)
    beside = {name: tuple(COLUMNS[name].beside(values, num, 0)) for name, values in target.columns.items()}
    return replace(
        target,
        token_ids=context + target.token_ids,
        weights=(0.0,) * num + target.weights,
        columns=beside,
        alternatives=tuple((num + place, token) for place, token in target.alternatives),
        duplicates=tuple((num + place, token) for place, token in target.duplicates),
    )


def _as_trained(target: Target, advantage: float, closing_ids: tuple[int, ...], weight: float) -> Target:
    """A corrected answer with an advantage, and with the end of turn among its tokens, so that it holds for that."""
    token_ids = target.token_ids + closing_ids
    return replace(
        target,
        token_ids=token_ids,
        weights=target.weights + (weight,) * len(closing_ids),
        columns={ADVANTAGES.name: (advantage,) * len(token_ids)},
    )


def make_pack(pack_id: str, segments: Sequence[Segment], encoder: Encoder) -> Pack:
    """Segments as one batch, in the order given."""
    return Pack(
        pack_id=pack_id,
        version=min(segment.version for segment in segments),
        batch=encoder.collate(segments),
        keys=tuple(segment.key for segment in segments),
        num_tokens=sum(segment.num_tokens for segment in segments),
        num_supervised_tokens=sum(segment.num_supervised_tokens for segment in segments),
        capacity_tokens=encoder.packing_length,
        quality=tuple(segment.quality for segment in segments),
        versions=tuple(segment.version for segment in segments),
    )


class Preprocessor:
    """Turns rollouts into segments and segments into packs, on the thread that asks, within milliseconds."""

    def __init__(self, encoder: Encoder, task: Task) -> None:
        self._encoder = encoder
        self._task = task
        self._last_prompt: tuple[int, PromptEncoding] | None = None
        self._held: dict[SampleKey, Segment] = {}

    def encode(self, rollouts: Sequence[Rollout]) -> list[EncodedRollout | Refusal]:
        """Each rollout as a segment, in their order. Its encodings, which are large, wait here for ``pack``."""
        return _each(rollouts, self._encode)

    def score(
        self, rollouts: Sequence[Rollout], *, in_group: bool = False, with_target: bool = False
    ) -> list[ScoredRollout | Refusal]:
        """Each rollout against its ground truth, in their order; nothing is kept.

        ``in_group``: they are going to be trained as they were sampled, by their rewards. ``with_target``: the reward
        of each corrected answer as well.
        """
        return _each(rollouts, partial(self._score, in_group=in_group, with_target=with_target))

    def pack(self, pack_id: str, segments: Sequence[Segment]) -> Pack | None:
        """Encoded segments as one batch, in the order given; None if some are not held any more."""
        if not all(map(self.holds, segments)):
            return None
        whole = [self._held[segment.key] for segment in segments]
        self.forget(segments)
        return make_pack(pack_id, whole, self._encoder)

    def holds(self, segment: Segment) -> bool:
        """True if ``pack`` can still pack it."""
        return segment.key in self._held

    def forget(self, segments: Sequence[Segment]) -> None:
        """These will not be packed."""
        for segment in segments:
            self._held.pop(segment.key, None)

    def interrupt(self) -> None:
        """Whatever is asked now, or later, need not be answered; from any thread."""
        return

    def close(self) -> None:
        """Gives everything back; nobody asks any more. May be called again."""
        return

    def _encode(self, rollout: Rollout) -> EncodedRollout:
        started = time.monotonic()
        prompt = self._prompt_of(rollout)
        segment, target = make_segment(rollout, prompt, self._encoder, self._task)
        self._held[segment.key] = segment
        return EncodedRollout(
            replace(segment, encodings=()), target, prompt.space, time.monotonic() - started
        )

    def _score(self, rollout: Rollout, *, in_group: bool, with_target: bool) -> ScoredRollout:
        if in_group:
            self._encoder.require_trainable(rollout)
        prompt = self._prompt_of(rollout) if in_group else self._encoder.encode_prompt(rollout.sample)
        require_same_prompt(rollout, prompt)
        target = make_target(rollout, prompt, self._encoder, self._task)
        if not with_target:
            log_probs = None if in_group else self._object_log_probs(rollout, target)
            return ScoredRollout(target, prompt.space, log_probs=log_probs)
        token_ids = rollout.token_ids[: rollout.last_turn] + target.token_ids
        turns = (*rollout.turns[:-1], (rollout.last_turn, len(token_ids))) if rollout.turns else ()
        answer = replace(rollout, text=target.text, token_ids=token_ids, turns=turns, truncated=False)
        said = replace(answer, **stand_ins(len(token_ids)))
        right = make_target(said, prompt, self._encoder, self._task)
        return ScoredRollout(target, prompt.space, right.quality.reward[TOTAL])

    def _object_log_probs(self, rollout: Rollout, target: Target) -> tuple[ObjectLogProbs, ...] | None:
        first, match = rollout.last_turn, target.match
        if rollout.log_probs is None or match is None or len(match.places) != len(match.predicted):
            return None
        token_ids, log_probs = rollout.token_ids[first:], rollout.log_probs[first:]
        return object_log_probs(match.places, rollout.text, token_ids, log_probs, self._encoder.decode)

    def _prompt_of(self, rollout: Rollout) -> PromptEncoding:
        """The last one is kept: rollouts of one row of the training data come one after another.

        The number of a row is enough: a prompt depends on nothing else, and evaluations, which have rows of their own,
        do not ask here.
        """
        row = rollout.sample.key.index
        if self._last_prompt is None or self._last_prompt[0] != row:
            self._last_prompt = row, self._encoder.encode_prompt(rollout.sample)
        return self._last_prompt[1]


def _each(rollouts: Sequence[Rollout], work: Callable[[Rollout], _FoundT]) -> list[_FoundT | Refusal]:
    found: list[_FoundT | Refusal] = []
    for rollout in rollouts:
        try:
            found.append(work(rollout))
        except (SampleError, MatchingError) as refusal:
            found.append(refusal)
    return found
