"""Writes of every sample its life, of every answer what a replay needs, and of a few rows the whole matches.

    RUN_DIR/ledger/rankN.jsonl    ``Ledger``; ``docs/design/channel_b.md`` tells what it proves
    RUN_DIR/record/rankN.jsonl    of the kinds ``RecordEntry``
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
from functools import partial
from typing import Any, Literal

from swift_stage2.columns import given_by
from swift_stage2.records import MatchQuality, Pack, Rollout, SampleKey, Target, VersionSpan, image_paths
from swift_stage2.telemetry.audit import AuditLog, rank_path

ledger_path = partial(rank_path, "ledger")
record_path = partial(rank_path, "record")
matches_path = partial(rank_path, "matches")


class Entry(StrEnum):
    """A kind of record. ``samples`` are [epoch, position, index, attempt] each."""

    START = "start"
    """A process began before ``step``, with ``state``; from the checkpoint ``save_id`` if it resumed one."""
    DRAWN = "drawn"
    READ = "read"
    """Row and images were read: ``num_objects`` and ``num_pixels`` of each, the latter null if unknown."""
    SENT = "sent"
    """A POST left: ``server``, ``seed``, ``version``."""
    FINISHED = "finished"
    """It ended: ``end`` is "answered" or says why not."""
    CUT = "cut"
    """Its answer had been aborted and is going to be resumed: ``spans`` are those of all ``num_tokens`` so far."""
    MATCHED = "matched"
    """A rollout of ``num_rollout_tokens`` was parsed, matched and corrected; ``version`` is that of the oldest of its
    ``spans``."""
    PACKED = "packed"
    RETURNED = "returned"
    """They are drawn again before any new one; ``samples`` have the attempt that they are drawn with."""
    TRAINED = "trained"
    """``step`` takes them; it is void if the process does not survive that step and the run is resumed."""
    QUARANTINED = "quarantined"
    UNUSED = "unused"
    """Nothing is trained of their rollouts; ``reason`` is an ``UnusedReason``."""
    CHECKPOINT = "checkpoint"
    """``state`` is the source's, as the checkpoint ``save_id`` before ``step`` holds it."""
    END = "end"
    """The process ended in order; it writes nothing after this."""
    TORN = "torn"
    """Never written: the reader puts it in the place of a line that its process did not come to finish."""


class ReturnReason(StrEnum):
    """Why a drawn sample came back untrained, to be drawn again."""

    STALE = "stale"
    """Its rollout fell out of the version window."""
    OVERFLOW = "overflow"
    """Its pack was the oldest of a queue over its limit."""
    TIMED_OUT = "timed_out"
    """It was asked alone and did not answer in time."""
    ABORTED = "aborted"
    """Its server ended it early for a pending round."""
    FAILED = "failed"
    """No server answered it: none was proven, the one asked was lost or refused, or the batch's time was over. Or no
    round proved the weights that answered."""
    STOPPED = "stopped"
    """The run ended while it was asked."""

    @property
    def counts_attempt(self) -> bool:
        """True if this return counts as an attempt. A server's fault does not."""
        return self in (ReturnReason.STALE, ReturnReason.OVERFLOW, ReturnReason.TIMED_OUT)


class UnusedReason(StrEnum):
    """Why nothing is trained of a rollout that was compared with others, though nothing is wrong with it."""

    NO_VARIANCE = "no_variance"
    """All rewards of its group are equal."""
    TOO_SMALL = "too_small"
    """Fewer than ``min_group`` of its group were left."""
    DROPPED = "dropped"
    """Its segment was dropped, and too few others of its group to compare it with another rollout."""


