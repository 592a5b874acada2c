"""The parts that a learner is made of: this rank's part of channel B."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swift_stage2.channel_b.pipeline import Pipeline
from swift_stage2.channel_b.ready_queue import ReadyQueue
from swift_stage2.channel_b.rollout_client import RolloutClient
from swift_stage2.channel_b.sample_source import SampleSource
from swift_stage2.config import Objective
from swift_stage2.evaluation import PinnedEvaluation
from swift_stage2.fence import InferFence
from swift_stage2.scheduling.round_schedule import RoundSchedule
from swift_stage2.scheduling.version_clock import VersionClock
from swift_stage2.scheduling.watches import TruncationGuard
from swift_stage2.servers.pending_abort import PendingAbort
from swift_stage2.servers.probe import SuspectProbe
from swift_stage2.weights.sync_round import WeightSync


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelB:
    """Everything of this rank that exists only when ``b_ratio`` is above 0."""

    source: SampleSource
    client: RolloutClient
    queue: ReadyQueue
    pipeline: Pipeline
    fence: InferFence
    clock: VersionClock
    guard: TruncationGuard
    rounds: RoundSchedule
    sync: WeightSync
    probe: SuspectProbe
    abort: PendingAbort
    run_id: str
    base_urls: list[str]
    """Of the servers, in the order of the configuration."""
    max_inflight_per_server: int
    min_ready_tokens: int
    continue_on_failure: bool
    evaluation: PinnedEvaluation | None = None
    final_evaluation_s: float = 0.0
    """How long the round and the evaluation of the final weights may take; 0: there are none."""
    answer_fingerprint: Sequence[str] = ()
    """The writing of targets: code fence, separators, escapes. A resumed run must have the same."""
    objective: Objective = Objective.CORRECTED_TARGET
    """A resumed run may have another one that its stream allows."""
    longest_fill_s: float | None = None
    """In mode inline, how long a B step waits for its packs at most. None: they are made beside training."""
