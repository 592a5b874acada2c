"""The program that every rank of ``swift rlhf`` runs, with ms-swift's client sending weights over gloo.

``torchrun -m benchmarks.grpo_program ARGUMENTS`` is ``swift rlhf ARGUMENTS`` on a machine without a GPU. Two
names of the client's module are replaced: the communicator, which is NCCL's there, and the loop that broadcasts on a
device's stream, which torch does not have for CPUs. A plugin would come too late: ms-swift connects before it imports
plugins.
"""

from __future__ import annotations

import runpy
from collections.abc import Iterable
from typing import Any

from swift_stage2.cpu_torchvision import declare_operators

_CLIENT = "swift.rlhf_trainers.vllm_client"


def send_over_gloo(client: Any) -> None:
    """Replaces both names in the module ``client``.

    Raises:
        RuntimeError: it has them no more: another release of ms-swift.
    """
    from swift_stage2.collectives import GlooCommunicator

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
    from swift.rlhf_trainers import vllm_client

    send_over_gloo(vllm_client)
    runpy.run_module("swift.cli.rlhf", run_name="__main__", alter_sys=True)
