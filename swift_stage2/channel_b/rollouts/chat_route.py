"""The route of rollouts on a plain ``vllm serve``, which takes one request a call at its OpenAI route.

The calls of a POST go out together and end together. A call that is cut has its request aborted by vLLM, so that the
call which settles it need only name it once more.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from swift_stage2 import wire
from swift_stage2.channel_b.rollouts.infer_route import InferRoute
from swift_stage2.channel_b.rollouts.requests import PostEnd, PostResult
from swift_stage2.errors import ProtocolError, ServerFault
from swift_stage2.servers import infer_wire, vllm_serve
from swift_stage2.servers.call import run

_MOST_CALLS = 256  # at once; vLLM computes no more than that together unless it is told to
_SHORTEST_TIMEOUT_S = 1e-3
_CONNECT_TIMEOUT_S = 10.0
# What vLLM says of a request that it cannot answer: another server would not, either.
_OF_THE_REQUEST = (400, 413, 422)

_Fault = ServerFault | ProtocolError


class ChatRoute(InferRoute):
    """One ``vllm serve``; ``model`` is the name that it answers to."""

    def __init__(self, base_url: str, *, model: str, api_key: str | None, connect_timeout_s: float) -> None:
        super().__init__(base_url, api_key=api_key, connect_timeout_s=connect_timeout_s)
        self._model = model
        self._unsettled: set[str] = set()  # ids of requests that a call was cut for
        self._room = asyncio.Semaphore(_MOST_CALLS)

    async def generate(
        self, requests: Sequence[Mapping[str, Any]], config: Mapping[str, Any], *, timeout_s: float
    ) -> PostResult:
        """As ``InferRoute.generate``; every completion names the weights that the server held afterwards."""
        end = time.monotonic() + timeout_s
        answers = await asyncio.gather(*(self._chat(request, config, end) for request in requests))
        faults = [answer for answer in answers if isinstance(answer, _Fault)]
        if faults:
            # What may still be computed counts most, what says something of a single request least.
            of_server = [fault for fault in faults if getattr(fault, "status", None) not in _OF_THE_REQUEST]
            ends = [self.end_of(vllm_serve.CHAT, fault) for fault in of_server]
            late = [end for end in ends if end.end is PostEnd.TIMED_OUT]
            return next(iter(late + ends), PostResult(PostEnd.ERROR_ANSWER, str(faults[0])))
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
            async with self._room:
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
        self._make = partial(
            route_to, base_url, chat_model, api_key=api_key, connect_timeout_s=_CONNECT_TIMEOUT_S
        )

    def generate(
        self, requests: Sequence[Mapping[str, Any]], config: Mapping[str, Any], *, timeout_s: float
    ) -> PostResult:
        """As ``InferRoute.generate``."""
        return run(self._make().generate(requests, config, timeout_s=timeout_s))


def route_to(
    base_url: str, chat_model: str | None, *, api_key: str | None, connect_timeout_s: float
) -> InferRoute:
    """The way to a server; ``chat_model`` is there if it is a plain ``vllm serve``."""
    if chat_model is None:
        return InferRoute(base_url, api_key=api_key, connect_timeout_s=connect_timeout_s)
    return ChatRoute(base_url, model=chat_model, api_key=api_key, connect_timeout_s=connect_timeout_s)
