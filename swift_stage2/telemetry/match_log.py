"""Keeps whole matches of a few rows, for the report's gallery and its match drift: ``RUN_DIR/matches/rankN.jsonl``.

The rows are chosen by the run's seed and are the same on all ranks and in every epoch, so that a row is seen again
under later versions. Written by the audit's own line writer, up to a bound.
"""

from __future__ import annotations

import random
from collections.abc import Container
from pathlib import Path

from swift_stage2.records import IntegerBox, Rollout, Target
from swift_stage2.telemetry.audit import AuditLog

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
