"""Finished rollouts of all ranks, read from logs that the learner writes anyway, while it runs or later.

A rollout is finished when it has been matched: the event ``matched`` tells of it, once, and ``sent`` named its server
before. Its text stands in ``completion``, which a recording has of all, or in the ``match`` of a few rows. Logs only
grow, so each is read from where the last look ended.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from swift_stage2.errors import UserError
from swift_stage2.records import match_ratios
from swift_stage2.telemetry.event_log import EventTail, log_paths, no_log
from swift_stage2.telemetry.events import Damaged, End, Start
from swift_stage2.telemetry.sample_events import (
    Key,
    Match,
    Matched,
    Place,
    Quarantined,
    RecordedCompletion,
    Returned,
    Sent,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRollout:
    """One rollout, as the log tells of it."""

    rollout: str
    """Its name, of which a run has no second one: run id, rank, epoch, position and attempt."""
    time: float
    """When it was matched, in Unix seconds."""
    run_id: str
    """Of the process of the run: a resumed one has another."""
    rank: int
    version: int
    """The oldest that any of its tokens was sampled under."""
    epoch: int
    position: int
    """In the rank's shard of the epoch."""
    row: int
    """Of the data set, among those that channel B uses."""
    group: str | None
    """Rank, epoch and number of its group: of the rollouts that are compared with it. None in a run without groups."""
    attempt: int
    server: str | None
    """That answered, or the merger in front of it; None where the log does not tell."""
    num_tokens: int
    truncated: bool
    pairs: int
    """Predictions that were matched to ground truth."""
    false: int
    """Predictions without a partner."""
    missed: int
    """Ground truth without a partner."""
    mean_iou: float | None
    """Of the pairs; None without any."""
    likeness: str
    """The task's word for what that is a mean of: IoU, or closeness of points."""
    dropped: Mapping[str, int]
    """Objects that the parser dropped, by reason."""
    reward: Mapping[str, float]
    """The task's terms and their ``total``."""
    text: str | None
    """The answer; None where it was not recorded."""


class RunRollouts:
    """The finished rollouts of one run, read on and on."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._ranks: dict[int, _RankRollouts] = {}

    @property
    def has_begun(self) -> bool:
        """Whether a rank has begun its log; False also where there is no run."""
        return bool(log_paths(self._run_dir))

    def require_begun(self, *, may_come: bool) -> None:
        """Raises UserError: there is no run, and none that ``may_come``."""
        if not (self.has_begun or may_come):
            raise no_log(self._run_dir)

    def read(self) -> Iterator[FinishedRollout]:
        """Those that have become known since the last call, by time; to be read to its end.

        Raises:
            UserError: the run has no channel B.
        """
        for rank, path in log_paths(self._run_dir).items():
            if rank not in self._ranks:
                self._ranks[rank] = _RankRollouts(self._run_dir, rank, path)
        return heapq.merge(*(each.read() for each in self._ranks.values()), key=attrgetter("time"))

    @property
    def doubts(self) -> Sequence[str]:
        """Why rollouts of a run that no process works on may be missing; empty if none is."""
        starts = [each.start for each in self._ranks.values() if each.start is not None]
        newest = max(starts, key=lambda start: start.time, default=None)
        found = []
        for rank in sorted({*range(newest.world_size if newest is not None else 1), *self._ranks}):
            told = self._ranks.get(rank)
            if told is None or not told.has_ended_in(newest):
                found.append(f"rank {rank} told no end: it was killed, or a full disk took no more")
            if told is not None and told.num_damaged:
                found.append(f"rank {rank}: {told.num_damaged} lines of its log are damaged")
        return found


class _RankRollouts:
    def __init__(self, run_dir: Path, rank: int, path: Path) -> None:
        self._run_dir = run_dir
        self._rank = rank
        self._tail = EventTail(path)
        self._servers: dict[Place, str] = {}  # of samples in hand
        self._texts: dict[Key, str] = {}
        self.start: Start | None = None
        """Of its last process."""
        self._has_ended = False
        self.num_damaged = 0

    def has_ended_in(self, newest: Start | None) -> bool:
        """Whether its last process is the one that ``newest`` began, and came to its orderly end."""
        is_newest = self.start is not None and newest is not None and self.start.run_id == newest.run_id
        return is_newest and self._has_ended

    def read(self) -> Iterator[FinishedRollout]:
        for event in self._tail.read():
            match event:
                case Start(queue_limit=None):
                    raise UserError(
                        f"rollouts are read from a run with channel B, got {self._run_dir}, whose run has none; name "
                        "the directory of another run, or set stage2_ab.schedule.b_ratio above 0"
                    )
                case Start():
                    self.start, self._has_ended = event, False
                    self._servers.clear()
                    self._texts.clear()
                case End():
                    self._has_ended = True
                case Damaged():
                    self.num_damaged += 1
                case Sent():
                    self._servers.update({key[:2]: event.server for key in event.samples})
                case Returned() | Quarantined():
                    for key in event.samples:
                        self._servers.pop(key[:2], None)
                        self._texts.pop(key, None)
                case RecordedCompletion():
                    self._texts[event.sample] = event.text
                case Match(purpose="training"):
                    self._texts[event.sample] = event.rollout
                case Matched():
                    for key in event.samples:
                        yield self._rollout(event, key)

    def _rollout(self, event: Matched, key: Key) -> FinishedRollout:
        (epoch, position, row, attempt), start, quality = key, self.start, event.quality
        run_id = start.run_id if start is not None else ""
        num_generations = start.state.num_generations if start is not None and start.state is not None else 1
        pairs = quality.num_pairs
        ratios = match_ratios(
            num_predictions=quality.num_predictions,
            num_ground_truth=quality.num_ground_truth,
            num_pairs=pairs,
            sum_iou=quality.sum_iou,
        )
        return FinishedRollout(
            rollout=f"{run_id}:{self._rank}:{epoch}:{position}:{attempt}",
            time=event.time,
            run_id=run_id,
            rank=self._rank,
            version=event.version,
            epoch=epoch,
            position=position,
            row=row,
            group=f"{self._rank}:{epoch}:{position // num_generations}" if num_generations > 1 else None,
            attempt=attempt,
            server=self._servers.pop(key[:2], None),
            num_tokens=event.num_rollout_tokens,
            truncated=bool(quality.num_truncated),
            pairs=pairs,
            false=quality.num_predictions - pairs,
            missed=quality.num_ground_truth - pairs,
            mean_iou=ratios.get("mean_iou"),
            likeness=start.likeness if start is not None else "IoU",
            dropped=quality.dropped,
            reward=quality.reward,
            text=self._texts.pop(key, None),
        )
