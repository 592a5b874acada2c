"""Turns the learner's module into named full tensors for a push, without touching the training weights.

Under LoRA every adapted weight leaves merged, computed on a copy. Names are those of the model without
its adapter, tied weights appear once. Weights of 4 bits (bitsandbytes) leave dense, in the dtype that the learner
computes with, as its own forward pass has them. Under ZeRO-3 and FSDP2 no rank holds a whole tensor: all ranks gather
a bucket together, and rank 0 copies it. Knows layers of PEFT and bitsandbytes, DeepSpeed's parameters and torch's
DTensors, not ms-swift.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from swift_stage2.errors import ConfigError
from swift_stage2.weights.tensors import in_buckets
from swift_stage2.wire import TensorSpec

_ADAPTER_PREFIX = "base_model.model."
_BASE_LAYER = ".base_layer"
_CHECKPOINTED = "_checkpoint_wrapped_module."  # by torch's activation checkpointing, which FSDP2 comes with


class WeightExport:
    """Reads one module. The module's structure must not change between calls.

    Raises:
        ConfigError: the module has an adapter that is more than a difference added to its weight.
    """

    def __init__(self, module: nn.Module) -> None:
        _refuse_other_adapters(module)
        self._sharded: list[Any] = [part for part in module.modules() if hasattr(part, "reshard")]  # FSDP2
        self._reshard()
        self._adapted = _adapted_layers(module)
        self._own = {  # by the name that a push carries
            _exported_name(name): (name, parameter)
            for name, parameter in module.named_parameters()
            if not _belongs_to_adapter(name)
        }
        if self.partitioned and any(_quantised(parameter) is not None for _, parameter in self._own.values()):
            raise ConfigError(
                "swift.quant_bits needs whole weights on every rank",
                got="partitioned ones, by ZeRO-3 or FSDP2",
                remedy="use ZeRO-2, or train without quant_bits",
            )

    @property
    def partitioned(self) -> bool:
        """Whether every read is a collective of all ranks, because each holds a part of a tensor (ZeRO-3, FSDP2)."""
        return any(_is_partitioned(parameter) for _, parameter in self._own.values())

    @property
    def on_gpu(self) -> bool:
        """Whether weights are read from a GPU."""
        return any(parameter.is_cuda for _, parameter in self._own.values())

    @property
    def gpu(self) -> torch.device | None:
        """The GPU that holds every tensor whole, if one does: a stream of it can read them all beside training."""
        devices = {parameter.device for _, parameter in self._own.values()}
        device = devices.pop() if len(devices) == 1 else None
        return device if device is not None and device.type == "cuda" and not self.partitioned else None

    def manifest(self) -> tuple[TensorSpec, ...]:
        """Name, shape and dtype of every tensor that a push carries, in push order."""
        return tuple(
            TensorSpec(name, tuple(_full_shape(tensor)), str(_dtype(tensor)).removeprefix("torch."))
            for name, (_, tensor) in self._own.items()
        )

    def plan(self, max_bytes: int) -> tuple[tuple[str, ...], ...]:
        """Names of the manifest in buckets of at most ``max_bytes``, the same on every rank.

        A larger tensor goes alone. Bytes are counted in the learner's own dtypes.
        """
        return tuple(tuple(spec.name for spec in bucket) for bucket in in_buckets(self.manifest(), max_bytes))

    def read(self, names: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
        """These tensors of the manifest, merged, contiguous, in the learner's dtypes.

        A tensor that is neither merged nor partitioned shares memory with the training weights. If ``partitioned``,
        the other ranks must call ``help_read`` with the same names at the same time.
        """
        own = [self._own[name] for name in names]
        exported = []
        with torch.no_grad(), self._gathered(own) as whole:
            for name, (own_name, parameter), tensor in zip(names, own, whole, strict=True):
                layer = self._adapted.get(own_name)
                if layer is not None:
                    tensor = _merged(layer, tensor)
                elif hasattr(parameter, "ds_shape"):
                    tensor = tensor.clone()  # the gathered memory is freed with the context
                exported.append((name, tensor.contiguous()))
        return exported

    def help_read(self, names: Sequence[str]) -> None:
        """This rank's part of rank 0's ``read`` of partitioned tensors; keeps nothing."""
        with torch.no_grad(), self._gathered([self._own[name] for name in names]):
            pass

    @contextmanager
    def _gathered(self, own: Sequence[tuple[str, nn.Parameter]]) -> Iterator[list[torch.Tensor]]:
        """These parameters whole on every rank; within, what adapters add to them is whole as well."""
        self._reshard()
        parameters = [parameter for _, parameter in own]
        adapters = [
            (layer, part, parameter)
            for name, _ in own
            if (layer := self._adapted.get(name)) is not None
            for part, parameter in layer.named_parameters()
            if _belongs_to_adapter(f".{part}")
        ]
        every = parameters + [parameter for _, _, parameter in adapters]
        with ExitStack() as stack:
            if any(hasattr(parameter, "ds_shape") for parameter in every):
                import deepspeed

                stack.enter_context(deepspeed.zero.GatheredParameters(every))
            for layer, part, parameter in adapters:
                if _is_sharded(parameter):
                    owner, _, key = part.rpartition(".")
                    held = layer.get_submodule(owner)._parameters
                    stack.callback(held.__setitem__, key, parameter)
                    held[key] = nn.Parameter(_whole(parameter), requires_grad=False)
            yield [_whole(parameter) for parameter in parameters]

    def _reshard(self) -> None:
        """Puts the shards back that a forward pass without a backward one (the canary's) has left whole."""
        for part in self._sharded:
            part.reshard()


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
                    "LoRA must be a difference added to a weight",
                    got=f"{variant}=true in layer={name}",
                    remedy="train without it",
                )


