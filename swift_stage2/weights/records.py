"""What a sync round is given: the records between the round and its pushes. What comes of it is in ``records.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from swift_stage2.config import Proof
from swift_stage2.servers.protocol import TensorSpec
from swift_stage2.servers.session import Deadline


class Canary(Protocol):
    """One greedy question whose answer the learner knows."""

    @property
    def request(self) -> dict[str, Any]: ...

    @property
    def config(self) -> dict[str, Any]: ...

    def answer(self) -> None:
        """Computes the learner's own answer under its present weights; same cost on every call.

        A collective of all ranks when no rank holds whole tensors (ZeRO-3), else called on rank 0 alone.
        """

    def agrees(self, token_ids: Sequence[int]) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOrder:
    """What one round asks of every server that takes part."""

    round_id: str
    run_id: str
    version: int
    manifest: tuple[TensorSpec, ...]  # the learner's own
    canary: Canary
    proof: Proof
    api_key: str | None
    deadline: Deadline  # of every call
