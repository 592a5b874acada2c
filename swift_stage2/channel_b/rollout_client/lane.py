"""One server as one rank asks it: POSTs one at a time, each under one fence ticket, on a thread of its own.

Works on a share of a batch within one time budget, and makes sure that a POST which was abandoned is
settled (the server answered a later ordered call) or the server suspect. Called by the client.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from swift_stage2.channel_b.rollout_client.connection import PostResult, ServerConnection
from swift_stage2.channel_b.rollout_client.plan import Piece, PostEnd, RequestPlan, SeedLedger
from swift_stage2.channel_b.rollout_client.trust import ServerTrust
from swift_stage2.config import DecodingConfig
from swift_stage2.errors import TicketTimeout
from swift_stage2.fence import InferFence, InferTicket
from swift_stage2.records import PostFailure, Rollout, Sample, SampleKey, VersionSpan
from swift_stage2.servers.protocol import request_config

logger = logging.getLogger(__name__)

Request = Mapping[str, Any]

_BUDGET_IN_TIMEOUTS = 2
_SHORTEST_TIMEOUT_S = 1e-3
_BUSY_PAUSE_S = 1.0


class PostEvents(Protocol):
    """Hears of every POST that asks for samples, on the thread of its lane."""

    def sent(self, keys: Sequence[SampleKey], *, server: str, seed: int, version: int) -> None: ...

    def finished(self, keys: Sequence[SampleKey], *, server: str, end: str, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Terms:
    """The settings that all POSTs of one batch share."""

    decoding: DecodingConfig
    events: PostEvents | None = None
    only_version: int | None = None
    """Nothing is asked under another version; the samples return instead. None: any version will do."""


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
        """Stops the budget for as long as the block runs."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._end += time.monotonic() - started


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


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneSettings:
    """The settings of all lanes of a client."""

    fence: InferFence
    seeds: SeedLedger
    stop: threading.Event
    request_timeout_s: float
    ticket_timeout_s: float  # one slice of the wait for a ticket
    connect_timeout_s: float
    api_key: str | None = field(repr=False)
    run_id: str | None
    canary: Request | None
    is_lost: Callable[[str, int], bool]
    watch_post: Callable[[], AbstractContextManager[None]]


