"""One server's share of a batch while it is worked on, and what became of it.

Made by the client from a batch, filled by a lane, merged into the batch's outcome by the client.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from swift_stage2.channel_b.rollout_client.plan import RequestPlan
from swift_stage2.channel_b.rollout_client.terms import Terms
from swift_stage2.records import BatchOutcome, PostFailure, Rollout, Sample, VersionSpan
from swift_stage2.servers.protocol import Completion

Request = Mapping[str, Any]


class TimeBudget:
    """Seconds that pass only while nobody waits for a ticket."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def remaining_s(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self._end - time.monotonic())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What passes inside is not counted."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._end += time.monotonic() - started


@dataclass(frozen=True, slots=True)
class Post:
    """What the rollouts of one POST have in common."""

    server: str
    seed: int
    version: int
    seconds: float


@dataclass(slots=True)
class Share:
    """Samples and their requests by number, the plan over these numbers, and what has come of them so far."""

    samples: Sequence[Sample]
    requests: Sequence[Request]
    terms: Terms
    plan: RequestPlan
    budget: TimeBudget
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    aborted: dict[int, Rollout] = field(default_factory=dict)
    failures: list[PostFailure] = field(default_factory=list)
    num_abandoned: int = 0
    num_posts: int = 0
    num_answered: int = 0
    """Requests answered, and below the seconds of the POSTs that answered them: the server's pace."""
    answered_s: float = 0.0

    def keep(self, number: int, completion: Completion, post: Post) -> None:
        """Turns a completion into the rollout of its sample; an aborted one leaves the sample to return."""
        kept = self.aborted if completion.finish_reason == "abort" else self.rollouts
        kept[number] = Rollout(
            sample=self.samples[number],
            text=completion.text,
            token_ids=completion.token_ids,
            prompt_token_ids=completion.prompt_token_ids,
            truncated=completion.finish_reason == "length",
            seed=post.seed if completion.seed is None else completion.seed,
            server=post.server,
            spans=(VersionSpan(post.version, 0, len(completion.token_ids)),),
            log_probs=completion.log_probs,
            seconds=post.seconds,
        )

    def may_be_of(self, version: int) -> bool:
        """Whether its terms let it be asked under ``version``."""
        return self.terms.only_version in (None, version)

    @property
    def resolved(self) -> list[Sample]:
        """Samples that have their rollout or are quarantined."""
        return [self.samples[number] for number in (*self.rollouts, *self.plan.quarantined)]


def merge_shares(
    shares: Mapping[str, Share], unasked: Sequence[Sample], suspects: Mapping[str, str]
) -> BatchOutcome:
    """The outcome of a batch from its shares by base URL, in the order of the batch."""
    parts = shares.values()
    return BatchOutcome(
        rollouts=tuple(part.rollouts[n] for part in parts for n in sorted(part.rollouts)),
        returned=(
            *(
                part.samples[n]
                for part in parts
                for n in range(len(part.samples))
                if n not in part.rollouts and n not in part.plan.quarantined
            ),
            *unasked,
        ),
        aborted=tuple(part.aborted[n] for part in parts for n in sorted(part.aborted)),
        timed_out=tuple(part.samples[n] for part in parts for n in part.plan.timed_out),
        quarantined=tuple(
            (part.samples[n], reason) for part in parts for n, reason in sorted(part.plan.quarantined.items())
        ),
        suspects=suspects,
        abandoned={url: part.num_abandoned for url, part in shares.items() if part.num_abandoned},
        failures=tuple(failure for part in parts for failure in part.failures),
        num_posts=sum(part.num_posts for part in parts),
    )
