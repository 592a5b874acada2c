"""The second process of stage *handover*: opens what stdin names, and prints how long it took and the checksum."""

from __future__ import annotations

import json
import mmap
import pickle
import sys
from base64 import b64decode

import torch

from swift_stage2.gpu_check.measuring import timed
from swift_stage2.weights.checksum import checksum_tensor


def main() -> None:
    """Reads {"descriptor", "num_bytes"} of a memory file, or {"handle"} of a tensor on the GPU."""
    where = json.load(sys.stdin)
    device = "cuda:0" if "handle" in where else "cpu"

    def see() -> torch.Tensor:
        if "handle" in where:
            tensor: torch.Tensor = pickle.loads(
                b64decode(where["handle"])
            )  # torch taught pickle what a handle is
            return tensor
        mapped = mmap.mmap(where["descriptor"], where["num_bytes"])
        return torch.frombuffer(mapped, dtype=torch.uint8)

    if device != "cpu":
        torch.zeros(1, device=device)  # the start of CUDA is no part of what is measured
    tensor, open_s = timed(device, see)
    checksum, sum_s = timed(device, lambda: checksum_tensor(tensor))
    print(json.dumps({"open_s": open_s, "sum_s": sum_s, "checksum": checksum}))


if __name__ == "__main__":
    main()
