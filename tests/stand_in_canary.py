"""A learner's canary that generates nothing."""

from __future__ import annotations

from collections.abc import Sequence

from swift_stage2.weights.proof import CanaryAnswer

REQUEST = {"messages": [{"role": "user", "content": "ping"}]}


class AgreeingAnswer(CanaryAnswer):
    """Agrees with every answer."""

    def agrees(self, token_ids: Sequence[int]) -> bool:
        return True


class RefusingAnswer(CanaryAnswer):
    """Must not be asked."""

    def agrees(self, token_ids: Sequence[int]) -> bool:
        raise AssertionError("a proof by checksums asks no canary")


class StandInCanary:
    def answer(self) -> CanaryAnswer:
        return AgreeingAnswer(REQUEST, {})


class UnaskedCanary:
    """Of versions that checksums prove."""

    def answer(self) -> CanaryAnswer:
        return RefusingAnswer(REQUEST, {})
