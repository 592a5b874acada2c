"""Detection, the task that is shipped: objects as text with boxes, in one of the dialects.

A corrected answer is the ground truth in the order in which the model found it, written as channel A's answers are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from swift_stage2.channel_b.answer_format import (
    fill_placeholders,
    learn_format,
    read_format,
    refusal,
    standard_format,
)
from swift_stage2.channel_b.dialects import DIALECTS, Dialect
from swift_stage2.channel_b.matching import MatchResult, match_objects
from swift_stage2.channel_b.parsing import (
    ParsedRollout,
    TrueObjects,
    lists_objects,
    parse_rollout,
    read_ground_truth,
)
from swift_stage2.channel_b.targets import (
    AnswerFormat,
    TokenGroup,
    order_ground_truth,
    render_target,
    weigh_tokens,
)
from swift_stage2.channel_b.task import Convert, Rows, Task, Tokenise, register_task
from swift_stage2.config import MatchingConfig, Stage2Config
from swift_stage2.config.registry import find
from swift_stage2.errors import ConfigError, DatasetError, SampleError
from swift_stage2.records import IntegerBox, MatchQuality, ObjectMatch, Rollout, Sample, Target

if TYPE_CHECKING:
    from swift_stage2.channel_b.encoding import Encoder

Objects = Sequence[tuple[str, IntegerBox]]
"""Labels and boxes in the template's space."""


