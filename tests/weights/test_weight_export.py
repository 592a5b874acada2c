"""The exported tensors against Hugging Face's state dict and PEFT's own merge."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from real_model import tiny_model
from torch import nn

from swift_stage2.config import Stage2Config
from swift_stage2.config.binding import bind
from swift_stage2.errors import ConfigError, WeightSyncError
from swift_stage2.training.losses import check_model
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.snapshot import SnapshotFile, WeightIdentity


@pytest.fixture
def model() -> Any:
    return copy.deepcopy(tiny_model()[0])


def _adapted(model: Any, **settings: Any) -> Any:
    """LoRA on every linear layer, as ms-swift's default ``all-linear`` has it, with adapters that say something."""
    in_full = ["lm_head", *settings.get("modules_to_save", ())]
    targets = [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and not any(part in name for part in in_full)
    ]
    torch.manual_seed(5)
    adapted = _with_lora(model, r=4, lora_alpha=16, target_modules=targets, **settings)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            nn.init.normal_(parameter, std=0.1)
    return adapted


def _with_lora(model: nn.Module, **settings: Any) -> Any:
    from peft import LoraConfig, get_peft_model  # after real_model, which makes torchvision importable

    return get_peft_model(model, LoraConfig(**settings))


_EVERYTHING = 1 << 40


