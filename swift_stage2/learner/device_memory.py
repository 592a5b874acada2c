"""The memory of a rank's device, which servers on the same device get while they are awake."""

from __future__ import annotations

import gc

import torch


class DeviceMemory:
    """What torch keeps for later goes back to the device; weights and optimizer states stay."""

    def release(self) -> None:
        """Between two steps, once the copy of the weights is made."""
        gc.collect()  # a cycle of the step before may hold activations
        torch.cuda.empty_cache()

    def take_back(self) -> None:
        """The servers sleep. Torch asks the device again by itself."""
