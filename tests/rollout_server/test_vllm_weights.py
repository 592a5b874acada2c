"""What a model of vLLM holds after a push, as all workers say together; models that fuse, cut, convert and drop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from swift_stage2.rollout_server.vllm_weights import LoadRecord, combine
from swift_stage2.servers.stock import WeightSums
from swift_stage2.weights.tensors import checksum_tensor, checksums_by_name


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


def arrived(weights: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: checksum_tensor(tensor) for name, tensor in weights.items()}


class Worker:
    """A worker with its model. ``loader`` stands in the place of the model's own."""

    def __init__(self, ranks: int = 1, rank: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.model = FusedModel(dtype, ranks, rank)
        self.record = LoadRecord()
        self.loader: Callable[[dict[str, torch.Tensor]], None] = self.model.load_weights

    def push(self, weights: dict[str, torch.Tensor], *, bucket: int = 2) -> None:
        """In buckets, as ms-swift does: a failure is logged, and the push goes on."""
        names = list(weights)
        for start in range(0, len(names), bucket):
            given = [(name, weights[name].clone()) for name in names[start : start + bucket]]
            with self.record.noting("update_flattened_params"):
                self.load(dict(given))
        self.record.end()

    def load(self, given: dict[str, torch.Tensor]) -> None:
        self.record.load(given, checksums_by_name(given), lambda weights: self.loader(dict(weights)))

    def report(self, question: str = "?") -> dict[str, Any]:
        return self.record.report(question, dict(self.model.named_parameters()))


def sums(*engines: Sequence[Worker], num_workers: int | None = None) -> WeightSums:
    reports = [[worker.report() for worker in workers] for workers in engines]
    return combine("process", "?", reports, num_workers or sum(map(len, engines)))


def test_a_push_is_held_as_it_was_sent_and_the_next_one_too() -> None:
    worker = Worker()
    for _ in range(2):
        weights = {name: tensor + 1 for name, tensor in make_weights().items()}
        worker.push(weights)
        told = sums([worker])
        assert told.resident == told.arrived == arrived(weights)
        assert told.problems(arrived(weights)) == []
        assert told.incarnation == "process"


def test_weights_held_in_another_dtype_are_told_as_given_if_they_were_converted_right() -> None:
    worker, weights = Worker(dtype=torch.bfloat16), make_weights()
    worker.push(weights)
    assert sums([worker]).problems(arrived(weights)) == []


def test_a_rank_that_is_missing_is_seen() -> None:
    worker, weights = Worker(ranks=2), make_weights()
    worker.push(weights)
    assert sums([worker]).resident.keys() == {"norm"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_workers_that_hold_parts_answer_together(ranks: int) -> None:
    engines = [[Worker(ranks, rank) for rank in range(ranks)] for _ in range(2)]
    weights = make_weights()
    for worker in (worker for engine in engines for worker in engine):
        worker.push(weights)
    assert sums(*engines).problems(arrived(weights)) == []


def test_no_memory_of_a_push_is_kept() -> None:
    worker, weights = Worker(), make_weights()
    given = {name: tensor.clone() for name, tensor in weights.items()}
    references = torch.multiprocessing.reductions.StorageWeakRef
    storages = [references(each.untyped_storage()) for each in given.values()]  # type: ignore[no-untyped-call]
    worker.load(given)
    del given
    assert all(storage.expired() for storage in storages)
    worker.model.norm = torch.nn.Parameter(torch.zeros(3))  # nor the model's own, once it holds others
    assert sums([worker]).resident.keys() == {"q", "k", "columns"}


def dropping(model: FusedModel, dropped: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda weights: model.load_weights(
        {name: each for name, each in weights.items() if name != dropped}
    )


@pytest.mark.parametrize("name", ["q", "norm"])
def test_a_tensor_that_is_dropped_is_named(name: str) -> None:
    worker, weights = Worker(), make_weights()
    worker.push(weights)  # an older one, which it then still holds
    worker.loader = dropping(worker.model, name)
    newer = {name: tensor + 1 for name, tensor in weights.items()}
    worker.push(newer)
    (problem,) = sums([worker]).problems(arrived(newer))
    assert problem.startswith(
        f"{name} (1 in all) arrived and was not seen whole in the model: it was dropped"
    )


def test_one_element_is_named_wherever_it_flips() -> None:
    worker, weights = Worker(), make_weights()
    worker.push(weights)
    worker.model.fused.data[0, 0] += 1
    assert sums([worker]).problems(arrived(weights)) == ["resident checksum of q differs (1 in all)"]
    other = {**weights, "norm": weights["norm"] + 1}
    worker.push(weights)
    assert sums([worker]).problems(arrived(other)) == ["arrived checksum of norm differs (1 in all)"]


def test_engines_that_hold_different_weights_hold_no_ones() -> None:
    workers, weights = [Worker(), Worker()], make_weights()
    for worker in workers:
        worker.push(weights)
    workers[1].model.norm.data[0] += 1
    assert sums([workers[0]], [workers[1]]).problems(arrived(weights)) == [
        "resident checksum of norm differs (1 in all)"
    ]


def test_a_failure_is_told_until_the_next_push() -> None:
    worker, weights = Worker(), make_weights()

    def fail(weights: dict[str, torch.Tensor]) -> None:
        raise ValueError("no such weight")

    worker.loader = fail
    worker.push(weights)
    assert sums([worker]).problems(arrived(weights))[0] == (
        "engine 0 worker 0: update_flattened_params: ValueError: no such weight"
    )
    worker.loader = worker.model.load_weights
    worker.push(weights)
    assert sums([worker]).problems(arrived(weights)) == []


def test_a_worker_that_does_not_answer_is_no_proof() -> None:
    worker, weights = Worker(), make_weights()
    worker.push(weights)
    told = combine("process", "?", [[worker.report()], None], 2)
    assert told.problems(arrived(weights)) == ["1 of 2 workers answered; the server's log says why"]
    assert combine("process", "?", [None], 1).problems({})[0].startswith("0 of 1 workers answered")


def test_an_answer_to_an_earlier_question_is_none() -> None:
    worker, weights = Worker(), make_weights()
    worker.push(weights)
    engines = [[worker.report(), worker.report("earlier")], [worker.report(), None]]
    told = combine("process", "?", engines, 4)
    assert told.problems(arrived(weights)) == ["2 of 4 workers answered; the server's log says why"]


def test_a_parameter_that_no_tensor_reached_is_named() -> None:
    worker = Worker()
    weights = make_weights()
    del weights["norm"]
    worker.push(weights)
    assert sums([worker]).problems(arrived(weights)) == [
        "nothing was loaded into the server's parameter norm (1 in all)"
    ]


def test_an_output_layer_tied_to_a_tensor_that_is_held_is_held_as_well() -> None:
    worker, weights = Worker(), make_weights()
    tied = {**weights, "lm_head.weight": weights["norm"]}
    worker.loader = dropping(worker.model, "lm_head.weight")
    worker.push(tied)
    assert sums([worker]).problems(arrived(tied)) == []
    untied = {**weights, "lm_head.weight": weights["norm"] + 1}
    worker.push(untied)
    assert sums([worker]).problems(arrived(untied))[0].startswith("lm_head.weight (1 in all) arrived")
