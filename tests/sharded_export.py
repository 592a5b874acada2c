"""The export of a module that two gloo ranks hold in parts: starts the ranks, and is what each of them reads with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from free_port import free_port

from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.tensors import checksum_tensor

_DEADLINE_S = 120.0


def exports_of(program: Path, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """The JSON object that each rank of the program prints last; they must all succeed."""
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    paths = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program)],
            env=os.environ
            | rendezvous
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": paths}
            | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [rank.communicate(timeout=_DEADLINE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(timeout=60)
    assert [rank.returncode for rank in ranks] == [0, 0], [error[-1500:] for _, error in outputs]
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


def read_checksums(export: WeightExport, bucket_bytes: int) -> dict[str, str]:
    """In a rank: reads every bucket together with the other one; rank 0 returns the checksums by name."""
    checksums: dict[str, str] = {}
    for names in export.plan(bucket_bytes):
        if os.environ["RANK"] == "0":
            checksums.update({name: checksum_tensor(tensor) for name, tensor in export.read(names)})
        else:
            export.help_read(names)
    return checksums
