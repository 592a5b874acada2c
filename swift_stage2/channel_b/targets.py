"""Turns a match and the ground truth into the corrected answer: its order, its text, its token weights.

The text is serialised from ground truth alone and divided into character spans without gap or
overlap, so that every token of the text, tokenised once as a whole, gets exactly one weight. Parsing
the text gives back the same objects. Called by the pipeline.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from swift_stage2.channel_b.answer_format import AnswerFormat, Objects


class Match(Protocol):
    """What the order of a target needs to know of a match."""

    @property
    def pairs(self) -> Sequence[tuple[int, int]]: ...  # (prediction, truth)


class TokenGroup(StrEnum):
    """What a piece of a target says. Weights are configured per group."""

    STRUCTURE = "structure"  # brackets, keys, quotes, and what stands between objects
    MATCHED_LABEL = "matched_label"
    MISSED_LABEL = "missed_label"
    MATCHED_COORDINATES = "matched_coordinates"
    MISSED_COORDINATES = "missed_coordinates"
    CLOSURE = "closure"  # from the bracket that closes the last object: nothing else is to come


@dataclass(frozen=True, slots=True)
class TextSpan:
    """Characters ``start <= i < end`` of a target's text."""

    start: int
    end: int
    group: TokenGroup


@dataclass(frozen=True, slots=True)
class TargetText:
    """An answer in a dialect. The spans cover the text from its first to its last character."""

    text: str
    spans: tuple[TextSpan, ...]


def order_ground_truth(match: Match, num_ground_truth: int) -> tuple[int, ...]:
    """Indices of all ground truth: what was predicted in predicted order, then the rest in its own.

    Raises:
        ValueError: the match names a truth that does not exist, or one truth twice.
    """
    found = [truth for _, truth in sorted(match.pairs)]
    if len(set(found)) < len(found) or not set(found) <= set(range(num_ground_truth)):
        raise ValueError(
            f"a match must pair each truth at most once, got pairs={tuple(match.pairs)} "
            f"num_ground_truth={num_ground_truth}; give the ground truth that was matched"
        )
    return (*found, *sorted(set(range(num_ground_truth)).difference(found)))


def render_target(objects: Objects, matched_flags: Sequence[bool], answer_format: AnswerFormat) -> TargetText:
    """Writes objects exactly as channel A's answers are written.

    Args:
        objects: (label, box) in the order of the answer; boxes are four integers in the template's space.
        matched_flags: per object, whether the model had predicted it.
        answer_format: learned from channel A's answers.

    Raises:
        SampleError: a label is blank or holds the end of the turn, or a box is not one that parses.
        ValueError: there is not one flag per object.
    """
    if len(objects) != len(matched_flags):
        raise ValueError(
            f"every object needs one flag, got num_objects={len(objects)} num_flags={len(matched_flags)}"
        )
    writer = _SpanWriter()
    for text, part, number in answer_format.pieces(objects):
        if number is None:
            writer.write(text, TokenGroup(part))
        else:
            writer.write(text, TokenGroup(f"{'matched' if matched_flags[number] else 'missed'}_{part}"))
    return writer.finish()


def weigh_tokens(
    offsets: Sequence[tuple[int, int]], spans: Sequence[TextSpan], weights: Mapping[TokenGroup, float]
) -> tuple[float, ...]:
    """One weight per token: that of the group which most of its characters belong to.

    Among equals the group that comes first in the token wins; a token without characters takes the
    group at its place. A group without a configured weight counts 1.

    Args:
        offsets: per token its characters ``start <= i < end``, from one tokenisation of the whole text.
        spans: of the same text.
        weights: per group.

    Raises:
        ValueError: a token lies outside the text.
    """
    starts = [span.start for span in spans]
    for start, end in offsets:
        if not 0 <= start <= end <= spans[-1].end:
            raise ValueError(
                f"tokens must lie within the text, got offsets=({start}, {end}) "
                f"num_characters={spans[-1].end}; tokenise the target's text as a whole"
            )
    return tuple(weights.get(_group_of(offset, spans, starts), 1.0) for offset in offsets)


def _group_of(offset: tuple[int, int], spans: Sequence[TextSpan], starts: Sequence[int]) -> TokenGroup:
    start, end = offset
    index = bisect_right(starts, start) - 1
    if end <= spans[index].end:
        return spans[index].group
    num_characters: dict[TokenGroup, int] = defaultdict(int)
    while index < len(spans) and spans[index].start < end:
        span = spans[index]
        num_characters[span.group] += min(end, span.end) - max(start, span.start)
        index += 1
    return max(num_characters, key=lambda group: num_characters[group])


class _SpanWriter:
    """Text that grows together with its spans; neighbours of one group become one span."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._spans: list[TextSpan] = []
        self._end = 0

    def write(self, piece: str, group: TokenGroup) -> None:
        start = self._end
        if self._spans and self._spans[-1].group == group:
            start = self._spans.pop().start
        self._pieces.append(piece)
        self._end += len(piece)
        if self._end > start:
            self._spans.append(TextSpan(start, self._end, group))

    def finish(self) -> TargetText:
        return TargetText("".join(self._pieces), tuple(self._spans))
