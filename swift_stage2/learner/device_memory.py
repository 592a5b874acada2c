"""The memory of a rank's device, which servers on the same device get while they are awake."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch


class DeviceMemory:
    """Frees a rank's device memory that torch caches, and moves optimizer states to main memory and back if asked to.

    Weights stay where they are. Moving a state there and back changes no bit of it.
    """

    def __init__(self, optimizer: Callable[[], torch.optim.Optimizer | None], *, offloads: bool) -> None:
        """``offloads``: the states of ``optimizer`` wait in main memory."""
        self._optimizer = optimizer
        self._offloads = offloads
        self._moved: list[tuple[dict[str, Any], str, torch.device]] = []

    def release(self) -> None:
        """Between two steps, once the copy of the weights is made."""
        optimizer = self._optimizer() if self._offloads else None
        for state in optimizer.state.values() if optimizer is not None else ():
            for name, value in state.items():
                device = getattr(value, "device", None)
                if device is not None and device.type != "cpu":  # Adam's count of steps stays where it is
                    self._moved.append((state, name, device))
                    state[name] = value.to("cpu")
        gc.collect()  # a cycle of the step before may hold activations
        torch.cuda.empty_cache()

    def take_back(self) -> None:
        """The servers sleep. What torch needs beside the states it asks the device for by itself."""
        for state, name, device in self._moved:
            state[name] = state[name].to(device)
        self._moved.clear()
