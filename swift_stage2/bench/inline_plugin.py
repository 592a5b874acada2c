"""ms-swift plugin of ``bench overlap``: the real learner with the queue and the pipeline of ``inline_pipeline``."""

from __future__ import annotations

from functools import partial
from typing import Any

from swift_stage2 import Stage2Trainer  # isort: skip, it must be imported before torchvision

from swift_stage2.assembly import start_run
from swift_stage2.bench.inline_pipeline import InlinePipeline, InlineQueue
from swift_stage2.training.stage2_trainer import register_trainer


class InlineTrainer(Stage2Trainer):
    """The trainer of the bench's jobs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        start = partial(start_run, make_queue=InlineQueue, make_pipeline=InlinePipeline)
        super().__init__(*args, **{"start_run": start, **kwargs})


register_trainer(InlineTrainer)
