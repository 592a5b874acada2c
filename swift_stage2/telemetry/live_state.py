"""Gathers what the live view shows from records of the audit: in rank 0 as it writes them, elsewhere from the files.

No thread, no output. Records that are not yet whole stay for the next look.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from swift_stage2.records import SHIPPED_RATIOS
from swift_stage2.telemetry.audit import Record, audit_path
from swift_stage2.telemetry.reading import AuditTail
from swift_stage2.telemetry.record_forms import AUDIT_FORMS, has_form

_SMOOTHING = 0.1  # weight of the newest step in the moving average of step seconds
_NUM_WARNINGS = 3
_NUM_CHANNELS = 20
_RATE_WINDOW_S = 10.0
CHANNEL_B = "channel_b"
"""A warning may wait for this: that channel B runs."""
_RATE_BATCHES = 8  # slow servers answer so few in the window that the rate would read 0


def server_name(server: int | str) -> str:
    """A warning may wait for this: that a round or a catch-up proves the server."""
    return f"server{server}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveState:
    """One moment of a run, as rank 0 knows it. None is what is not known yet."""

    step: int = 0
    """Optimizer steps begun."""
    total_steps: int = 0
    seconds_per_step: float | None = None
    epoch: float | None = None
    loss: float | None = None
    channel: str = "A"
    """The channels of the last steps, one letter each, newest last."""
    b_enabled: bool = True
    num_b_run: int = 0
    num_b_skipped: int = 0
    skip_reason: str | None = None
    """Why the last skipped B step was skipped."""
    version: int = 0
    version_lag: int | None = None
    queue_depths: tuple[int | None, ...] = ()
    """By rank, at the last logging step."""
    queue_limit: int | None = None
    rollouts_per_s: float | None = None
    round_pending: bool = False
    round_in_transfer: bool = False
    last_round: str = "none yet"
    added_servers: tuple[str, ...] = ()
    """That joined since the start, each with its step."""
    last_evaluation: str | None = None
    """On the servers; None until one has ended."""
    warnings: tuple[str, ...] = ()

    @property
    def eta_s(self) -> float | None:
        if self.seconds_per_step is None:
            return None
        return max(0, self.total_steps - self.step) * self.seconds_per_step

    @property
    def queue_depth_min(self) -> int | None:
        """The queue that gates every rank's next B step."""
        return min((depth for depth in self.queue_depths if depth is not None), default=None)


