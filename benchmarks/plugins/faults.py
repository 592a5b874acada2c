"""An ``--external_plugins`` file for ms-swift: the real trainer, whose transport and disk commit faults on demand.

Everything else of the learner is what a user runs. Given to the jobs of ``swift-stage2 bench faults``.
"""

from __future__ import annotations

from typing import Any

from swift_stage2 import Stage2Trainer  # isort: skip, it must be imported before torchvision

from benchmarks.faults.commit import FaultyTransport, PushHistory, SlowDisk, Switches
from swift_stage2.telemetry.audit import AuditLog
from swift_stage2.training.stage2_trainer import register_trainer
from swift_stage2.weights.transport import WeightTransport


class FaultyTrainer(Stage2Trainer):
    """The trainer of the bench's jobs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._switches = Switches.from_environment()
        self._history = PushHistory()
        AuditLog.put = staticmethod(SlowDisk(self._switches).write)

    def wrap_transport(self, transport: WeightTransport) -> WeightTransport:
        return FaultyTransport(transport, self._switches, self._history)


register_trainer(FaultyTrainer)
