"""ms-swift plugin of GRPO learners in ``bench peer``: a thread clock that also tells rollouts and weights, a reward.

What the main thread spends in ms-swift's own rollout call, its wait for an asynchronous one, and its push of weights is
added up beside the columns of ``read_times``, and the tokens that it trains. Nothing of ms-swift behaves otherwise. The
reward is that of our detection task.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from swift_stage2.compat import declare_operators

declare_operators()  # before ms-swift imports torchvision

from swift.callbacks import callbacks_map  # noqa: E402
from swift.rewards import ORM, orms  # noqa: E402
from swift.rlhf_trainers.rollout_mixin import RolloutTrainerMixin  # noqa: E402

from benchmarks.clocks import ExclusiveTimer  # noqa: E402
from benchmarks.learner_job import GRPO_CLOCK, PUSH_NS, REWARD, ROLLOUT_NS, TOKENS  # noqa: E402
from benchmarks.plugins.clocks import ThreadClock  # noqa: E402
from swift_stage2.channel_b.detection import DetectionTask  # noqa: E402
from swift_stage2.channel_b.task import TOTAL, try_task  # noqa: E402
from swift_stage2.config import Stage2Config  # noqa: E402
from swift_stage2.config.binding import bind  # noqa: E402

_LOSS = "_compute_loss_single"
_TIMED = {"_engine_infer": ROLLOUT_NS, "_wait_queue": ROLLOUT_NS, "_move_model_to_vllm": PUSH_NS}


class GrpoClock(ThreadClock):
    """The one rank's clock, with three more columns."""

    def __init__(self, args: Any, trainer: Any) -> None:
        super().__init__(args, trainer)
        self._timer = ExclusiveTimer()
        for name, column in _TIMED.items():
            setattr(trainer, name, _on_main_thread(self._timer, column, getattr(trainer, name)))
        self._num_tokens = 0
        self._loss = getattr(trainer, _LOSS)
        setattr(trainer, _LOSS, self._counted_loss)

    def read(self) -> dict[str, int]:
        spent = self._timer.total_ns
        columns = {name: spent.get(name, 0) for name in (ROLLOUT_NS, PUSH_NS)}
        return super().read() | columns | {TOKENS: self._num_tokens}

    def _counted_loss(self, model: Any, model_inputs: Any, grpo_batch: Any) -> Any:
        self._num_tokens += int(grpo_batch.completion_mask.sum())
        return self._loss(model, model_inputs, grpo_batch)


class DetectionReward(ORM):  # type: ignore[misc]
    """As ``objective: grpo`` has it by default. The tiny model's template leaves the rows' coordinates as they are."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        nothing = {"stage2_ab": {"schedule": {"b_ratio": 0}}}
        self._task = DetectionTask.from_config(bind(Stage2Config, nothing))

    def __call__(
        self, completions: list[str], *, objects: Sequence[Mapping[str, Any]], **_: Any
    ) -> list[float]:
        rows = ({"objects": each} for each in objects)
        targets = (try_task(self._task, row, text) for row, text in zip(rows, completions, strict=True))
        return [target.quality.reward[TOTAL] for target in targets]


def _on_main_thread(timer: ExclusiveTimer, owner: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, timed when the main thread calls it; asynchronous rollouts run on another."""
    timed = timer.timed(owner, function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        on_main = threading.current_thread() is threading.main_thread()
        return (timed if on_main else function)(*args, **kwargs)

    return call


for _name in _TIMED:
    if not hasattr(RolloutTrainerMixin, _name):
        raise RuntimeError(f"bench peer was written for ms-swift 4.6: RolloutTrainerMixin has no {_name}")
callbacks_map[GRPO_CLOCK] = GrpoClock
orms[REWARD] = DetectionReward
