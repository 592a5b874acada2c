"""One call of the rollout client to one server, how it ended, and the time that calls may take together.

A ``ServerFault`` becomes a ``PostEnd`` here and nowhere else. Called by the server's lane; ``end`` may come from any
thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from swift_stage2 import wire
from swift_stage2.channel_b.rollout_client.plan import PostEnd
from swift_stage2.columns import asked_by
from swift_stage2.errors import FaultKind, ProtocolError, ServerFault
from swift_stage2.servers import infer_wire
from swift_stage2.servers.call import ServerCaller

_REFUSALS = {
    401: "the server refuses the API key; set the variable that rollout.api_key_env names",
    403: "the server refuses the API key; set the variable that rollout.api_key_env names",
    409: "the server refuses rollouts in its present state",
}
# These say nothing of the requests: the server has no room (429), or a merger or proxy speaks of the server behind it.
_STATUS_ENDS = {
    429: PostEnd.BUSY,
    502: PostEnd.LOST,
    504: PostEnd.TIMED_OUT,
}
_ENDS = {
    FaultKind.UNREACHABLE: PostEnd.UNREACHABLE,
    FaultKind.LOST: PostEnd.LOST,
    FaultKind.LATE: PostEnd.TIMED_OUT,
    FaultKind.STATUS: PostEnd.ERROR_ANSWER,
    FaultKind.UNUSABLE: PostEnd.ERROR_ANSWER,
    FaultKind.ENDED: PostEnd.STOPPED,
}


@dataclass(frozen=True, slots=True)
class PostResult:
    """How a call ended; ``completions`` iff an ``/infer/`` call was answered.

    ``named``: places of the requests that an error answer says failed; a stock server names none.
    """

    end: PostEnd
    reason: str = ""
    completions: tuple[infer_wire.Completion, ...] = ()
    named: tuple[int, ...] = ()


class TimeBudget:
    """Seconds that pass only while nobody waits for a ticket."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def remaining_s(self) -> float:
        return max(0.0, self._end - time.monotonic())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the budget for as long as the block runs."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._end += time.monotonic() - started


class ServerConnection(ServerCaller):
    """HTTP to one server. Whatever ``end`` cuts or refuses ends as ``STOPPED``."""

    def infer(
        self,
        requests: Sequence[Mapping[str, Any]],
        config: Mapping[str, Any],
        *,
        timeout_s: float,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> PostResult:
        """Asks for one completion per request, in order; ``is_wanted`` as in ``ServerCaller.call``."""
        asked = _identified(requests)
        body = {"infer_requests": asked, "request_config": config}
        most_bytes = infer_wire.most_infer_bytes(len(requests), config["max_tokens"])
        try:
            record = self.ask(
                "POST",
                wire.INFER,
                body,
                timeout_s=timeout_s,
                most_bytes=most_bytes,
                is_wanted=is_wanted,
            )
            completions = infer_wire.parse_infer_reply(record, len(requests), asked_by(config))
            _require_own(asked, completions)
        except (ServerFault, ProtocolError) as error:
            return self._judge(wire.INFER, error, len(requests))
        return PostResult(PostEnd.ANSWERED, completions=completions)

    def reset_prefix_cache(self, *, timeout_s: float) -> PostResult:
        """An ordered call: ``ANSWERED`` means that what was sent before it is over."""
        path, most_bytes = wire.RESET_PREFIX_CACHE, wire.MOST_CONTROL_BYTES
        try:
            record = self.ask("POST", path, {}, timeout_s=timeout_s, most_bytes=most_bytes)
            if not wire.parse_cache_reset(record):  # engines say so while something still runs
                raise ProtocolError("an idle server resets its prefix cache, got status=False")
        except (ServerFault, ProtocolError) as error:
            return self._judge(path, error, 0)
        return PostResult(PostEnd.ANSWERED)

    def _judge(self, path: str, error: ServerFault | ProtocolError, num_requests: int) -> PostResult:
        if not isinstance(error, ServerFault):
            reason = self.without_key(f"{self.base_url}{path}: {error}")
            return PostResult(PostEnd.ERROR_ANSWER, reason)
        if error.status in _REFUSALS:
            return PostResult(PostEnd.REFUSED, f"{_REFUSALS[error.status]}: {error}")
        if error.status in _STATUS_ENDS:
            return PostResult(_STATUS_ENDS[error.status], str(error))
        places = infer_wire.parse_failed_places(error.record)
        named = tuple(place for place in places if place < num_requests)
        return PostResult(PostEnd.LOST if error.kind is None else _ENDS[error.kind], str(error), named=named)


def _identified(requests: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same infer requests, each with an id that no other has."""
    return [{**request, infer_wire.REQUEST_ID: uuid4().hex} for request in requests]


def _require_own(requests: Iterable[Mapping[str, Any]], completions: Iterable[infer_wire.Completion]) -> None:
    """Refuses an answer of our server that names another request than the ``_identified`` one in its place.

    Prompt ids tell no two rows apart that have one prompt and images of one size. A stock server echoes nothing.

    Raises:
        ProtocolError: it names another request, or none.
    """
    for place, (request, completion) in enumerate(zip(requests, completions, strict=True)):
        if completion.incarnation is not None and completion.request_id != request[infer_wire.REQUEST_ID]:
            raise ProtocolError(
                f"an answer must be of the request in its place, got request_id={completion.request_id} for "
                f"{infer_wire.REQUEST_ID}={request[infer_wire.REQUEST_ID]} at place {place}"
            )
