"""A score per object that a model named: the likelihood, under the model, of the tokens that spell the object. Pure.

A token belongs to a text if any of its characters does: a quote that shares a token with a label counts with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, TypeAlias

from pydantic import Field, FiniteFloat

from swift_stage2.channel_b.parsing import Span

_DECIMALS = 5
_MOST_BEFORE = 16
_UNKNOWN = "\ufffd"  # what tokenizers write for bytes that are no whole character
_LogProbs: TypeAlias = Annotated[
    tuple[Annotated[FiniteFloat, Field(ge=-3.4e38, le=0)], ...], Field(min_length=1)
]


class ScoreWay(StrEnum):
    """Which tokens count, and how: the geometric mean of their probabilities, or the product."""

    LABEL_MEAN = "label_mean"
    LABEL_PRODUCT = "label_product"
    BOX_MEAN = "box_mean"
    BOX_PRODUCT = "box_product"
    BOTH_MEAN = "both_mean"
    BOTH_PRODUCT = "both_product"


DEFAULT_WAY = ScoreWay.BOTH_MEAN


@dataclass(frozen=True, slots=True)
class ObjectLogProbs:
    """Natural log-probabilities of one object's tokens, to five decimals."""

    label: _LogProbs
    box: _LogProbs
    """Of the coordinates, not of what separates them."""

    def score(self, way: ScoreWay) -> float:
        """0 to 1. A token that holds the end of the label and a coordinate counts twice in ``both``."""
        part, _, kind = way.partition("_")
        values = self.label + self.box if part == "both" else self.label if part == "label" else self.box
        return math.exp(math.fsum(values) / (len(values) if kind == "mean" else 1))


def object_log_probs(
    places: Sequence[Sequence[Span]],
    text: str,
    token_ids: Sequence[int],
    log_probs: Sequence[float] | None,
    decode: Callable[[Sequence[int]], str],
) -> tuple[ObjectLogProbs, ...] | None:
    """Of every object of a turn's ``text``; None where the server gave none for its tokens, or they spell another.

    ``places`` are the objects' own, as ``PredictedObject`` has them; ``log_probs`` are one per token; ``decode`` spells
    tokens, special ones too. The end of turn may follow the text.
    """
    if log_probs is None or len(log_probs) != len(token_ids) or not decode(token_ids).startswith(text):
        return None
    spans = token_spans(token_ids, decode) if places else []

    def of(parts: Sequence[Span]) -> tuple[float, ...]:
        touched = (any(start < end and begin < stop for begin, end in parts) for start, stop in spans)
        return tuple(
            round(value, _DECIMALS) for value, is_in in zip(log_probs, touched, strict=True) if is_in
        )

    found = tuple(ObjectLogProbs(of(each[:1]), of(each[1:])) for each in places)
    return found if all(each.label and each.box for each in found) else None


def token_spans(token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[Span]:
    """The characters of each token; those that share a character all have it.

    Tokens are spelt behind a few others, for some tokenizers spell a first one without its space: from the last one on
    that is spelt alike alone and there, or from a few before if none is.
    """
    spans: list[Span] = []
    first = origin = 0  # a token, and where its text begins
    said = ""
    for number, token in enumerate(token_ids):
        before, said = said, decode(token_ids[first : number + 1])
        spans.append((origin + len(before.rstrip(_UNKNOWN)), origin + len(said)))
        alone = decode([token])
        if alone and _UNKNOWN not in alone and said.endswith(alone):
            first, origin, said = number, origin + len(said) - len(alone), alone
        elif number - first >= _MOST_BEFORE and not said.endswith(_UNKNOWN):
            first, origin, said = number + 1, origin + len(said), ""
    return spans
