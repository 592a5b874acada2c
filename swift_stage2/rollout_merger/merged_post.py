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

from swift_stage2.errors import ProtocolError
from swift_stage2.servers import protocol

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

    requests: str  # JSON of the requests, without the list's brackets
    num_requests: int
    key: str  # JSON of everything else, without the seed
    seed: int | None
    max_tokens: int = _MOST_TOKENS  # of each answer; a caller that names none gets what a server may give


def mergeable(record: Any) -> InferBody | None:
    """None when the body is not one that can share a POST; the server then judges it alone.

    Requests without a seed share POSTs only among themselves.
    """
    if not isinstance(record, dict):
        return None
    record = dict(record)
    requests, config = record.pop("infer_requests", None), record.pop("request_config", None)
    if not isinstance(requests, list) or not requests or not isinstance(config, dict | None):
        return None
    rest = dict(config or {})
    seed = rest.pop("seed", None)
    if seed is not None and type(seed) is not int:
        return None
    key = json.dumps([rest, record, seed is None], sort_keys=True)
    max_tokens = rest.get("max_tokens")
    if type(max_tokens) is not int or not 0 < max_tokens <= _MOST_TOKENS:
        max_tokens = _MOST_TOKENS
    return InferBody(json.dumps(requests)[1:-1], len(requests), key, seed, max_tokens)


def merge(bodies: Sequence[InferBody]) -> bytes:
    """The body of one POST for all of them, in order; it carries the first one's seed."""
    first = bodies[0]
    config, rest, _ = json.loads(first.key)
    if first.seed is not None:
        config["seed"] = first.seed
    fields = json.dumps({**rest, "request_config": config})
    return f'{{"infer_requests":[{",".join(body.requests for body in bodies)}],{fields[1:]}'.encode()


def split(reply: bytes, bodies: Sequence[InferBody], layout: SeedLayout) -> list[bytes]:
    """One reply per body, its outputs unchanged but for the seed in ``rollout_infos``.

    Raises:
        ProtocolError: the reply is not a list with one object per request.
    """
    outputs = protocol.parse_json(reply)
    num_requests = sum(body.num_requests for body in bodies)
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
            json.dumps(list(islice(rest, body.num_requests)), allow_nan=False).encode() for body in bodies
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
