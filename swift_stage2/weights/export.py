"""Turns the learner's module into named full tensors for a push, without touching the training weights.

Under LoRA every adapted weight leaves merged, computed on a copy. Names are those of the model without
its adapter, tied weights appear once. Under ZeRO-3 no rank holds a whole tensor: all ranks gather a bucket
together, and rank 0 copies it. Knows PEFT's layers and DeepSpeed's parameters, not ms-swift.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from swift_stage2.errors import ConfigError
from swift_stage2.servers.protocol import TensorSpec

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

    @property
    def partitioned(self) -> bool:
        """Whether every read is a collective of all ranks, because each holds only a part of a tensor (ZeRO-3)."""
        return any(_is_partitioned(parameter) for parameter in self._module.parameters())

    @property
    def on_gpu(self) -> bool:
        """Whether weights are read from a GPU."""
        return any(parameter.is_cuda for parameter in self._module.parameters())

    def manifest(self) -> tuple[TensorSpec, ...]:
        """Name, shape and dtype of every tensor that a push carries, in push order."""
        return tuple(
            TensorSpec(
                _exported_name(name), tuple(_full_shape(tensor)), str(tensor.dtype).removeprefix("torch.")
            )
            for name, tensor in self._own_tensors()
        )

    def plan(self, max_bytes: int) -> tuple[tuple[str, ...], ...]:
        """Names of the manifest in buckets of at most ``max_bytes``, the same on every rank.

        A larger tensor goes alone. Bytes are counted in the learner's own dtypes.
        """
        buckets: list[tuple[str, ...]] = []
        names: list[str] = []
        size = 0
        for name, tensor in self._own_tensors():
            num_bytes = _full_shape(tensor).numel() * tensor.element_size()
            if names and size + num_bytes > max_bytes:
                buckets.append(tuple(names))
                names, size = [], 0
            names.append(_exported_name(name))
            size += num_bytes
        return (*buckets, tuple(names)) if names else tuple(buckets)

    def read(self, names: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
        """These tensors of the manifest, merged, contiguous, in the learner's dtypes.

        A tensor that is neither merged nor partitioned shares memory with the training weights. If ``partitioned``,
        the other ranks must call ``help_read`` with the same names at the same time.
        """
        own = self._named(names)
        exported = []
        with torch.no_grad(), self._gathered(own):
            for name, (own_name, parameter) in zip(names, own, strict=True):
                layer = self._adapted.get(own_name)
                tensor = parameter.detach() if layer is None else _merged(layer, parameter)
                if layer is None and _is_partitioned(parameter):
                    tensor = tensor.clone()  # the gathered memory is freed with the context
                exported.append((name, tensor.contiguous()))
        return exported

    def help_read(self, names: Sequence[str]) -> None:
        """This rank's part of rank 0's ``read`` of partitioned tensors; keeps nothing."""
        with self._gathered(self._named(names)):
            pass

    def _own_tensors(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self._module.named_parameters():
            if not _belongs_to_adapter(name):
                yield name, parameter

    def _named(self, names: Sequence[str]) -> list[tuple[str, nn.Parameter]]:
        own = {_exported_name(name): (name, parameter) for name, parameter in self._own_tensors()}
        return [own[name] for name in names]

    def _gathered(self, own: Sequence[tuple[str, nn.Parameter]]) -> AbstractContextManager[None]:
        """A context in which these parameters, and what adapters add to them, are whole on every rank."""
        parameters = [parameter for _, parameter in own]
        for name, _ in own:
            layer = self._adapted.get(name)
            if layer is not None:
                parameters += [p for part, p in layer.named_parameters() if _belongs_to_adapter(f".{part}")]
        if not any(_is_partitioned(parameter) for parameter in parameters):
            return nullcontext()
        import deepspeed

        context: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(parameters)
        return context


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


def _is_partitioned(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "ds_shape")


def _full_shape(parameter: torch.Tensor) -> torch.Size:
    """Shape of the whole tensor; a partitioned one shows itself as empty."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


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
