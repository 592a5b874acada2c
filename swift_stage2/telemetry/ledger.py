"""Keeps every sample's life, ``RUN_DIR/ledger/rankN.jsonl``, and what a replay needs besides, ``RUN_DIR/record/``.

Written by the audit's own line writer, so a torn line is stepped over and a full disk leaves a gap record. What
the sample source tells is written under its lock, so the ledger up to a ``checkpoint`` record and that
checkpoint's state agree exactly. ``docs/design/ledger.md`` tells what it proves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from swift_stage2.errors import UserError
from swift_stage2.records import Pack, Rollout, SampleKey, Segment, StepRecord
from swift_stage2.telemetry.audit import GAP, AuditLog, Record, is_empty_gap, record_of
from swift_stage2.telemetry.record_forms import LEDGER_FORMS, has_form


class Entry(StrEnum):
    """What a record tells. ``samples`` are [epoch, position, index, attempt] each."""

    START = "start"
    """A process began before ``step``, with ``state``; from the checkpoint ``save_id`` if it resumed one."""
    DRAWN = "drawn"
    READ = "read"
    """Row and images were read: ``num_objects`` and ``num_pixels`` of each, the latter null if unknown."""
    SENT = "sent"
    """A POST left: ``server``, ``seed``, ``version``."""
    FINISHED = "finished"
    """It ended: ``end`` is "answered" or says why not."""
    MATCHED = "matched"
    """A rollout of ``num_rollout_tokens`` was parsed, matched, corrected and encoded; ``version`` is the rollout's."""
    PACKED = "packed"
    RETURNED = "returned"
    """They are drawn again before any new one; ``samples`` have the attempt that they are drawn with."""
    TRAINED = "trained"
    """``step`` takes them; it is void if the process does not survive that step and the run is resumed."""
    QUARANTINED = "quarantined"
    CHECKPOINT = "checkpoint"
    """``state`` is the source's, as the checkpoint ``save_id`` before ``step`` holds it."""
    END = "end"
    """The process ended in order; it writes nothing after this."""
    TORN = "torn"
    """Never written: what the reader puts in the place of a line that its process did not come to finish."""


_HEAD = b'{"kind":"'  # of every record


def ledger_path(run_dir: Path, rank: int) -> Path:
    """Where ``rank`` of a run writes."""
    return run_dir / "ledger" / f"rank{rank}.jsonl"


class Ledger:
    """One rank's record of every sample's life. Safe for any number of threads; never raises for the disk's sake."""

    def __init__(self, log: AuditLog) -> None:
        self._log = log
        self._has_started = False

    def start(
        self,
        *,
        run_id: str,
        step: int,
        world_size: int,
        version_window: int,
        save_id: str | None,
        state: Mapping[str, Any],
    ) -> None:
        """A process begins; called before anything is drawn. ``save_id`` names the checkpoint it resumes."""
        self._has_started = True
        self._log.write(
            Entry.START,
            run_id=run_id,
            step=step,
            world_size=world_size,
            version_window=version_window,
            save_id=save_id,
            state=state,
        )

    def drawn(self, keys: Sequence[SampleKey]) -> None:
        """The source gave out these samples, new or returned."""
        self._log.write(Entry.DRAWN, samples=_entries(keys))

    def read(
        self, keys: Sequence[SampleKey], *, num_objects: Sequence[int], num_pixels: Sequence[int | None]
    ) -> None:
        """Rows and images of drawn samples were read; one entry per sample."""
        self._log.write(
            Entry.READ, samples=_entries(keys), num_objects=list(num_objects), num_pixels=list(num_pixels)
        )

    def sent(self, keys: Sequence[SampleKey], *, server: str, seed: int, version: int) -> None:
        """A POST asks ``server``, which holds ``version``, for one rollout each."""
        self._log.write(Entry.SENT, samples=_entries(keys), server=server, seed=seed, version=version)

    def finished(self, keys: Sequence[SampleKey], *, server: str, end: str, seconds: float) -> None:
        """That POST ended."""
        self._log.write(
            Entry.FINISHED, samples=_entries(keys), server=server, end=end, seconds=round(seconds, 4)
        )

    def matched(self, segment: Segment) -> None:
        """A rollout became a segment."""
        self._log.write(
            Entry.MATCHED,
            samples=_entries([segment.key]),
            version=segment.version,
            num_tokens=segment.num_tokens,
            num_rollout_tokens=segment.num_rollout_tokens,
            quality=segment.quality,
        )

    def packed(self, pack: Pack) -> None:
        """Segments became a pack; called before the pack can be trained or dropped."""
        self._log.write(
            Entry.PACKED,
            samples=_entries(pack.keys),
            pack_id=pack.pack_id,
            version=pack.version,
            num_tokens=pack.num_tokens,
            capacity_tokens=pack.capacity_tokens,
        )

    def returned(self, keys: Sequence[SampleKey], reason: str) -> None:
        """Samples came back untrained."""
        self._log.write(Entry.RETURNED, samples=_entries(keys), reason=reason)

    def trained(self, keys: Sequence[SampleKey], *, pack_id: str, step: int, version: int) -> None:
        """``step`` takes a pack, under the weights ``version``."""
        self._log.write(Entry.TRAINED, samples=_entries(keys), pack_id=pack_id, step=step, version=version)

    def quarantined(self, key: SampleKey, reason: str, message: str) -> None:
        """A sample is given up."""
        self._log.write(Entry.QUARANTINED, samples=_entries([key]), reason=reason, message=message)

    def checkpoint(self, *, step: int, save_id: str, state: Mapping[str, Any]) -> None:
        """The source's state was taken for a checkpoint."""
        self._log.write(Entry.CHECKPOINT, step=step, save_id=save_id, state=state)

    def flush_to_disk(self) -> None:
        """Makes what was written outlast the machine's end; called before a checkpoint is written."""
        self._log.flush_to_disk()

    def close(self) -> None:
        """Tell the end and close the file; later records are dropped. May be called again."""
        self._log.close(last=Entry.END if self._has_started else None)


