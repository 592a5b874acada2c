"""Asks all proven rollout servers of a rank for rollouts and says what became of every sample.

Every sample submitted comes out exactly once: as a rollout, as poisonous, or to be asked again. Servers' faults cost a
server its trust, never a sample an attempt. What is submitted goes to the lane where it would end first; what ended
waits in one outbox. ``submit`` and ``next_finished`` belong to one thread (the pipeline's); what the learner tells of
rounds, ``wake``, ``request_stop`` and the properties may be used from any.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from swift_stage2.channel_b.rollout_client.lane import (
    LaneSettings,
    PostEvents,
    ServerLane,
    Share,
    Terms,
    backlog,
)
from swift_stage2.channel_b.rollout_client.plan import SeedLedger, ServerPace, choose
from swift_stage2.channel_b.rollout_client.trust import ServedWeights
from swift_stage2.columns import Column
from swift_stage2.config import DecodingConfig
from swift_stage2.fence import InferFence
from swift_stage2.records import BatchOutcome, Rollout, Sample
from swift_stage2.scheduling.horizon import max_prompts_in_flight

Asked = tuple[Sample, Mapping[str, Any]]

logger = logging.getLogger(__name__)

_STOP_SLICE_S = 0.2
_CLOSING_S = 5.0


class RolloutClient:
    """This rank's door to the rollout servers. A context manager; it owns a thread per place that is at work."""

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
        run_id: str | None = None,
        canary: Mapping[str, Any] | None = None,
        stop: threading.Event | None = None,
        max_inflight_per_server: int = 1,
        is_lost: Callable[[str, int], bool] = lambda url, version: False,
        events: PostEvents | None = None,
        watch_post: Callable[[], AbstractContextManager[None]] = nullcontext,
        chat_models: Mapping[str, str] | None = None,
        columns: tuple[Column, ...] = (),
    ) -> None:
        """No server is proven at first.

        ``ticket_timeout_s`` is one slice of the wait for a ticket; between slices ``stop`` is looked at. ``canary`` is
        a request that any sound server answers, for a server that has not answered anything yet. ``run_id`` is what
        our server stamps. ``max_inflight_per_server`` prompts of all ranks fill a server. ``is_lost`` says of a base
        URL whether what was proven there for a version is known to have ended: a stock server's answers do not tell
        who gives them. ``events`` hears of every POST that brings no terms of its own, on the thread of its place;
        ``watch_post`` is entered there for the time that any POST is out. ``chat_models``, by base URL, are the names
        that plain ``vllm serve``s answer to. ``columns`` are asked for with whatever brings no terms of its own.
        """
        self._stop = stop or threading.Event()
        self._ticket_timeout_s = ticket_timeout_s
        self._rank = rank
        self._world_size = world_size
        self._max_inflight = max_inflight_per_server
        self._num_shares = 0
        self._changed = threading.Condition()
        self._finished: deque[BatchOutcome] = deque()
        self._failure: Exception | None = None
        self._is_woken = False
        self._settings = LaneSettings(
            fence=fence,
            seeds=SeedLedger(run_seed=run_seed, rank=rank, world_size=world_size),
            stop=self._stop,
            request_timeout_s=request_timeout_s,
            ticket_timeout_s=ticket_timeout_s,
            api_key=api_key,
            run_id=run_id,
            canary=canary,
            is_lost=is_lost,
            watch_post=watch_post,
            chat_models=chat_models or {},
            most_per_post=max_inflight_per_server,
            finished=self._take_in,
            failed=self._fail,
        )
        self._terms = Terms(decoding, events, columns)
        self._lanes = {url: self._new_lane(url, number) for number, url in enumerate(servers)}
        self._paces = dict.fromkeys(servers, ServerPace())

    def _new_lane(self, base_url: str, number: int) -> ServerLane:
        # Where the places do not divide by the ranks, which ranks get one more rotates from server to server.
        num_places = max(
            1, (self._max_inflight + (self._rank + number) % self._world_size) // self._world_size
        )
        return ServerLane(base_url, self._settings, name=f"rollout-lane-{number}", num_places=num_places)

    def learn_chat_model(self, base_url: str, chat_model: str) -> None:
        """A server that nobody has asked yet is a plain ``vllm serve``; called on the thread that tells of rounds."""
        models = {**self._settings.chat_models, base_url: chat_model}
        self._settings = replace(self._settings, chat_models=models)
        self._lanes[base_url].close(0.0)
        lane = self._new_lane(base_url, list(self._lanes).index(base_url))
        self._lanes = {**self._lanes, base_url: lane}  # in one move: other threads go through them

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def proven(self) -> tuple[str, ...]:
        """Base URLs that are asked."""
        return tuple(url for url, lane in self._lanes.items() if lane.trust.is_proven)

    @property
    def is_open(self) -> bool:
        """False while no server is asked: a round has closed the fence, or none is proven."""
        return self._settings.fence.is_open and bool(self.proven)

    @property
    def suspects(self) -> dict[str, str]:
        """Base URL → why that server gets no request before a round proves it."""
        doubts = {url: lane.trust.suspicion for url, lane in self._lanes.items()}
        return {url: reason for url, reason in doubts.items() if reason is not None}

    @property
    def num_unsettled(self) -> int:
        """Servers that may still be computing abandoned POSTs. Drained means: 0, and nothing in the fence.

        After a stop it can stay above 0, because nothing is settled any more: no round may follow.
        """
        return sum(lane.is_settling for lane in self._lanes.values())

    def expect_round(self, round_id: str, version: int) -> None:
        """The next round, if it is staged, may be answered with before the learner hears of it.

        Called once the round before has ended: what that one did not prove is not going to be.
        """
        for lane in self._lanes.values():
            lane.trust.expect(round_id, version)

    def forgive(self, servers: Collection[str]) -> None:
        """A staged round or catch-up of ``servers``, which are not asked, begins: later suspicions are newer."""
        for url in servers:
            self._lanes[url].trust.forgive()

    def set_proven(self, served: Mapping[str, ServedWeights], *, drained: bool = True) -> None:
        """Exactly these base URLs are asked from now on, each with what it serves. Call it before the fence reopens.

        ``drained``: nothing was in flight during the round, so that its proof lifts any suspicion. Otherwise a server
        that is suspect stays so. A staged round calls this whenever another of its servers is proven.

        Raises:
            ValueError: a server that this client was not made with.
        """
        if unknown := served.keys() - self._lanes.keys():
            raise ValueError(f"only servers of this client can be proven, got {sorted(unknown)}")
        for url, lane in self._lanes.items():
            if (weights := served.get(url)) is None:
                lane.withdraw()
                continue
            if not lane.trust.is_proven:  # it returns, perhaps as another process
                self._paces[url] = ServerPace(last_share=self._num_shares)
            lane.trust.prove(weights, drained=drained)

    def confirms(self, rollout: Rollout) -> bool | None:
        """True if a round proved, on its server, the weights of ``rollout``; False if none will; None until then."""
        return self._lanes[rollout.server].trust.confirms(rollout.round_id)

    def withdraw(self, servers: Collection[str]) -> None:
        """``servers`` are asked no more before a round proves them, and what they were asked is not waited for."""
        for url in servers:
            self._lanes[url].withdraw()

    def distrust(self, server: str, reason: str) -> None:
        """``server`` is suspect: what it answered showed so later than its lane could see."""
        self._lanes[server].distrust(reason)

    def note_agreement(self, servers: Collection[str]) -> frozenset[str]:
        """Prompts of ``servers`` were the learner's. All servers of which this was ever noted since they came back."""
        for url in servers:
            self._lanes[url].trust.agree()
        return frozenset(url for url, lane in self._lanes.items() if lane.trust.has_agreed)

    @property
    def free_places(self) -> int:
        """Prompts that may be submitted now: by the lanes' room and by this rank's share of all that may be asked."""
        lanes = [] if self._stop.is_set() else [lane for lane in self._proven_lanes() if not lane.is_settling]
        if not lanes:
            return 0
        most = max_prompts_in_flight(self._max_inflight, len(lanes), self._world_size)
        if any(lane.trust.streams for lane in lanes):
            most += backlog(most)
        in_hand = sum(lane.in_hand for lane in lanes)
        return max(0, min(most - in_hand, sum(max(0, lane.room) for lane in lanes)))

    def submit(
        self, samples: Sequence[Sample], requests: Sequence[Mapping[str, Any]], terms: Terms | None = None
    ) -> None:
        """Asks for one rollout per sample; ``requests[i]`` is the infer request of ``samples[i]``. Does not wait.

        Without ``terms`` with the decoding and the events that the client was made with. Every sample comes out of
        ``next_finished`` once. A share waits for tickets as long as it takes, and apart from that at most 2 ×
        ``request_timeout_s`` once a place works on it. More than ``free_places`` wait for longer.

        Raises:
            ValueError: not one request per sample.
        """
        if len(samples) != len(requests):
            raise ValueError(
                f"one request per sample, got num_samples={len(samples)} num_requests={len(requests)}"
            )
        left = list(zip(samples, requests, strict=True))
        while left:
            lane = None if self._stop.is_set() else self._choose_lane(len(left))
            if lane is None:
                self._put(BatchOutcome(returned=tuple(sample for sample, _ in left), terms=terms))
                return
            part, left = _without_copies(left, lane.post_size)
            lane.submit(
                [sample for sample, _ in part], [request for _, request in part], terms or self._terms
            )

    def next_finished(self, timeout_s: float) -> BatchOutcome | None:
        """The outcome of one share, in the order in which they end; None after ``timeout_s``, or when woken before.

        Raises:
            Exception: that a place failed with, once nothing else is left.
        """
        ends = time.monotonic() + timeout_s
        with self._changed:
            while not (self._finished or self._failure or self._is_woken):
                if (left_s := ends - time.monotonic()) <= 0:
                    break
                self._changed.wait(min(left_s, _STOP_SLICE_S))
                if self._stop.is_set():
                    self._end_lanes()
            self._is_woken = False
            if not self._finished:
                if self._failure is not None:
                    raise self._failure
                return None
            outcome = self._finished.popleft()
        return outcome

    def wake(self) -> None:
        """Makes ``next_finished`` return at once, this time or the next; from any thread."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def request_stop(self) -> None:
        """Ends every share soon, now and for ever; POSTs in flight are cut. Does not wait."""
        self._stop.set()
        self._end_lanes()

    def close(self) -> None:
        """Stops and frees every thread and connection, within seconds."""
        self.request_stop()
        for url, lane in self._lanes.items():
            if not lane.close(self._ticket_timeout_s + _CLOSING_S):
                logger.warning("the lane of %s did not end in time; it is left behind", url)

    def _proven_lanes(self) -> list[ServerLane]:
        return [lane for lane in tuple(self._lanes.values()) if lane.trust.is_proven]

    def _choose_lane(self, num_prompts: int) -> ServerLane | None:
        lanes = self._proven_lanes()
        lanes = [lane for lane in lanes if not lane.is_settling] or lanes
        lanes = [lane for lane in lanes if lane.room > 0] or lanes
        if not lanes:
            return None
        paces, in_hand = [self._paces[lane.base_url] for lane in lanes], [lane.in_hand for lane in lanes]
        sizes = [min(lane.post_size, num_prompts) for lane in lanes]
        # The few requests of many ranks shall not all meet on the first server.
        turn, self._num_shares = self._rank + self._num_shares, self._num_shares + 1
        lane = lanes[choose(paces, in_hand, sizes, share=self._num_shares, turn=turn)]
        self._paces[lane.base_url] = replace(self._paces[lane.base_url], last_share=self._num_shares)
        return lane

    def _take_in(self, lane: ServerLane, share: Share) -> None:
        """A place has ended a share; on its thread."""
        outcome = _outcome_of(share)
        with self._changed:
            # A server that takes requests one by one answers as many at once as it has places.
            num_answered = share.num_answered * lane.num_places
            self._paces[lane.base_url] = self._paces[lane.base_url].after(num_answered, share.answered_s)
        self._put(outcome if share.terms is not self._terms else replace(outcome, terms=None))

    def _put(self, outcome: BatchOutcome) -> None:
        with self._changed:
            self._finished.append(outcome)
            self._changed.notify_all()

    def _fail(self, failure: Exception) -> None:
        with self._changed:
            self._failure = failure
            self._changed.notify_all()

    def _end_lanes(self) -> None:
        for lane in tuple(self._lanes.values()):
            lane.end()


def _without_copies(asked: Sequence[Asked], most: int) -> tuple[list[Asked], list[Asked]]:
    """The first of ``asked``, at most so many and no row twice, for one POST; and the rest.

    A POST has one seed, and some servers give copies of a request in it one answer.
    """
    part: list[Asked] = []
    rest: list[Asked] = []
    rows: set[int] = set()
    for sample, request in asked:
        fits = len(part) < most and sample.key.index not in rows
        (part if fits else rest).append((sample, request))
        rows.add(sample.key.index)
    return part, rest


def _outcome_of(share: Share) -> BatchOutcome:
    """In the order of the share."""
    plan = share.plan
    return BatchOutcome(
        rollouts=tuple(share.rollouts[n] for n in sorted(share.rollouts)),
        returned=tuple(
            sample
            for n, sample in enumerate(share.samples)
            if n not in share.rollouts and n not in plan.quarantined
        ),
        aborted=tuple(share.aborted[n] for n in sorted(share.aborted)),
        timed_out=tuple(share.samples[n] for n in plan.timed_out),
        quarantined=tuple((share.samples[n], reason) for n, reason in sorted(plan.quarantined.items())),
        failures=tuple(share.failures),
        num_posts=share.num_posts,
        seconds=share.seconds,
        terms=share.terms,
    )
