"""Whose fault it is when a server's prompt is not the learner's: a sample's, or the server's. Pure.

A server with another processor or template differs on every sample, a bad sample differs alone: so a sample is given up
only where its server agreed with the learner on another one. Other pixel limits differ on large images only, so that a
server with many such samples is told of. Called by the pipeline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence

from swift_stage2.errors import PromptMismatch
from swift_stage2.records import Rollout

MANY_GIVEN_UP = 8


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


class MismatchTally:
    """Counts by server the samples that are given up because it was asked another prompt."""

    def __init__(self) -> None:
        self._num_given_up: Counter[str] = Counter()

    def note(self, server: str, mismatch: PromptMismatch) -> str | None:
        """One more sample of ``server``; a warning once there are ``MANY_GIVEN_UP``, and only then."""
        self._num_given_up[server] += 1
        if self._num_given_up[server] != MANY_GIVEN_UP:
            return None
        return (
            f"{server}: its prompts agree with the learner's for some samples and differed for {MANY_GIVEN_UP}, which "
            "were given up; where only large images differ, pixel limits do: compare max_pixels and template of server "
            f"and learner; the last one: {mismatch}"
        )
