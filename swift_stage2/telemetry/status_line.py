"""One line per logging step that tells how a run goes, of what rank 0 learns of all ranks. Pure, but for the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from swift_stage2.scheduling.step_plan import SkipReason


class StatusLine:
    """Keeps what one logging step told until its loss is known."""

    def __init__(
        self, total_steps: int, queue_limit: int | None, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """``queue_limit`` None means that there is no channel B."""
        self._total_steps = total_steps
        self._queue_limit = queue_limit
        self._now_s = now_s
        self._before = (now_s(), 0.0, 0.0)  # time, step and rollouts at the logging step before
        self._parts: tuple[str, ...] = ()

    def take(
        self,
        step: int,
        epoch: float | None,
        values: Mapping[str, float | None],
        queue_depths: Sequence[float | None],
    ) -> None:
        """``values`` are those of all ranks by the name of their metric, ``queue_depths`` by rank."""
        self._parts = tuple(self._told(step, epoch, values, queue_depths))

    def line(self, loss: float | None = None) -> str:
        """The line of the last logging step, once; else nothing."""
        if not self._parts:
            return ""
        first, *others = self._parts
        self._parts = ()
        return " | ".join([first if loss is None else f"{first}, loss {loss:.4f}", *others])

    def _told(
        self,
        step: int,
        epoch: float | None,
        values: Mapping[str, float | None],
        queue_depths: Sequence[float | None],
    ) -> Iterator[str]:
        now, rollouts = self._now_s(), values.get("rollouts_received") or 0.0
        begun, first, received = self._before
        self._before = (now, step, rollouts)
        yield f"step {step}/{self._total_steps}{_known(', epoch {:.2f}', epoch)}"
        if 0 < first < step:  # the first steps are no measure
            pace = (now - begun) / (step - first)
            yield f"{pace:.2f} s/step, {_duration(max(0, self._total_steps - step) * pace)} left"
        if self._queue_limit is None:
            return
        skips = {reason: values.get(f"b_steps_skipped/{reason}") or 0 for reason in SkipReason}
        why = "".join(f", {reason} {count:g}" for reason, count in skips.items() if count)
        yield f"B {values.get('b_steps_run') or 0:g} of {values.get('b_steps_wanted') or 0:g} wanted{why}"
        depths = [depth for depth in queue_depths if depth is not None]
        if depths:
            yield f"queue {min(depths):g} of {self._queue_limit}"
        yield f"version {values.get('ver_current') or 0:g}{_known(', lag {:g}', values.get('ver_lag'))}"
        if 0 < first < step and now > begun:
            yield f"{(rollouts - received) / (now - begun):.3g} rollouts/s"


def _known(pattern: str, value: float | None) -> str:
    return "" if value is None else pattern.format(value)


def _duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}"