class ServerLane:
    """One server as this rank sees it. All but ``trust`` and ``end`` belong to the client's thread."""

    def __init__(self, base_url: str, settings: LaneSettings, *, name: str) -> None:
        self.base_url = base_url
        self.trust = ServerTrust()
        self._settings = settings
        self._connection = ServerConnection(
            base_url, api_key=settings.api_key, connect_timeout_s=settings.connect_timeout_s
        )
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._last: Future[None] | None = None
        self._known_good = [] if settings.canary is None else [settings.canary]
        self._num_abandoned_prompts = 0

    @property
    def in_flight(self) -> int:
        """Prompts of abandoned POSTs that the server may still be computing."""
        return 0 if self.trust.settle_by is None else self._num_abandoned_prompts

    def submit(self, samples: Sequence[Sample], requests: Sequence[Request], terms: Terms) -> Future[Share]:
        """Starts work on a share; the future raises ``FenceShutDown`` when the fence ends."""
        return self._thread.submit(self._work_on, samples, requests, terms)

    def end(self) -> None:
        """Ends the call in progress; after the owner's stop event is set. Idempotent."""
        self._connection.end()

    def close(self, timeout_s: float) -> bool:
        """Ends everything and waits for it; False if the thread is still at work after ``timeout_s``."""
        self.end()
        if self._last is None:
            self._last = self._thread.submit(lambda: None)  # behind all that was submitted
            self._thread.shutdown(wait=False)
        running = wait([self._last], timeout=timeout_s).not_done
        if not running:
            self._connection.close()
        return not running

    def _work_on(self, samples: Sequence[Sample], requests: Sequence[Request], terms: Terms) -> Share:
        budget = TimeBudget(_BUDGET_IN_TIMEOUTS * self._settings.request_timeout_s)
        plan = RequestPlan(len(requests), probe_early=bool(self._known_good))
        share = Share(samples, requests, terms, plan, budget)
        try:
            while (piece := share.plan.next_piece()) is not None and self._may_go_on(budget):
                self._ask(share, piece)
        finally:
            if self.trust.settle_by is not None and not self._settings.stop.is_set():
                with suppress(RuntimeError):  # closed meanwhile: nothing is settled any more
                    self._thread.submit(self._settle_or_suspect)  # after this: the share need not wait for it
        for number in (*share.rollouts, *plan.quarantined):
            self._settings.seeds.forget(samples[number].key)
        return share

    def _may_go_on(self, budget: TimeBudget) -> bool:
        return (
            not self._settings.stop.is_set()
            and self.trust.is_proven
            and self._settle(budget.remaining_s)
            and budget.remaining_s > 0
        )

    def _ask(self, share: Share, piece: Piece) -> None:
        requests = [share.requests[number] for number in piece.indices] or self._known_good
        if not requests:
            reason = f"nothing that it was asked ever succeeded: {share.failures[-1].reason}"
            share.plan.blame_server(reason)
            self._suspect(reason)
            return
        with self._ticket(share.budget) as ticket:
            # A round may have come and gone during the wait, and have left this server out.
            if (
                ticket is None
                or not self.trust.is_proven
                or share.terms.only_version not in (None, ticket.version)
            ):
                share.plan.end()
                return
            end = self._post(share, piece, requests, ticket)
        if end is not PostEnd.BUSY:
            return
        if share.budget.remaining_s < self._settings.request_timeout_s:
            share.plan.end()  # a call that found room now might not end in time
        self._settings.stop.wait(_BUSY_PAUSE_S)  # without the ticket, so that no round waits for it

    def _post(self, share: Share, piece: Piece, requests: Sequence[Request], ticket: InferTicket) -> PostEnd:
        leader = share.samples[(piece.indices or tuple(share.plan.accused))[0]]
        seed = self._settings.seeds.next_seed(leader.key)
        timeout_s = max(_SHORTEST_TIMEOUT_S, min(self._settings.request_timeout_s, share.budget.remaining_s))
        keys = [share.samples[number].key for number in piece.indices]
        events = share.terms.events if keys else None
        if events is not None:
            events.sent(keys, server=self.base_url, seed=seed, version=ticket.version)
        started = time.monotonic()
        with self._settings.watch_post():
            result = self._connection.infer(requests, self._config(share, piece, seed), timeout_s=timeout_s)
        seconds = time.monotonic() - started
        share.num_posts += 1
        result = self._doubt(result, ticket.version)
        if events is not None:
            events.finished(keys, server=self.base_url, end=result.end, seconds=seconds)
        if result.end is PostEnd.ANSWERED:
            self._known_good = [requests[0]]
            if all(completion.finish_reason != "abort" for completion in result.completions):
                share.num_answered += len(piece.indices)
                share.answered_s += seconds
            for number, completion in zip(piece.indices, result.completions, strict=not piece.is_probe):
                # An aborted one leaves its sample to return.
                kept = share.aborted if completion.finish_reason == "abort" else share.rollouts
                kept[number] = Rollout(
                    sample=share.samples[number],
                    text=completion.text,
                    token_ids=completion.token_ids,
                    prompt_token_ids=completion.prompt_token_ids,
                    truncated=completion.finish_reason == "length",
                    seed=seed if completion.seed is None else completion.seed,
                    server=self.base_url,
                    spans=(VersionSpan(ticket.version, 0, len(completion.token_ids)),),
                    log_probs=completion.log_probs,
                    seconds=seconds,
                )
        elif result.end in (PostEnd.TIMED_OUT, PostEnd.STOPPED):
            self._abandon(share, len(requests))
        self._record(share, piece, result)
        return result.end

    def _doubt(self, result: PostResult, version: int) -> PostResult:
        objection = self.trust.objection(result.completions, version=version, run_id=self._settings.run_id)
        is_stamped = all(completion.incarnation is not None for completion in result.completions)
        # Asked after the answer: a process that has replaced the proven one cannot have answered before the loss.
        if objection is None and not is_stamped and self._settings.is_lost(self.base_url, version):
            objection = (
                f"the process that the round of version {version} proved was lost; who answers is another"
            )
        if objection is None:
            return result
        return PostResult(PostEnd.DISTRUSTED, f"{self.base_url}: {objection}")

    def _abandon(self, share: Share, num_prompts: int) -> None:
        """While the ticket is held: a drained fence with nothing unsettled must mean an idle server."""
        share.num_abandoned += 1
        self._num_abandoned_prompts = self.in_flight + num_prompts
        self.trust.settle_by = time.monotonic() + self._settings.request_timeout_s

    def _record(self, share: Share, piece: Piece, result: PostResult) -> None:
        share.plan.record(piece, result.end, result.reason, result.named)
        if result.end is not PostEnd.ANSWERED:
            share.failures.append(PostFailure(self.base_url, result.end, len(piece.indices), result.reason))
            logger.info("no rollout for %d requests: %s", len(piece.indices), result.reason)
        if share.plan.server_fault is not None:
            self._suspect(share.plan.server_fault)

    def _settle_or_suspect(self) -> None:
        try:
            self._settle(self._settings.request_timeout_s)
        except Exception as error:  # nobody may wait for this call, and a server unsettled holds every round
            self._suspect(f"an abandoned POST could not be settled: {type(error).__name__}: {error}")
            raise

    def _settle(self, patience_s: float) -> bool:
        """Asks the ordered call until it answers, ``patience_s`` pass, or the server becomes suspect."""
        settle_by = self.trust.settle_by
        if settle_by is None:
            return True
        patience_ends = time.monotonic() + patience_s
        result = self._reset(min(settle_by, patience_ends))
        if result.end in (PostEnd.ERROR_ANSWER, PostEnd.UNREACHABLE):
            result = self._reset(min(settle_by, patience_ends))
        still_has_time = result.end is PostEnd.TIMED_OUT and patience_ends < settle_by
        if result.end is PostEnd.ANSWERED:
            self.trust.settle_by = None
        elif result.end is not PostEnd.STOPPED and not still_has_time:
            self._suspect(f"a POST was abandoned and could not be settled: {result.reason}")
        return result.end is PostEnd.ANSWERED

    def _reset(self, moment: float) -> PostResult:
        timeout_s = max(_SHORTEST_TIMEOUT_S, moment - time.monotonic())
        return self._connection.reset_prefix_cache(timeout_s=timeout_s)

    def _suspect(self, reason: str) -> None:
        logger.warning("%s is suspect, no request before a round proves it: %s", self.base_url, reason)
        self.trust.suspect(reason)

    @contextmanager
    def _ticket(self, budget: TimeBudget) -> Iterator[InferTicket | None]:
        """Holds a ticket; None once the owner wants to stop. Waiting is never a failure."""
        fence, slice_s = self._settings.fence, self._settings.ticket_timeout_s
        with ExitStack() as stack:
            ticket: InferTicket | None = None
            with budget.paused():
                while ticket is None and not self._settings.stop.is_set():
                    try:
                        ticket = stack.enter_context(fence.ticket(slice_s))
                    except TicketTimeout:
                        continue
            yield ticket

    def _config(self, share: Share, piece: Piece, seed: int) -> dict[str, Any]:
        decoding = share.terms.decoding
        return request_config(
            max_new_tokens=1 if piece.is_probe else decoding.max_new_tokens,
            temperature=decoding.temperature,
            top_p=decoding.top_p,
            top_k=decoding.top_k,
            repetition_penalty=decoding.repetition_penalty,
            seed=seed,
        )
