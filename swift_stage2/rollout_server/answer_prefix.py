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
        faults = {
            "must be ids of the model's vocabulary": token >= num_ids,
            "may not end in the token that ends an answer": token in end_ids,
            "may hold no token that stands for an image, video or audio": token in media_ids,
        }
        for rule, is_broken in faults.items():
            if is_broken:
                got = f"prefix_token_ids[{place}]={token} num_ids={num_ids}"
                raise SampleError(f"prefix_token_ids {rule}", got=got, remedy=_AGAIN)
    if inputs.get("position_ids") is not None:
        raise SampleError(
            "this model's template numbers positions itself, so it takes no prefix", remedy=_AGAIN
        )
    longer = {**inputs, "input_ids": [*inputs["input_ids"], *prefix]}
    for key, filler in _OF_AN_ANSWER.items():
        if isinstance(values := inputs.get(key), torch.Tensor):
            more = values.new_full((*values.shape[:-1], len(prefix)), filler)
            longer[key] = torch.cat([values, more], dim=-1)
        elif values is not None:
            longer[key] = [*values, *[filler] * len(prefix)]
    return longer
