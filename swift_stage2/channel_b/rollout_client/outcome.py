"""What became of one batch of samples: every sample is in exactly one of rollouts, returned and quarantined.

Made by the client, read by the pipeline and its telemetry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swift_stage2.channel_b.records import Rollout, Sample
from swift_stage2.channel_b.rollout_client.plan import PostEnd


@dataclass(frozen=True, slots=True)
class PostFailure:
    """One POST that brought no rollout."""

    server: str
    end: PostEnd
    num_requests: int  # 0 for a probe or an ordered call
    reason: str


@dataclass(frozen=True, slots=True)
class BatchOutcome:
    """The answer of ``RolloutClient.generate``; samples keep the order in which they were given."""

    rollouts: tuple[Rollout, ...] = ()
    returned: tuple[Sample, ...] = ()
    """To be asked again later, their attempts not counted up."""
    aborted: tuple[Rollout, ...] = ()
    """What the server aborted for a round had said so far. Its samples are among ``returned``, and are not aborted
    twice."""
    timed_out: tuple[Sample, ...] = ()
    """Those of ``returned`` that were asked alone and did not answer in time: perhaps too slow for ever."""
    quarantined: tuple[tuple[Sample, str], ...] = ()
    """Poisonous requests, each with its reason."""
    suspects: Mapping[str, str] = field(default_factory=dict)
    """Base URL → reason, for servers that became suspect since the last outcome."""
    abandoned: Mapping[str, int] = field(default_factory=dict)
    """Base URL → POSTs that their deadline ended."""
    failures: tuple[PostFailure, ...] = ()
    num_posts: int = 0
