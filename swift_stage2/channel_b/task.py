"""What is done with one rollout: parse, match, and write the corrected target. Detection is one task.

A task is pure and owns no thread; the pipeline gives it the rollout, the ground truth in the template's
coordinate space and the tokeniser. Another task may take this one's place through the ``Task`` Protocol.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from swift_stage2.channel_b.answer_format import AnswerFormat, read_format, refusal, standard_format
from swift_stage2.channel_b.dialects import Dialect
from swift_stage2.channel_b.matching import MatchResult, match_objects
from swift_stage2.channel_b.parsing import ParsedRollout, parse_rollout
from swift_stage2.channel_b.targets import TokenGroup, order_ground_truth, render_target, weigh_tokens
from swift_stage2.errors import ConfigError
from swift_stage2.records import IntegerBox, MatchQuality, ObjectMatch, Rollout, Target
from swift_stage2.telemetry.trace import EnterSpan, untraced

Tokenise = Callable[[str], tuple[tuple[int, ...], tuple[tuple[int, int], ...]]]


class Task(Protocol):
    """Turns a rollout and its ground truth into the target that channel B trains on."""

    @property
    def closing_weight(self) -> float: ...

    def correct(
        self, rollout: Rollout, labels: Sequence[str], boxes: Sequence[IntegerBox], tokenise: Tokenise
    ) -> Target: ...

    def check_answer(self, text: str, objects: Sequence[tuple[str, IntegerBox]]) -> object: ...

    def with_span(self, span: EnterSpan) -> Task: ...


class DetectionTask:
    """Objects as text with boxes, in one of the dialects of ``parsing``."""

    def __init__(
        self,
        *,
        dialect: str,
        iou_threshold: float,
        top_k: int,
        unmatched_prediction_cost: float,
        unmatched_ground_truth_cost: float,
        same_label: bool,
        weights: Mapping[TokenGroup, float],
        span: EnterSpan = untraced,
    ) -> None:
        """``span`` is entered with the name of every stage."""
        self._dialect = Dialect(dialect)
        self.answer_format = standard_format(self._dialect)
        """How targets are written."""
        self._iou_threshold = iou_threshold
        self._top_k = top_k
        self._unmatched_prediction_cost = unmatched_prediction_cost
        self._unmatched_ground_truth_cost = unmatched_ground_truth_cost
        self._same_label = same_label
        self._weights = dict(weights)
        self._span = span

    def with_span(self, span: EnterSpan) -> DetectionTask:
        """The same task, entering another span."""
        other = copy.copy(self)
        other._span = span
        return other

    def with_format(self, answer_format: AnswerFormat) -> DetectionTask:
        """The same task, writing targets in a format that was learned from channel A's answers."""
        other = copy.copy(self)
        other.answer_format = answer_format
        return other

    @property
    def closing_weight(self) -> float:
        """Weight of the template's end-of-turn tokens."""
        return self._weights[TokenGroup.CLOSURE]

    def correct(
        self, rollout: Rollout, labels: Sequence[str], boxes: Sequence[IntegerBox], tokenise: Tokenise
    ) -> Target:
        """The ground truth in the order in which the model found it, then what it missed.

        ``boxes`` and the rollout share one coordinate space. A rollout with no usable object gives the
        ground truth in its own order.
        """
        with self._span("parse"):
            parsed = parse_rollout(rollout.text, self._dialect)
        with self._span("match"):
            match = match_objects(
                [found.box for found in parsed.objects],
                boxes,
                iou_threshold=self._iou_threshold,
                top_k=self._top_k,
                unmatched_prediction_cost=self._unmatched_prediction_cost,
                unmatched_ground_truth_cost=self._unmatched_ground_truth_cost,
                allowed=_same_label(parsed, labels) if self._same_label else None,
            )
        with self._span("target"):
            return self._target(rollout, labels, boxes, tokenise, parsed, match)

    def check_answer(self, text: str, objects: Sequence[tuple[str, IntegerBox]]) -> AnswerFormat:
        """What channel A's answer shows of its format; refuses one that channel B could not write.

        Answers that pass one by one may still contradict each other: ``join_formats`` finds out, or ``learn_format``.

        Raises:
            ConfigError: the answer does not list, in this dialect, exactly its ground truth, or is spelled in a way
                that is not known; shows both texts.
        """
        parsed = parse_rollout(text, self._dialect)
        found = tuple((found.label, found.box) for found in parsed.objects)
        if found != tuple(objects) or parsed.dropped or parsed.truncated:
            raise ConfigError(refusal(self._dialect, text, self.answer_format.write(objects)))
        return read_format(text, self._dialect)

    def _target(
        self,
        rollout: Rollout,
        labels: Sequence[str],
        boxes: Sequence[IntegerBox],
        tokenise: Tokenise,
        parsed: ParsedRollout,
        match: MatchResult,
    ) -> Target:
        order = order_ground_truth(match, len(boxes))
        matched = {truth for _, truth in match.pairs}
        rendered = render_target(
            [(labels[truth], boxes[truth]) for truth in order],
            [truth in matched for truth in order],
            self.answer_format,
        )
        token_ids, offsets = tokenise(rendered.text)
        return Target(
            text=rendered.text,
            token_ids=token_ids,
            weights=weigh_tokens(offsets, rendered.spans, self._weights),
            quality=MatchQuality(
                num_predictions=len(parsed.objects),
                num_ground_truth=len(boxes),
                num_pairs=len(match.pairs),
                sum_iou=float(sum(match.ious)),
                num_gated=match.gated,
                num_truncated=int(rollout.truncated),
                dropped={str(reason): count for reason, count in parsed.dropped.items()},
            ),
            match=ObjectMatch(
                predicted=tuple((found.label, found.box) for found in parsed.objects),
                truth=tuple(zip(labels, boxes, strict=True)),
                pairs=tuple((*pair, iou) for pair, iou in zip(match.pairs, match.ious, strict=True)),
            ),
        )


def _same_label(parsed: ParsedRollout, labels: Sequence[str]) -> np.ndarray:
    predicted = np.array([found.label for found in parsed.objects], dtype=object)
    same: np.ndarray = np.equal.outer(predicted, np.array(labels, dtype=object)).astype(bool)
    return same
