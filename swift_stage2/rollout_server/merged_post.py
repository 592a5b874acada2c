"""Several ``/infer/`` bodies into one POST, and its reply into one for each caller. Pure.

Bodies may share a POST when everything but their requests and seeds is equal. The POST carries the seed of its
first part, so every output is stamped with the seed that its request really had. Called by the dispatcher.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from swift_stage2 import wire
from swift_stage2.errors import ProtocolError

_MOST_TOKENS = 1 << 16


@dataclass(frozen=True, slots=True)
class SeedLayout:
    """How the server makes each request's seed from its call's.

    ms-swift 4.6's engine adds the request's place in its list (``VllmEngine.infer``: ``seed += i``). Each data
    parallel worker counts its own list from 0. The async engine gives every request the call's own seed.
    """

    data_parallel_size: int = 1
    async_engine: bool = False

    def seeds(self, first: int, num_requests: int) -> list[int]:
        """The seed of each request of one call, in order."""
        if self.async_engine:
            return [first] * num_requests
        size, num_larger = divmod(num_requests, self.data_parallel_size)
        return [
            first + place
            for worker in range(self.data_parallel_size)
            for place in range(size + (worker < num_larger))
        ]


@dataclass(frozen=True, slots=True)
class InferBody:
    """One call's body, ready to be joined with others of the same ``key``."""

    requests: list[Any]
    rest: dict[str, Any]  # the body without requests and seed
    seed: int | None

    @property
    def key(self) -> str:
        """Requests without a seed share POSTs only among themselves."""
        return json.dumps([self.rest, self.seed is None], sort_keys=True)

    @property
    def max_tokens(self) -> int:
        """Of each answer; a caller that names none gets what a server may give."""
        wanted = self.rest["request_config"].get("max_tokens")
        return wanted if type(wanted) is int and 0 < wanted <= _MOST_TOKENS else _MOST_TOKENS


def mergeable(record: Any) -> InferBody | None:
    """None when the body is not one that can share a POST; the server then judges it alone."""
    if not isinstance(record, dict):
        return None
    requests, config = record.get("infer_requests"), record.get("request_config")
    if not isinstance(requests, list) or not requests or not isinstance(config, dict | None):
        return None
    config = config or {}
    seed = config.get("seed")
    if seed is not None and type(seed) is not int:
        return None
    settings = {key: value for key, value in config.items() if key != "seed"}
    rest = {key: value for key, value in record.items() if key != "infer_requests"}
    return InferBody(requests, {**rest, "request_config": settings}, seed)


def merge(bodies: Sequence[InferBody]) -> bytes:
    """The body of one POST for all of them, in order; it carries the first one's seed."""
    first = bodies[0]
    seed = {} if first.seed is None else {"seed": first.seed}
    config = {**first.rest["request_config"], **seed}
    requests = [request for body in bodies for request in body.requests]
    return json.dumps({**first.rest, "infer_requests": requests, "request_config": config}).encode()


def split(reply: bytes, bodies: Sequence[InferBody], layout: SeedLayout) -> list[bytes]:
    """One reply per body, its outputs unchanged but for the seed in ``rollout_infos``.

    Raises:
        ProtocolError: the reply is not a list with one object per request.
    """
    outputs = wire.parse_json(reply)
    num_requests = sum(len(body.requests) for body in bodies)
    if not isinstance(outputs, list) or len(outputs) != num_requests:
        got = len(outputs) if isinstance(outputs, list) else type(outputs).__name__
        raise ProtocolError(f"an /infer/ reply must hold {num_requests} outputs, got num_outputs={got}")
    if not all(isinstance(output, dict) for output in outputs):
        raise ProtocolError("every output of an /infer/ reply must be an object")
    if bodies[0].seed is not None:
        for output, seed in zip(outputs, layout.seeds(bodies[0].seed, num_requests), strict=True):
            _stamp(output, seed)
    rest = iter(outputs)
    try:
        return [
            json.dumps(list(islice(rest, len(body.requests))), allow_nan=False).encode() for body in bodies
        ]
    except ValueError as error:  # 1e400 is JSON, but no number of this machine
        raise ProtocolError(f"an /infer/ reply must hold finite numbers: {error}") from error


def _stamp(output: dict[str, Any], seed: int) -> None:
    infos = output.get("rollout_infos")
    infos = infos if isinstance(infos, dict) else {}
    stamp = infos.get("stage2")
    output["rollout_infos"] = {
        **infos,
        "stage2": {**(stamp if isinstance(stamp, dict) else {}), "seed": seed},
    }
