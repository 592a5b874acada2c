"""The turns of a conversation, as ms-swift's schedulers answer them, in the token ids of the whole of it.

A reply holds the ids before the last turn, those of every turn and which of them the model sampled, but not where the
turns stand. Between them stands what the environment said.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby

from swift_stage2.errors import ProtocolError

Turn = tuple[int, int]
"""Positions ``start <= i < end`` that the model sampled, one after the other."""

_HEADER_TOKENS = 3  # with which a chat template begins an answer, as in <|im_start|>assistant\n


def place_turns(
    token_ids: Sequence[int], turns: Sequence[Sequence[int]], masks: Sequence[Sequence[int]]
) -> tuple[int, tuple[Turn, ...]]:
    """Where the answer begins in the ids of a conversation, which end with its last turn, and its sampled turns.

    ``turns`` are the assistant's messages and ``masks`` has 1 for each of their tokens that the model sampled, 0 for
    one that a scheduler put in. A turn stands where the tokens before it are most like those before the last one, at
    the later of two such places: one that is nothing but an end of turn must not be found at every message's end.

    Returns:
        The position of the first turn, and each unbroken run of sampled tokens, counted from there.

    Raises:
        ProtocolError: other masks than turns, none sampled, or a turn that is not there.
    """
    if [len(turn) for turn in turns] != [len(mask) for mask in masks]:
        raise ProtocolError(
            f"every turn's token needs a mask, got num_turns={len(turns)} num_tokens={sum(map(len, turns))} "
            f"num_masks={len(masks)} num_values={sum(map(len, masks))}"
        )
    starts = _starts(token_ids, turns)
    first, is_sampled = starts[0], [0] * (len(token_ids) - starts[0])
    for start, mask in zip(starts, masks, strict=True):
        is_sampled[start - first : start - first + len(mask)] = mask
    found, end = list[Turn](), 0
    for value, run in groupby(is_sampled):
        start, end = end, end + len(tuple(run))
        if value:
            found.append((start, end))
    if is_sampled and not found:
        raise ProtocolError(f"the model must have sampled something, got num_masked={len(is_sampled)} tokens")
    return first, tuple(found)


def _starts(token_ids: Sequence[int], turns: Sequence[Sequence[int]]) -> list[int]:
    # As texts read backwards: Python finds the last place of a part in a time linear in the text.
    whole, end = _backwards(token_ids), len(token_ids)
    starts = [end - len(turns[-1])]
    if tuple(token_ids[starts[0] :]) != tuple(turns[-1]):
        raise ProtocolError(
            f"a conversation of {end} tokens must end with its last turn, of {len(turns[-1])}"
        )
    header = whole[len(turns[-1]) :][:_HEADER_TOKENS]
    for number in range(len(turns) - 2, -1, -1):
        turn, before = _backwards(turns[number]), end - starts[-1]
        places = (whole.find(turn + header[:length], before) for length in range(len(header), -1, -1))
        place = next((place for place in places if place >= 0), -1)
        if place < 0:
            raise ProtocolError(
                f"every turn must stand in its conversation, got none such before position {starts[-1]} for turn "
                f"{number + 1} of {len(turns)}, of {len(turn)} tokens"
            )
        starts.append(end - place - len(turn))
    return starts[::-1]


def _backwards(token_ids: Sequence[int]) -> str:
    try:
        return "".join(map(chr, reversed(token_ids)))
    except (ValueError, OverflowError) as error:
        raise ProtocolError(f"token ids must be numbers of a vocabulary: {error}") from error


def spread(
    values: Sequence[float], turns: Sequence[Turn], num_tokens: int, filler: float
) -> tuple[float, ...]:
    """Values of sampled tokens, in order, at their positions; ``filler`` at all others."""
    spread_out, given = [filler] * num_tokens, iter(values)
    for place in chain.from_iterable(range(*turn) for turn in turns):
        spread_out[place] = next(given)
    return tuple(spread_out)
