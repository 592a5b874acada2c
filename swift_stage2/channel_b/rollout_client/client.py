"""Asks all proven rollout servers of a rank for one batch and says what became of every sample.

Every sample given comes back exactly once: as a rollout, as poisonous, or to be asked again. Servers'
faults cost a server its trust, never a sample an attempt. ``generate`` belongs to one thread (the
pipeline's); ``set_proven``, ``request_stop`` and the properties may be used from any.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from swift_stage2.channel_b.rollout_client.lane import (
    LaneSettings,
    PostEvents,
    ServerLane,
    Share,
    Terms,
)
from swift_stage2.channel_b.rollout_client.plan import SeedLedger, ServerLoad, ServerPace, as_slices, place
from swift_stage2.config import DecodingConfig
from swift_stage2.config.rollout import MAX_REQUESTS_PER_POST
from swift_stage2.fence import InferFence
from swift_stage2.records import BatchOutcome, Sample

logger = logging.getLogger(__name__)

_STOP_SLICE_S = 0.2
_CLOSING_S = 5.0


class RolloutClient:
    """This rank's door to the rollout servers. A context manager; it owns one thread per server."""

    def __init__(
        self,
        servers: Sequence[str],
        *,
        fence: InferFence,
        decoding: DecodingConfig,
        request_timeout_s: float,
        run_seed: int,
        rank: int,
        world_size: int,
        api_key: str | None = None,
        ticket_timeout_s: float = 1.0,
        connect_timeout_s: float = 10.0,
        run_id: str | None = None,
        canary: Mapping[str, Any] | None = None,
        stop: threading.Event | None = None,
        full_share: int = 1,
        is_lost: Callable[[str, int], bool] = lambda url, version: False,
        events: PostEvents | None = None,
        watch_post: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """No server is proven at first.

        ``ticket_timeout_s`` is one slice of the wait for a ticket; between slices ``stop`` is looked at. ``canary`` is
        a request that any sound server answers, for a server that has not answered anything yet. ``run_id`` is what
        our server stamps. ``full_share`` is how many samples fill a server: no more servers are asked than a batch
        fills. ``is_lost`` says of a base URL whether what was proven there for a version is known to have ended: a
        stock server's answers do not tell who gives them. ``events`` hears of every POST that brings no terms of its
        own, on the lane's thread; ``watch_post`` is entered there for the time that any POST is out.
        """
        self._stop = stop or threading.Event()
        self._ticket_timeout_s = ticket_timeout_s
        self._rank = rank
        self._full_share = full_share
        self._num_batches = 0
        settings = LaneSettings(
            fence=fence,
            seeds=SeedLedger(run_seed=run_seed, rank=rank, world_size=world_size),
            stop=self._stop,
            request_timeout_s=request_timeout_s,
            ticket_timeout_s=ticket_timeout_s,
            connect_timeout_s=connect_timeout_s,
            api_key=api_key,
            run_id=run_id,
            canary=canary,
            is_lost=is_lost,
            watch_post=watch_post,
        )
        self._terms = Terms(decoding, events)
        urls = [url.rstrip("/") for url in servers]
        self._lanes = {url: ServerLane(url, settings, name=f"rollout-lane-{n}") for n, url in enumerate(urls)}
        self._paces = dict.fromkeys(urls, ServerPace())

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def proven(self) -> tuple[str, ...]:
        """Base URLs that are asked."""
        return tuple(url for url, lane in self._lanes.items() if lane.trust.is_proven)

    @property
    def suspects(self) -> dict[str, str]:
        """Base URL → why that server gets no request before a round proves it."""
        doubts = {url: lane.trust.suspicion for url, lane in self._lanes.items()}
        return {url: reason for url, reason in doubts.items() if reason is not None}

    @property
    def num_unsettled(self) -> int:
        """Servers that may still be computing an abandoned POST. Drained means: 0, and nothing in the fence.

        After a stop it can stay above 0, because nothing is settled any more: no round may follow.
        """
        return sum(lane.trust.settle_by is not None for lane in self._lanes.values())

    def set_proven(
        self, servers: Collection[str], incarnations: Mapping[str, str | None] | None = None
    ) -> None:
        """Exactly ``servers`` were proven by a round, and lose any suspicion. Call it before the fence reopens.

        ``incarnations`` (base URL → the stamp that the round saw) makes a restart show in the very next reply.

        Raises:
            ValueError: a server that this client was not made with.
        """
        stamps = {url.rstrip("/"): stamp for url, stamp in (incarnations or {}).items()}
        proven = {url.rstrip("/") for url in servers}
        if unknown := proven - self._lanes.keys():
            raise ValueError(f"only servers of this client can be proven, got {sorted(unknown)}")
        for url, lane in self._lanes.items():
            if url in proven:
                if not lane.trust.is_proven:  # it returns, perhaps as another process
                    self._paces[url] = ServerPace(last_batch=self._num_batches)
                lane.trust.prove(stamps.get(url))
            else:
                lane.trust.withdraw()

    def withdraw(self, servers: Collection[str]) -> None:
        """``servers`` are asked no more before a round proves them; what this rank suspects stays as it is."""
        for url in servers:
            self._lanes[url.rstrip("/")].trust.withdraw()

    def distrust(self, server: str, reason: str) -> None:
        """``server`` is suspect: what it answered showed so later than its lane could see."""
        logger.warning("%s is suspect, no request before a round proves it: %s", server, reason)
        self._lanes[server.rstrip("/")].trust.suspect(reason)

    def note_agreement(self, servers: Collection[str]) -> frozenset[str]:
        """Prompts of ``servers`` were the learner's. All servers of which this was ever noted since they came back."""
        for url in servers:
            self._lanes[url].trust.agree()
        return frozenset(url for url, lane in self._lanes.items() if lane.trust.has_agreed)

    def generate(
        self, samples: Sequence[Sample], requests: Sequence[Mapping[str, Any]], terms: Terms | None = None
    ) -> BatchOutcome:
        """Asks for one rollout per sample; ``requests[i]`` is the infer request of ``samples[i]``.

        Without ``terms`` with the decoding and the events that the client was made with.

        Waits for tickets as long as it takes, and apart from that at most 2 × ``request_timeout_s`` once its lanes are
        free; a lane that still settles an abandoned POST is free after at most ``request_timeout_s``.

        Raises:
            FenceShutDown: the fence will never open again.
            ValueError: not one request per sample, or more than 4096 for one server.
        """
        if len(samples) != len(requests):
            raise ValueError(
                f"one request per sample, got num_samples={len(samples)} num_requests={len(requests)}"
            )
        lanes = [] if self._stop.is_set() else self._usable_lanes()
        sizes = self._place(len(samples), lanes)
        if any(size > MAX_REQUESTS_PER_POST for size in sizes):
            raise ValueError(
                f"a server gets at most {MAX_REQUESTS_PER_POST} requests at once, "
                f"got num_samples={len(samples)} num_servers={len(lanes)}"
            )
        futures = {
            lane.base_url: lane.submit(samples[part], requests[part], terms or self._terms)
            for lane, part in zip(lanes, as_slices(sizes), strict=True)
            if part.stop > part.start
        }
        self._await(futures.values())
        shares = {url: future.result(timeout=0) for url, future in futures.items()}
        for url, share in shares.items():
            self._paces[url] = self._paces[url].after(share.num_answered, share.answered_s, self._num_batches)
        return _merge(shares, () if lanes else samples, self._take_news())

    def request_stop(self) -> None:
        """Makes ``generate`` return soon, now and for ever; a POST in flight is cut. Does not wait."""
        self._stop.set()
        for lane in self._lanes.values():
            lane.end()

    def close(self) -> None:
        """Stops and frees every thread and connection, within seconds."""
        self.request_stop()
        for url, lane in self._lanes.items():
            if not lane.close(self._ticket_timeout_s + _CLOSING_S):
                logger.warning("the lane of %s did not end in time; it is left behind", url)

    def _usable_lanes(self) -> list[ServerLane]:
        proven = [lane for lane in self._lanes.values() if lane.trust.is_proven]
        return [lane for lane in proven if lane.trust.settle_by is None] or proven

    def _place(self, num_samples: int, lanes: Sequence[ServerLane]) -> Sequence[int]:
        if not lanes:
            return ()
        loads = [ServerLoad(self._paces[lane.base_url], lane.in_flight) for lane in lanes]
        self._num_batches += 1
        # Small batches of many ranks shall not all meet on the first server.
        turn = self._rank + self._num_batches - 1
        return place(num_samples, loads, full_share=self._full_share, turn=turn, batch=self._num_batches)

    def _await(self, futures: Collection[Future[Any]]) -> None:
        """Waits for all of them, or for the first that raises; passes the owner's stop on to the lanes."""
        pending = set(futures)
        while pending:
            done, pending = wait(pending, timeout=_STOP_SLICE_S, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result(timeout=0)
            if self._stop.is_set():
                self.request_stop()

    def _take_news(self) -> dict[str, str]:
        news = {url: lane.trust.take_news() for url, lane in self._lanes.items()}
        return {url: reason for url, reason in news.items() if reason is not None}


def _merge(
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
