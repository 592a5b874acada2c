"""Turns the learner's module into named full tensors for a push, without touching the training weights.

Under LoRA every adapted weight leaves merged, computed on a copy. Names are those of the model without
its adapter, tied weights appear once. Knows PEFT's layers, not ms-swift; called by the weight sync.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from swift_stage2.errors import ConfigError, WeightSyncError
from swift_stage2.rollout_protocol import TensorSpec

_ADAPTER_PREFIX = "base_model.model."
_BASE_LAYER = ".base_layer"


class WeightExport:
    """Reads one module. The module's structure must not change between calls.

    Raises:
        ConfigError: the module has an adapter that is more than a difference added to its weight.
    """

    def __init__(self, module: nn.Module) -> None:
        _refuse_other_adapters(module)
        self._module = module
        self._adapted = _adapted_layers(module)

    def manifest(self) -> tuple[TensorSpec, ...]:
        """Name, shape and dtype of every tensor that a push carries, in push order."""
        return tuple(
            TensorSpec(_exported_name(name), tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self._own_tensors()
        )

    def tensors(self, dtypes: Mapping[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the manifest, merged, contiguous, in the dtype named for it (default: its own).

        Raises:
            WeightSyncError: a tensor is not finite.
        """
        with torch.no_grad():
            for name, tensor in self._own_tensors():
                exported = _exported_name(name)
                layer = self._adapted.get(name)
                if layer is not None:
                    tensor = _merged(layer, tensor)
                if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                    raise WeightSyncError(
                        f"weights must be finite to be pushed, got a NaN or infinity in tensor={exported}; "
                        "lower the learning rate or resume from an earlier checkpoint"
                    )
                dtype = getattr(torch, dtypes[exported]) if exported in dtypes else tensor.dtype
                yield exported, tensor.detach().to(dtype).contiguous()

    def _own_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._module.named_parameters():
            if not _belongs_to_adapter(name):
                yield name, parameter


def buckets(
    tensors: Iterator[tuple[str, torch.Tensor]], max_bytes: int
) -> Iterator[Sequence[tuple[str, torch.Tensor]]]:
    """Groups tensors in order into buckets of at most ``max_bytes``; a larger tensor goes alone."""
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if bucket and size + num_bytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += num_bytes
    if bucket:
        yield bucket


def flatten(bucket: Sequence[tuple[str, torch.Tensor]]) -> tuple[torch.Tensor, list[dict[str, object]]]:
    """One uint8 tensor holding a bucket's bytes, and where each tensor lies in it.

    The metadata has the fields of ms-swift's ``FlattenedTensorMetadata``; indices are bytes.
    """
    chunks = [tensor.reshape(-1).view(torch.uint8) for _, tensor in bucket]
    metadata: list[dict[str, object]] = []
    start = 0
    for (name, tensor), chunk in zip(bucket, chunks, strict=True):
        end = start + chunk.numel()
        metadata.append(
            {
                "name": name,
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype),
                "start_idx": start,
                "end_idx": end,
                "numel": chunk.numel(),
            }
        )
        start = end
    return torch.cat(chunks), metadata


def _adapted_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Base weights that an adapter changes, by parameter name, with the layer that holds both."""
    return {
        f"{name}{_BASE_LAYER}.weight": layer
        for name, layer in module.named_modules()
        if hasattr(layer, "base_layer") and hasattr(layer, "get_delta_weight")
    }


def _refuse_other_adapters(module: nn.Module) -> None:
    for name, layer in module.named_modules():
        for variant in ("use_dora", "lora_bias"):
            by_adapter = getattr(layer, variant, None)
            if isinstance(by_adapter, dict) and any(by_adapter.values()):
                raise ConfigError(
                    f"LoRA must be a difference added to a weight, got {variant}=true in layer={name}; "
                    "train without it"
                )


def _merged(layer: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    merged = weight.detach().clone()
    for adapter in layer.active_adapters:  # type: ignore[union-attr]
        if adapter in layer.lora_A or adapter in getattr(layer, "lora_embedding_A", {}):  # type: ignore[operator]
            merged += layer.get_delta_weight(adapter).to(merged.dtype)  # type: ignore[operator]
    return merged


def _belongs_to_adapter(name: str) -> bool:
    return ".lora_" in name or ".original_module." in name


def _exported_name(name: str) -> str:
    return name.removeprefix(_ADAPTER_PREFIX).replace(_BASE_LAYER, "").replace(".modules_to_save.default", "")
