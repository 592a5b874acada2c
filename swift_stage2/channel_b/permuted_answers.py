"""Finds servers that gave one request's answer to another, by the prompt ids that every answer carries. Pure.

An answer whose prompt is that of another sample in the same batch says nothing against its own sample; and where one
answer went astray, those to equal prompts may have as well. Called by the pipeline and by evaluations.
"""

from __future__ import annotations

from collections.abc import Sequence

from swift_stage2.errors import PromptMismatch
from swift_stage2.records import Rollout

PERMUTED = "it gave one request's answer to another, as the prompt ids of its answers show"


def permuting_servers(rollouts: Sequence[Rollout], found: Sequence[object]) -> frozenset[str]:
    """Base URLs among ``rollouts``; ``found[i]`` is what the preprocessor made of ``rollouts[i]``, or its refusal."""
    asked: dict[str, set[tuple[int, ...]]] = {}
    for rollout, each in zip(rollouts, found, strict=True):
        prompt = each.expected if isinstance(each, PromptMismatch) else rollout.prompt_token_ids
        asked.setdefault(rollout.server, set()).add(prompt)
    return frozenset(
        rollout.server
        for rollout, each in zip(rollouts, found, strict=True)
        if isinstance(each, PromptMismatch) and rollout.prompt_token_ids in asked[rollout.server]
    )
