"""The export of a module that FSDP2 has sharded over two gloo ranks, against the same module whole, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sharded_export import exports_of

_PROGRAM = Path(__file__).with_name("two_rank_fsdp2.py")


@pytest.fixture(scope="module")
def exports() -> list[dict[str, Any]]:
    return exports_of(_PROGRAM, {})


@pytest.mark.parametrize("tuner", ["full", "lora"])
@pytest.mark.slow
def test_sharded_weights_leave_whole_and_merged_by_the_names_of_the_bare_model(
    exports: list[dict[str, Any]], tuner: str
) -> None:
    for rank in exports:
        assert rank[tuner]["partitioned"]
        assert rank[tuner]["num_buckets"] > 1
        assert rank[tuner]["announced_as_whole"]
    assert exports[0][tuner]["as_merged"]


@pytest.mark.parametrize("tuner", ["full", "lora"])
@pytest.mark.slow
def test_a_forward_pass_that_leaves_tensors_whole_hides_no_later_step(
    exports: list[dict[str, Any]], tuner: str
) -> None:
    trained = ["block.0.bias", "block.0.weight", "block.1.bias", "block.1.weight", "embed.weight"]
    adapted = ["block.0.weight", "frozen.weight"]
    assert exports[0][tuner]["changed"] == {"full": trained, "lora": adapted}[tuner]
    assert all(rank[tuner]["shards_are_back"] for rank in exports)