def _pushed(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    export = WeightExport(module)
    (names,) = export.plan(_EVERYTHING)
    return export.read(names)


def _exported(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(_pushed(module))


def _state(model: Any) -> dict[str, torch.Tensor]:
    """The weights that a plain model saves, tied ones once."""
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def test_a_plain_model_leaves_under_its_own_names(model: Any) -> None:
    exported, state = _exported(model), _state(model)
    assert exported.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(exported[name], tensor), name


def test_the_manifest_announces_what_the_push_carries_in_order(model: Any) -> None:
    for module in (model, _adapted(copy.deepcopy(model))):
        pushed = _pushed(module)
        announced = [(spec.name, spec.shape, spec.dtype) for spec in WeightExport(module).manifest()]
        assert announced == [
            (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in pushed
        ]
        assert all(tensor.is_contiguous() and not tensor.requires_grad for _, tensor in pushed)


def test_lora_leaves_merged_and_the_training_weights_stay(model: Any) -> None:
    adapted = _adapted(model)
    biases = {layer.base_layer.bias is None for layer in adapted.modules() if hasattr(layer, "base_layer")}
    assert biases == {True, False}, "layers with and without a bias must be adapted"
    before = {name: (p.detach().clone(), p.requires_grad) for name, p in adapted.named_parameters()}
    expected = _state(copy.deepcopy(adapted).merge_and_unload())
    exported = _exported(adapted)
    assert exported.keys() == expected.keys()
    plain = _state(tiny_model()[0])
    changed = [name for name, tensor in exported.items() if not torch.equal(tensor, plain[name])]
    assert len(changed) == sum(hasattr(layer, "base_layer") for layer in adapted.modules())
    for name, tensor in expected.items():
        torch.testing.assert_close(exported[name], tensor, rtol=0, atol=1e-6, msg=name)
    for name, parameter in adapted.named_parameters():
        assert torch.equal(parameter, before[name][0]), name
        assert parameter.requires_grad == before[name][1], name
        assert parameter.grad is None


def test_modules_that_are_trained_in_full_beside_lora_leave_as_trained(model: Any) -> None:
    adapted = _adapted(model, modules_to_save=["merger"])
    expected = _state(copy.deepcopy(adapted).merge_and_unload())
    exported = _exported(adapted)
    assert exported.keys() == expected.keys()
    merger = [name for name in exported if "merger" in name]
    assert merger
    for name in merger:
        torch.testing.assert_close(exported[name], expected[name], rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapted_model_of_4_bits_leaves_as_the_dense_one_that_its_forward_pass_computes_with(
    model: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    """With double quantisation, as ms-swift's default is; the dense model from before knows names and shapes."""
    from transformers import BitsAndBytesConfig

    dense = model.to(dtype)
    dense.save_pretrained(tmp_path)
    packing = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype, llm_int8_skip_modules=["visual", "lm_head"],
    )  # fmt: skip
    quantised = type(dense).from_pretrained(tmp_path, quantization_config=packing, dtype=dtype)
    check_model(quantised, bind(Stage2Config, {"stage2_ab": {"schedule": {"b_ratio": 0}}}))
    names = [name for name, layer in quantised.named_modules() if type(layer).__name__ == "Linear4bit"]
    assert names
    adapted = _with_lora(quantised, r=4, lora_alpha=16, target_modules=names[: len(names) // 2])
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1)

    exported = _exported(adapted)
    announced = [(spec.name, spec.shape, spec.dtype) for spec in WeightExport(adapted).manifest()]
    assert announced == [(spec.name, spec.shape, spec.dtype) for spec in WeightExport(dense).manifest()]
    assert sum(not torch.equal(exported[name], tensor) for name, tensor in _exported(dense).items()) == len(
        names
    )
    dense.load_state_dict(exported, strict=False)
    ids = torch.arange(5, 37)[None]
    with torch.no_grad():
        ours, theirs = (each.eval()(input_ids=ids).logits.float() for each in (adapted, dense))
    rounding = float(torch.finfo(dtype).eps) * float(ours.abs().max()) * 16
    torch.testing.assert_close(theirs, ours, rtol=0, atol=rounding)
    assert all(torch.equal(tensor, exported[name]) for name, tensor in _pushed(adapted))
    next(parameter for parameter in adapted.parameters() if hasattr(parameter, "quant_state")).ds_shape = (1,)
    with pytest.raises(ConfigError, match="whole weights on every rank, got partitioned ones"):
        WeightExport(adapted)


@pytest.mark.parametrize("variant", ["use_dora", "lora_bias"])
def test_adapters_that_are_no_plain_difference_are_refused(variant: str) -> None:
    model = nn.Sequential()
    model.add_module("one", nn.Linear(4, 4))
    adapted = _with_lora(model, r=2, target_modules=["one"], **{variant: True})
    with pytest.raises(ConfigError, match=f"got {variant}=true in layer=base_model.model.one"):
        WeightExport(adapted)


def _snapshot_of(module: nn.Module) -> SnapshotFile:
    export = WeightExport(module)
    snapshot = SnapshotFile(export.manifest(), bucket_bytes=1 << 18)
    for names in export.plan(1 << 18):
        snapshot.put(export.read(names))
    return snapshot


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name(model: Any, value: float) -> None:
    name = "model.language_model.layers.2.mlp.down_proj.weight"
    with torch.no_grad():
        model.get_parameter(name).view(-1)[-1] = value
    with pytest.raises(WeightSyncError, match=f"tensor={name}; lower the learning rate"):
        _snapshot_of(model).describe(WeightIdentity("run", 1))


def test_a_snapshot_keeps_what_training_changes_afterwards(model: Any) -> None:
    before = {name: tensor.clone() for name, tensor in _state(model).items()}
    snapshot = _snapshot_of(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert snapshot.tensors.keys() == before.keys()
    assert all(torch.equal(snapshot.tensors[name], tensor) for name, tensor in before.items())


# --- buckets -----------------------------------------------------------------------------------------


class _Sized(nn.Module):
    """Parameters t0, t1, … of so many bytes each."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        for number, size in enumerate(sizes):
            parameter = nn.Parameter(torch.zeros(size, dtype=torch.uint8), requires_grad=False)
            self.register_parameter(f"t{number}", parameter)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((4, 4, 2), [["t0", "t1", "t2"]]),
        ((4, 4, 3), [["t0", "t1"], ["t2"]]),
        ((11, 1), [["t0"], ["t1"]]),
        ((1, 11, 1), [["t0"], ["t1"], ["t2"]]),
        ((10, 10), [["t0"], ["t1"]]),
        ((), []),
    ],
)
def test_buckets_keep_the_order_and_the_limit(sizes: tuple[int, ...], expected: list[list[str]]) -> None:
    assert [list(names) for names in WeightExport(_Sized(*sizes)).plan(max_bytes=10)] == expected
