"""The export of a module that two gloo ranks hold in parts: starts the ranks, and is what each of them reads with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from free_port import free_port

from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.tensors import checksum_tensor

_DEADLINE_S = 300.0  # DeepSpeed compiles an operator first


def exports_of(program: Path, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """The JSON object that each rank of the program prints last; they must all succeed."""
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    paths = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    with ExitStack() as files:
        # Not pipes: a rank that has filled one waits for its reader, and the other rank for it.
        outputs, errors = (
            [files.enter_context(TemporaryFile("w+", encoding="utf-8")) for _ in (0, 1)] for _ in range(2)
        )
        ranks = [
            subprocess.Popen(
                [sys.executable, str(program)],
                env=os.environ
                | rendezvous
                | {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": paths}
                | environment,
                stdout=outputs[rank],
                stderr=errors[rank],
            )
            for rank in (0, 1)
        ]
        end = time.monotonic() + _DEADLINE_S
        try:
            for rank in ranks:
                rank.wait(timeout=max(0.0, end - time.monotonic()))
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait(timeout=60)
        printed, complaints = (
            [(file.seek(0), file.read())[1] for file in both] for both in (outputs, errors)
        )
    assert [rank.returncode for rank in ranks] == [0, 0], [complaint[-1500:] for complaint in complaints]
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
