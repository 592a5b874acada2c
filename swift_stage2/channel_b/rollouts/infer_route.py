"""The route of rollouts on our server and on a stock ``swift rollout``: ``/infer/``, and what settles a call.

A ``ServerFault`` becomes a ``PostEnd`` here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import uuid4

from swift_stage2 import wire
from swift_stage2.channel_b.rollouts.requests import PostEnd, PostResult
from swift_stage2.columns import asked_by
from swift_stage2.errors import FaultKind, ProtocolError, ServerFault
from swift_stage2.servers import infer_wire
from swift_stage2.servers.call import ServerHttp

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
}


class InferRoute(ServerHttp):
    """One server that answers ``/infer/``."""

    async def generate(
        self, requests: Sequence[Mapping[str, Any]], config: Mapping[str, Any], *, timeout_s: float
    ) -> PostResult:
        """Asks for one completion per request, in order."""
        asked = [{**request, infer_wire.REQUEST_ID: uuid4().hex} for request in requests]
        body = {"infer_requests": asked, "request_config": config}
        most_bytes = infer_wire.most_infer_bytes(len(requests), config["max_tokens"])
        try:
            record = await self.ask("POST", wire.INFER, body, timeout_s=timeout_s, most_bytes=most_bytes)
            completions = infer_wire.parse_infer_reply(record, len(requests), asked_by(config))
            _require_own(asked, completions)
        except (ServerFault, ProtocolError) as error:
            return self.end_of(wire.INFER, error)
        return PostResult(PostEnd.ANSWERED, completions=completions)

    async def settle(self, *, timeout_s: float) -> PostResult:
        """An ordered call: ``ANSWERED`` means that what was sent before it is over."""
        path, most_bytes = wire.RESET_PREFIX_CACHE, wire.MOST_CONTROL_BYTES
        try:
            record = await self.ask("POST", path, {}, timeout_s=timeout_s, most_bytes=most_bytes)
            if not wire.parse_cache_reset(record):  # engines say so while something still runs
                raise ProtocolError("an idle server resets its prefix cache, got status=False")
        except (ServerFault, ProtocolError) as error:
            return self.end_of(path, error)
        return PostResult(PostEnd.ANSWERED)

    def end_of(self, path: str, error: ServerFault | ProtocolError) -> PostResult:
        """The end of a call that brought no good answer."""
        if not isinstance(error, ServerFault):
            reason = self.without_key(f"{self.base_url}{path}: {error}")
            return PostResult(PostEnd.ERROR_ANSWER, reason)
        if error.status in _REFUSALS:
            return PostResult(PostEnd.REFUSED, f"{_REFUSALS[error.status]}: {error}")
        if error.status in _STATUS_ENDS:
            return PostResult(_STATUS_ENDS[error.status], str(error))
        return PostResult(PostEnd.LOST if error.kind is None else _ENDS[error.kind], str(error))


def _require_own(requests: Iterable[Mapping[str, Any]], completions: Iterable[infer_wire.Completion]) -> None:
    """Refuses an answer that names another request than the one in its place, as our server's do.

    Prompt ids tell no two rows apart that have one prompt and images of one size. A stock server echoes nothing.

    Raises:
        ProtocolError: it names another request.
    """
    for place, (request, completion) in enumerate(zip(requests, completions, strict=True)):
        if completion.request_id not in (None, request[infer_wire.REQUEST_ID]):
            raise ProtocolError(
                f"an answer must be of the request in its place, got request_id={completion.request_id} for "
                f"{infer_wire.REQUEST_ID}={request[infer_wire.REQUEST_ID]} at place {place}"
            )
