"""ms-swift plugin of GRPO learners in ``bench peer``: a thread clock that also tells rollouts and weights, a reward.

What the main thread spends in ms-swift's own rollout call, its wait for an asynchronous one, and its push of weights is
added up beside the columns of ``read_times``. Nothing of ms-swift behaves otherwise.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from swift_stage2.compat import declare_operators

declare_operators()  # before ms-swift imports torchvision

from swift.callbacks import callbacks_map  # noqa: E402
from swift.rewards import ORM, orms  # noqa: E402
from swift.rlhf_trainers.rollout_mixin import RolloutTrainerMixin  # noqa: E402

from benchmarks.clocks import ExclusiveTimer  # noqa: E402
from benchmarks.learner_job import GRPO_CLOCK, PUSH_NS, REWARD, ROLLOUT_NS  # noqa: E402
from benchmarks.plugins.clocks import ThreadClock  # noqa: E402
from swift_stage2.channel_b.parsing import parse_rollout  # noqa: E402

_TIMED = {"_engine_infer": ROLLOUT_NS, "_wait_queue": ROLLOUT_NS, "_move_model_to_vllm": PUSH_NS}


class GrpoClock(ThreadClock):
    """The one rank's clock, with two more columns."""

    def __init__(self, args: Any, trainer: Any) -> None:
        super().__init__(args, trainer)
        self._timer = ExclusiveTimer()
        for name, column in _TIMED.items():
            setattr(trainer, name, _on_main_thread(self._timer, column, getattr(trainer, name)))

    def read(self) -> dict[str, int]:
        spent = self._timer.total_ns
        return super().read() | {name: spent.get(name, 0) for name in (ROLLOUT_NS, PUSH_NS)}


class ObjectCount(ORM):  # type: ignore[misc]
    """How many objects an answer names: cheap, and defined for every answer."""

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [float(len(parse_rollout(text).objects)) for text in completions]


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
orms[REWARD] = ObjectCount
