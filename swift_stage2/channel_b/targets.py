"""Turns a match and the ground truth into the corrected answer: its order, its text, its token weights.

The text is serialised from ground truth alone, in pieces that each belong to one group, so that every token of the
text, tokenised once as a whole, gets exactly one weight. Parsing the text gives back the same objects.
"""

from __future__ import annotations

import json
import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from statistics import mode

from swift_stage2.channel_b.dialects import END_OF_TURN, Dialect, is_in_order
from swift_stage2.channel_b.task import Tokenise
from swift_stage2.config import MissedOrder
from swift_stage2.errors import SampleError
from swift_stage2.records import SampleKey

Objects = Sequence[tuple[str, Sequence[int]]]
"""(label, box) in the order of an answer; boxes are x1, y1, x2, y2, points x, y, in the template's space."""


class TokenGroup(StrEnum):
    """The role of a piece of a target. Weights are configured per group."""

    STRUCTURE = "structure"  # brackets, keys and quotes
    MATCHED_LABEL = "matched_label"
    MISSED_LABEL = "missed_label"
    MATCHED_COORDINATES = "matched_coordinates"
    MISSED_COORDINATES = "missed_coordinates"
    CLOSURE = "closure"  # from the bracket that closes the last object: nothing else is to come
    ANOTHER = "another"  # from the bracket that closes any other one up to the next object


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTemplate:
    """Every character of an answer but its labels and numbers.

    Between ``head`` and ``tail`` stand objects, each ``opener``, value, ``middle``, value, ``closer``.
    """

    dialect: Dialect
    head: str  # up to the first object: '```json\n['
    opener: str  # from an object's bracket to its first value; in the map from behind the object's number
    box_first: bool
    coordinate: str  # '{}', '<|coord_{}|>' or the latter in quotes
    coordinate_separator: str
    middle: str  # between the two values
    closer: str  # from behind the second value to the object's closing bracket, without that
    tail: str  # behind the last object: ']\n```'
    first_number: int  # of the map's objects
    separator: str  # between two objects
    empty: str  # the whole answer without objects
    ensure_ascii: bool

    @property
    def fingerprint(self) -> list[str]:
        """An answer with objects and one without: what a resumed run must write alike."""
        count = self.dialect.num_coordinates
        return [self.write((("é", (0, 1, 2, 3)[:count]), ("b", (4, 5, 6, 7)[:count]))), self.empty]

    def pieces(self, objects: Objects, found: Sequence[bool]) -> Iterator[tuple[str, TokenGroup]]:
        """The answer that lists ``objects``, from its first to its last character; ``found`` has a flag for each.

        Raises:
            SampleError: a label is blank or holds the end of the turn, or a box is not one that parses.
        """
        if not objects:
            start = self.empty.index(self.dialect.opener) + 1
            yield self.empty[:start], TokenGroup.STRUCTURE
            yield self.empty[start:], TokenGroup.CLOSURE
            return
        yield self.head, TokenGroup.STRUCTURE
        for number, (each, is_found) in enumerate(zip(objects, found, strict=True)):
            if number:
                yield "}" + self.separator, TokenGroup.ANOTHER
            yield from self._object(number, *each, is_found=is_found)
        yield "}" + self.tail, TokenGroup.CLOSURE

    def write(self, objects: Objects) -> str:
        """The answer as text. Raises SampleError as ``pieces`` does."""
        return "".join(text for text, _ in self.pieces(objects, [True] * len(objects)))

    def places(self, objects: Objects) -> list[int]:
        """The character at which each object begins in what ``write`` gives."""
        places, end = [], len(self.head)
        for number, each in enumerate(objects):
            end += len("}" + self.separator) if number else 0
            places.append(end)
            end += len(self.object_at(number, each))
        return places

    def object_at(self, number: int, each: tuple[str, Sequence[int]]) -> str:
        """An object as it stands at a place of an answer, up to the bracket that closes it."""
        return "".join(text for text, _ in self._object(number, *each, is_found=True))

    def behind(self, number: int, num_objects: int) -> str:
        """The text from the bracket that closes object ``number`` to the first value of the next object.

        Behind the last of ``num_objects`` it is the rest of the answer.
        """
        if number + 1 == num_objects:
            return "}" + self.tail
        return "}" + self.separator + self.opening(number + 1)

    def opening(self, number: int) -> str:
        """The text from an object's beginning to its first value."""
        return (f'"object_{self.first_number + number}' if self.dialect.named else "") + self.opener

    def _object(
        self, number: int, label: str, box: Sequence[int], *, is_found: bool
    ) -> Iterator[tuple[str, TokenGroup]]:
        label_group = TokenGroup.MATCHED_LABEL if is_found else TokenGroup.MISSED_LABEL
        box_group = TokenGroup.MATCHED_COORDINATES if is_found else TokenGroup.MISSED_COORDINATES
        values = (self._escape(label), label_group), (self._spell(box), box_group)
        yield self.opening(number), TokenGroup.STRUCTURE
        yield values[self.box_first]
        yield self.middle, TokenGroup.STRUCTURE
        yield values[not self.box_first]
        yield self.closer, TokenGroup.STRUCTURE

    def _escape(self, label: str) -> str:
        """The label as it stands between quotes."""
        if not label.strip() or END_OF_TURN in label:
            raise SampleError(
                f"a label must be text without {END_OF_TURN}",
                got=f"label={label!r}",
                remedy="mend the row's objects.ref",
            )
        return json.dumps(label.strip(), ensure_ascii=self.ensure_ascii)[1:-1]

    def _spell(self, box: Sequence[int]) -> str:
        coordinates, count = [int(coordinate) for coordinate in box], self.dialect.num_coordinates
        if len(coordinates) != count or coordinates != list(box) or not is_in_order(coordinates):
            raise SampleError(
                f"a true object must have {count} integer coordinates of at least 0, of a box x1 <= x2 and y1 <= y2",
                got=f"box={tuple(box)}",
                remedy="mend the row's objects.bbox",
            )
        return self.coordinate_separator.join(map(self.coordinate.format, coordinates))


