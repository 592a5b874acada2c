"""Turns the ledgers of all ranks into an account: what became of every sample, and what breaks the rules. Pure.

Each rank's effective history is replayed by itself; then the ranks are compared. ``docs/design/ledger.md`` lists the
rules. Called by ``report`` and by the fault bench.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from swift_stage2.telemetry.audit import Record
from swift_stage2.telemetry.ledger import Entry
from swift_stage2.telemetry.ledger_history import Process, effective_history, run_of, split_by_process
from swift_stage2.telemetry.ledger_replay import RankAccount, Replay, Violation
from swift_stage2.telemetry.ledger_witnesses import Witness, doubts_of


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
