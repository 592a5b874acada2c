"""The programs that every rank of ``swift sft`` and ``swift rlhf`` runs, on a machine without a GPU.

``torchrun -m benchmarks.swift_program sft|rlhf ARGUMENTS`` is ``swift sft|rlhf ARGUMENTS``: those commands only start
torchrun with their modules. Of stage 2 it takes the declarations for torchvision and the way out of a job. GRPO's
client sends weights over gloo: two names of its module are replaced, the communicator, which is NCCL's there, and the
loop that broadcasts on a device's stream, which torch does not have for CPUs. A plugin would come too late: ms-swift
connects before it imports plugins.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterable
from typing import Any

from swift_stage2.collectives import GlooCommunicator, leave_job
from swift_stage2.compat import declare_operators

_CLIENT = "swift.rlhf_trainers.vllm_client"


def send_over_gloo(client: Any) -> None:
    """Replaces both names in the module ``client``.

    Raises RuntimeError: it has them no more: another release of ms-swift.
    """
    for name, ours in {
        "PyNcclCommunicator": GlooCommunicator,
        "_broadcast_tensors_for_vllm_weight_sync": _broadcast,
    }.items():
        if not hasattr(client, name):
            raise RuntimeError(f"bench peer was written for ms-swift 4.6: {_CLIENT} has no {name}")
        setattr(client, name, ours)


def _broadcast(communicator: Any, tensors: Iterable[Any]) -> None:
    for tensor in tensors:
        communicator.broadcast(tensor, src=communicator.rank)


if __name__ == "__main__":
    declare_operators()
    command = sys.argv.pop(1)
    if command == "rlhf":
        from swift.rlhf_trainers import vllm_client

        send_over_gloo(vllm_client)
    runpy.run_module(f"swift.cli.{command}", run_name="__main__", alter_sys=True)
    leave_job()  # or a rank that has trained to its end may abort, and the bench counts it as failed
