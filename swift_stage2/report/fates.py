"""Tells from a ledger what became of every draw of a sample, in words. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from swift_stage2.report.matches import Key
from swift_stage2.telemetry.audit import Record
from swift_stage2.telemetry.ledger import Entry


def fates_of(records: Iterable[Record]) -> dict[Key, str]:
    """By draw of one rank's effective history; a draw that is still in hand is absent."""
    fates: dict[Key, str] = {}
    drawn: dict[
        tuple[int, int], Key
    ] = {}  # a return names the attempt that comes next, not the one that ended
    for record in records:
        fate = _fate(record)
        for sample in record.get("samples", ()):
            place, key = (sample[0], sample[1]), (sample[0], sample[1], sample[2], sample[3])
            if record["kind"] == Entry.DRAWN:
                drawn[place] = key
            elif fate:
                fates[drawn.pop(place, key)] = fate
    return fates


def _fate(record: Record) -> str | None:
    match record["kind"]:
        case Entry.TRAINED:
            return f"trained at step {record['step']}"
        case Entry.QUARANTINED:
            return f"given up: {record['reason']}"
        case Entry.RETURNED:
            return f"not trained, asked again: {record['reason']}"
    return None
