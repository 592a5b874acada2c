"""What a sync round is given and what comes of it: the records between the round, its pushes and every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
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


@dataclass(frozen=True, slots=True)
class ServerReport:
    """How one server fared in one round.

    ``seconds`` by phase: begin, connect, push, acknowledge, prove; apart from these, during the push: wait
    (for the learner's next bucket) and pack (cast, checksums, one flat tensor).
    """

    proven: bool
    error: str | None
    proof: str  # "checksums+canary", "checksums" or "canary"
    num_bytes: int
    seconds: dict[str, float]
    incarnation: str | None = None


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """What every rank learns of a round."""

    round_id: str
    version: int
    reports: dict[int, ServerReport] = field(default_factory=dict)
    learner_fault: str | None = None
    hung: str | None = None
    seconds: float = 0.0
    canary_seconds: float = 0.0
    export_seconds: float = 0.0  # reading, merging and gathering weights; once for all servers

    @property
    def proven(self) -> tuple[int, ...]:
        return tuple(server for server, report in self.reports.items() if report.proven)

    @property
    def failed(self) -> tuple[int, ...]:
        return tuple(server for server, report in self.reports.items() if not report.proven)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RoundOutcome:
        reports = {int(server): ServerReport(**report) for server, report in data["reports"].items()}
        return cls(**{**data, "reports": reports})
