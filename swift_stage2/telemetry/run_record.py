"""Keeps what a replay needs and the ledger does not hold: ``RUN_DIR/record/rankN.jsonl``, JSON lines that only grow.

What the servers said, which channel every step trained, and every loss to the last bit. Samples, packs and who
trained them stand in the ledger; a replay joins the two. Written by the audit's own line writer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from swift_stage2.telemetry.audit import AuditLog
from swift_stage2.telemetry.facts import RolloutFacts, StepFacts
from swift_stage2.telemetry.ledger import Entry


class RecordEntry(StrEnum):
    """What a line tells."""

    START = Entry.START.value
    """A process began: the ``run_id`` that its ledger has too, its configuration and surroundings."""
    COMPLETION = "completion"
    """What a server said to ``sample``, [epoch, position, index, attempt]."""
    STEP = "step"
    """A step's plan, before it trains. The packs of channel B are those that the ledger says ``step`` trained."""
    LOSSES = "losses"
    """The step is over; the loss of every micro_step as ``float.hex``."""


def record_path(run_dir: Path, rank: int) -> Path:
    """Where ``rank`` of a run writes."""
    return run_dir / "record" / f"rank{rank}.jsonl"


class RunRecord:
    """One rank's part of what a replay needs. Safe for any number of threads; never raises for the disk's sake."""

    def __init__(self, log: AuditLog) -> None:
        self._log = log

    def start(
        self,
        *,
        run_id: str,
        step: int,
        world_size: int,
        config: Mapping[str, Any],
        surroundings: Mapping[str, Any],
    ) -> None:
        """A process begins before ``step``. ``config`` holds no secret."""
        self._log.write(
            RecordEntry.START,
            run_id=run_id,
            step=step,
            world_size=world_size,
            config=config,
            surroundings=surroundings,
        )

    def completion(self, rollout: RolloutFacts) -> None:
        """A server answered; called before the rollout becomes a segment."""
        key = rollout.sample.key
        self._log.write(
            RecordEntry.COMPLETION,
            sample=[key.epoch, key.position, key.index, key.attempt],
            text=rollout.text,
            token_ids=rollout.token_ids,
            truncated=rollout.truncated,
            spans=[[span.version, span.start, span.end] for span in rollout.spans],
        )

    def step(self, facts: StepFacts) -> None:
        """A step's plan is made; ``version`` tells which round was the last one committed before it."""
        self._log.write(RecordEntry.STEP, step=facts.step, channel=facts.plan.channel, version=facts.version)

    def losses(self, step: int, losses: Sequence[str]) -> None:
        """``step`` has trained."""
        self._log.write(RecordEntry.LOSSES, step=step, losses=losses)

    def close(self) -> None:
        """Close the file; later lines are dropped. May be called again."""
        self._log.close()
