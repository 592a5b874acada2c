"""The ways to ask for rollouts: ``/infer/`` of our server and a stock ``swift rollout``, the chat of a ``vllm serve``.

A ``ServerFault`` becomes a ``PostEnd`` here and nowhere else. A plain ``vllm serve`` takes one request a call, so the
calls of a POST go out together and end together; one that is cut has its request aborted by vLLM, so that the call
which settles it need only name it once more.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from swift_stage2 import wire
from swift_stage2.channel_b.rollouts.requests import PostEnd, PostResult
from swift_stage2.columns import LOG_PROBS, asked_by
from swift_stage2.errors import FaultKind, ProtocolError, ServerFault
from swift_stage2.servers import infer_wire, vllm_serve
from swift_stage2.servers.session import ServerHttp, run

_SHORTEST_TIMEOUT_S = 1e-3
_Fault = ServerFault | ProtocolError
# These say nothing of the requests: the server answers nobody like us (a wrong key, its present state), has no room
# (429), or a merger or proxy speaks of the server behind it.
_STATUS_ENDS = {
    401: PostEnd.REFUSED,
    403: PostEnd.REFUSED,
    409: PostEnd.REFUSED,
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
        self,
        requests: Sequence[Mapping[str, Any]],
        config: Mapping[str, Any],
        *,
        timeout_s: float,
        may_lack: Collection[str] = (),
    ) -> PostResult:
        """Asks for one completion per request, in order; of the columns asked for they may lack some.

        Unusable log-probabilities that they may lack spoil no answer.
        """
        asked = [{**request, infer_wire.REQUEST_ID: uuid.uuid4().hex} for request in requests]
        body = {"infer_requests": asked, "request_config": config}
        most_bytes = infer_wire.most_infer_bytes(len(requests), config["max_tokens"])
        try:
            record = await self.ask("POST", wire.INFER, body, timeout_s=timeout_s, most_bytes=most_bytes)
            needed = asked_by(config).difference(may_lack)
            try:
                completions = infer_wire.parse_infer_reply(record, len(requests), needed)
            except ProtocolError:
                if LOG_PROBS.name not in may_lack:
                    raise
                infer_wire.remove_log_probs(record)
                completions = infer_wire.parse_infer_reply(record, len(requests), needed)
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


class ChatRoute(InferRoute):
    """One ``vllm serve``; ``model`` is the name that it answers to."""

    def __init__(self, base_url: str, *, model: str, api_key: str | None) -> None:
        super().__init__(base_url, api_key=api_key)
        self._model = model
        self._unsettled: set[str] = set()  # ids of requests that a call was cut for

    async def generate(
        self,
        requests: Sequence[Mapping[str, Any]],
        config: Mapping[str, Any],
        *,
        timeout_s: float,
        may_lack: Collection[str] = (),
    ) -> PostResult:
        """As ``InferRoute.generate``; every completion names the weights that the server held afterwards."""
        end = time.monotonic() + timeout_s
        answers = await asyncio.gather(*(self._chat(request, config, end) for request in requests))
        faults = [answer for answer in answers if isinstance(answer, _Fault)]
        if faults:
            # What may still be computed counts most, what may say something of a single request least.
            ends = [self.end_of(vllm_serve.CHAT, fault) for fault in faults]
            order = {PostEnd.TIMED_OUT: 0, PostEnd.ERROR_ANSWER: 2}
            return min(ends, key=lambda each: order.get(each.end, 1))
        try:
            record = await self._ask("GET", vllm_serve.WEIGHT_INFO, None, end, wire.MOST_CONTROL_BYTES)
            said = vllm_serve.parse_weight_version(record)
        except (ServerFault, ProtocolError) as error:
            return self.end_of(vllm_serve.WEIGHT_INFO, error)
        completions = (answer for answer in answers if isinstance(answer, infer_wire.Completion))
        return PostResult(
            PostEnd.ANSWERED, completions=tuple(vllm_serve.stamped(each, said) for each in completions)
        )

    async def settle(self, *, timeout_s: float) -> PostResult:
        """Ends what was asked in calls that were cut; ``ANSWERED`` means that nothing of it runs."""
        unsettled = frozenset(self._unsettled)  # other calls go on meanwhile
        body = {"request_ids": [vllm_serve.engine_name(each) for each in sorted(unsettled)]}
        if body["request_ids"]:  # none would mean all that anybody has asked
            end = time.monotonic() + timeout_s
            try:
                await self._ask("POST", vllm_serve.ABORT_REQUESTS, body, end, wire.MOST_CONTROL_BYTES)
            except (ServerFault, ProtocolError) as error:
                return self.end_of(vllm_serve.ABORT_REQUESTS, error)
        self._unsettled.difference_update(unsettled)
        return PostResult(PostEnd.ANSWERED)

    async def _chat(
        self, request: Mapping[str, Any], config: Mapping[str, Any], end: float
    ) -> infer_wire.Completion | _Fault:
        request_id = uuid.uuid4().hex
        most_bytes = infer_wire.most_infer_bytes(1, config["max_tokens"])
        try:
            body = vllm_serve.chat_body(self._model, request, config, request_id)
            reply = await self._ask("POST", vllm_serve.CHAT, body, end, most_bytes)
            return vllm_serve.parse_chat_reply(reply, request_id)
        except (ServerFault, ProtocolError) as error:
            if isinstance(error, ServerFault) and error.status is None:  # no answer came
                self._unsettled.add(request_id)
            return error
        except asyncio.CancelledError:
            self._unsettled.add(request_id)
            raise

    async def _ask(self, method: str, path: str, body: Any, end: float, most_bytes: int) -> Any:
        timeout_s = max(_SHORTEST_TIMEOUT_S, end - time.monotonic())
        return await self.ask(method, path, body, timeout_s=timeout_s, most_bytes=most_bytes)


class RouteNow:
    """One server's route for callers without an event loop: a call at a time, each waited for."""

    def __init__(self, base_url: str, chat_model: str | None, *, api_key: str | None) -> None:
        self._route = route_to(base_url, chat_model, api_key=api_key)

    def generate(
        self,
        requests: Sequence[Mapping[str, Any]],
        config: Mapping[str, Any],
        *,
        timeout_s: float,
        may_lack: Collection[str] = (),
    ) -> PostResult:
        """As ``InferRoute.generate``."""
        return run(self._route.generate(requests, config, timeout_s=timeout_s, may_lack=may_lack))


def route_to(base_url: str, chat_model: str | None, *, api_key: str | None) -> InferRoute:
    """The way to a server; ``chat_model`` is there if it is a plain ``vllm serve``."""
    if chat_model is None:
        return InferRoute(base_url, api_key=api_key)
    return ChatRoute(base_url, model=chat_model, api_key=api_key)
