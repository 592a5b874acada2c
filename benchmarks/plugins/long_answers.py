"""ms-swift plugin for a server on vLLM: some answers may not end before they have many tokens.

Of all requests the share that ``LONG_SHARE_VARIABLE`` says, drawn with a seed. What such an answer says is of no use.
"""

from __future__ import annotations

import os
import random
from typing import Any

from vllm import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from benchmarks.servers import LONG_SHARE_VARIABLE

LONG_TOKENS = 400
"""Ten times what the demo's model answers, about."""

_process = InputProcessor.process_inputs
_share = float(os.environ[LONG_SHARE_VARIABLE])
_draw = random.Random(0).random


def process_inputs(
    self: InputProcessor, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
) -> Any:
    if isinstance(params, SamplingParams) and (params.max_tokens or 0) >= LONG_TOKENS and _draw() < _share:
        params = params.clone()
        params.min_tokens = LONG_TOKENS
    return _process(self, request_id, prompt, params, *args, **kwargs)


InputProcessor.process_inputs = process_inputs
