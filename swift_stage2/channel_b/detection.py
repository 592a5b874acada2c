"""Detection, the task that is shipped: objects as text with boxes, in one of the dialects.

A corrected answer is the ground truth in the order in which the model found it, written as channel A's answers are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from swift_stage2.channel_b.answer_templates import (
    fill_placeholders,
    learn_template,
    refusal,
    require_templates,
    standard_template,
)
from swift_stage2.channel_b.dialects import DIALECTS, OBJECT_LIST, Dialect
from swift_stage2.channel_b.matching import MatchResult, match_objects
from swift_stage2.channel_b.parsing import (
    ParsedRollout,
    TrueObjects,
    lists_objects,
    parse_rollout,
    read_ground_truth,
)
from swift_stage2.channel_b.targets import (
    AlternativeTokens,
    Continuations,
    TokenGroup,
    order_ground_truth,
    order_missed,
    weigh_tokens,
)
from swift_stage2.channel_b.task import Convert, Rows, Task, Tokenise, register_task
from swift_stage2.config import MatchingConfig, MissedOrder, Stage2Config
from swift_stage2.config.rules import find
from swift_stage2.errors import ConfigError, DatasetError, SampleError
from swift_stage2.records import Coordinates, MatchQuality, ObjectMatch, Rollout, Sample, SampleKey, Target

if TYPE_CHECKING:
    from swift_stage2.channel_b.encoding import Encoder

Objects = Sequence[tuple[str, Coordinates]]
"""Labels with boxes, or points, in the template's space."""


