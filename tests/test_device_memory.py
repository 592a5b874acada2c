"""Optimizer states that wait in main memory come back to where each was."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from swift_stage2.learner.device_memory import DeviceMemory


@dataclass(frozen=True)
class OnDevice:
    """A tensor of a device that is not here."""

    name: str
    device: torch.device

    def to(self, device: torch.device | str) -> OnDevice:
        return OnDevice(self.name, torch.device(device))


@pytest.mark.parametrize("offloads", [True, False])
def test_states_leave_the_device_and_come_back_and_what_was_on_the_cpu_stays(offloads: bool) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    before = {
        "step": torch.tensor(3.0),
        "exp_avg": OnDevice("m", torch.device("cuda:1")),
        "exp_avg_sq": OnDevice("v", torch.device("cuda:1")),
    }
    state = dict(before)
    optimizer.state[optimizer.param_groups[0]["params"][0]] = state
    memory = DeviceMemory(lambda: optimizer, offloads=offloads)
    for _ in range(2):
        memory.release()
        assert [state[name].device.type for name in ("exp_avg", "exp_avg_sq")] == (
            ["cpu"] * 2 if offloads else ["cuda"] * 2
        )
        memory.take_back()
        assert state == before
        assert state["step"] is before["step"]
