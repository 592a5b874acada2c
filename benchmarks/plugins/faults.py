"""An ``--external_plugins`` file for ms-swift: the real trainer, which notes what rollouts it trains.

Given to the jobs of ``swift-stage2 bench faults``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from swift_stage2 import Stage2Trainer  # isort: skip, it must be imported before torchvision

from benchmarks.faults.accounting import Taken
from swift_stage2.channel_b.pipeline import Pipeline
from swift_stage2.records import Rollout
from swift_stage2.training.stage2_trainer import register_trainer


class NotingTrainer(Stage2Trainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        Pipeline._match = _note_and_match  # type: ignore[assignment,method-assign]


_match = Pipeline._match


def _note_and_match(pipeline: Pipeline, rollouts: Sequence[Rollout]) -> None:
    for version, number in Counter(rollout.version for rollout in rollouts).items():
        pipeline.events.log.write(Taken(version=version, num_rollouts=number))
    _match(pipeline, rollouts)


register_trainer(NotingTrainer)
