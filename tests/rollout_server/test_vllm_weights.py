"""A load in a model whose loader fuses, cuts, converts, or does nothing; anonymous memory into another process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from swift_stage2.rollout_server.vllm_weights import LoadTrace, SharedStaging, open_staged, resident_checksums
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
    pieces = []
    for model in models:
        trace = LoadTrace(weights, drop_copies=drop_copies)
        with trace:
            model.load_weights(weights)
        after(model)
        pieces += trace.pieces(list(model.parameters()))
    read = {name: checksum_tensor(tensor) for name, tensor in weights.items()}
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


def test_what_is_overwritten_by_another_tensor_is_seen() -> None:
    weights = make_weights()

    def overwrite(model: FusedModel) -> None:
        model.fused.data[:4] = model.fused.data[4:]

    resident = load([FusedModel()], weights, after=overwrite)
    assert resident["q"] == checksum_tensor(weights["k"])


def test_a_parameter_that_was_replaced_after_the_load_does_not_count_as_loaded() -> None:
    weights = make_weights()

    def replace(model: FusedModel) -> None:
        model.norm = torch.nn.Parameter(torch.zeros(3))

    resident = load([FusedModel()], weights, after=replace)
    assert resident.keys() == {"q", "k", "columns"}


def test_parameters_that_nothing_was_copied_into_are_named() -> None:
    weights = make_weights()
    model = FusedModel()
    trace = LoadTrace(weights)
    with trace:
        model.load_weights({name: weights[name] for name in ("q", "columns")})
    assert trace.untouched(dict(model.named_parameters())) == ["norm"]


# --- staging ------------------------------------------------------------------------------------
READER = """
import json, sys
from swift_stage2.rollout_server.vllm_weights import open_staged
from swift_stage2.weights.tensors import checksum_tensor
path, num_bytes, layout = json.loads(sys.argv[1])
tensors = open_staged(path, num_bytes, layout)
print(json.dumps({name: [list(t.shape), checksum_tensor(t)] for name, t in tensors.items()}))
"""


def odd_weights(seed: int = 1) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "a": torch.randn(5, 3),
        "b": torch.randn(7).to(torch.bfloat16),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "numbers": torch.arange(9).reshape(3, 3).t(),  # not contiguous
    }


def test_another_process_reads_what_was_put_in() -> None:
    weights = odd_weights()
    staging = SharedStaging()
    staged = staging.put(weights)
    argument = json.dumps([staged.path, staged.num_bytes, staged.layout])
    reply = subprocess.run(
        [sys.executable, "-c", READER, argument], capture_output=True, text=True, timeout=60, check=True
    )
    expected = {name: [list(t.shape), checksum_tensor(t)] for name, t in weights.items()}
    assert json.loads(reply.stdout) == expected
    staging.close()


def test_a_reader_sees_the_next_round_and_writes_for_itself_only() -> None:
    staging = SharedStaging()
    first = staging.put(odd_weights(1))
    seen = open_staged(first.path, first.num_bytes, first.layout)
    seen["a"].zero_()
    again = open_staged(first.path, first.num_bytes, first.layout)
    assert torch.equal(again["a"], odd_weights(1)["a"])
    del seen, again
    weights = {"other": torch.randn(1000)}
    second = staging.put(weights)
    assert second.path == first.path
    opened = open_staged(second.path, second.num_bytes, second.layout)
    assert torch.equal(opened["other"], weights["other"])
    staging.close()


def test_it_has_no_name_and_is_gone_when_it_is_closed() -> None:
    before = {path.name for path in Path("/dev/shm").iterdir()}
    staging = SharedStaging()
    staged = staging.put(odd_weights())
    assert not {
        name for name in {path.name for path in Path("/dev/shm").iterdir()} - before if "swift" in name
    }
    staging.close()
    staging.close()
    with pytest.raises(OSError, match="No such file"):
        open_staged(staged.path, staged.num_bytes, staged.layout)
