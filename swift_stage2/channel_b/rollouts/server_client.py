"""One server as one rank asks it: a task per POST, each under one ticket of the server's fence.

A server of ours gets a POST per request, once a prompt of it was the learner's; until then a few go together, so that
neither one odd row nor one long answer decides. Another one gets one POST at a time, with what has gathered while the
one before was out. A POST that was abandoned is settled (the server answered a
later ordered call), or the server becomes suspect. Lives on the client's event loop; what any thread may use says so.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Coroutine, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from swift_stage2.channel_b.rollouts.batch import Ask, Batch, Unasked
from swift_stage2.channel_b.rollouts.requests import PostEnd, PostResult
from swift_stage2.channel_b.rollouts.routes import route_to
from swift_stage2.channel_b.rollouts.server_state import InFlightRequest, PlaceLimit, ServerState
from swift_stage2.errors import FenceShutDown
from swift_stage2.fence import InferFence, InferTicket
from swift_stage2.records import BatchOutcome, Sample
from swift_stage2.servers.health_check import ServerKind
from swift_stage2.servers.infer_wire import request_config

if TYPE_CHECKING:
    from swift_stage2.channel_b.rollouts.client import RolloutClient

logger = logging.getLogger(__name__)

_BUDGET_IN_TIMEOUTS = 2
_SHORTEST_TIMEOUT_S = 1e-3
_MOST_FAILURES = 3
_FIRST_POST = 4


def backlog(num_places: int) -> int:
    """Requests that may wait for a place: so many get free while the pipeline prepares for a quarter of a rollout.

    They cost no freshness, because a version is taken when the POST leaves.
    """
    return max(1, num_places // 4)


def _row(sample: Sample) -> Hashable:
    """Rows of an evaluation are of another data set, which their epoch tells."""
    return sample.key.epoch, sample.key.index


class ServerClient:
    """One server as this rank sees it. ``state``, ``submit``, the properties and what stops requests: any thread."""

    def __init__(
        self, client: RolloutClient, base_url: str, *, fence: InferFence, num_places: int, kind: ServerKind
    ) -> None:
        """``num_places``: this rank's share of what the server may be asked at once. ``fence`` is closed."""
        self.base_url = base_url
        self.fence = fence
        self.state = ServerState(stamps=kind.stamps)
        self._client = client
        self._loop = client.loop
        self._num_places = num_places
        self._route = route_to(base_url, kind.chat_model, api_key=client.api_key)
        self._lock = threading.Lock()
        self._waiting: deque[Ask] = deque()
        self._limit = PlaceLimit()
        self._num_successes = 0
        self._failed_since: set[Hashable] = set()  # rows whose request failed alone since the last success
        self._failed: dict[Hashable, int] = {}
        """By row, that failed alone: the number of successes until then."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: dict[asyncio.Task[PostResult], InFlightRequest | None] = {}  # None: a call that settles
        self._settling = asyncio.Lock()
        self._opened = asyncio.Event()  # set when the fence may have, or the client stops
        self.in_hand = 0
        """Prompts that were submitted and have not come back. Written under the lock."""

    @property
    def is_stopping(self) -> bool:
        """True once the client stops."""
        return self._client.stopping.is_set()

    @property
    def request_timeout_s(self) -> float:
        return self._client.request_timeout_s

    @property
    def num_places(self) -> int:
        """POSTs that may be out at once: one where a POST carries a whole batch."""
        return self._limit.within(self._num_places) if self.state.streams else 1

    @property
    def post_size(self) -> int:
        """Requests that a POST may carry."""
        if self.state.streams:
            return 1
        most = _FIRST_POST if self.state.stamps else self._client.max_inflight_per_server
        return self._limit.within(most)

    @property
    def room(self) -> int:
        """Prompts that may be submitted now; behind a POST that carries a batch none, so that the next one is large."""
        if self.state.streams:
            return self.num_places + backlog(self.num_places) - self.in_hand
        return 0 if self.in_hand else self.post_size

    @property
    def is_open(self) -> bool:
        """True if the server is asked, and a request given to it now would leave at once."""
        return self.state.is_proven and self.fence.is_open

    @property
    def is_busy(self) -> bool:
        """True while this rank may ask the server, or may have something in flight there."""
        return self.fence.is_open or self.fence.in_flight > 0 or self.is_settling

    def update(self, version: int, *, is_closed: bool) -> None:
        """Takes what all ranks have agreed on: the ``version`` that the server has proven, 0 if nobody may ask it."""
        if version:
            self.state.prove(version)
        elif self.state.is_proven or self.fence.is_open:
            self.state.stop_requests()
            self._cut_soon()
        if is_closed or not version:
            self.fence.close()
        elif not self.is_stopping and (version != self.fence.version or not self.fence.is_open):
            self.fence.reopen(version)

    @property
    def is_settling(self) -> bool:
        """True while the server may still compute a request that this rank has abandoned."""
        return self.state.is_settling

    def submit(self, asks: Sequence[Ask]) -> None:
        """Has them asked, at once or when a place gets free. Each comes back, whatever happens."""
        with self._lock:
            self._waiting.extend(asks)
            self.in_hand += len(asks)
        try:
            self._loop.call_soon_threadsafe(self.fill)
        except RuntimeError:  # the client has stopped, and the loop is closed
            self.fill()

    def mark_suspect(self, reason: str) -> None:
        """Nothing is asked of the server, and no answer that is still to come is waited for."""
        logger.warning(
            "%s is suspect, no request before it has proven weights anew: %s", self.base_url, reason
        )
        self.state.mark_suspect(reason)
        self._cut_soon()

    def _cut_soon(self) -> None:
        with suppress(RuntimeError):  # the loop is closed: nothing is called any more
            self._loop.call_soon_threadsafe(self.cut_calls)

    # --- on the loop ----------------------------------------------------------------------------
    def cut_calls(self) -> None:
        """Ends the calls of POSTs that are not wanted any more, or all once the client stops. On the loop."""
        is_stopping = self.is_stopping
        for call, post in self._calls.items():
            if is_stopping or not (self.state.is_proven if post is None else post.is_wanted):
                call.cancel()
        self._opened.set()

    async def close(self) -> None:
        """Waits until everything has come back. On the loop, after a stop."""
        self.cut_calls()
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def fill(self) -> None:
        """Gives every free place something to do; once the client stops, what waits comes back."""
        if self.is_stopping:
            while asks := self._next_asks():
                Batch(self, dict(enumerate(asks)), 0.0).give_back()
            return
        while len(self._tasks) < self.num_places and (asks := self._next_asks()):
            task = self._loop.create_task(self._work_on(asks))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda _: self.fill())

    def _next_asks(self) -> list[Ask]:
        """As many as a POST may carry, of one kind, and no row twice.

        A POST has one seed, and some servers give copies of a request in it one answer.
        """
        asks, rows, kept = list[Ask](), set[int](), deque[Ask]()
        with self._lock:
            most = self.post_size
            while self._waiting and len(asks) < most:
                ask = self._waiting.popleft()
                fits = ask.sample.key.index not in rows and (not asks or ask.settings is asks[0].settings)
                (asks if fits else kept).append(ask)
                rows.add(ask.sample.key.index)
            self._waiting.extendleft(reversed(kept))
        return asks

    async def _work_on(self, asks: Sequence[Ask]) -> None:
        batch = Batch(self, dict(enumerate(asks)), _BUDGET_IN_TIMEOUTS * self._client.request_timeout_s)
        try:
            with suppress(Unasked):
                await batch.resolve()
            batch.give_back()
            with suppress(Unasked):
                await self.settle()
        except Exception as error:  # top of the task: the client's next call raises it
            self.mark_suspect(f"its requests failed here: {type(error).__name__}: {error}")
            batch.give_back()
            self._client.fail(error)

    async def enter(self) -> InferTicket:
        """A ticket of the fence, to be left again. Raises Unasked: the server is not asked, or the client stops."""
        try:
            while self.state.is_proven and not self.is_stopping:
                self._opened.clear()
                if (ticket := self.fence.enter()) is not None:
                    return ticket
                # The fence reopens, the server is withdrawn, or the client stops.
                await self._opened.wait()  # deadline: the client's life
        except FenceShutDown as end:  # only at the end of a run, which stops the client as well
            raise Unasked from end
        raise Unasked

    async def pause(self, seconds: float) -> None:
        """Sleeps for so long, or until the client stops."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.is_stopping:
                    self._opened.clear()
                    await self._opened.wait()  # deadline: ``seconds``

    def may_be_poisonous(self, sample: Sample) -> bool:
        """True if its row failed alone here, and another one has succeeded since."""
        return self._failed.get(_row(sample), self._num_successes) < self._num_successes

    def note_failure(self, sample: Sample) -> bool:
        """Its row failed alone. True if the server is at fault: one row after the other did, and none succeeded."""
        self._failed[_row(sample)] = self._num_successes
        self._failed_since.add(_row(sample))
        return len(self._failed_since) >= _MOST_FAILURES

    async def post(self, asks: Sequence[Ask], ticket: InferTicket, remaining_s: float) -> PostResult:
        """One POST under a ticket. Raises Unasked: the server must not be asked."""
        settings = asks[0].settings
        version = ticket.version
        if settings.only_version not in (None, version) or (post := self.state.begin_post()) is None:
            raise Unasked
        keys = [ask.sample.key for ask in asks]
        seed = self._client.seeds.next_seed(keys[0])
        requests = [ask.request for ask in asks]
        observer = settings.observer
        if observer is not None:
            observer.sent(keys, server=self.base_url, seed=seed, version=version)
        columns = (*settings.columns, *settings.wished)
        config = request_config(**asdict(settings.decoding), seed=seed, columns=columns)
        may_lack = {each.name for each in settings.wished if each not in settings.columns}
        timeout_s = max(_SHORTEST_TIMEOUT_S, min(self._client.request_timeout_s, remaining_s))
        began_s = time.monotonic()
        with self._client.watch_post():
            result = await self._call(post, requests, config, timeout_s, may_lack)
        ended_s = time.monotonic()
        result = await self._believed(post, result, version)
        most = self._num_places if self.state.streams else self._client.max_inflight_per_server
        self._limit.observe(result.end, began_s=began_s, ended_s=ended_s, most=most, num_requests=len(asks))
        # While the ticket is held: a drained fence with nothing unsettled must mean an idle server.
        is_abandoned = result.end in (PostEnd.TIMED_OUT, PostEnd.STOPPED)
        is_known = self.state.end_post(post, is_abandoned=is_abandoned)
        if not is_known:
            result = PostResult(PostEnd.LOST, f"{self.base_url}: it became suspect while this was asked")
        if observer is not None:
            observer.finished(keys, server=self.base_url, end=result.end, seconds=ended_s - began_s)
        if result.end is PostEnd.ANSWERED:
            self._num_successes += 1
            self._failed_since.clear()
        else:
            logger.info("no rollout for %d requests: %s", len(asks), result.reason)
        is_meant = is_known and post.is_wanted
        return replace(result, seed=seed, seconds=ended_s - began_s, is_meant=is_meant)

    def finish(self, outcome: BatchOutcome) -> None:
        """Hands ``outcome`` to the client."""
        with self._lock:
            self.in_hand -= len(outcome.samples)
        for sample in (
            *(each.sample for each in outcome.rollouts),
            *(each for each, _ in outcome.quarantined),
        ):
            self._client.seeds.forget(sample.key)
        self._client.put(outcome)

    async def _call(
        self,
        post: InFlightRequest,
        requests: Sequence[Mapping[str, Any]],
        config: Mapping[str, Any],
        timeout_s: float,
        may_lack: Collection[str],
    ) -> PostResult:
        """The call, which ``cut_calls`` ends as lost or, once the client stops, as stopped."""
        if post.is_wanted and not self.is_stopping:
            call = self._route.generate(requests, config, timeout_s=timeout_s, may_lack=may_lack)
            result = await self._cuttable(call, post)
            if result is not None:
                return result
        end = PostEnd.STOPPED if self.is_stopping else PostEnd.LOST
        return PostResult(end, f"{self.base_url}: the answer is not waited for any more")

    async def _believed(self, post: InFlightRequest, result: PostResult, version: int) -> PostResult:
        """With the versions that made each completion; ``DISTRUSTED`` if they cannot be the server's."""
        run_id = self._client.run_id
        spans = self.state.spans_of(post, result.completions, version=version, run_id=run_id)
        # Asked after the answer: a process that has replaced the proven one cannot have answered before the loss.
        asks = result.end is PostEnd.ANSWERED and not self.state.stamps
        if asks and await asyncio.to_thread(self._client.is_lost, self.base_url, version):
            spans = f"the process that proved version {version} was lost; who answers is another"
        if isinstance(spans, str):
            return PostResult(PostEnd.DISTRUSTED, f"{self.base_url}: {spans}")
        return replace(result, spans=spans)

    async def settle(self) -> None:
        """Asks the ordered call until it answers or the server becomes suspect, within a request's time.

        The call that was sent after a POST settles it, whoever abandoned it. It waits for requests of other ranks, too,
        which have as long. Raises Unasked: it is not settled.
        """
        if not self.is_settling:
            return
        async with self._settling:  # deadline: who holds it has one
            posts, settle_by = self.state.abandoned(), time.monotonic() + self.request_timeout_s
            if not posts:
                return
            if not self.state.is_proven or self.is_stopping:
                raise Unasked
            result = await self._settle_call(settle_by)
            if self.state.is_proven and result.end in (PostEnd.ERROR_ANSWER, PostEnd.UNREACHABLE):
                result = await self._settle_call(settle_by)
            if result.end is PostEnd.ANSWERED:
                self.state.settle(posts)
                return
            if not self.is_stopping and posts & self.state.abandoned():
                self.mark_suspect(f"a POST was abandoned and could not be settled: {result.reason}")
        raise Unasked

    async def _settle_call(self, moment: float) -> PostResult:
        timeout_s = max(_SHORTEST_TIMEOUT_S, moment - time.monotonic())
        result = await self._cuttable(self._route.settle(timeout_s=timeout_s), None)
        return result or PostResult(PostEnd.STOPPED, "the call was cut")

    async def _cuttable(
        self, work: Coroutine[Any, Any, PostResult], post: InFlightRequest | None
    ) -> PostResult | None:
        """The result of a call; None if ``cut_calls`` has ended it."""
        call = self._loop.create_task(work)
        self._calls[call] = post
        try:
            await asyncio.wait({call})  # deadline: the call's own
        finally:
            del self._calls[call]
            call.cancel()
        return None if call.cancelled() else call.result()  # deadline: it has ended
