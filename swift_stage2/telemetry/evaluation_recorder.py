"""Turns evaluations into audit records: every POST, every sample given up, and what came of the whole.

Apart from the pipeline's recorder, so that nothing of an evaluation reaches the ledger or the counters of what
trains. POSTs are told on the threads of their lanes.
"""

from __future__ import annotations

from collections.abc import Sequence

from swift_stage2.telemetry.audit import AuditLog
from swift_stage2.telemetry.facts import EvaluationFacts, KeyFacts, RolloutFacts, TargetFacts
from swift_stage2.telemetry.match_log import MatchLog
from swift_stage2.telemetry.metrics import PREFIX


class EvaluationRecorder:
    """One rank's side of evaluations."""

    def __init__(self, audit: AuditLog, matches: MatchLog) -> None:
        self._audit = audit
        self._matches = matches
        self._versions: dict[str, int] = {}  # of the POST that each server is asked; a lane has one at a time

    def sent(self, keys: Sequence[KeyFacts], *, server: str, seed: int, version: int) -> None:
        """A POST begins."""
        self._versions[server] = version

    def finished(self, keys: Sequence[KeyFacts], *, server: str, end: str, seconds: float) -> None:
        """It is over; its ticket is still held."""
        self._audit.write(
            "post",
            purpose="evaluation",
            server=server,
            version=self._versions[server],
            end=end,
            seconds=seconds,
            rows=[key.index for key in keys],
        )

    def matched(self, rollout: RolloutFacts, target: TargetFacts, space: tuple[int, int] | None) -> None:
        """A sample was answered; ``space`` is that of the boxes, width and height."""
        self._matches.evaluation(rollout, target, space)

    def given_up(self, index: int, message: str) -> None:
        """Row ``index`` of the validation set counts as failed."""
        self._audit.write("evaluation_failure", row=index, message=message)

    def ended(self, facts: EvaluationFacts) -> dict[str, float]:
        """One evaluation, summed over ranks; returns its scalars by full tag."""
        counts = facts.counts
        self._audit.write(
            "evaluation",
            step=facts.ended_step,
            due_step=facts.run.due_step,
            begun_step=facts.run.begun_step,
            version=facts.run.version,
            end=facts.end,
            counts=counts,
            ratios=counts.ratios,
        )
        values = dict(counts.ratios) | {"num_samples": counts.num_answered, "version": facts.run.version}
        return {f"{PREFIX}eval/{name}": float(value) for name, value in values.items()}