class Ledger:
    """One rank's record of every sample's life. Safe for any number of threads; never raises for the disk's sake."""

    def __init__(self, log: AuditLog) -> None:
        self._log = log
        self._has_started = False

    def write(self, entry: Entry, keys: Sequence[SampleKey] | None = None, /, **facts: Any) -> None:
        """Tells ``entry`` of the samples ``keys``. ``record_forms.LEDGER_FORMS`` declares the facts of each kind."""
        self._has_started |= entry is Entry.START
        samples = {} if keys is None else {"samples": [key.entry for key in keys]}
        self._log.write(entry, **samples, **facts)

    def sent(self, keys: Sequence[SampleKey], *, server: str, seed: int, version: int) -> None:
        """A POST asks ``server``, which was proven with ``version``, for one rollout each."""
        self.write(Entry.SENT, keys, server=server, seed=seed, version=version)

    def finished(self, keys: Sequence[SampleKey], *, server: str, end: str, seconds: float) -> None:
        self.write(Entry.FINISHED, keys, server=server, end=end, seconds=round(seconds, 4))

    def cut(self, rollout: Rollout) -> None:
        """It was aborted, and its rest is asked for."""
        self.write(
            Entry.CUT, [rollout.sample.key], num_tokens=len(rollout.token_ids), spans=spans_of(rollout.spans)
        )

    def matched(self, rollout: Rollout, quality: MatchQuality) -> None:
        self.write(
            Entry.MATCHED,
            [rollout.sample.key],
            version=rollout.version,
            spans=spans_of(rollout.spans),
            num_rollout_tokens=len(rollout.token_ids),
            quality=quality,
        )

    def packed(self, pack: Pack) -> None:
        """Segments became a pack; called before the pack can be trained or dropped."""
        self.write(
            Entry.PACKED,
            pack.keys,
            pack_id=pack.pack_id,
            version=pack.version,
            num_tokens=pack.num_tokens,
            capacity_tokens=pack.capacity_tokens,
        )

    def flush_to_disk(self) -> None:
        """Makes what was written outlast the machine's end; called before a checkpoint is written."""
        self._log.flush_to_disk()

    def close(self) -> None:
        """Tell the end and close the file; later records are dropped. May be called again."""
        self._log.close(last=Entry.END if self._has_started else None)


class RecordEntry(StrEnum):
    START = Entry.START.value
    """A process began: the ``run_id`` that its ledger has too, its configuration and surroundings."""
    COMPLETION = "completion"
    """A server's answer to ``sample``, [epoch, position, index, attempt]; told before it becomes a segment."""
    ADVANTAGES = "advantages"
    """Those of completions that were compared, in the order of ``samples``; told before they become segments."""
    STEP = "step"
    """A step's plan, before it trains. The packs of channel B are those that the ledger says ``step`` trained."""
    LOSSES = "losses"
    """The step is over; the loss of every micro_step as ``float.hex``."""


def spans_of(spans: Sequence[VersionSpan]) -> list[list[int]]:
    """The form in which every file of a run has them: version, start, end."""
    return [[span.version, span.start, span.end] for span in spans]


def completion_of(rollout: Rollout) -> dict[str, Any]:
    """The facts of a ``COMPLETION``."""
    return {
        "sample": rollout.sample.key.entry,
        "text": rollout.text,
        "token_ids": rollout.token_ids,
        "truncated": rollout.truncated,
        "spans": spans_of(rollout.spans),
        **given_by(rollout),
    }


MOST_BYTES = 64 * 2**20
_EVALUATED_ROWS = 64
Purpose = Literal["training", "evaluation"]


def rows_to_keep(num_rows: int, num_kept: int, seed: int) -> frozenset[int]:
    """Which rows of the training set are kept, at most ``num_kept``."""
    return frozenset(random.Random(seed).sample(range(num_rows), min(num_kept, num_rows)))


class MatchLog:
    """One rank's part. Used from the pipeline's thread."""

    def __init__(self, log: AuditLog, rows: Container[int]) -> None:
        """``rows`` of the training set are kept; of a validation set the first few, if any is."""
        self._log = log
        self._rows: Mapping[Purpose, Container[int]] = {
            "training": rows,
            "evaluation": range(_EVALUATED_ROWS) if rows else (),
        }

    def write(
        self, purpose: Purpose, rollout: Rollout, target: Target, space: tuple[int, int] | None
    ) -> None:
        """A rollout became a segment, or a sample of an evaluation was answered."""
        match, key = target.match, rollout.sample.key
        if key.index not in self._rows[purpose]:
            return
        if match is None or space is None or self._log.num_bytes > MOST_BYTES:
            return
        self._log.write(
            "match",
            purpose=purpose,
            sample=key.entry,
            version=rollout.version,
            spans=spans_of(rollout.spans),
            images=image_paths(rollout.sample.row),
            space=space,
            truth=[{"label": label, "box": box} for label, box in match.truth],
            predicted=[{"label": label, "box": box} for label, box in match.predicted],
            pairs=[[prediction, truth, round(iou, 4)] for prediction, truth, iou in match.pairs],
            rollout=rollout.text,
            target=target.text,
            truncated=rollout.truncated,
            dropped=target.quality.dropped,
            reward={term: round(value, 4) for term, value in target.quality.reward.items()},
        )