def _is_partitioned(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "ds_shape") or _is_sharded(parameter)


def _is_sharded(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "full_tensor")  # torch's DTensor


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    """Of a sharded one: a collective, which makes it anew on every rank; of a quantised one: made anew, dense."""
    if _quantised(parameter) is not None:
        from peft.utils.integrations import dequantize_bnb_weight

        dense: torch.Tensor = dequantize_bnb_weight(parameter)  # type: ignore[arg-type]
        return dense
    if not _is_sharded(parameter):
        return parameter.detach()
    whole: torch.Tensor = parameter.full_tensor()  # type: ignore[attr-defined]
    return whole


def _full_shape(parameter: torch.Tensor) -> torch.Size:
    """Shape of the whole tensor; DeepSpeed shows a partitioned one as empty, bitsandbytes packs one of 4 bits."""
    quantised = _quantised(parameter)
    return torch.Size(
        quantised.shape if quantised is not None else getattr(parameter, "ds_shape", parameter.shape)
    )


def _dtype(parameter: torch.Tensor) -> torch.dtype:
    quantised = _quantised(parameter)
    return parameter.dtype if quantised is None else quantised.dtype


def _quantised(parameter: torch.Tensor) -> Any:
    """The state by which bitsandbytes packs a parameter in 4 bits; None of a dense one."""
    return getattr(parameter, "quant_state", None)


def _merged(layer: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    merged = weight.detach().clone()
    for adapter in layer.active_adapters:  # type: ignore[union-attr]
        if adapter in layer.lora_A or adapter in getattr(layer, "lora_embedding_A", {}):  # type: ignore[operator]
            merged += layer.get_delta_weight(adapter).to(merged.dtype)  # type: ignore[operator]
    return merged


def _belongs_to_adapter(name: str) -> bool:
    return ".lora_" in name or ".original_module." in name


def _exported_name(name: str) -> str:
    name = name.replace(_CHECKPOINTED, "").removeprefix(_ADAPTER_PREFIX)
    return name.replace(_BASE_LAYER, "").replace(".modules_to_save.default", "")
