"""A load in a model whose loader fuses, cuts, converts, or does nothing; anonymous memory into another process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from swift_stage2.rollout_server.vllm_weights import LoadTrace, held_pieces, resident_checksums, untouched
from swift_stage2.weights.tensors import checksum_tensor


class FusedModel(torch.nn.Module):
    """As vLLM holds a layer: q and k in one parameter, each rank with its own rows, the rest by name."""

    def __init__(self, dtype: torch.dtype = torch.float32, ranks: int = 1, rank: int = 0) -> None:
        super().__init__()
        self.ranks, self.rank = ranks, rank
        self.fused = torch.nn.Parameter(torch.zeros(8 // ranks, 3, dtype=dtype))
        self.columns = torch.nn.Parameter(torch.zeros(3, 4 // ranks, dtype=dtype))
        self.norm = torch.nn.Parameter(torch.ones(3, dtype=dtype))

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        rows, columns = 4 // self.ranks, 4 // self.ranks
        for name, tensor in weights.items():
            if name in ("q", "k"):
                start = 0 if name == "q" else rows
                self.fused.data.narrow(0, start, rows).copy_(tensor.narrow(0, self.rank * rows, rows))
            elif name == "columns":
                self.columns.data.copy_(tensor.narrow(1, self.rank * columns, columns))
            else:
                self.norm.data.copy_(tensor)


def make_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "q": torch.randn(4, 3),
        "k": torch.randn(4, 3),
        "columns": torch.randn(3, 4),
        "norm": torch.randn(3),
    }


def load(
    models: list[FusedModel],
    weights: dict[str, torch.Tensor],
    *,
    drop_copies: bool = False,
    after: Callable[[FusedModel], None] = lambda model: None,
) -> dict[str, str]:
    pieces, read = [], arrived(weights)
    for model in models:
        trace = LoadTrace(weights, drop_copies=drop_copies)
        with trace:
            model.load_weights(weights)
        after(model)
        pieces += held_pieces(trace.parts(read), model.parameters())
    return resident_checksums({name: tensor.shape for name, tensor in weights.items()}, read, pieces)


def arrived(weights: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: checksum_tensor(tensor) for name, tensor in weights.items()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_fused_and_cut_parameters_are_told_by_the_checkpoints_names(ranks: int) -> None:
    weights = make_weights()
    models = [FusedModel(ranks=ranks, rank=rank) for rank in range(ranks)]
    assert load(models, weights) == arrived(weights)


def test_a_rank_that_is_missing_is_seen() -> None:
    weights = make_weights()
    assert load([FusedModel(ranks=2, rank=0)], weights).keys() == {"norm"}


def test_weights_held_in_another_dtype_are_told_as_given_if_they_were_converted_right() -> None:
    weights = make_weights()
    assert load([FusedModel(torch.bfloat16)], weights) == arrived(weights)


def test_a_load_that_changes_nothing_is_seen_in_every_tensor() -> None:
    weights = make_weights()
    resident = load([FusedModel()], weights, drop_copies=True)
    assert resident.keys() == weights.keys()
    assert all(resident[name] != checksum for name, checksum in arrived(weights).items())


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_changed_element_is_seen_in_its_own_tensor(ranks: int) -> None:
    weights = make_weights()

    def flip(model: FusedModel) -> None:
        model.fused.data[-1, -1] += 1  # the last of k

    models = [FusedModel(ranks=ranks, rank=rank) for rank in range(ranks)]
    resident = load(models, weights, after=flip)
    assert {name for name, checksum in arrived(weights).items() if resident.get(name) != checksum} == {"k"}


def test_parameters_that_nothing_was_copied_into_are_named() -> None:
    weights = make_weights()
    model = FusedModel()
    trace = LoadTrace(weights)
    with trace:
        model.load_weights({name: weights[name] for name in ("q", "columns")})
    assert untouched(trace.parts(arrived(weights)), dict(model.named_parameters())) == ["norm"]
