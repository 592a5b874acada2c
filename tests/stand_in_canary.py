"""A learner's canary that generates nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class StandInCanary:
    """Agrees with every answer."""

    def __init__(self) -> None:
        self.request: dict[str, Any] = {"messages": [{"role": "user", "content": "ping"}]}
        self.config: dict[str, Any] = {}

    def answer(self) -> None: ...

    def agrees(self, token_ids: Sequence[int]) -> bool:
        return True


class UnaskedCanary(StandInCanary):
    """Of rounds that checksums prove."""

    def agrees(self, token_ids: Sequence[int]) -> bool:
        raise AssertionError("a proof by checksums asks no canary")
