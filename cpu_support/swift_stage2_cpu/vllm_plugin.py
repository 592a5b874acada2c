"""Called by vLLM in its engine and in every worker: weights that can be replaced, and gloo instead of NCCL.

The patched names are those of vLLM 0.32 and ms-swift 4.6. A name that is gone raises here, at start-up, and never
lets a server run that would keep its old weights.
"""

from __future__ import annotations

import sys
from typing import Any

_SWIFT_SERVER = "swift.pipelines.infer.rollout"


def register() -> None:
    """Idempotent, as vLLM asks of plugins; does nothing unless vLLM runs on its CPU platform."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    _keep_linear_weights()
    _use_gloo()
    _let_weight_transfer_run()


def _keep_linear_weights() -> None:
    """vLLM's CPU linear layers pack their weight and drop it, after which ``load_weights`` has nowhere to write."""
    import torch
    import vllm.model_executor.layers.utils as layers

    _require(layers, "dispatch_cpu_unquantized_gemm")

    def keep(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    layers.dispatch_cpu_unquantized_gemm = keep


def _use_gloo() -> None:
    """ms-swift's worker builds vLLM's NCCL communicator, which without a GPU broadcasts nothing and says nothing."""
    import swift.utils
    import swift.utils.torch_utils
    import vllm.distributed.device_communicators.pynccl as pynccl

    from swift_stage2.collectives import GlooCommunicator

    owners: list[Any] = [pynccl]
    if _SWIFT_SERVER in sys.modules:
        owners.append(sys.modules[_SWIFT_SERVER])
    for owner in owners:
        _require(owner, "PyNcclCommunicator")
        owner.PyNcclCommunicator = GlooCommunicator
    for owner in (swift.utils.torch_utils, swift.utils, *owners[1:]):
        _require(owner, "synchronize")
        owner.synchronize = _nothing_to_wait_for


def _let_weight_transfer_run() -> None:
    """vLLM's own weight transfer (``--weight-transfer-config``) asks for a GPU's number and stream on its way to NCCL.

    Without one PyTorch refuses both: "Cannot access accelerator device when none is available". Gloo needs neither.
    """
    import torch

    torch.accelerator.current_device_index = lambda: 0
    torch.cuda.current_stream = _no_stream  # type: ignore[assignment]


def _no_stream(device: object = None) -> None:
    """Stands in for CUDA's current stream: gloo sends at once and queues nothing."""


def _nothing_to_wait_for(device: object = None) -> None:
    """A transfer over gloo is over when its call returns."""


def _require(owner: Any, name: str) -> None:
    if not hasattr(owner, name):
        raise RuntimeError(
            f"swift_stage2_cpu was written for another release: {owner.__name__} has no {name}"
        )
