"""The tokens with which another object than the target's would go on at a place of its text. Pure.

They say what a plain loss cannot: that another missed object would be as right there (``Target.alternatives``), and
that one which is listed already would be wrong (``Target.duplicates``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cache

from swift_stage2.channel_b.targets import AnswerTemplate, Objects
from swift_stage2.channel_b.task import Tokenise

Continuations = tuple[tuple[int, int], ...]
"""(place in ``token_ids``, token), ascending."""


class TokensInstead:
    """Places in one target where an answer could go on with another object.

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
        own_tokens, other_tokens = (
            self._tokens_of(before + self._object_at(as_if, each) + behind) for each in (number, other)
        )
        pairs = enumerate(zip(own_tokens, other_tokens, strict=False))
        return next(((first + place, token) for place, (own, token) in pairs if own != token), None)

    @staticmethod
    def _merged(found: Iterable[tuple[int, int] | None]) -> Continuations:
        return tuple(sorted({pair for pair in found if pair is not None}))