def order_ground_truth(pairs: Sequence[tuple[int, int]], num_ground_truth: int) -> tuple[int, ...]:
    """Indices of all ground truth: what was predicted in predicted order, then the rest in its own.

    ``pairs`` are (prediction, truth).

    Raises:
        ValueError: they name a truth that does not exist, or one truth twice.
    """
    found = [truth for _, truth in sorted(pairs)]
    if len(set(found)) < len(found) or not set(found) <= set(range(num_ground_truth)):
        raise ValueError(
            f"a match must pair each truth at most once, got pairs={tuple(pairs)} "
            f"num_ground_truth={num_ground_truth}; give the ground truth that was matched"
        )
    return (*found, *sorted(set(range(num_ground_truth)).difference(found)))


def order_missed(missed: Sequence[int], truth: Objects, order: MissedOrder, key: SampleKey) -> Sequence[int]:
    """``missed``, indices of ``truth``, as ``order`` says; the same for the same attempt at a sample."""
    if order is MissedOrder.READING:
        return sorted(missed, key=lambda number: (truth[number][1][1], truth[number][1][0]))
    if order is MissedOrder.RANDOM:
        return random.Random(repr(list(key))).sample(missed, len(missed))
    return missed


def weigh_tokens(
    offsets: Sequence[tuple[int, int]],
    pieces: Iterable[tuple[str, TokenGroup]],
    weights: Mapping[TokenGroup, float],
) -> tuple[float, ...]:
    """One weight per token: that of the group which most of its characters belong to.

    Among equals the group that comes first in the token wins; a token without characters takes the
    group at its place. A group without a configured weight counts 1.

    Args:
        offsets: per token its characters ``start <= i < end``, from one tokenisation of the whole text.
        pieces: the text as ``AnswerTemplate.pieces`` gives it.
        weights: per group.
    """
    groups = [group for text, group in pieces for _ in text]
    groups.append(groups[-1])  # for a token without characters behind the last one
    return tuple(weights.get(mode(groups[start : max(end, start + 1)]), 1.0) for start, end in offsets)


Continuations = tuple[tuple[int, int], ...]
"""(place in ``token_ids``, token), ascending."""


class AlternativeTokens:
    """The tokens with which another object than the target's would go on at a place of its text. Pure.

    They say what a plain loss cannot: that another missed object would be as right there (``Target.alternatives``), and
    that one which is listed already would be wrong (``Target.duplicates``).

    Another object in the place of one shares tokens with it, up to the first that differs. Only the text around an
    object is tokenised, from the beginning of the token in which it begins to the first value of the next object:
    tokenizers split text before they merge, and a token made for answers holds no value.
    """

    def __init__(
        self,
        objects: Objects,
        template: AnswerTemplate,
        offsets: Sequence[tuple[int, int]],
        tokenise: Tokenise,
    ) -> None:
        """``objects`` as the target lists them; ``offsets`` of the tokens of its whole text."""
        self._objects = objects
        self._template = template
        self._starts = [start for start, _ in offsets]
        self._tokens_of = cache(lambda piece: tokenise(piece)[0])
        self._object_at = cache(lambda number, each: template.object_at(number, objects[each]))
        self._written = cache(lambda: (template.write(objects), template.places(objects)))

    def alternatives(self, num_found: int) -> Continuations:
        """At every object from ``num_found`` on, those with which one that follows it may go on."""
        numbers = range(num_found, len(self._objects))
        return self._merged(
            self._at(number, other) for number in numbers for other in numbers if other > number
        )

    def duplicates(self, listed_twice: Iterable[int], right: Continuations) -> Continuations:
        """Behind every object of ``listed_twice``, those that would begin it once more; none that is ``right``."""
        pairs = [(place, twice) for twice in listed_twice for place in range(twice + 1, len(self._objects))]
        found = self._merged(self._at(number, twice) for number, twice in pairs)
        return tuple(pair for pair in found if pair not in right)

    def _at(self, number: int, other: int) -> tuple[int, int] | None:
        text, places = self._written()
        first = bisect_right(self._starts, places[number]) - 1
        before = text[self._starts[first] : places[number]]
        behind = self._template.behind(number, len(self._objects))
        as_if = number if self._template.dialect.named else 0  # elsewhere an object does not tell its number
        mine, theirs = (
            self._tokens_of(before + self._object_at(as_if, each) + behind) for each in (number, other)
        )
        pairs = enumerate(zip(mine, theirs, strict=False))
        return next(((first + place, token) for place, (own, token) in pairs if own != token), None)

    @staticmethod
    def _merged(found: Iterable[tuple[int, int] | None]) -> Continuations:
        return tuple(sorted({pair for pair in found if pair is not None}))
