"""Calls of the rollout client to a plain ``vllm serve``, which takes one request a call at its OpenAI route.

The calls of a share go out together and end together. A call that is cut has its request aborted by vLLM, so that the
ordered call which settles it need only name it once more.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from swift_stage2 import wire
from swift_stage2.channel_b.rollout_client.connection import PostResult, ServerConnection
from swift_stage2.channel_b.rollout_client.plan import PostEnd
from swift_stage2.errors import ProtocolError, ServerFault
from swift_stage2.servers import infer_wire, vllm_serve

_MOST_CALLS = 256  # at once; vLLM computes no more than that together unless it is told to
_SHORTEST_TIMEOUT_S = 1e-3
# What vLLM says of a request that it cannot answer: another server would not, either.
_OF_THE_REQUEST = (400, 413, 422)

_Fault = ServerFault | ProtocolError


class ChatConnection(ServerConnection):
    """HTTP to one ``vllm serve``; ``model`` is the name that it answers to."""

    def __init__(self, base_url: str, *, model: str, api_key: str | None, connect_timeout_s: float) -> None:
        super().__init__(base_url, api_key=api_key, connect_timeout_s=connect_timeout_s)
        self._model = model
        self._unsettled: set[str] = set()  # ids of requests that a call was cut for

    def infer(
        self,
        requests: Sequence[Mapping[str, Any]],
        config: Mapping[str, Any],
        *,
        timeout_s: float,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> PostResult:
        """As ``ServerConnection.infer``; every completion names the weights that the server held afterwards."""
        end = time.monotonic() + timeout_s
        with ThreadPoolExecutor(min(len(requests), _MOST_CALLS), "chat") as pool:
            answers = list(pool.map(lambda request: self._chat(request, config, end, is_wanted), requests))
        faults = {place: answer for place, answer in enumerate(answers) if isinstance(answer, _Fault)}
        if faults:
            return self._judge_all(faults)
        try:
            record = self._ask("GET", vllm_serve.WEIGHT_INFO, None, end, wire.MOST_CONTROL_BYTES)
            said = vllm_serve.parse_weight_version(record)
        except (ServerFault, ProtocolError) as error:
            return self._judge(vllm_serve.WEIGHT_INFO, error, 0)
        completions = (answer for answer in answers if isinstance(answer, infer_wire.Completion))
        return PostResult(
            PostEnd.ANSWERED, completions=tuple(vllm_serve.stamped(each, said) for each in completions)
        )

    def reset_prefix_cache(self, *, timeout_s: float) -> PostResult:
        """Ends what was asked in calls that were cut; ``ANSWERED`` means that nothing of it runs."""
        unsettled = frozenset(self._unsettled)  # other places go on asking
        body = {"request_ids": [vllm_serve.engine_name(each) for each in sorted(unsettled)]}
        if body["request_ids"]:  # none would mean all that anybody has asked
            end = time.monotonic() + timeout_s
            try:
                self._ask("POST", vllm_serve.ABORT_REQUESTS, body, end, wire.MOST_CONTROL_BYTES)
            except (ServerFault, ProtocolError) as error:
                return self._judge(vllm_serve.ABORT_REQUESTS, error, 0)
        self._unsettled.difference_update(unsettled)
        return PostResult(PostEnd.ANSWERED)

    def _chat(
        self, request: Mapping[str, Any], config: Mapping[str, Any], end: float, is_wanted: Callable[[], bool]
    ) -> infer_wire.Completion | _Fault:
        request_id = uuid.uuid4().hex
        most_bytes = infer_wire.most_infer_bytes(1, config["max_tokens"])
        try:
            body = vllm_serve.chat_body(self._model, request, config, request_id)
            reply = self._ask("POST", vllm_serve.CHAT, body, end, most_bytes, is_wanted)
            return vllm_serve.parse_chat_reply(reply, request_id)
        except (ServerFault, ProtocolError) as error:
            if isinstance(error, ServerFault) and error.status is None:  # no answer came
                self._unsettled.add(request_id)
            return error

    def _ask(
        self,
        method: str,
        path: str,
        body: Any,
        end: float,
        most_bytes: int,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Any:
        timeout_s = max(_SHORTEST_TIMEOUT_S, end - time.monotonic())
        return self.ask(method, path, body, timeout_s=timeout_s, most_bytes=most_bytes, is_wanted=is_wanted)

    def _judge_all(self, faults: Mapping[int, _Fault]) -> PostResult:
        """A fault that says something of the server counts more than what it says of single requests."""
        of_server = [
            fault for fault in faults.values() if getattr(fault, "status", None) not in _OF_THE_REQUEST
        ]
        if of_server:
            return self._judge(vllm_serve.CHAT, of_server[0], 0)
        return PostResult(PostEnd.ERROR_ANSWER, str(next(iter(faults.values()))), named=tuple(faults))


def connect(
    base_url: str, chat_model: str | None, *, api_key: str | None, connect_timeout_s: float
) -> ServerConnection:
    """The way to a server; ``chat_model`` is there if it is a plain ``vllm serve``."""
    if chat_model is None:
        return ServerConnection(base_url, api_key=api_key, connect_timeout_s=connect_timeout_s)
    return ChatConnection(base_url, model=chat_model, api_key=api_key, connect_timeout_s=connect_timeout_s)
