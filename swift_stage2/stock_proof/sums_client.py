"""Hooks of ms-swift's ``VLLMClient``: it sums what it sends, and compares after every push what each server holds.

For a job of ``swift rlhf`` (or ``megatron rlhf``) whose server runs with the same plugin. The environment variable
SWIFT_STAGE2_WEIGHT_PROOF says what a difference does: ``raise`` (default) ends the job, ``warn`` logs it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from swift.rlhf_trainers.utils import FlattenedTensorBucket
from swift.rlhf_trainers.vllm_client import VLLMClient
from swift.utils import get_logger

from swift_stage2.errors import ProtocolError, ServerFault, UserError
from swift_stage2.servers.stock import WeightSums
from swift_stage2.weights.tensors import checksums_by_name
from swift_stage2.wire import WEIGHT_SUMS, parse_json

VARIABLE = "SWIFT_STAGE2_WEIGHT_PROOF"
_MODES = ("raise", "warn")
_TIMEOUT_S = 300.0
_MAX_SHOWN = 3
_ADAPTER_TOLD = "of an adapter, which is not traced in vLLM's memory, arrived"

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
    "update_adapter_flattened_param": lambda peft_config, metadatas, flattened_tensor: _cut(
        metadatas, flattened_tensor
    ),
    "update_adapter_param": lambda peft_config, lora_params: lora_params,
}


def register_client() -> None:
    """Changes ms-swift's client class in place. Raises UserError for a mode that is none."""
    mode = os.environ.get(VARIABLE, "raise")
    if mode not in _MODES:
        raise UserError(f"{VARIABLE} must be raise or warn", got=f"{mode!r}")
    _Guard(raises=mode == "raise").wrap(VLLMClient)


class _Guard:
    """Keeps what one process has sent since the last push, and judges the servers' answers."""

    def __init__(self, *, raises: bool) -> None:
        self._raises = raises
        self._sent: dict[str, str] = {}
        self._has_asked = False
        self._told: set[str] = set()

    def wrap(self, client_class: type[Any]) -> None:
        """Each method still does what ms-swift's does. Connecting is none of them: it is over before plugins come."""
        for name, tensors_of in _TENSORS_OF.items():
            setattr(
                client_class, name, self._sending(getattr(client_class, name), tensors_of, "adapter" in name)
            )
        finish = client_class.process_weights_after_loading

        def finish_and_check(client: Any) -> None:
            finish(client)
            sent, self._sent = self._sent, {}
            self._check(client, sent, WeightSums.problems, "arrived and are resident")

        client_class.process_weights_after_loading = finish_and_check

    def _sending(
        self, method: Callable[..., Any], tensors_of: Callable[..., NamedTensors], is_adapter: bool
    ) -> Callable[..., None]:
        def send(client: Any, *args: Any, **kwargs: Any) -> None:
            self._require_sums(client)
            tensors = tensors_of(*args, **kwargs)
            sent = checksums_by_name(tensors)
            method(client, *args, **kwargs)
            if is_adapter:  # which comes whole
                self._check(client, sent, WeightSums.adapter_problems, _ADAPTER_TOLD)
            else:
                self._sent |= sent

        return send

    def _require_sums(self, client: Any) -> None:
        """Before the first push: a server without the plugin could only be told of after it."""
        if self._has_asked:
            return
        self._has_asked = True
        for index, base_url in enumerate(client.base_urls):
            reply = client.sessions[index].get(f"{base_url}{WEIGHT_SUMS}", timeout=_TIMEOUT_S)
            if reply.status_code != 200:
                self._tell(
                    f"{base_url} must show its weights, got status {reply.status_code} of {WEIGHT_SUMS}; start it "
                    "with swift rollout --external_plugins and the same file"
                )

    def _check(
        self,
        client: Any,
        sent: Mapping[str, str],
        problems_of: Callable[[WeightSums, Mapping[str, str]], list[str]],
        shown: str,
    ) -> None:
        for index, base_url in enumerate(client.base_urls):
            try:
                problems = problems_of(_ask(client.sessions[index], base_url), sent)
            except ServerFault as fault:
                self._tell(str(fault))
                return
            if problems:
                first = "; ".join(problems[:_MAX_SHOWN])
                self._tell(f"{base_url} does not hold the weights it was sent: {first}")
                return
        if shown not in self._told:
            self._told.add(shown)
            logger.info(f"{len(sent)} tensors {shown} as they were sent at {', '.join(client.base_urls)}")

    def _tell(self, problem: str) -> None:
        if self._raises:
            raise ServerFault(problem)
        logger.warning(problem)


def _ask(session: Any, base_url: str) -> WeightSums:
    reply = session.post(f"{base_url}{WEIGHT_SUMS}", timeout=_TIMEOUT_S)
    if reply.status_code != 200:
        raise ServerFault(f"{base_url}{WEIGHT_SUMS}: status {reply.status_code}: {reply.text[:200]}")
    try:
        return WeightSums.from_json(parse_json(reply.content))
    except ProtocolError as error:
        raise ServerFault(f"{base_url}{WEIGHT_SUMS}: {error}") from error
