"""Turns one rank's ledger into its effective history: what survives of every process that wrote it. Pure.

A resumed process names the checkpoint it begins with; what was written after that checkpoint, by whichever process,
is void. Called by ``ledger_account``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from swift_stage2.telemetry.audit import Record
from swift_stage2.telemetry.ledger import Entry

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
