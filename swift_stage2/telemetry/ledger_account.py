"""Turns the ledgers of all ranks into an account: what became of every sample, and what breaks the rules. Pure.

Each rank's effective history is replayed by itself; then the ranks are compared. ``docs/design/ledger.md`` lists the
rules. Called by ``report`` and by the fault bench.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

from swift_stage2.telemetry.audit import Record
from swift_stage2.telemetry.ledger import Entry
from swift_stage2.telemetry.ledger_replay import RankAccount, Replay, Violation

Process = Sequence[Record]
"""What one process wrote; the first record is its ``start``, unless the ledger begins without one."""


def split_by_process(records: Sequence[Record]) -> list[Process]:
    """The processes of a ledger, oldest first."""
    begins = [index for index, record in enumerate(records) if record["kind"] == Entry.START]
    bounds = [0, *(index for index in begins if index), len(records)]
    return [records[begin:end] for begin, end in pairwise(bounds) if records[begin:end]]


def run_of(process: Process) -> str | None:
    """The id that the run's ranks agreed on; None for a process without a ``start``."""
    return process[0].get("run_id")


def effective_history(processes: Sequence[Process]) -> list[Process]:
    """What counts of each process's records, oldest first: those on the way to where the last process stands.

    Each process's records begin with its ``start``. Without the checkpoint that it names, nothing before counts.
    """
    history: list[Process] = []
    number, end = len(processes) - 1, None
    while number >= 0:
        part = processes[number][:end]
        history.append(part)
        save_id = part[0].get("save_id") if part else None
        found = _find_checkpoint(processes[:number], save_id) if save_id else None
        number, end = found or (-1, None)
    return history[::-1]


def _find_checkpoint(processes: Sequence[Process], save_id: str) -> tuple[int, int] | None:
    """(process, number of its records up to and with the checkpoint)."""
    for number in reversed(range(len(processes))):
        for index, record in enumerate(processes[number]):
            if record["kind"] == Entry.CHECKPOINT and record["save_id"] == save_id:
                return number, index + 1
    return None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAccount:
    """All ranks' accounts, and what only shows when they are compared."""

    ranks: tuple[RankAccount, ...]
    violations: tuple[Violation, ...]
    doubts: tuple[str, ...] = ()
    """What others tell of the run and its ledger does not (``ledger_witnesses``), a sentence each."""

    @property
    def num_violations(self) -> int:
        """Broken rules, over all ranks."""
        return len(self.violations) + sum(len(rank.violations) for rank in self.ranks)

    @property
    def is_provable(self) -> bool:
        """Whether every record of the effective history is there, as far as anything tells."""
        return not self.doubts and not any(rank.num_records_lost for rank in self.ranks)

    @property
    def is_balanced(self) -> bool:
        """Whether it is proven that every sample has one end or is in hand."""
        return self.is_provable and self.num_violations == 0


def account_of(
    ledgers: Mapping[int, Sequence[Record]], witnesses: Mapping[int, Witness] | None = None
) -> RunAccount:
    """The account of a run from the records of every rank, oldest first; parts of a run follow each other.

    ``witnesses`` by rank: what else tells of what its ledger must hold.
    """
    histories = effective_histories(ledgers)
    doubts = (
        doubt
        for rank, witness in sorted((witnesses or {}).items())
        for doubt in doubts_of(rank, witness, histories.get(rank, []), ledgers.get(rank, []))
    )
    ranks = tuple(
        _replay(rank, history, sum(len(r["samples"]) for r in ledgers[rank] if r["kind"] == Entry.TRAINED))
        for rank, history in histories.items()
    )
    return RunAccount(ranks=ranks, violations=tuple(_compare(histories)), doubts=tuple(doubts))


def effective_histories(ledgers: Mapping[int, Sequence[Record]]) -> dict[int, list[Process]]:
    """By rank, what counts of each process's records, oldest first."""
    processes = {rank: split_by_process(records) for rank, records in sorted(ledgers.items())}
    # A process that some rank never began cannot have trained, for every step is agreed on by all.
    common = set.intersection(*({run_of(process) for process in every} for every in processes.values()))
    return {
        rank: effective_history([process for process in every if run_of(process) in common])
        for rank, every in processes.items()
    }


def _replay(rank: int, history: Sequence[Process], num_ever_trained: int) -> RankAccount:
    records = [record for process in history for record in process]
    while records and records[-1]["kind"] == Entry.TORN:
        records.pop()  # a process was killed while it wrote this, or is writing it now
    replay = Replay(rank)
    for record in records:
        replay.take(record)
    return replay.account(
        num_resumes=max(0, len(history) - 1), num_void=num_ever_trained - replay.num_trained
    )


def _compare(histories: Mapping[int, Sequence[Process]]) -> Iterator[Violation]:
    if not all(histories.values()):
        yield Violation("all ranks tell of a process that they began together")
        return
    (first, way), *others = (
        (rank, [(process[0].get("run_id"), process[0].get("save_id")) for process in history])
        for rank, history in histories.items()
    )
    for rank, other in others:
        if other != way:
            yield Violation(f"all ranks resume the same checkpoints, rank {rank} others than rank {first}")
    world_size = histories[first][-1][0].get("world_size", 1)
    if missing := sorted(set(range(world_size)) - set(histories)):
        yield Violation(
            f"every rank has a ledger, rank {', '.join(map(str, missing))} of {world_size} has none"
        )
