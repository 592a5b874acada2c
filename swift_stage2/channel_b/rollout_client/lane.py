"""One server as one rank asks it: at most one POST per place, each under one fence ticket, on a thread of its place.

A place works on one share within one time budget, and makes sure that a POST which was abandoned is settled (the
server answered a later ordered call) or the server suspect. Trust, pace and limit are the server's, shared by its
places. Called by the client.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from typing import Any, Protocol

from swift_stage2.channel_b.rollout_client.chat_connection import connect
from swift_stage2.channel_b.rollout_client.connection import PostResult, TimeBudget
from swift_stage2.channel_b.rollout_client.plan import Piece, PlaceLimit, PostEnd, RequestPlan, SeedLedger
from swift_stage2.channel_b.rollout_client.trust import OutPost, ServedWeights, ServerTrust
from swift_stage2.columns import Column, given_by
from swift_stage2.config import DecodingConfig
from swift_stage2.config.rollout import MAX_REQUESTS_PER_POST
from swift_stage2.errors import FenceShutDown, TicketTimeout
from swift_stage2.fence import InferFence, InferTicket
from swift_stage2.records import PostFailure, Rollout, Sample, SampleKey, VersionSpan
from swift_stage2.servers.infer_wire import PREFIX, request_config

logger = logging.getLogger(__name__)

Request = Mapping[str, Any]

_BUDGET_IN_TIMEOUTS = 2
_SHORTEST_TIMEOUT_S = 1e-3
_CONNECT_TIMEOUT_S = 10.0
_BUSY_PAUSE_S = 1.0


def backlog(num_places: int) -> int:
    """Requests that may wait for a place: so many get free while the pipeline prepares for a quarter of a rollout.

    They cost no freshness, because a version is taken when the POST leaves.
    """
    return max(1, num_places // 4)


class PostEvents(Protocol):
    """Hears of every POST that asks for samples, on the thread of its place."""

    def sent(self, keys: Sequence[SampleKey], *, server: str, seed: int, version: int) -> None: ...

    def finished(self, keys: Sequence[SampleKey], *, server: str, end: str, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Terms:
    """The settings of all POSTs for what was submitted together. Whose outcome it is, too."""

    decoding: DecodingConfig
    events: PostEvents | None = None
    columns: tuple[Column, ...] = ()
    """Every answer must bring their values."""
    only_version: int | None = None
    """Nothing is asked of a server with another version; the samples return instead. None: any version will do."""


@dataclass(slots=True)
class Share:
    """Samples and their requests by number, the plan over these numbers, and what has come of them so far."""

    samples: Sequence[Sample]
    requests: Sequence[Request]
    terms: Terms
    plan: RequestPlan
    budget: TimeBudget  # begun anew when a place takes the share
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    aborted: dict[int, Rollout] = field(default_factory=dict)
    failures: list[PostFailure] = field(default_factory=list)
    num_posts: int = 0
    num_answered: int = 0
    """Requests answered, and below the seconds of the POSTs that answered them: the server's pace."""
    answered_s: float = 0.0
    seconds: float = 0.0
    """At its place, waits for tickets included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneSettings:
    fence: InferFence
    seeds: SeedLedger
    stop: threading.Event
    request_timeout_s: float
    ticket_timeout_s: float  # one slice of the wait for a ticket
    api_key: str | None = field(repr=False)
    run_id: str | None
    canary: Request | None
    is_lost: Callable[[str, int], bool]
    watch_post: Callable[[], AbstractContextManager[None]]
    chat_models: Mapping[str, str]  # by base URL
    most_per_post: int  # of a server that is asked for whole batches
    finished: Callable[[ServerLane, Share], None]
    failed: Callable[[Exception], None]


class ServerLane:
    """One server as this rank sees it. ``submit`` and ``close`` belong to the client's thread."""

    def __init__(self, base_url: str, settings: LaneSettings, *, name: str, num_places: int) -> None:
        """``num_places``: this rank's share of what the server may be asked at once."""
        self.base_url = base_url
        self.trust = ServerTrust()
        self._settings = settings
        self._name = name
        self._num_places = num_places
        self._connection = connect(
            base_url,
            settings.chat_models.get(base_url),
            api_key=settings.api_key,
            connect_timeout_s=_CONNECT_TIMEOUT_S,
        )
        self._lock = threading.Lock()
        self._waiting: deque[Share] = deque()
        self._places: dict[int, threading.Thread] = {}  # at most ``num_places``, none without work
        self._limit = PlaceLimit()
        self._settling = threading.Lock()
        self._known_good = [] if settings.canary is None else [settings.canary]
        self.in_hand = 0
        """Prompts that were submitted and have not come back. Written under the lane's lock."""

    @property
    def num_places(self) -> int:
        """POSTs that may be out at once: one where a POST carries a whole batch."""
        return self._limit.within(self._num_places) if self.trust.streams else 1

    @property
    def post_size(self) -> int:
        return 1 if self.trust.streams else min(self._settings.most_per_post, MAX_REQUESTS_PER_POST)

    @property
    def room(self) -> int:
        """Prompts that may be submitted now; behind a POST that carries a batch none, so that the next one is large."""
        if self.trust.streams:
            return self.num_places + backlog(self.num_places) - self.in_hand
        return 0 if self.in_hand else self.post_size

    @property
    def is_settling(self) -> bool:
        """True while the server may still compute a request that this rank has abandoned."""
        return self.trust.settle_by is not None

    def submit(self, samples: Sequence[Sample], requests: Sequence[Request], terms: Terms) -> None:
        """Has a place work on a share: at once, or when one gets free. ``finished`` gets it, whatever happens."""
        plan = RequestPlan(len(requests), probe_early=bool(self._known_good))
        with self._lock:
            self._waiting.append(Share(samples, requests, terms, plan, TimeBudget(0.0)))
            self.in_hand += len(samples)
            if len(self._places) < self.num_places:
                place = next(number for number in count() if number not in self._places)
                name = f"{self._name}-{place}"
                thread = threading.Thread(target=self._serve, args=(place,), name=name, daemon=True)
                thread.start()  # one that cannot be started is no place, which ``close`` would join
                self._places[place] = thread

    def distrust(self, reason: str) -> None:
        """The server is suspect, and no answer that is still to come is waited for."""
        logger.warning("%s is suspect, no request before a round proves it: %s", self.base_url, reason)
        self.trust.suspect(reason)
        self._connection.give_up()

    def withdraw(self) -> None:
        """A round did not prove the server: nothing is asked of it, and nobody waits for what it was asked."""
        self.trust.withdraw()
        self._connection.give_up()

    def end(self) -> None:
        """Ends the calls in progress; after the owner's stop event is set. Idempotent."""
        self._connection.end()

    def close(self, timeout_s: float) -> bool:
        """Ends everything and waits for it; False if a place is still at work after ``timeout_s``."""
        self.end()
        ends = time.monotonic() + timeout_s
        with self._lock:
            places = list(self._places.values())
        for place in places:
            place.join(max(0.0, ends - time.monotonic()))
        running = any(place.is_alive() for place in places)
        if not running:
            self._connection.close()
        return not running

    def _serve(self, place: int) -> None:
        """The life of one place: share after share, as long as one waits."""
        try:
            while (share := self._next_share(place)) is not None:
                self._work_on(share)
                with self._lock:
                    self.in_hand -= len(share.samples)
                self._settings.finished(self, share)
                if self.trust.settle_by is not None and not self._settings.stop.is_set():
                    self._settle_or_suspect()  # after that: the share need not wait for it
        except Exception as error:  # top of the thread: the client's next call raises it
            self._settings.failed(error)

    def _next_share(self, place: int) -> Share | None:
        with self._lock:
            if self._waiting and len(self._places) <= self.num_places:
                return self._waiting.popleft()
            del self._places[place]
            return None

    def _work_on(self, share: Share) -> None:
        began_s = time.monotonic()
        budget = share.budget = TimeBudget(_BUDGET_IN_TIMEOUTS * self._settings.request_timeout_s)
        while (piece := share.plan.next_piece()) is not None and self._may_go_on(budget):
            self._ask(share, piece)
        for number in (*share.rollouts, *share.plan.quarantined):
            self._settings.seeds.forget(share.samples[number].key)
        share.seconds = time.monotonic() - began_s

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
            self.distrust(reason)
            return
        with self._ticket(share.budget) as ticket:
            # A round may have come and gone during the wait, and have left this server out.
            if (
                ticket is None
                or share.terms.only_version not in (None, self.trust.version_under(ticket.version))
                or (post := self.trust.begin_post()) is None
            ):
                share.plan.end()
                return
            end = self._post(share, piece, requests, ticket, post)
        if end is not PostEnd.BUSY:
            return
        if share.budget.remaining_s < self._settings.request_timeout_s:
            share.plan.end()  # a call that found room now might not end in time
        self._settings.stop.wait(_BUSY_PAUSE_S)  # without the ticket, so that no round waits for it

    def _post(
        self, share: Share, piece: Piece, requests: Sequence[Request], ticket: InferTicket, post: OutPost
    ) -> PostEnd:
        leader = share.samples[(piece.indices or tuple(share.plan.accused))[0]]
        seed = self._settings.seeds.next_seed(leader.key)
        timeout_s = max(_SHORTEST_TIMEOUT_S, min(self._settings.request_timeout_s, share.budget.remaining_s))
        keys = [share.samples[number].key for number in piece.indices]
        events = share.terms.events if keys else None
        if events is not None:
            version = self.trust.version_under(ticket.version)
            events.sent(keys, server=self.base_url, seed=seed, version=version)
        config, started = self._config(share, piece, seed), time.monotonic()
        with self._settings.watch_post():
            result = self._connection.infer(
                requests, config, timeout_s=timeout_s, is_wanted=lambda: post.is_wanted
            )
        ended = time.monotonic()
        seconds = ended - started
        share.num_posts += 1
        result, weights = self._judge(post, result, ticket.version)
        self._limit.observe(result.end, began_s=started, ended_s=ended, most=self._num_places)
        # While the ticket is held: a drained fence with nothing unsettled must mean an idle server.
        is_abandoned = result.end in (PostEnd.TIMED_OUT, PostEnd.STOPPED)
        settle_by = ended + self._settings.request_timeout_s if is_abandoned else None
        if not self.trust.end_post(post, settle_by=settle_by):
            result = PostResult(PostEnd.LOST, f"{self.base_url}: it became suspect while this was asked")
            share.plan.end()
        elif not post.is_wanted and result.end is not PostEnd.ANSWERED:
            share.plan.end()  # cut by a withdrawal: no word on the server, which may be proven anew by now
        if events is not None:
            events.finished(keys, server=self.base_url, end=result.end, seconds=seconds)
        if result.end is PostEnd.ANSWERED:
            self._known_good = [{key: value for key, value in requests[0].items() if key != PREFIX}]
            if all(completion.finish_reason != "abort" for completion in result.completions):
                share.num_answered += len(piece.indices)
                share.answered_s += seconds
            answers = zip(result.completions, weights, strict=True)
            for number, (completion, made_by) in zip(piece.indices, answers, strict=not piece.is_probe):
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
                    spans=(VersionSpan(made_by.version, 0, len(completion.token_ids)),),
                    seconds=seconds,
                    round_id=made_by.round_id,
                    **given_by(completion),
                )
        self._record(share, piece, result)
        return result.end

    def _judge(
        self, post: OutPost, result: PostResult, version: int
    ) -> tuple[PostResult, tuple[ServedWeights, ...]]:
        """The result, and the weights that made each completion; ``DISTRUSTED`` if they cannot be the server's."""
        weights = self.trust.weights_of(
            post, result.completions, version=version, run_id=self._settings.run_id
        )
        is_stamped = all(completion.incarnation is not None for completion in result.completions)
        # Asked after the answer: a process that has replaced the proven one cannot have answered before the loss.
        if not (isinstance(weights, str) or is_stamped) and self._settings.is_lost(self.base_url, version):
            weights = (
                f"the process that the round of version {version} proved was lost; who answers is another"
            )
        if isinstance(weights, str):
            return PostResult(PostEnd.DISTRUSTED, f"{self.base_url}: {weights}"), ()
        return result, weights

    def _record(self, share: Share, piece: Piece, result: PostResult) -> None:
        if result.end is not PostEnd.ANSWERED:
            share.failures.append(PostFailure(self.base_url, result.end, len(piece.indices), result.reason))
            logger.info("no rollout for %d requests: %s", len(piece.indices), result.reason)
        if share.plan.has_ended:  # nothing that its POST says is believed
            return
        share.plan.record(piece, result.end, result.reason, result.named)
        if share.plan.server_fault is not None:
            self.distrust(share.plan.server_fault)

    def _settle_or_suspect(self) -> None:
        try:
            self._settle(self._settings.request_timeout_s)
        except Exception as error:  # a server unsettled holds every round
            self.distrust(f"an abandoned POST could not be settled: {type(error).__name__}: {error}")
            raise

    def _settle(self, patience_s: float) -> bool:
        """Asks the ordered call until it answers, ``patience_s`` pass, or the server becomes suspect.

        One place at a time. The call that was sent after a POST settles it, whoever abandoned it.
        """
        patience_ends = time.monotonic() + patience_s
        if self.trust.settle_by is None:
            return True
        if not self._settling.acquire(timeout=patience_s):
            return False
        try:
            settle_by, posts = self.trust.settle_by, self.trust.abandoned()
            if settle_by is None:
                return self.trust.is_proven
            result = self._reset(min(settle_by, patience_ends))
            if result.end in (PostEnd.ERROR_ANSWER, PostEnd.UNREACHABLE):
                result = self._reset(min(settle_by, patience_ends))
            still_has_time = result.end is PostEnd.TIMED_OUT and patience_ends < settle_by
            if result.end is PostEnd.ANSWERED:
                self.trust.settle(posts)
            elif result.end is not PostEnd.STOPPED and not still_has_time and posts & self.trust.abandoned():
                self.distrust(f"a POST was abandoned and could not be settled: {result.reason}")
            return result.end is PostEnd.ANSWERED
        finally:
            self._settling.release()

    def _reset(self, moment: float) -> PostResult:
        timeout_s = max(_SHORTEST_TIMEOUT_S, moment - time.monotonic())
        return self._connection.reset_prefix_cache(timeout_s=timeout_s)

    @contextmanager
    def _ticket(self, budget: TimeBudget) -> Iterator[InferTicket | None]:
        """Holds a ticket; None once the owner wants to stop or the fence has ended. Waiting is never a failure."""
        fence, slice_s = self._settings.fence, self._settings.ticket_timeout_s
        with ExitStack() as stack:
            ticket: InferTicket | None = None
            with budget.paused():
                while ticket is None and not self._settings.stop.is_set():
                    try:
                        ticket = stack.enter_context(fence.ticket(slice_s))
                    except TicketTimeout:
                        continue
                    except FenceShutDown:  # only at the end of a run
                        self._settings.stop.set()
            yield ticket

    def _config(self, share: Share, piece: Piece, seed: int) -> dict[str, Any]:
        terms = share.terms
        decoding = replace(terms.decoding, max_new_tokens=1) if piece.is_probe else terms.decoding
        return request_config(**asdict(decoding), seed=seed, columns=terms.columns)
