"""The parts that phases need, in which servers and learner have the same devices in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swift_stage2.learner.device_memory import DeviceMemory
from swift_stage2.scheduling.phase_schedule import PhaseSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """One rank's. What happens in which order is told by ``LearnerVersions``."""

    schedule: PhaseSchedule
    """Channel B's own."""
    packs_per_step: int
    memory: DeviceMemory
    put_to_sleep: Callable[[], Sequence[str | None]]
    """On rank 0, of every server: why it does not sleep, or None. On the others nothing is done."""

    @property
    def num_demanded(self) -> int:
        """Packs that are to be ready before the servers sleep."""
        return self.schedule.num_left * self.packs_per_step
