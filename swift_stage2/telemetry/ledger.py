"""Writes of every sample its life, of every answer what a replay needs, and of a few rows the whole matches.

    RUN_DIR/ledger/rankN.jsonl    ``Ledger``; ``docs/design/ledger.md`` tells what it proves
    RUN_DIR/record/rankN.jsonl    ``RunRecord``
    RUN_DIR/matches/rankN.jsonl   ``MatchLog``, for the report's gallery and match drift

Written by the audit's own line writer, so a torn line is stepped over and a full disk leaves a gap record. What
the sample source tells is written under its lock, so the ledger up to a ``checkpoint`` record and that
checkpoint's state agree exactly. Rows of matches are chosen by the run's seed and are the same on all ranks and in
every epoch, so that a row is seen again under later versions.
"""

from __future__ import annotations

import random
from collections.abc import Container, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from swift_stage2.records import IntegerBox, Pack, Rollout, SampleKey, Segment, StepRecord, Target
from swift_stage2.telemetry.audit import AuditLog


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


MOST_BYTES = 64 * 2**20
_EVALUATED_ROWS = 64


def matches_path(run_dir: Path, rank: int) -> Path:
    """Where ``rank`` of a run writes."""
    return run_dir / "matches" / f"rank{rank}.jsonl"


def rows_to_keep(num_rows: int, num_kept: int, seed: int) -> frozenset[int]:
    """Which rows of the training set are kept, at most ``num_kept``."""
    return frozenset(random.Random(seed).sample(range(num_rows), min(num_kept, num_rows)))


class MatchLog:
    """One rank's part. Used from the pipeline's thread."""

    def __init__(self, log: AuditLog, rows: Container[int]) -> None:
        """``rows`` of the training set are kept; of a validation set the first few, if any is."""
        self._log = log
        self._rows = rows
        self._evaluated: Container[int] = range(_EVALUATED_ROWS) if rows else ()

    def training(self, rollout: Rollout, target: Target, space: tuple[int, int] | None) -> None:
        """A rollout became a segment."""
        if rollout.sample.key.index in self._rows:
            self._write("training", rollout, target, space)

    def evaluation(self, rollout: Rollout, target: Target, space: tuple[int, int] | None) -> None:
        """A sample of an evaluation was answered."""
        if rollout.sample.key.index in self._evaluated:
            self._write("evaluation", rollout, target, space)

    def close(self) -> None:
        """Close the file; later records are dropped. May be called again."""
        self._log.close()

    def _write(self, purpose: str, rollout: Rollout, target: Target, space: tuple[int, int] | None) -> None:
        match, key = target.match, rollout.sample.key
        if match is None or space is None or self._log.num_bytes > MOST_BYTES:
            return
        self._log.write(
            "match",
            purpose=purpose,
            sample=[key.epoch, key.position, key.index, key.attempt],
            version=min(span.version for span in rollout.spans),
            images=rollout.sample.image_paths,
            space=space,
            truth=[_object(each) for each in match.truth],
            predicted=[_object(each) for each in match.predicted],
            pairs=[[prediction, truth, round(iou, 4)] for prediction, truth, iou in match.pairs],
            rollout=rollout.text,
            target=target.text,
            truncated=rollout.truncated,
            dropped=target.quality.dropped,
        )


def _object(each: tuple[str, IntegerBox]) -> dict[str, object]:
    label, box = each
    return {"label": label, "box": box}
