"""A recorded run as files: the real source and the real writer, driven by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from builders import completion_of
from ledger_run import LedgerRun
from telemetry.run_facts import step

from swift_stage2.records import Rollout, Sample, SampleKey, VersionSpan
from swift_stage2.scheduling.step_plan import Channel, StepPlan
from swift_stage2.telemetry.events import Losses

SURROUNDINGS = {"directory": "/", "environment": {}, "device": "cpu", "threads": 1, "versions": {}}


class RecordedRank:
    """One rank's process. Every step has two micro_steps."""

    def __init__(
        self,
        run_dir: Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        run_id: str = "run",
        state: str | None = None,
        config: dict[str, Any] | None = None,
        log_probs: tuple[float, ...] | None = None,
    ) -> None:
        self.run = LedgerRun(
            run_dir,
            rank=rank,
            world_size=world_size,
            run_id=run_id,
            state=state,
            config=config or {"swift": {}},
            surroundings=SURROUNDINGS,
        )
        self._log_probs = log_probs
        self._num_packs = 0

    def plan_a(self) -> int:
        """The next step is planned."""
        number = self.run.step
        self.run.step += 1
        self._write_plan(number, Channel.A)
        return number

    def plan_b(self) -> int:
        """The next step is planned and takes two packs of two samples."""
        number = self.run.step
        for _ in range(2):
            self._num_packs += 1
            keys = self.run.draw(2)
            for key in keys:
                self.run.log.write(completion_of(completion(key, log_probs=self._log_probs)))
            self.run.match(keys)
            self.run.pack(keys, f"p{self._num_packs}")
            self.run.source.settle_trained(keys, pack_id=f"p{self._num_packs}", step=number, version=1)
        self.run.step += 1
        self._write_plan(number, Channel.B)
        return number

    def _write_plan(self, number: int, channel: Channel) -> None:
        self.run.log.write(step(number, StepPlan(channel)))

    def end(self, number: int) -> None:
        """That step has trained."""
        self.run.log.write(Losses(step=number, losses=((number + 0.1).hex(), (number + 0.2).hex())))

    def train(self, channels: str) -> None:
        """Whole steps."""
        for channel in channels:
            self.end(self.plan_a() if channel == "A" else self.plan_b())


LOG_PROBS = (-0.1, -1.1754943508222875e-38)  # the latter is a float32 that is hardly one


def completion(key: SampleKey, *, log_probs: tuple[float, ...] | None = None) -> Rollout:
    return Rollout(
        sample=Sample(key, {}),
        text=f"[{key.position}]",
        token_ids=(5, key.position),
        prompt_token_ids=(1,),
        truncated=False,
        seed=3,
        server="http://s",
        spans=(VersionSpan(1, 0, 1), VersionSpan(2, 1, 2)),
        log_probs=log_probs,
    )


def edit(path: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Every line as ``change`` gives it; None removes it."""
    lines = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines if line is not None))
