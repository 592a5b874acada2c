"""Compares a rank's ledger with what else tells of its samples: the audit's steps, and the checkpoints on disk. Pure.

A ledger whose last records are lost looks like that of a run that was killed earlier. Only what was written elsewhere
can tell them apart. Called by ``ledger_account``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from swift_stage2.telemetry.audit import Record
from swift_stage2.telemetry.ledger import Entry
from swift_stage2.telemetry.ledger_history import Process, run_of

_MOST_STEPS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What one rank's file in a checkpoint says of its samples."""

    name: str
    step: int
    save_id: str
    state: Mapping[str, Any]


@dataclass(slots=True)
class Witness:
    """What else is known of one rank."""

    packs: set[tuple[int, str]] = field(default_factory=set)
    """(step, pack) that the audit tells of; a step's ledger record is written before its audit record."""
    ended_run: str | None = None
    """The id of the last process, if its audit tells an orderly end, which its ledger tells before."""
    checkpoints: list[Checkpoint] = field(default_factory=list)
    """Those on disk; the ledger's record of one is there before it."""


def doubts_of(
    rank: int, witness: Witness, history: Sequence[Process], ledger: Sequence[Record]
) -> Iterator[str]:
    """What is missing in a rank's ``ledger``, of which ``history`` counts."""
    records = list(chain.from_iterable(history))
    trained = {(record["step"], record["pack_id"]) for record in records if record["kind"] == Entry.TRAINED}
    if missing := sorted(witness.packs - trained):
        steps = sorted({step for step, _ in missing})
        yield (
            f"rank {rank}: the audit tells of {len(witness.packs)} packs of channel B that steps trained, the ledger "
            f"lacks {len(missing)} of them, of {_named(steps)}"
        )
    if history and witness.ended_run is not None and run_of(history[-1]) == witness.ended_run:
        is_numbered = history[-1][0].get("sequence") is not None  # earlier releases told no end
        if is_numbered and history[-1][-1]["kind"] != Entry.END:
            yield f"rank {rank}: the audit tells that the run ended in order, the ledger ends before that"
    yield from _checkpoints(rank, witness.checkpoints, records, ledger)


def _checkpoints(
    rank: int, checkpoints: Sequence[Checkpoint], records: Sequence[Record], ledger: Sequence[Record]
) -> Iterator[str]:
    first_step = min((record["step"] for record in ledger if record["kind"] == Entry.START), default=0)
    counted = {record["save_id"]: record for record in records if record["kind"] == Entry.CHECKPOINT}
    told = {record.get("save_id") for record in ledger if record["kind"] in (Entry.START, Entry.CHECKPOINT)}
    for checkpoint in checkpoints:
        record = counted.get(checkpoint.save_id)
        if record is None and checkpoint.save_id not in told and checkpoint.step > first_step:
            yield f"rank {rank}: {checkpoint.name} is of a save that the ledger does not tell of"
        elif record is not None and record["state"] != checkpoint.state:
            yield f"rank {rank}: {checkpoint.name} holds other samples in hand than the ledger tells"


def _named(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:_MOST_STEPS_SHOWN]))
    more = len(steps) - _MOST_STEPS_SHOWN
    return f"step{'s' if len(steps) > 1 else ''} {shown}" + (f" and {more} more" if more > 0 else "")
