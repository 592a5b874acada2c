"""Hooks of ms-swift's ``VLLMClient``: it sums what it sends, and compares after every push what each server holds.

For a job of ``swift rlhf`` (or ``megatron rlhf``) whose server runs with the same plugin: a difference ends the job.
Adapters that are pushed as such are not looked at: vLLM keeps them in forms of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from swift.rlhf_trainers.utils import FlattenedTensorBucket
from swift.rlhf_trainers.vllm_client import VLLMClient
from swift.utils import get_logger

from swift_stage2.errors import ProtocolError, ServerFault
from swift_stage2.servers.stock import WeightSums
from swift_stage2.weights.tensors import checksums_by_name
from swift_stage2.wire import WEIGHT_SUMS, parse_json

_TIMEOUT_S = 300.0
_MAX_SHOWN = 3

logger = get_logger()

NamedTensors = Mapping[str, torch.Tensor]


def _cut(metadatas: Sequence[Any], flattened_tensor: torch.Tensor) -> NamedTensors:
    """As the server cuts them."""
    bucket = FlattenedTensorBucket(metadata=list(metadatas), flattened_tensor=flattened_tensor)
    tensors: NamedTensors = bucket.reconstruct_tensors()
    return tensors


# The tensors that each sending method of ms-swift's client is given.
_TENSORS_OF: Mapping[str, Callable[..., NamedTensors]] = {
    "update_named_param": lambda name, weights: {name: weights},
    "update_flattened_params": _cut,
}


def register_client() -> None:
    """Changes ms-swift's client class in place: its methods raise ServerFault for a server that lacks what was sent.

    Each method still does what ms-swift's does. Connecting is none of them: it is over before plugins come.
    """
    guard, finish = _Guard(), VLLMClient.process_weights_after_loading
    for name, tensors_of in _TENSORS_OF.items():
        setattr(VLLMClient, name, guard.sending(getattr(VLLMClient, name), tensors_of))

    def finish_and_check(client: Any) -> None:
        finish(client)
        guard.check(client)

    VLLMClient.process_weights_after_loading = finish_and_check


class _Guard:
    """Keeps what one process has sent since the last push, and judges the servers' answers."""

    def __init__(self) -> None:
        self._sent: dict[str, str] = {}
        self._has_asked = self._has_told = False

    def sending(
        self, method: Callable[..., Any], tensors_of: Callable[..., NamedTensors]
    ) -> Callable[..., None]:
        def send(client: Any, *args: Any, **kwargs: Any) -> None:
            if not self._has_asked:  # before the first push: a server without the plugin is told of at once
                self._has_asked = True
                for session, base_url in zip(client.sessions, client.base_urls, strict=True):
                    _content(session.get, base_url)
            self._sent |= checksums_by_name(tensors_of(*args, **kwargs))
            method(client, *args, **kwargs)

        return send

    def check(self, client: Any) -> None:
        sent, self._sent = self._sent, {}
        if not sent:
            return
        for session, base_url in zip(client.sessions, client.base_urls, strict=True):
            try:
                sums = WeightSums.from_json(parse_json(_content(session.post, base_url)))
            except ProtocolError as error:
                raise ServerFault(f"{base_url}{WEIGHT_SUMS}: {error}") from error
            if problems := sums.problems(sent):
                first = "; ".join(problems[:_MAX_SHOWN])
                raise ServerFault(f"{base_url} does not hold the weights it was sent: {first}")
        if not self._has_told:
            self._has_told = True
            where = ", ".join(client.base_urls)
            logger.info(f"{len(sent)} tensors arrived and are resident as they were sent at {where}")


def _content(call: Callable[..., Any], base_url: str) -> bytes:
    reply = call(f"{base_url}{WEIGHT_SUMS}", timeout=_TIMEOUT_S)
    if reply.status_code != 200:
        raise ServerFault(
            f"{base_url} must show its weights, got status {reply.status_code} of {WEIGHT_SUMS}: {reply.text[:200]}; "
            "start it with swift rollout --external_plugins and the same file"
        )
    content: bytes = reply.content
    return content