class LiveTracker:
    """The present ``LiveState`` of a run, from the records of its audits; rank 0 tells of what all ranks share."""

    def __init__(self, num_ranks: int, total_steps: int, *, queue_limit: int | None) -> None:
        """``queue_limit`` None means that there is no channel B."""
        self.state = LiveState(
            total_steps=total_steps, b_enabled=queue_limit is not None, queue_limit=queue_limit
        )
        self._depths: list[int | None] = [None] * num_ranks
        self._causes: dict[str, set[str]] = {}  # of warnings that go with them
        self._channels: deque[str] = deque(maxlen=_NUM_CHANNELS)
        self._rollouts: deque[tuple[float, int]] = deque()
        self._last_step_s: float | None = None  # when the step began that the next one ends

    def take(self, record: Record) -> None:
        match record["kind"]:
            case "step":
                self._take_step(record)
            case "batch":
                self._rollouts.append((record["time"], record["num_rollouts"]))
            case "warning":
                self.warn(str(record["message"]), record.get("until", ()))
            case "start" if record["rank"] == 0:  # an earlier process's steps are history
                self._change(step=record["step"], num_b_run=0, num_b_skipped=0, added_servers=(), warnings=())
                self._last_step_s = None
                self._rollouts = deque([(record["time"], 0)])
            case "round" | "catch_up" as kind if record["rank"] == 0:
                proven = [server["proven"] for server in record["servers"].values()]
                for server, is_proven in zip(record["servers"], proven, strict=True):
                    if is_proven:
                        self._mend(server_name(server))
                when = f"v{record['version']} at step {record['step']}, {record['seconds']:.2f} s"
                how = "proven" if kind == "round" else "caught up"
                self._change(last_round=f"{when}, {sum(proven)}/{len(proven)} {how}")
            case "server_added" if record["rank"] == 0:
                told = f"{record['base_url']} at step {record['step']}"
                self._change(added_servers=(*self.state.added_servers, told))
            case "metrics" if record["rank"] == 0 and record.get("epoch") is not None:
                self._change(epoch=record["epoch"])
            case "loss" if record["rank"] == 0:
                self._change(loss=float(record["loss"]))
            case "evaluation" if record["rank"] == 0:
                counts, ratios = record["counts"], record["ratios"]
                quality = f", F1 {ratios['f1']:.3f} (matched as rollouts are)" if "f1" in ratios else ""
                own = (name for name in ratios if name not in SHIPPED_RATIOS)
                quality += "".join(f", {name} {ratios[name]:.3g}" for name in own)
                answered = f"{counts['num_answered']} of {counts['num_wanted']} ({record['end']})"
                self._change(last_evaluation=f"v{record['version']}{quality}, {answered}")

    def take_others(self, depths: Sequence[float | None], num_rollouts: float, now: float) -> None:
        """Takes in what rank 0 learns of all ranks at a logging step: ready packs, and rollouts since the last one."""
        if not self.state.b_enabled:
            return
        self._depths = [None if depth is None else int(depth) for depth in depths]
        self._rollouts.append((now, int(num_rollouts)))
        self._change(queue_depths=tuple(self._depths), rollouts_per_s=self._rate(now))

    def warn(self, message: str, until: Iterable[str] = ()) -> None:
        """Shows a warning among the newest few; every rank tells those that all ranks found."""
        if causes := set(until):
            self._causes[message] = causes
        if message not in self.state.warnings:
            self._change(warnings=(*self.state.warnings, message)[-_NUM_WARNINGS:])

    def _mend(self, cause: str) -> None:
        """Drops the warnings that had this cause left alone."""
        for causes in self._causes.values():
            causes.discard(cause)
        gone = {message for message, causes in self._causes.items() if not causes}
        self._causes = {message: causes for message, causes in self._causes.items() if causes}
        self._change(warnings=tuple(each for each in self.state.warnings if each not in gone))

    def _change(self, **values: Any) -> None:
        self.state = replace(self.state, **values)

    def _take_step(self, record: Record) -> None:
        before, rank, reason, lag = self.state, record["rank"], record["skip_reason"], record["version_lag"]
        if before.b_enabled and rank < len(self._depths):
            self._depths[rank] = record["queue_depth"]
            self._change(queue_depths=tuple(self._depths))
        if rank != 0:
            return
        if record["channel"] == "B":
            self._mend(CHANNEL_B)
        self._channels.append(record["channel"])
        self._change(
            step=record["step"] + 1,
            seconds_per_step=self._pace(record["time"]),
            channel="".join(self._channels),
            num_b_run=before.num_b_run + (record["channel"] == "B"),
            num_b_skipped=before.num_b_skipped + (reason is not None),
            skip_reason=before.skip_reason if reason is None else reason,
            version=record["version"],
            version_lag=before.version_lag if lag is None else lag,
            round_pending=record["round_pending"],
            round_in_transfer=record.get("round_in_transfer", False),
            rollouts_per_s=self._rate(record["time"]),
        )

    def _pace(self, now: float) -> float | None:
        """The moving average of the seconds between steps, of which another begins; None until there were two."""
        average, begun = self.state.seconds_per_step, self._last_step_s
        self._last_step_s = now
        if begun is None or now <= begun:
            return average
        return now - begun if average is None else average + _SMOOTHING * (now - begun - average)

    def _rate(self, now: float) -> float | None:
        """Rollouts per second of all ranks, over some seconds or the last few batches, whichever is longer."""
        if not self.state.b_enabled or not self._rollouts:
            return None
        batches = self._rollouts
        while len(batches) > _RATE_BATCHES + 1 and batches[1][0] < now - _RATE_WINDOW_S:
            batches.popleft()
        since = batches[0][0]  # its own rollouts were made before it
        return sum(count for _, count in islice(batches, 1, None)) / (now - since) if now > since else None


class RunProgress(LiveTracker):
    """Follows a run of other processes, whose audits grow."""

    def __init__(self, run_dir: Path, num_ranks: int, total_steps: int, *, queue_limit: int | None) -> None:
        super().__init__(num_ranks, total_steps, queue_limit=queue_limit)
        self._tails = [AuditTail(audit_path(run_dir, rank)) for rank in range(num_ranks)]

    @classmethod
    def of_run(cls, run_dir: Path) -> RunProgress | None:
        """Of a run that tells of itself in its audit; None as long as it has told nothing."""
        records = AuditTail(audit_path(run_dir, 0)).read()
        starts = [record for record in records if record["kind"] == "start" and has_form(record, AUDIT_FORMS)]
        start = starts[-1] if starts else {}
        num_ranks, total_steps = start.get("world_size"), start.get("total_steps")
        if num_ranks is None or total_steps is None:
            return None
        return cls(run_dir, num_ranks, total_steps, queue_limit=start.get("queue_limit"))

    def refresh(self) -> LiveState:
        """Takes in what was written since the last call."""
        records = [record for tail in self._tails for record in tail.read()]
        for record in sorted(records, key=lambda record: record["time"]):
            if has_form(record, AUDIT_FORMS):
                self.take(record)
            else:
                self.warn("the audit holds lines that are none of this release's; they are not shown")
        return self.state
