"""An answer goes on behind its first ids, which come with the request as they were sampled. For both engines.

The ids go behind the encoded prompt. Neither a tokenizer nor a template sees them: another spelling of the same text
would be another answer. Images stay the prompt's own, so an id that stands for media is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from swift_stage2.errors import SampleError

# Per-token fields of ms-swift's encoded inputs beside the ids, and what they say of a token of an answer.
_OF_AN_ANSWER = {"token_type_ids": 0, "mm_token_type_ids": 0, "image_token_types": -1}
_AGAIN = "ask again without prefix_token_ids"


def append_prefix(
    inputs: dict[str, Any],
    prefix: Sequence[int],
    *,
    num_ids: int,
    end_ids: Collection[int],
    media_ids: Collection[int],
) -> dict[str, Any]:
    """The encoded prompt with ``prefix`` behind it. ``num_ids`` is the size of the model's vocabulary.

    Raises:
        SampleError: an id that is none of the model's, ends an answer or stands for media; or a template that numbers
            positions itself.
    """
    for place, token in enumerate(prefix):
        if token >= num_ids:
            raise SampleError(
                "prefix_token_ids must be ids of the model's vocabulary",
                got=f"prefix_token_ids[{place}]={token} num_ids={num_ids}",
                remedy="send the ids that this model has sampled",
            )
        if token in end_ids:
            raise SampleError(
                "an answer cannot go on behind the token that ends it",
                got=f"prefix_token_ids[{place}]={token}",
                remedy=_AGAIN,
            )
        if token in media_ids:
            raise SampleError(
                "prefix_token_ids may hold no token that stands for an image, video or audio",
                got=f"prefix_token_ids[{place}]={token}",
                remedy=_AGAIN,
            )
    if inputs.get("position_ids") is not None:
        raise SampleError(
            "this model's template numbers positions itself, so it takes no prefix", remedy=_AGAIN
        )
    return {
        **inputs,
        "input_ids": [*inputs["input_ids"], *prefix],
        **{
            key: _extended(inputs[key], len(prefix), filler)
            for key, filler in _OF_AN_ANSWER.items()
            if inputs.get(key) is not None
        },
    }


def _extended(values: Any, num_more: int, filler: int) -> Any:
    if isinstance(values, torch.Tensor):
        more = values.new_full((*values.shape[:-1], num_more), filler)
        return torch.cat([values, more], dim=-1)
    return [*values, *[filler] * num_more]
