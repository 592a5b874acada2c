"""Checksums for the unmodified ``swift rollout``, and for ms-swift's own trainers that push weights to it.

prove_weights   the file for ``--external_plugins``, of ``swift rollout`` and of ``swift rlhf`` alike   PLUGIN
├── sums_server   in the server: the worker extension by name (our engine's), one route, one answer of all engines
└── sums_client   in a trainer of ms-swift's: its client sums what it sends, and asks after every push
"""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

PLUGIN = Path(__file__).with_name("prove_weights.py")

_SERVER_PROGRAM = "swift.pipelines.infer.rollout"


def register() -> None:
    """Hooks into the program of ms-swift that runs in this process: its server, or its client in a trainer."""
    server_program = sys.modules.get(_SERVER_PROGRAM)
    if server_program is not None:
        from swift_stage2.stock_proof.sums_server import register_server

        register_server(server_program)
    elif multiprocessing.parent_process() is None:  # else a worker of a data loader, which would import vLLM
        from swift_stage2.stock_proof.sums_client import register_client

        register_client()
