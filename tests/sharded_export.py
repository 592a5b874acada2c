"""The export of a module that two gloo ranks hold in parts: starts the ranks, and is what each of them reads with."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from two_ranks import run_ranks

from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.tensors import checksum_tensor


def exports_of(program: Path, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """The JSON object that each rank of the program prints last; they must all succeed."""
    printed, _ = run_ranks(program, **environment)
    return [json.loads(output.splitlines()[-1]) for output in printed]


def read_checksums(export: WeightExport, bucket_bytes: int) -> dict[str, str]:
    """In a rank: reads every bucket together with the other one; rank 0 returns the checksums by name."""
    checksums: dict[str, str] = {}
    for names in export.plan(bucket_bytes):
        if os.environ["RANK"] == "0":
            checksums.update({name: checksum_tensor(tensor) for name, tensor in export.read(names)})
        else:
            export.help_read(names)
    return checksums
