"""Turns the audit files of a run that is going on into the state that the live view shows.

Reads from another process, so it costs the run nothing and sees all ranks. Records that are not yet whole stay
for the next look. Called by the main loops of the demo and of ``launch``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import islice
from pathlib import Path

from swift_stage2.telemetry.audit import Record, audit_path, record_of
from swift_stage2.telemetry.live_state import LastRound, LiveState
from swift_stage2.telemetry.record_forms import LIVE_FORMS, has_form

_NUM_CHANNELS = 20
_RATE_WINDOW_S = 10.0
_RATE_BATCHES = 8  # slow servers answer so few in the window that the rate would read 0
_SMOOTHING = 0.1  # weight of the newest step in the moving average of step seconds
_NUM_WARNINGS = 3


class AuditTail:
    """One growing JSONL file, read from where the last look ended. The file may appear later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Record]:
        """The records that have become whole since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [record for line in whole.splitlines() if (record := _parse(line)) is not None]


class RunProgress:
    """The present ``LiveState`` of a run. What is the same on all ranks is taken from rank 0."""

    def __init__(
        self,
        run_dir: Path,
        num_ranks: int,
        total_steps: int,
        *,
        b_enabled: bool,
        queue_limit: int | None = None,
    ) -> None:
        self._tails = [AuditTail(audit_path(run_dir, rank)) for rank in range(num_ranks)]
        self._depths: list[int | None] = [None] * num_ranks
        self._channels: deque[str] = deque(maxlen=_NUM_CHANNELS)
        self._rollouts: deque[tuple[float, int]] = deque()
        self._last_step_time: float | None = None
        self.state = LiveState(total_steps=total_steps, b_enabled=b_enabled, queue_limit=queue_limit)

    @classmethod
    def of_run(cls, run_dir: Path) -> RunProgress | None:
        """Of a run that tells of itself in its audit; None as long as it has told nothing."""
        records = AuditTail(audit_path(run_dir, 0)).read()
        starts = [record for record in records if record["kind"] == "start" and has_form(record, LIVE_FORMS)]
        if not starts:
            return None
        start = starts[-1]
        return cls(
            run_dir,
            start["world_size"],
            start["total_steps"],
            b_enabled=start["queue_limit"] is not None,
            queue_limit=start["queue_limit"],
        )

    def refresh(self) -> LiveState:
        """Takes in what was written since the last call."""
        records = [record for tail in self._tails for record in tail.read()]
        for record in sorted(records, key=lambda record: record["time"]):
            if has_form(record, LIVE_FORMS):
                self._take(record)
            else:
                self._take_warning(
                    "the audit holds lines that are none of this release's; they are not shown"
                )
        return self.state

    def _take(self, record: Record) -> None:
        match record["kind"]:
            case "start" if record["rank"] == 0:  # an earlier process's steps are history
                self.state = replace(self.state, step=record["step"], num_b_run=0, num_b_skipped=0)
                self._last_step_time = None
                self._rollouts = deque([(record["time"], 0)])
            case "step":
                self._take_step(record)
            case "batch":
                self._take_batch(record)
            case "round" if record["rank"] == 0:
                self._take_round(record)
            case "metrics" if record["rank"] == 0:
                epoch = record.get("epoch")
                self.state = replace(self.state, epoch=self.state.epoch if epoch is None else epoch)
            case "loss" if record["rank"] == 0:
                self.state = replace(self.state, loss=float(record["loss"]))
            case "warning":
                self._take_warning(str(record["message"]))

    def _take_step(self, record: Record) -> None:
        if self.state.b_enabled and record["rank"] < len(self._depths):
            self._depths[record["rank"]] = record["queue_depth"]
            self.state = replace(self.state, queue_depths=tuple(self._depths))
        if record["rank"] != 0:
            return
        self._channels.append(record["channel"])
        state, reason, lag = self.state, record["skip_reason"], record["version_lag"]
        self.state = replace(
            state,
            step=record["step"] + 1,
            seconds_per_step=self._pace(record["time"]),
            channel="".join(self._channels),
            num_b_run=state.num_b_run + (record["channel"] == "B"),
            num_b_skipped=state.num_b_skipped + (reason is not None),
            skip_reason=reason or state.skip_reason,
            version=record["version"],
            version_lag=state.version_lag if lag is None else lag,
            round_pending=record["round_pending"],
            rollouts_per_s=self._rate(record["time"]),
        )

    def _take_batch(self, record: Record) -> None:
        self._rollouts.append((record["time"], record["num_rollouts"]))

    def _take_round(self, record: Record) -> None:
        servers = record["servers"].values()
        last = LastRound(
            step=record["step"],
            version=record["version"],
            seconds=record["seconds"],
            num_proven=sum(server["proven"] for server in servers),
            num_servers=len(servers),
        )
        self.state = replace(self.state, last_round=last)

    def _take_warning(self, message: str) -> None:
        if message not in self.state.warnings:  # every rank tells what all ranks found
            self.state = replace(self.state, warnings=(*self.state.warnings, message)[-_NUM_WARNINGS:])

    def _pace(self, time_s: float) -> float | None:
        before, self._last_step_time = self._last_step_time, time_s
        average = self.state.seconds_per_step
        if before is None or time_s <= before:
            return average
        seconds = time_s - before
        return seconds if average is None else average + _SMOOTHING * (seconds - average)

    def _rate(self, now: float) -> float | None:
        """Rollouts per second of all ranks, over some seconds or the last few batches, whichever is longer."""
        if not self.state.b_enabled or not self._rollouts:
            return None
        batches = self._rollouts
        while len(batches) > _RATE_BATCHES + 1 and batches[1][0] < now - _RATE_WINDOW_S:
            batches.popleft()
        since = batches[0][0]  # its own rollouts were made before it
        return sum(count for _, count in islice(batches, 1, None)) / (now - since) if now > since else None


def _parse(line: bytes) -> Record | None:
    record = record_of(line)
    return record if record is not None and isinstance(record.get("time"), int | float) else None
