"""One round or catch-up on rank 0, until its end was heard: who takes part, until when, and who was told of.

Used by ``sync_round`` on the main thread. Times are of ``time.monotonic``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from swift_stage2.records import RoundOutcome, ServerReport
from swift_stage2.weights.courier import PushEnd
from swift_stage2.weights.proof import Canary


@dataclass(slots=True)
class Transfer:
    """Weights on their way to ``targets``; what has not ended by ``end`` is given up."""

    version: int
    staged: bool
    targets: Sequence[int]
    timeout_s: float
    straggler_s: float
    """For the other servers after the first proof, and for a catch-up that a round waits for."""
    step: int | None = None
    """Of the snapshot; noted with weights on a disk."""
    is_catch_up: bool = False
    held: bool = False  # installs wait for ``let_install``
    canary: Canary | None = None
    canary_seconds: float = 0.0
    snapshot_seconds: float = 0.0
    pushed: bool = False  # the courier has it
    learner_fault: str | None = None
    told: set[int] = field(default_factory=set)  # servers that all ranks have heard of
    started: float = field(init=False)
    end: float = field(init=False)
    limit: str = field(init=False)  # that the end stands for

    def __post_init__(self) -> None:
        self.started = time.monotonic()
        self.start_time()

    def start_time(self) -> None:
        """All of ``timeout_s`` begins now."""
        self.end, self.limit = time.monotonic() + self.timeout_s, f"{self.timeout_s:g} s"

    def shorten(self, since: str) -> None:
        """From now on it has at most ``straggler_s``; ``since`` says why."""
        if (end := time.monotonic() + self.straggler_s) < self.end:
            self.end, self.limit = end, f"{self.straggler_s:g} s of {since}"

    def has_ended(self, ends: Mapping[int, PushEnd]) -> bool:
        """Whether nothing more is waited for, after these ends of pushes. The first proof shortens the time."""
        if any(each.report and each.report.proven for each in ends.values()):
            self.shorten("the first proof")
        is_idle = self.learner_fault is not None or not self.pushed
        return is_idle or ends.keys() >= set(self.targets) or time.monotonic() > self.end

    def outcome(
        self, reports: dict[int, ServerReport], news: tuple[int, ...], *, ended: bool, fault: str | None
    ) -> RoundOutcome:
        """As all ranks are told; ``fault``: the learner's, of a push."""
        return RoundOutcome(
            self.version,
            reports=reports,
            news=news,
            ended=ended,
            staged=self.staged,
            is_catch_up=self.is_catch_up,
            learner_fault=self.learner_fault or fault,
            seconds=time.monotonic() - self.started,
            canary_seconds=self.canary_seconds,
            snapshot_seconds=self.snapshot_seconds,
        )
