"""One of two gloo ranks whose adapted model DeepSpeed has partitioned (ZeRO-3); started by ``test_zero.py``.

Prints one JSON object: what the export announced and read, against the same model whole.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from sharded_export import read_checksums
from torch import nn

from swift_stage2.collectives import leave_job
from swift_stage2.errors import WeightSyncError
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.snapshot import SnapshotFile, WeightIdentity
from swift_stage2.weights.tensors import checksum_tensor

RANK = int(os.environ["RANK"])
_BUCKET_BYTES = 2048
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 64},
}


def adapted_model() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    model = nn.Sequential()
    model.add_module("first", nn.Linear(48, 96))
    model.add_module("norm", nn.LayerNorm(96))
    model.add_module("second", nn.Linear(96, 31, bias=False))
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=16, target_modules=["first", "second"]))
    for parameter in adapted.parameters():
        nn.init.normal_(parameter, std=0.1)
    return adapted.to(torch.bfloat16)


def parts_digest(module: nn.Module) -> str:
    """Of what this rank holds of every parameter."""
    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(parameter.ds_tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    whole = adapted_model()
    merged = copy.deepcopy(whole).merge_and_unload()
    announced_whole = [spec.to_json() for spec in WeightExport(whole).manifest()]
    partitioned = adapted_model()
    deepspeed.zero.Init(module=partitioned, config_dict_or_path=CONFIG)
    export = WeightExport(partitioned)
    before = parts_digest(partitioned)
    checksums = read_checksums(export, _BUCKET_BYTES)
    result: dict[str, Any] = {
        "partitioned": export.partitioned,
        "num_buckets": len(export.plan(_BUCKET_BYTES)),
        "announced_as_whole": [spec.to_json() for spec in export.manifest()] == announced_whole,
        "as_merged": checksums == {n: checksum_tensor(p) for n, p in merged.named_parameters()},
        "parts_stay": parts_digest(partitioned) == before,
        "still_partitioned": all(parameter.numel() == 0 for parameter in partitioned.parameters()),
    }
    own = {name: parameter for name, parameter in partitioned.named_parameters() if "second" in name}
    with deepspeed.zero.GatheredParameters(list(own.values()), modifier_rank=0), torch.no_grad():
        if RANK == 0:
            next(iter(own.values()))[0, 0] = float("nan")
    names = export.plan(1 << 30)[0]
    try:
        if RANK == 0:
            snapshot, identity = (
                SnapshotFile(export.manifest(), bucket_bytes=1),
                WeightIdentity("run", "run-1", 1),
            )
            snapshot.put(export.read(names))
            snapshot.describe(identity)
        else:
            export.help_read(names)
        result["error"] = None
    except WeightSyncError as error:
        result["error"] = str(error)
    deepspeed.comm.barrier()  # no rank is left inside a gather
    print(json.dumps(result), flush=True)
    leave_job()


if __name__ == "__main__":
    main()
