"""ms-swift plugin for a server on vLLM: answers may not end before they have as many tokens as are drawn for them.

A share of ``LONG_SHARE_VARIABLE`` is long. With a share of 0 every answer is as long as one in twenty long ones make
the mean, so that both have the same work. What such answers say is of no use.
"""

from __future__ import annotations

import os
import random
from typing import Any

from vllm import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from benchmarks.servers import LONG_SHARE_VARIABLE

LONG_TOKENS = 400
"""Ten times what the demo's model answers, about."""
_EVEN_TOKENS = 43
"""Least tokens of every answer that make the mean of ``matched`` answers what a share of 0.05 makes it."""

_MEDIA_TOKENS = (6, 7)
"""Of the demo's model, which names them where it may not end. An answer that holds one is not trained by its reward."""

_share = float(os.environ[LONG_SHARE_VARIABLE])
_draw = random.Random(0).random
_generate = AsyncLLM.generate


def _drawn(self: AsyncLLM, prompt: Any, sampling_params: SamplingParams, *args: Any, **more: Any) -> Any:
    if (sampling_params.max_tokens or 0) >= LONG_TOKENS:
        sampling_params = sampling_params.clone()
        sampling_params.logit_bias = dict.fromkeys(_MEDIA_TOKENS, -100.0)
        least = 0 if _share else _EVEN_TOKENS
        sampling_params.min_tokens = LONG_TOKENS if _draw() < _share else least
    return _generate(self, prompt, sampling_params, *args, **more)


AsyncLLM.generate = _drawn
