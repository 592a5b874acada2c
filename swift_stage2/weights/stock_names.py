"""Tensor names of the learner against those of vLLM, which fuses some and nests modules in another order. Pure.

vLLM loads by the names of checkpoints. transformers may give a module another name while it runs, and ms-swift turns
such names back in its own push; the learner's export does not, so rounds and doctor compare.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# The learner's name -> vLLM's, where several tensors become one.
_FUSINGS = (
    (re.compile(r"\.(q|k|v)_proj\."), ".qkv_proj."),
    (re.compile(r"\.experts\.\d+\.(gate|up)_proj\.weight"), ".experts.w13_weight"),
    (re.compile(r"\.experts\.\d+\.down_proj\.weight"), ".experts.w2_weight"),
    (re.compile(r"\.(gate|up)_proj\."), ".gate_up_proj."),
)
# Hugging Face and vLLM nest the same modules in other orders of these.
_WRAPPERS = ("model.", "language_model.")


def differing_names(learner: Iterable[str], server_keys: Iterable[str]) -> list[str]:
    """The learner's tensors that vLLM has no place for, then vLLM's that none fills; tied output layers left out."""
    wanted = {vllm_name(name): name for name in learner}
    held = {_unwrapped(key) for key in server_keys}
    homeless = sorted(name for fused, name in wanted.items() if fused not in held)
    return [name for name in (*homeless, *sorted(held - wanted.keys())) if "lm_head" not in name]


def vllm_name(name: str) -> str:
    """Where vLLM keeps a tensor of the learner, without the wrapping modules in front."""
    for pattern, fused in _FUSINGS:
        name = pattern.sub(fused, name)
    return _unwrapped(name)


def _unwrapped(name: str) -> str:
    while name.startswith(_WRAPPERS):
        name = name.partition(".")[2]
    return name
