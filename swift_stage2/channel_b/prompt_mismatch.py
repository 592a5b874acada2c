"""Whose fault it is when a server's prompt is not the learner's: a sample's, or the server's. Pure.

A server with another processor or template differs on every sample, a bad sample differs alone: so a sample is given up
only where its server agreed with the learner on another one. Other pixel limits differ on large images only, and are
told by ``doctor`` and by the samples that are given up. Called by the pipeline.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from swift_stage2.errors import PromptMismatch
from swift_stage2.records import Rollout


def misreading_servers(
    rollouts: Sequence[Rollout], found: Sequence[object], agreeing: Container[str]
) -> dict[str, str]:
    """Base URL → why the server is suspect; ``found[i]`` is what became of ``rollouts[i]``, or its refusal.

    ``agreeing`` are the servers whose prompt was the learner's for any sample, here or since a round proved them anew.
    """
    mismatches: dict[str, list[PromptMismatch]] = {}
    for rollout, each in zip(rollouts, found, strict=True):
        if isinstance(each, PromptMismatch) and rollout.server not in agreeing:
            mismatches.setdefault(rollout.server, []).append(each)
    return {
        server: f"its prompts differ from the learner's ({len(each)} of {len(each)}, and none agreed before): {each[0]}"
        for server, each in mismatches.items()
    }