@register_task("detection")
class DetectionTask(Task):
    """Matches objects by their boxes. ``answer_format`` is how targets are written."""

    def __init__(
        self,
        *,
        dialect: Dialect,
        matching: MatchingConfig,
        weights: Mapping[TokenGroup, float],
    ) -> None:
        self._dialect = dialect
        self.answer_format = standard_format(dialect)
        self._matching = asdict(matching)
        self._same_label = self._matching.pop("same_label")
        self._weights = dict(weights)
        self.closing_weight = self._weights[TokenGroup.CLOSURE]

    @classmethod
    def from_config(cls, config: Stage2Config) -> Self:
        """By the sections ``matching`` and ``target``."""
        target = config.stage2_ab.channel_b.target
        return cls(
            dialect=find(DIALECTS, "stage2_ab.channel_b.target.dialect", target.dialect),
            matching=config.stage2_ab.channel_b.matching,
            weights={group: getattr(target.weights, group.value) for group in TokenGroup},
        )

    def read_truth(self, row: Mapping[str, Any]) -> TrueObjects:
        return read_ground_truth(row)

    def has_truth(self, row: Mapping[str, Any]) -> bool:
        return lists_objects(row)

    def to_space(self, truth: TrueObjects, convert: Convert) -> Objects:
        boxes = ((x1, y1, x2, y2) for x1, y1, x2, y2 in convert(truth.boxes))
        return tuple(zip(truth.labels, boxes, strict=True))

    def correct(self, rollout: Rollout, truth: Objects, tokenise: Tokenise) -> Target:
        """The ground truth in the order in which the model found it, then what it missed.

        A rollout with no usable object gives the ground truth in its own order.
        """
        labels, boxes = [label for label, _ in truth], [box for _, box in truth]
        with self.span("parse"):
            parsed = parse_rollout(rollout.text, self._dialect)
        with self.span("match"):
            match = match_objects(
                [found.box for found in parsed.objects],
                boxes,
                allowed=_same_label(parsed, labels) if self._same_label else None,
                **self._matching,
            )
        with self.span("target"):
            return self._target(rollout, truth, tokenise, parsed, match)

    def check_answer(self, text: str, truth: Objects, normalise: Callable[[str], str] = str) -> AnswerFormat:
        """The format of channel A's answer; refuses one that channel B could not write.

        Answers that pass one by one may still contradict each other: ``join_formats`` finds out, or ``learn_format``.

        Raises:
            ConfigError: the answer does not list, in this dialect, exactly its ground truth, or is spelled in a way
                that is not known; shows both texts.
        """
        parsed = parse_rollout(text, self._dialect)
        found = tuple((found.label, found.box) for found in parsed.objects)
        objects = tuple((normalise(label), box) for label, box in truth)
        if found != objects or parsed.dropped or parsed.unclosed:
            raise ConfigError(refusal(self._dialect, text, self.answer_format.write(objects)))
        return read_format(text, self._dialect)

    def learn(self, rows: Rows, sample: Sample, encoder: Encoder) -> Self:
        """Writing as channel A's answers are written. A row that channel B cannot use teaches nothing.

        The template renders one sample; all other rows are rendered as text, without their images, which is quick. The
        outcome depends on the rows and their order only, so that every rank, and a resumed run, learns the same.

        Raises:
            ConfigError: an answer is nothing that the dialect can write, or the template changes what it renders.
            DatasetError: two rows are written in two ways; shows both.
            SampleError: the template refuses the sample.
        """
        text, prompt = encoder.answer_of(sample), encoder.encode_prompt(sample)
        truth = self.to_space(sample.truth, prompt.convert)
        shown = self.check_answer(text, truth, encoder.normalise)
        objects = [(encoder.normalise(label), box) for label, box in truth]
        answer = encoder.normalise(fill_placeholders(_answer(sample.row), objects))
        before, found, after = text.partition(answer)
        if not found:
            raise ConfigError(
                "the template must render an answer as it stands in the data set, got "
                f"answer={text[:160]!r} of {answer[:160]!r}; set QWENVL_BBOX_FORMAT=new"
            )
        texts = (before + encoder.normalise(filled) + after for filled in _answers(rows))
        other = copy.copy(self)
        other.answer_format = learn_format(texts, shown.dialect)
        return other

    @property
    def spelling(self) -> list[str]:
        return self.answer_format.spelling

    def _target(
        self,
        rollout: Rollout,
        truth: Objects,
        tokenise: Tokenise,
        parsed: ParsedRollout,
        match: MatchResult,
    ) -> Target:
        order = order_ground_truth(match.pairs, len(truth))
        matched = {number for _, number in match.pairs}
        rendered = render_target(
            [truth[number] for number in order],
            [number in matched for number in order],
            self.answer_format,
        )
        token_ids, offsets = tokenise(rendered.text)
        return Target(
            text=rendered.text,
            token_ids=token_ids,
            weights=weigh_tokens(offsets, rendered.spans, self._weights),
            quality=MatchQuality(
                num_predictions=len(parsed.objects),
                num_ground_truth=len(truth),
                num_pairs=len(match.pairs),
                sum_iou=float(sum(match.ious)),
                num_gated=match.gated,
                num_truncated=int(rollout.truncated),
                dropped={str(reason): count for reason, count in parsed.dropped.items()},
            ),
            match=ObjectMatch(
                predicted=tuple((found.label, found.box) for found in parsed.objects),
                truth=tuple(truth),
                pairs=tuple((*pair, iou) for pair, iou in zip(match.pairs, match.ious, strict=True)),
            ),
        )


def _same_label(parsed: ParsedRollout, labels: Sequence[str]) -> np.ndarray:
    predicted = np.array([found.label for found in parsed.objects], dtype=object)
    same: np.ndarray = np.equal.outer(predicted, np.array(labels, dtype=object)).astype(bool)
    return same


def _answers(rows: Rows) -> Iterator[str]:
    for number in range(len(rows)):
        row = rows[number]
        try:
            truth = read_ground_truth(row)
        except SampleError:
            continue  # nor will channel B draw it
        if row["messages"][-1]["role"] == "assistant":
            yield fill_placeholders(_answer(row), tuple(zip(truth.labels, truth.boxes, strict=True)))


def _answer(row: Mapping[str, Any]) -> str:
    content = row["messages"][-1]["content"]
    if not isinstance(content, str):
        raise DatasetError(f"an answer must be plain text, got content={content!r}; write the text itself")
    return content
