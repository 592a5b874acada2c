"""A client as tests build it, and a batch that it is asked for and waited for: no part of the package does that."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from waiting import wait_for

from swift_stage2.channel_b.rollouts import RequestSettings, RolloutClient
from swift_stage2.config import DecodingConfig
from swift_stage2.records import BatchOutcome, Sample, SampleKey

Requests = Sequence[Mapping[str, Any]]
LONGEST_WAIT_S = 60.0


def make_client(*urls: str, **changes: Any) -> RolloutClient:
    """The only rank's client, which has heard of no proof."""
    settings: dict[str, Any] = {
        "decoding": DecodingConfig(),
        "request_timeout_s": LONGEST_WAIT_S,
        "run_seed": 1,
        "rank": 0,
        "world_size": 1,
    }
    return RolloutClient(urls, **settings | changes)


def prove(client: RolloutClient, *urls: str, version: int = 3) -> None:
    """All ranks agree that these servers, by default all, have proven ``version``."""
    for url in urls or tuple(client._servers):
        client.update(url, version, closed=False)


def withdraw(client: RolloutClient, url: str) -> None:
    """All ranks agree that nobody asks it."""
    client.update(url, 0, closed=False)


def unsettled(client: RolloutClient) -> set[str]:
    """Servers that may still compute what was abandoned."""
    return {url for url, server in client._servers.items() if server.is_settling}


def await_settled(client: RolloutClient) -> None:
    """Waits until the client has settled what it abandoned, or given it up."""
    wait_for(lambda: not unsettled(client))


def generate(
    client: RolloutClient, samples: Sequence[Sample], requests: Requests, terms: RequestSettings | None = None
) -> BatchOutcome:
    """One outcome of all shares, in the order of ``samples``. Nothing else may be out."""
    client.submit(samples, requests, terms)
    return collect(client, samples)


def ask(client: RolloutClient, requests: Requests, terms: RequestSettings | None = None) -> BatchOutcome:
    """The outcome of these requests, each of a row of its own."""
    samples = [Sample(SampleKey(0, n, n), {}) for n in range(len(requests))]
    return generate(client, samples, requests, terms)


def collect(client: RolloutClient, samples: Sequence[Sample]) -> BatchOutcome:
    """Waits until each of ``samples`` has come out, once."""
    place = {sample.key: n for n, sample in enumerate(samples)}
    shares: list[BatchOutcome] = []
    missing = set(place)
    ends = time.monotonic() + LONGEST_WAIT_S
    while missing:
        assert time.monotonic() < ends, f"never came out: {missing}"
        if (share := client.next_finished(1.0)) is None:
            continue
        keys = [sample.key for sample in all_samples(share)]
        assert missing.issuperset(keys), "every sample comes out exactly once"
        assert len(keys) == len(set(keys))
        missing -= set(keys)
        shares.append(share)
    return BatchOutcome(
        rollouts=tuple(
            sorted((r for each in shares for r in each.rollouts), key=lambda r: place[r.sample.key])
        ),
        returned=tuple(sorted((s for each in shares for s in each.returned), key=lambda s: place[s.key])),
        timed_out=tuple(sorted((s for each in shares for s in each.timed_out), key=lambda s: place[s.key])),
        quarantined=tuple(
            sorted((q for each in shares for q in each.quarantined), key=lambda q: place[q[0].key])
        ),
        failures=tuple(failure for each in shares for failure in each.failures),
        num_posts=sum(each.num_posts for each in shares),
    )


def all_samples(outcome: BatchOutcome) -> list[Sample]:
    """Those of every end."""
    answered = [rollout.sample for rollout in outcome.rollouts]
    return [*answered, *outcome.returned, *(sample for sample, _ in outcome.quarantined)]