def read_ledger(path: Path) -> list[Record]:
    """The records of one file, in the order in which they were written.

    Where a line is none, or has not the form of its kind: ``Entry.TORN`` if it could be the beginning of one, else a
    gap of one record.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        records = [_parse(line) for line in file if line.strip()]
    return [record for record in records if not is_empty_gap(record)]


def read_ledgers(run_dirs: Sequence[Path]) -> dict[int, list[Record]]:
    """Every rank's records, those of the first directory first.

    Raises:
        UserError: a directory holds no ledger, or one of its files cannot be read.
    """
    ledgers: dict[int, list[Record]] = {}
    for run_dir in run_dirs:
        paths = sorted((run_dir / "ledger").glob("rank*.jsonl"))
        if not paths:
            inside = sorted(str(path.parent) for path in run_dir.glob("v*/ledger"))
            what = f"{run_dir}" if run_dir.is_dir() else f"{run_dir}, which does not exist"
            raise UserError(
                f"a report needs a run's directory with ledger/rank*.jsonl, got {what}; name "
                + (
                    " or ".join(inside)
                    or "swift.output_dir (and in it the folder vN-DATE) of a run that had channel B"
                )
                + ", with telemetry.audit: true"
            )
        for path in paths:
            try:
                ledgers.setdefault(int(path.stem.removeprefix("rank")), []).extend(read_ledger(path))
            except (OSError, ValueError) as error:
                raise UserError(
                    f"a ledger is rank<number>.jsonl and can be read, got path={path}: {error}; make it readable"
                ) from error
    return ledgers


def _parse(line: bytes) -> Record:
    record = record_of(line)
    if record is not None and record["kind"] in LEDGER_FORMS and has_form(record, LEDGER_FORMS):
        return record
    if record is None and (line.startswith(_HEAD) or _HEAD.startswith(line.rstrip(b"\n"))):
        return {"kind": str(Entry.TORN)}
    return {"kind": GAP, "records_lost": 1}


def _entries(keys: Sequence[SampleKey]) -> list[list[int]]:
    return [[key.epoch, key.position, key.index, key.attempt] for key in keys]


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

    def completion(self, rollout: Rollout) -> None:
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

    def step(self, facts: StepRecord) -> None:
        """A step's plan is made; ``version`` tells which round was the last one committed before it."""
        self._log.write(RecordEntry.STEP, step=facts.step, channel=facts.plan.channel, version=facts.version)

    def losses(self, step: int, losses: Sequence[str]) -> None:
        """``step`` has trained."""
        self._log.write(RecordEntry.LOSSES, step=step, losses=losses)

    def close(self) -> None:
        """Close the file; later lines are dropped. May be called again."""
        self._log.close()
