"""Directories of runs as the real writers leave them, of steps whose lengths are known to the nanosecond."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ledger_run import LedgerRun
from PIL import Image
from telemetry.run_facts import pack, round_outcome, step

from swift_stage2.records import EvaluationCounts, Pack
from swift_stage2.scheduling.step_plan import Channel, SkipReason, StepPlan
from swift_stage2.telemetry.event_log import EventLog, event_path
from swift_stage2.telemetry.events import End, Evaluation, Match, Metrics, Round

CONFIG: dict[str, Any] = {
    "stage2_ab": {
        "schedule": {"b_ratio": 0.5},
        "channel_b": {
            "prefetch": {"version_window": 2, "sync_every_steps": 4},
            "matching": {"iou_threshold": 0.5},
        },
    },
    "rollout": {"servers": [{"base_url": "http://127.0.0.1:1"}]},
}
A_S, B_S, BUSY_S, ROUND_S = 0.2, 0.4, 0.05, 0.3
"""Seconds of a quiet step of each channel, what a rollout in flight adds, and of a sync round."""
ASKING_S, PREPARING_S = 0.3, 0.05
"""The pipeline's work for one pack."""


class RunFiles:
    """One rank's process: steps alternate between A and B, a round runs before every fourth.

    Every B step trains a pack of one sample, whose whole life is told.
    """

    def __init__(self, run_dir: Path, *, rank: int = 0, config: Mapping[str, Any] = CONFIG) -> None:
        self.run_dir = run_dir
        self.rank = rank
        self.now = 1_000_000.0
        self.log = EventLog(event_path(run_dir, rank))
        self._config = config
        self._spent: dict[str, int] = {"other": 500_000_000}
        self._totals: dict[str, int] = {}
        self.version = 0
        self.num_b = 0
        self.step = 0

    def start(self, *, state: str | None = None, **told: Any) -> RunFiles:
        """A process begins, from the checkpoint that ``state`` holds; ``told`` is of the start, too."""
        self.samples = LedgerRun(
            self.run_dir,
            rank=self.rank,
            num_rows=41,
            run_id="r" if state is None else "resumed",
            state=state,
            log=self.log,
            time=self.now,
            config=self._config,
            **told,
        )
        self.step, self._spent = self.samples.step, {"other": 500_000_000}
        return self

    def save(self, save_id: str = "s1") -> str:
        """A checkpoint before the next step."""
        self.samples.step = self.step
        return self.samples.save(save_id)

    def train(self, num_steps: int, *, with_b: bool = True, skipped: SkipReason | None = None) -> RunFiles:
        """Steps one after another; ``skipped``: wanted B steps run A, for this reason."""
        for _ in range(num_steps):
            if with_b and self.step % 4 == 0:
                self._round()
            wants_b = with_b and self.step % 2 == 1
            self._plan("B" if wants_b and not skipped else "A", skipped if wants_b else None)
            self.step += 1
            if self.step % 10 == 0:
                self.tell_metrics(self.step)
        return self

    def tell_metrics(self, step: int | None) -> None:
        """A logging step; None is the run's end."""
        work = {"asking": self.num_b * ASKING_S, "preparing": self.num_b * PREPARING_S}
        pipeline_ns = {name: round(spent * 1e9) for name, spent in work.items()}
        wall_ns = max(sum(self._totals.values()), sum(pipeline_ns.values()))
        pipeline_ns["idle"] = wall_ns - sum(pipeline_ns.values())
        total = self._totals | {name: self._totals.get(name, 0) + ns for name, ns in self._spent.items()}
        self.log.write(
            Metrics(
                time=self.now,
                step=step,
                numbers={"packs_made": self.num_b, "packs_trained": self.num_b},
                activity_ns=total,
                pipeline_ns=pipeline_ns,
            )
        )

    def evaluate(self, **own: float) -> RunFiles:
        """An evaluation of two samples that began here, one of them answered; ``own`` are metrics of the task."""
        told = {"precision": 0.5, "recall": 0.25, "f1": 1 / 3, "mean_iou": 0.75, "truncated_ratio": 0.0}
        self.log.write(
            Evaluation(
                time=self.now,
                step=self.step + 1,
                due_step=self.step,
                begun_step=self.step,
                version=self.version,
                end="round_due",
                counts=EvaluationCounts(num_wanted=2, num_answered=1),
                ratios=told | own,
            )
        )
        return self

    def match(
        self,
        sample: Sequence[int],
        *,
        version: int = 1,
        truth: Sequence[Sequence[float]] = ((10, 10, 60, 60),),
        predicted: Sequence[Sequence[float]] = ((10, 10, 60, 58),),
        pairs: Sequence[Sequence[float]] = ((0, 0, 0.96),),
        images: Sequence[str | None] = (),
        label: str = "car",
        said: str | None = None,
        **others: Any,
    ) -> None:
        """One rollout against its ground truth; ``said`` is the label of what was predicted, if it is another."""
        self.now += 0.001
        values: dict[str, Any] = {"space": (112, 112), "rollout": "said"}
        values |= {"target": "trained", "truncated": False, "dropped": {}, "reward": {}}
        self.log.write(
            Match(
                time=self.now,
                sample=tuple(sample),
                version=version,
                images=tuple(images),
                truth=tuple((label, tuple(box)) for box in truth),
                predicted=tuple((said or label, tuple(box)) for box in predicted),
                pairs=tuple(tuple(pair) for pair in pairs),
                **(values | others),
            )
        )

    def end(self) -> None:
        """An orderly end."""
        self.tell_metrics(None)
        self.log.close(End())

    def _round(self) -> None:
        self.version += 1
        self._spend("syncing", ROUND_S)
        outcome = round_outcome(self.version, True, seconds=ROUND_S)
        servers = {str(server): report for server, report in outcome.reports.items()}
        facts = {"time": self.now, "step": self.step, "committed": True, "pending_seconds": 0.0}
        self.log.write(Round.of(outcome, kind="round", servers=servers, **facts))

    def _plan(self, channel: str, skip_reason: SkipReason | None) -> None:
        packs: tuple[Pack, ...] = ()
        if channel == "B":
            packs = (pack(str(self.step), max(0, self.version - 1)),)
            self._train_sample()
        self.num_b += len(packs)
        in_flight = self.step % 6 == 5
        plan = StepPlan(Channel(channel), skip_reason)
        told = step(
            self.step, plan, version=self.version, packs=packs, queue_depth=self.step % 3, in_flight=in_flight
        )
        self.log.write(told.model_copy(update={"time": self.now, "activity_ns": self._spent}))
        self._totals = self._totals | {
            name: self._totals.get(name, 0) + ns for name, ns in self._spent.items()
        }
        self._spent = {}
        # A POST that is in flight at a plan slows the step before it down, and the one after it.
        self._spend("busy", A_S if channel == "A" else B_S)
        if in_flight or (self.step + 1) % 6 == 5:
            self._spend("busy", BUSY_S)

    def _train_sample(self) -> None:
        keys = self.samples.draw(1)
        self.samples.match(keys, self.version)
        self.samples.pack(keys, str(self.step))
        self.samples.step = self.step
        self.samples.train(keys, str(self.step), version=self.version)

    def _spend(self, activity: str, seconds: float) -> None:
        self.now += seconds
        self._spent[activity] = self._spent.get(activity, 0) + round(seconds * 1e9)


def balanced_ledger(run_dir: Path) -> LedgerRun:
    """Samples that were all trained, and nothing else of a run."""
    run = LedgerRun(run_dir)
    for _ in range(6):
        run.train_drawn(1)
    return run


def picture(path: Path, size: tuple[int, int] = (112, 112)) -> str:
    """An image file; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.linear_gradient("L").resize(size).convert("RGB")
    image.save(path)
    return str(path)
