"""A batch of samples that one server is asked for together, until each has an end.

A POST that failed is asked again, request by request. A request is quarantined only if it failed alone, twice, and
another one succeeded on the same server between the two. One that failed once returns, to be drawn again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from swift_stage2.channel_b.rollouts.requests import PostEnd, PostResult, RequestSettings
from swift_stage2.columns import given_by
from swift_stage2.records import BatchOutcome, PostFailure, Rollout, Sample

if TYPE_CHECKING:
    from swift_stage2.channel_b.rollouts.server_client import ServerClient

_BUSY_PAUSE_S = 1.0


@dataclass(eq=False, frozen=True, slots=True)
class Ask:
    """One sample that a rollout is asked for."""

    sample: Sample
    request: Mapping[str, Any]
    settings: RequestSettings


class Unasked(Exception):
    """Nothing more is asked for these samples now: the server may not be asked, time is over, or the client stops."""


class Batch:
    def __init__(self, server: ServerClient, asks: dict[int, Ask], budget_s: float) -> None:
        """``budget_s``: all that its POSTs may take together, waits for tickets apart."""
        self._server = server
        self._left = asks
        self._settings = asks[0].settings
        self._ends_s = time.monotonic() + budget_s
        self._failures: list[PostFailure] = []
        self._num_posts = 0
        self._began_s = time.monotonic()

    @property
    def _remaining_s(self) -> float:
        return max(0.0, self._ends_s - time.monotonic())

    async def resolve(self) -> None:
        """Brings every sample to an end, as far as the server and the time allow. Raises Unasked: no further."""
        result = await self._post(tuple(self._left))
        if result.end is not PostEnd.ERROR_ANSWER or len(self._left) == 1:
            return
        for number in tuple(self._left):
            await self._post((number,))
        for number, ask in tuple(self._left.items()):
            if self._server.may_be_poisonous(ask.sample):
                await self._post((number,))

    def give_back(self) -> None:
        """Samples that nobody answered return, and POSTs that failed are told."""
        if self._left or self._num_posts:
            self._finish(returned=tuple(ask.sample for ask in self._left.values()))
            self._left.clear()

    def _blame_one(self, number: int, reason: str) -> None:
        """A request was asked alone, and an error came."""
        sample = self._left[number].sample
        if self._server.may_be_poisonous(sample):
            del self._left[number]
            self._finish(quarantined=((sample, reason),))
        elif self._server.note_failure(sample):
            self._blame(f"it answers one request after the other with an error: {reason}")

    def _blame(self, reason: str) -> NoReturn:
        self._server.mark_suspect(reason)
        raise Unasked

    async def _post(self, numbers: tuple[int, ...]) -> PostResult:
        """POSTs for these samples. Answers are given back at once; what says something of the server is acted upon.

        ``ANSWERED``, ``ERROR_ANSWER`` and, of a single sample, ``TIMED_OUT`` return.

        Raises:
            Unasked: nothing more is asked.
        """
        server, is_again = self._server, False
        while True:
            await server.settle()
            if server.is_stopping or not server.state.is_proven or not self._remaining_s:
                raise Unasked
            result = await self._post_once(numbers)
            match result.end:
                case PostEnd.ANSWERED:
                    return result
                case _ if not result.is_meant:
                    raise Unasked
                case PostEnd.ERROR_ANSWER:
                    if len(numbers) == 1:
                        self._blame_one(numbers[0], result.reason)
                    return result
                case PostEnd.BUSY:
                    if self._remaining_s < server.request_timeout_s:
                        raise Unasked  # a call that found room now might not end in time
                    await server.pause(_BUSY_PAUSE_S)  # without a ticket, so that no round waits for it
                case PostEnd.UNREACHABLE if not is_again:
                    is_again = True
                case PostEnd.TIMED_OUT if len(numbers) == 1:
                    sample = self._left.pop(numbers[0]).sample
                    self._finish(returned=(sample,), timed_out=(sample,))
                    return result
                case PostEnd.TIMED_OUT | PostEnd.STOPPED:
                    raise Unasked  # a batch that was late proves nothing; the next one is smaller
                case _:
                    self._blame(result.reason)

    async def _post_once(self, numbers: tuple[int, ...]) -> PostResult:
        waits_from_s = time.monotonic()
        try:
            ticket = await self._server.enter()
        finally:
            self._ends_s += time.monotonic() - waits_from_s  # no time of the batch, and never a failure
        try:
            asks = [self._left[number] for number in numbers]
            result = await self._server.post(asks, ticket, self._remaining_s)
            self._num_posts += 1
            if result.end is PostEnd.ANSWERED:
                self._deliver(numbers, result)
            else:
                url = self._server.base_url
                self._failures.append(PostFailure(url, result.end, len(numbers), result.reason))
        finally:
            self._server.fence.leave()
        return result

    def _deliver(self, numbers: tuple[int, ...], result: PostResult) -> None:
        rollouts = list[Rollout]()
        answers = zip(result.completions, result.spans, strict=True)
        for number, (completion, spans) in zip(numbers, answers, strict=True):
            rollout = Rollout(
                sample=self._left.pop(number).sample,
                text=completion.text,
                token_ids=completion.token_ids,
                prompt_token_ids=completion.prompt_token_ids,
                truncated=completion.finish_reason == "length",
                seed=result.seed if completion.seed is None else completion.seed,
                server=self._server.base_url,
                spans=spans,
                seconds=result.seconds,
                turns=completion.turns,
                **given_by(completion),
            )
            rollouts.append(rollout)
        self._finish(rollouts=tuple(rollouts))

    def _finish(self, **ends: Any) -> None:
        """Tells of some samples, and of all POSTs since it was told last."""
        outcome = BatchOutcome(
            **ends,
            failures=tuple(self._failures),
            num_posts=self._num_posts,
            seconds=time.monotonic() - self._began_s,
            settings=self._settings,
        )
        self._failures, self._num_posts, self._began_s = [], 0, time.monotonic()
        self._server.finish(outcome)
