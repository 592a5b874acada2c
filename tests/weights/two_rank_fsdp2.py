"""One of two gloo ranks whose adapted model FSDP2 has sharded; started by ``test_fsdp2_export.py``.

Prints one JSON object: what the export announced and read, against the same model whole.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import torch
from sharded_export import read_checksums
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

from swift_stage2.collectives import leave_job
from swift_stage2.compat import declare_operators
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.tensors import checksum_tensor

_BUCKET_BYTES = 4096


class Tied(nn.Module):
    """Odd sizes, which no two ranks share evenly; one weight in two places, one that is never trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(61, 33)
        self.block = nn.Sequential(nn.Linear(33, 33), nn.LayerNorm(33))
        self.frozen = nn.Linear(33, 33, bias=False).requires_grad_(False)
        self.head = nn.Linear(33, 61, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.head(self.frozen(self.block(self.embed(ids))))
        return hidden


def model(*, adapted: bool) -> Any:
    whole: Any = Tied()
    if adapted:
        declare_operators()  # before peft imports torchvision
        from peft import LoraConfig, get_peft_model

        whole = get_peft_model(whole, LoraConfig(r=4, lora_alpha=16, target_modules=["0", "frozen"]))
        for name, parameter in whole.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter, std=0.1)
    return whole


def shard(module: Any) -> None:
    """As Accelerate does: blocks recompute their activations, and the tail stays whole after a forward pass."""
    inner = module.base_model.model if hasattr(module, "base_model") else module
    inner.block = checkpoint_wrapper(inner.block)
    fully_shard(inner.block)
    fully_shard([inner.embed, inner.head], reshard_after_forward=False)
    fully_shard(module)


def compare(*, adapted: bool) -> dict[str, Any]:
    whole, sharded = model(adapted=adapted), model(adapted=adapted)
    merged = copy.deepcopy(whole).merge_and_unload() if adapted else whole
    shard(sharded)
    export = WeightExport(sharded)
    held = dict(sharded.named_parameters())
    with torch.no_grad():
        sharded(torch.arange(7)[None])  # leaves tensors whole, and others in the place of the shards
    first = read_checksums(export, _BUCKET_BYTES)
    placed = {name: each is held[name] for name, each in sharded.named_parameters()}
    optimizer = torch.optim.SGD([p for p in sharded.parameters() if p.requires_grad], lr=0.1)
    sharded(torch.arange(7)[None]).square().mean().backward()
    optimizer.step()
    second = read_checksums(export, _BUCKET_BYTES)
    return {
        "partitioned": export.partitioned,
        "num_buckets": len(export.plan(_BUCKET_BYTES)),
        "announced_as_whole": export.manifest() == WeightExport(whole).manifest(),
        "as_merged": first == {name: checksum_tensor(p) for name, p in merged.named_parameters()},
        "shards_are_back": all(placed.values()),
        "changed": sorted(name for name in first if first[name] != second[name]),
    }


def main() -> None:
    torch.distributed.init_process_group("gloo")
    print(json.dumps({tuner: compare(adapted=tuner == "lora") for tuner in ("full", "lora")}), flush=True)
    torch.distributed.barrier()  # no rank is left inside a gather
    leave_job()


if __name__ == "__main__":
    main()
