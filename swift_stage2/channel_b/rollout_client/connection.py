"""One HTTP call to one server at a time, with one deadline for all of it, and how it ended.

Foreign errors become a ``PostEnd`` here and nowhere else. Every call opens a connection of its own: a
rollout takes seconds, a handshake does not, and so an idle connection that the server closed cannot be
mistaken for one lost during a POST. Called by the server's lane; ``end`` may come from any thread.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from swift_stage2 import rollout_protocol as protocol
from swift_stage2.channel_b.rollout_client.plan import PostEnd
from swift_stage2.cuttable_call import CuttableCall
from swift_stage2.errors import ConfigError, ProtocolError

_REFUSALS = {
    401: "the server refuses the API key; set the variable that rollout.api_key_env names",
    403: "the server refuses the API key; set the variable that rollout.api_key_env names",
    409: "the server refuses rollouts in its present state",
}
# What a merger or a proxy says of the server behind it; the server itself never says so.
_GATEWAY_ENDS = {
    502: PostEnd.LOST,
    504: PostEnd.TIMED_OUT,
}
_QUOTED_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class PostResult:
    """How a call ended; ``completions`` iff an ``/infer/`` call was answered.

    ``named``: places of the requests that an error answer says failed; a stock server names none.
    """

    end: PostEnd
    reason: str = ""
    completions: tuple[protocol.Completion, ...] = ()
    named: tuple[int, ...] = ()


class ServerConnection:
    """HTTP to one server. Proxies from the environment are ignored; the key is never shown."""

    def __init__(self, base_url: str, *, api_key: str | None, connect_timeout_s: float) -> None:
        if api_key is not None and not (api_key.isascii() and api_key.isprintable() and " " not in api_key):
            raise ConfigError("the API key must be printable ASCII without spaces; check rollout.api_key_env")
        self.base_url = base_url
        self._api_key = api_key
        self._connect_timeout_s = connect_timeout_s
        self._lock = threading.Lock()
        self._ended = False
        self._call: CuttableCall[PostEnd] | None = None
        headers = {"Content-Type": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(base_url=base_url, headers=headers, trust_env=False, limits=limits)

    def infer(
        self, requests: Sequence[Mapping[str, Any]], config: Mapping[str, Any], *, timeout_s: float
    ) -> PostResult:
        """Asks for one completion per request, in order."""
        body = {"infer_requests": list(requests), "request_config": config}
        completions: list[protocol.Completion] = []
        result = self._post(
            protocol.INFER,
            body,
            timeout_s,
            lambda reply: completions.extend(protocol.parse_infer_reply(reply, len(requests))),
        )
        named = tuple(place for place in result.named if place < len(requests))
        return PostResult(result.end, result.reason, tuple(completions), named)

    def reset_prefix_cache(self, *, timeout_s: float) -> PostResult:
        """An ordered call: ``ANSWERED`` means that what was sent before it is over."""
        return self._post(protocol.RESET_PREFIX_CACHE, {}, timeout_s, _require_reset)

    def end(self) -> None:
        """Ends the call in progress and refuses later ones; both end as ``STOPPED``. Idempotent."""
        with self._lock:
            self._ended = True
            if self._call is not None:
                self._call.cut(PostEnd.STOPPED)

    def close(self) -> None:
        """Frees the HTTP client; after the last call has ended."""
        self._http.close()

    def _post(self, path: str, body: Any, timeout_s: float, parse: Callable[[Any], object]) -> PostResult:
        call: CuttableCall[PostEnd] = CuttableCall()
        with self._lock:
            if self._ended:
                return PostResult(PostEnd.STOPPED, "this process is shutting down")
            self._call = call
        # httpx limits each read; the timer limits the call, also against a server that trickles.
        timer = threading.Timer(timeout_s, call.cut, (PostEnd.TIMED_OUT,))
        timer.daemon = True
        timer.start()
        try:
            result = self._exchange(path, body, timeout_s, parse, call)
        finally:
            timer.cancel()
            with self._lock:
                self._call = None
        return PostResult(result.end, self._without_key(result.reason), named=result.named)

    def _exchange(
        self,
        path: str,
        body: Any,
        timeout_s: float,
        parse: Callable[[Any], object],
        call: CuttableCall[PostEnd],
    ) -> PostResult:
        where = f"{self.base_url}{path}"
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, self._connect_timeout_s))
        try:
            response = self._http.post(
                path, content=json.dumps(body).encode(), timeout=timeout, extensions={"trace": call.trace}
            )
        except httpx.RequestError as error:
            end = _how_it_ended(error, call.finish())
            if end is PostEnd.TIMED_OUT:
                return PostResult(end, f"{where} did not answer in time, got timeout_s={timeout_s:.3f}")
            return PostResult(end, f"{where}: {type(error).__name__}: {error}")
        if (cut := call.finish()) is not None:
            return PostResult(cut, f"{where} was still answering, got timeout_s={timeout_s:.3f}")
        return self._judge(where, response, parse)

    def _judge(self, where: str, response: httpx.Response, parse: Callable[[Any], object]) -> PostResult:
        if response.status_code in _REFUSALS:
            rule = _REFUSALS[response.status_code]
            reason = f"{rule}: {where} answered {response.status_code}: {self._quote(response)}"
            return PostResult(PostEnd.REFUSED, reason)
        if response.status_code in _GATEWAY_ENDS:
            reason = f"{where} answered {response.status_code}: {self._quote(response)}"
            return PostResult(_GATEWAY_ENDS[response.status_code], reason)
        if response.status_code != httpx.codes.OK:
            reason = f"{where} answered {response.status_code}: {self._quote(response)}"
            named = protocol.parse_failed_places(response.content)
            return PostResult(PostEnd.ERROR_ANSWER, reason, named=named)
        try:
            parse(response.json())
        except ProtocolError as error:
            return PostResult(PostEnd.ERROR_ANSWER, f"{where}: {error}")
        except (ValueError, RecursionError):
            reason = f"{where} answered something that is not JSON: {self._quote(response)!r}"
            return PostResult(PostEnd.ERROR_ANSWER, reason)
        return PostResult(PostEnd.ANSWERED)

    def _quote(self, response: httpx.Response) -> str:
        return self._without_key(response.text)[:_QUOTED_CHARACTERS]

    def _without_key(self, text: str) -> str:
        return text.replace(self._api_key, "***") if self._api_key else text


def _require_reset(reply: Any) -> None:
    if not protocol.parse_cache_reset(reply):  # engines say so while something still runs
        raise ProtocolError("an idle server resets its prefix cache, got status=False")


def _how_it_ended(error: httpx.RequestError, cut_as: PostEnd | None) -> PostEnd:
    match error:
        case _ if cut_as is PostEnd.STOPPED:
            return cut_as
        case httpx.ConnectError() | httpx.ConnectTimeout():
            return PostEnd.UNREACHABLE
        case _ if cut_as is not None:
            return cut_as
        case httpx.TimeoutException():
            return PostEnd.TIMED_OUT
        case httpx.DecodingError():
            return PostEnd.ERROR_ANSWER
        case _:
            return PostEnd.LOST