@register_task("detection")
class DetectionTask(Task):
    """Matches objects by their boxes. ``template`` is how targets are written.

    A dialect of points gives the objects two coordinates; whoever derives a task for these matches them.
    """

    default_dialect: ClassVar[str] = OBJECT_LIST.name
    num_coordinates: ClassVar[int] = 4
    """Of the dialects that it takes."""

    def __init__(
        self,
        *,
        dialect: Dialect,
        matching: MatchingConfig,
        weights: Mapping[TokenGroup, float],
        missed_order: MissedOrder = MissedOrder.GIVEN,
        weighs_duplicates: bool = False,
    ) -> None:
        self._dialect = dialect
        self.template = standard_template(dialect)
        self._matching = matching
        self._costs = {
            name: getattr(matching, name)
            for name in ("top_k", "unmatched_prediction_cost", "unmatched_ground_truth_cost")
        }
        self._weights = dict(weights)
        self._missed_order = missed_order
        self._weighs_duplicates = weighs_duplicates
        self.closing_weight = self._weights[TokenGroup.CLOSURE]

    @classmethod
    def from_config(cls, config: Stage2Config) -> Self:
        """By the sections ``matching`` and ``target``.

        Raises:
            ConfigError: the dialect is unknown, or its objects have another number of coordinates.
        """
        target = config.stage2_ab.channel_b.target
        key = "stage2_ab.channel_b.target.dialect"
        dialect = find(DIALECTS, key, target.dialect or cls.default_dialect)
        if dialect.num_coordinates != cls.num_coordinates:
            raise ConfigError(
                f"{key} must have {cls.num_coordinates} coordinates per object for task {config.stage2_ab.task}",
                got=f"dialect={dialect} with {dialect.num_coordinates}",
                remedy=f"leave it out for {cls.default_dialect}",
            )
        return cls(
            dialect=dialect,
            matching=config.stage2_ab.channel_b.matching,
            weights={TokenGroup(name): weight for name, weight in target.weights.by_group().items()},
            weighs_duplicates=target.weights.duplicate > 0,
            missed_order=target.missed_order,
        )

    def read_truth(self, row: Mapping[str, Any]) -> TrueObjects:
        return read_ground_truth(row, self._dialect.num_coordinates)

    def has_truth(self, row: Mapping[str, Any]) -> bool:
        return lists_objects(row)

    def to_space(self, truth: TrueObjects, convert: Convert) -> Any:
        return tuple(zip(truth.labels, convert(truth.boxes), strict=True))

    def objects_of(self, truth: Any) -> Objects:
        """The objects of what ``to_space`` gave."""
        objects: Objects = truth
        return objects

    def match(self, predicted: Objects, truth: Any) -> MatchResult:
        """Pairs what the model named with the truth that ``to_space`` gave."""
        true = self.objects_of(truth)
        return match_objects(
            [box for _, box in predicted],
            [box for _, box in true],
            allowed=self._allowed(predicted, true),
            iou_threshold=self._matching.iou_threshold,
            **self._costs,
        )

    def correct(self, rollout: Rollout, truth: Any, tokenise: Tokenise) -> Target:
        """The ground truth in the order in which the model found it, then what it missed.

        A rollout with no usable object gives the ground truth in its own order. One that was not read whole still gives
        the order of what it names, and is scored as if it had named nothing.
        """
        parsed = parse_rollout(rollout.text, self._dialect)
        predicted = [(found.label, found.box) for found in parsed.objects]
        match = self.match(predicted, truth)
        twice = self._listed_twice(predicted, truth, match) if self._weighs_duplicates else []
        return self._target(rollout, self.objects_of(truth), tokenise, parsed, match, twice)

    def order_of(self, text: str, truth: Any, key: SampleKey) -> tuple[int, ...]:
        """Indices of the truth in the order in which ``correct`` lists it for this answer; raises as ``match``."""
        named = [(found.label, found.box) for found in parse_rollout(text, self._dialect).objects]
        return self._order(self.match(named, truth), self.objects_of(truth), key)

    def check_answer(self, text: str, truth: Any, normalise: Callable[[str], str] = str) -> None:
        """Refuses an answer of channel A that channel B could not write.

        Raises:
            ConfigError: the answer does not list, in this dialect, exactly its ground truth, or no template writes it;
                shows both texts.
        """
        parsed = parse_rollout(text, self._dialect)
        found = tuple((found.label, found.box) for found in parsed.objects)
        objects = tuple((normalise(label), box) for label, box in self.objects_of(truth))
        if found != objects or parsed.dropped or not parsed.is_whole:
            raise refusal(self._dialect, text, self.template.write(objects))
        require_templates(text, self._dialect)

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
        self.check_answer(text, truth, encoder.normalise)
        objects = [(encoder.normalise(label), box) for label, box in self.objects_of(truth)]
        answer = encoder.normalise(fill_placeholders(_answer(sample.row), objects))
        if text != answer:
            raise ConfigError(
                "the template must render an answer as it stands in the data set",
                got=f"answer={text[:160]!r} of {answer[:160]!r}",
                remedy="set QWENVL_BBOX_FORMAT=new",
            )
        other = copy.copy(self)
        other.template = learn_template(map(encoder.normalise, self._answers(rows)), self._dialect)
        return other

    @property
    def fingerprint(self) -> list[str]:
        return self.template.fingerprint

    def _allowed(self, predicted: Objects, truth: Objects) -> np.ndarray | None:
        """The pairs of one label, where only they may be."""
        if not self._matching.same_label:
            return None
        one, other = (
            np.array([label for label, _ in objects], dtype=object) for objects in (predicted, truth)
        )
        same: np.ndarray = np.equal.outer(one, other).astype(bool)
        return same

    def _listed_twice(self, predicted: Objects, truth: Any, match: MatchResult) -> list[int]:
        """Truths that have a partner and that another prediction, under their label, would match as well."""
        true, matched = self.objects_of(truth), {number for _, number in match.pairs}
        alone = sorted(set(range(len(predicted))).difference(found for found, _ in match.pairs))
        rest = [predicted[found] for found in alone]
        pairs = self.match(rest, truth).pairs
        return [number for found, number in pairs if number in matched and rest[found][0] == true[number][0]]

    def _answers(self, rows: Rows) -> Iterator[str]:
        for number in range(len(rows)):
            row = rows[number]
            try:
                truth = read_ground_truth(row, self._dialect.num_coordinates)
            except SampleError:
                continue  # nor will channel B draw it
            if row["messages"][-1]["role"] == "assistant":
                yield fill_placeholders(_answer(row), tuple(zip(truth.labels, truth.boxes, strict=True)))

    def _order(self, match: MatchResult, truth: Objects, key: SampleKey) -> tuple[int, ...]:
        order, num_found = order_ground_truth(match.pairs, len(truth)), len(match.pairs)
        return (*order[:num_found], *order_missed(order[num_found:], truth, self._missed_order, key))

    def _target(
        self,
        rollout: Rollout,
        truth: Objects,
        tokenise: Tokenise,
        parsed: ParsedRollout,
        match: MatchResult,
        listed_twice: Sequence[int],
    ) -> Target:
        order, num_found = self._order(match, truth, rollout.sample.key), len(match.pairs)
        objects = [truth[number] for number in order]
        is_found = [True] * num_found + [False] * (len(objects) - num_found)
        pieces = list(self.template.pieces(objects, is_found))
        text = "".join(piece for piece, _ in pieces)
        token_ids, offsets = tokenise(text)
        instead = AlternativeTokens(objects, self.template, offsets, tokenise)
        alternatives: Continuations = ()
        duplicates: Continuations = ()
        if self._missed_order is MissedOrder.ANY:
            alternatives = instead.alternatives(num_found)
        if listed_twice:
            duplicates = instead.duplicates(map(order.index, listed_twice), alternatives)
        scored = match if parsed.is_whole else MatchResult((), 0)
        return Target(
            text=text,
            token_ids=token_ids,
            weights=weigh_tokens(offsets, pieces, self._weights),
            alternatives=alternatives,
            duplicates=duplicates,
            quality=MatchQuality(
                num_predictions=len(parsed.counted),
                num_ground_truth=len(truth),
                num_pairs=len(scored.pairs),
                sum_iou=float(sum(scored.ious)),
                num_gated=scored.gated,
                num_truncated=int(rollout.truncated),
                dropped=parsed.lost,
                num_unclosed=int(not parsed.is_whole),
                num_duplicates=scored.duplicates,
                num_beside=int(parsed.has_text_beside),
            ),
            match=ObjectMatch(
                predicted=tuple((found.label, found.box) for found in parsed.counted),
                truth=tuple(truth),
                pairs=tuple((*pair, iou) for pair, iou in zip(scored.pairs, scored.ious, strict=True)),
                places=tuple(found.places for found in parsed.counted),
            ),
        )


def _answer(row: Mapping[str, Any]) -> str:
    content = row["messages"][-1]["content"]
    if not isinstance(content, str):
        raise DatasetError(
            "an answer must be plain text", got=f"content={content!r}", remedy="write the text itself"
        )
    return content
