"""A program that two ranks of one job run, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile

from free_port import free_port

_DEADLINE_S = 300.0  # DeepSpeed compiles an operator first


def run_ranks(program: Path, *words: str, status: int = 0, **environment: str) -> tuple[list[str], list[str]]:
    """Runs the program on both ranks; returns their outputs and their errors. Both must end with ``status``."""
    paths = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    job |= {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment}
    with ExitStack() as files:
        # Not pipes: a rank that has filled one waits for its reader, and the other rank for it.
        outputs, errors = (
            [files.enter_context(TemporaryFile("w+", encoding="utf-8")) for _ in (0, 1)] for _ in range(2)
        )
        ranks = [
            subprocess.Popen(
                [sys.executable, str(program), *words],
                env=os.environ | job | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
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
    assert [rank.returncode for rank in ranks] == [status] * 2, [each[-2000:] for each in complaints]
    return printed, complaints
