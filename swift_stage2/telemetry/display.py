"""Rank 0's display while a run goes on: TensorBoard's curves, and one line per logging step.

Totals are totals of the run; ratios cover the window since the last logging step and are absent when nothing happened
in it. A full disk ends the curves, and the log the run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from swift_stage2.scheduling.step_plan import SkipReason
from swift_stage2.telemetry.events import Step
from swift_stage2.telemetry.metrics import METRICS, PREFIX, RATIOS, reward_ratios
from swift_stage2.telemetry.timing import NANOSECONDS

if TYPE_CHECKING:  # it takes a second to load, and a report needs none of it
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)

_IF_USED = ("stage_seconds/", "groups_", "rollouts_unused/", "rollouts_dropped_stale", "targets_left_out")


def scalars_of_merge(
    totals: Mapping[str, float], activity_ns: Mapping[str, int], window_start: Mapping[str, float]
) -> dict[str, float]:
    """Every scalar of one logging step, of all ranks. ``window_start`` holds the counters at the one before."""
    # Stages that this run does not time one by one, and groups that it does not make, would be lines at zero.
    used = {name: value for name, value in totals.items() if value or not name.startswith(_IF_USED)}
    scalars = {
        PREFIX + metric.tag: float(used[metric.name])
        for metric in METRICS
        if metric.tag is not None and metric.name in used
    }
    for ratio in (*RATIOS, *reward_ratios(totals)):
        if (value := ratio.value(totals, window_start)) is not None:
            scalars[PREFIX + ratio.tag] = value
    if num_steps := totals["steps"]:
        num_wanted, num_run = totals["b_steps_wanted"], totals["b_steps_run"]
        num_skipped = sum(totals[f"b_steps_skipped/{why}"] for why in SkipReason)
        schedule = {"b_ratio_realized": num_run / num_steps, "b_debt": num_wanted - num_run}
        schedule["b_steps_skipped_total"] = num_skipped
        scalars |= {f"{PREFIX}async/{name}": value for name, value in schedule.items()}
    spent = {**activity_ns, "wall": sum(activity_ns.values())}
    return scalars | {f"{PREFIX}time/learner_{name}": ns / NANOSECONDS for name, ns in spent.items()}


def scalars_of_plan(told: Step) -> dict[str, float]:
    """The plan of one step; equal on every rank."""
    return {
        f"{PREFIX}async/policy_wants_b": float(told.wants_b),
        f"{PREFIX}async/step_kind_b": float(told.channel == "B"),
        f"{PREFIX}async/b_step_skipped_due_to_queue": float(told.skip_reason == "not_enough_packs"),
    }


class TensorBoardSink:
    """One event file in ``directory``, made at the first write; None keeps nothing. Not for several threads at once."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._writer: SummaryWriter | None = None
        self._closed = directory is None

    def write_scalars(self, step: int, scalars: Mapping[str, float], *, flush: bool = True) -> None:
        """Write all ``scalars``, by full tag."""
        if self._closed or not scalars:
            return
        from torch.utils.tensorboard import SummaryWriter

        with self._until_full():
            if self._writer is None:
                self._writer = SummaryWriter(str(self._directory), filename_suffix=".stage2")
            for tag, value in scalars.items():
                self._writer.add_scalar(tag, value, step)
            if flush:
                self._writer.flush()

    def close(self) -> None:
        """Close the file; later writes are dropped. May be called again."""
        writer, self._writer, self._closed = self._writer, None, True
        if writer is not None:
            with self._until_full():
                writer.close()

    @contextmanager
    def _until_full(self) -> Iterator[None]:
        """Ends the curves where the disk takes no more: readers stop at a torn record."""
        try:
            yield
        except OSError as error:
            self._writer, self._closed = None, True
            logger.warning("no more curves in %s: %s", self._directory, error)


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

    def take(self, step: int, epoch: float | None, values: Mapping[str, float]) -> None:
        """``values`` are those of all ranks by the name of their metric."""
        self._parts = tuple(self._told(step, epoch, values))

    def line(self, loss: float | None = None) -> str:
        """The line of the last logging step, once; else nothing."""
        if not self._parts:
            return ""
        first, *others = self._parts
        self._parts = ()
        return " | ".join([first if loss is None else f"{first}, loss {loss:.4f}", *others])

    def _told(self, step: int, epoch: float | None, values: Mapping[str, float]) -> Iterator[str]:
        now, rollouts = self._now_s(), values.get("rollouts_received", 0.0)
        begun, first, received = self._before
        self._before = (now, step, rollouts)
        yield f"step {step}/{self._total_steps}{_known(', epoch {:.2f}', epoch)}"
        if 0 < first < step:  # the first steps are no measure
            pace = (now - begun) / (step - first)
            left = timedelta(seconds=round(max(0, self._total_steps - step) * pace))
            yield f"{pace:.2f} s/step, {left} left"
        if self._queue_limit is None:
            return
        skips = {reason: values.get(f"b_steps_skipped/{reason}", 0) for reason in SkipReason}
        why = "".join(f", {reason} {count:g}" for reason, count in skips.items() if count)
        yield f"B {values.get('b_steps_run', 0):g} of {values.get('b_steps_wanted', 0):g} wanted{why}"
        if "queue_depth" in values:
            yield f"queue {values['queue_depth']:g} of {self._queue_limit}"
        yield f"version {values.get('ver_current', 0):g}{_known(', lag {:g}', values.get('ver_lag'))}"
        if 0 < first < step and now > begun:
            yield f"{(rollouts - received) / (now - begun):.3g} rollouts/s"


def _known(pattern: str, value: float | None) -> str:
    return "" if value is None else pattern.format(value)
