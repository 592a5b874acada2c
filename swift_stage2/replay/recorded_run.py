"""The steps that a run took (plan, packs, completions, losses), as its event logs tell, and a replay's verdict.

Only the last process that every rank began, and of it only the steps that every rank ended. Read by ``command``
and by every rank of a replay, which all come to the same result.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from swift_stage2.errors import UserError
from swift_stage2.records import Rollout, Sample, SampleKey, VersionSpan
from swift_stage2.scheduling.step_plan import Channel
from swift_stage2.telemetry.event_log import Process, RankEvents, read_logs, run_of, split_by_process
from swift_stage2.telemetry.events import (
    Advantages,
    Damaged,
    Key,
    Losses,
    Packed,
    RecordedCompletion,
    Step,
    Trained,
)
from swift_stage2.whole_file import read_regular

_VERDICT_FILE = "verdict.json"


@dataclass(frozen=True, slots=True)
class RecordedPack:
    """One pack that a step trained; ``completions`` in the order of its segments, without rows and prompts."""

    pack_id: str
    num_tokens: int
    completions: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step of one rank. ``losses`` are of its micro_steps, as ``float.hex``."""

    step: int
    channel: Channel
    version: int
    packs: tuple[RecordedPack, ...]
    losses: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """The last process of a recorded run. ``steps`` by rank, alike in number and channel on all ranks."""

    directory: Path
    run_id: str
    world_size: int
    first_step: int
    last_step: int
    config: Mapping[str, Any]
    surroundings: Mapping[str, Any]
    steps: Mapping[int, tuple[RecordedStep, ...]]

    def verdict(self, num_compared: int, difference: str | None) -> ReplayVerdict:
        """Of a replay that found ``num_compared`` steps bit-equal, and then ``difference``."""
        return ReplayVerdict(
            first_step=self.first_step,
            last_step=self.last_step,
            num_b_steps=sum(step.channel is Channel.B for step in self.steps[0]),
            num_compared=num_compared,
            difference=difference,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayVerdict:
    """How a replay ended: ``num_compared`` steps from ``first_step`` on had the recorded losses on every rank."""

    first_step: int
    last_step: int
    num_b_steps: int
    """Of channel B, among the steps that every rank ended."""
    num_compared: int
    difference: str | None

    @property
    def is_equal(self) -> bool:
        """Whether every recorded step was taken and had the recorded losses."""
        return self.difference is None and self.num_compared == self.last_step - self.first_step + 1

    @property
    def sentence(self) -> str:
        if self.difference is not None:
            return f"differs: {self.difference}; steps before it, all bit-equal: {self.num_compared}"
        if not self.is_equal:
            return (
                f"not finished: steps from step {self.first_step} on, all bit-equal: {self.num_compared}; the record "
                f"goes to step {self.last_step}"
            )
        return (
            f"equal: every loss of steps {self.first_step} to {self.last_step}, {self.num_b_steps} of them on channel "
            f"B, is bit-equal on every rank"
        )

    def write(self, output: Path) -> None:
        """Leaves it in ``output`` for who started the ranks."""
        (output / _VERDICT_FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")


def read_verdict(output: Path) -> ReplayVerdict | None:
    """The verdict that rank 0 left; None if it ended before it could."""
    path = output / _VERDICT_FILE
    return ReplayVerdict(**json.loads(read_regular(path))) if path.is_file() else None


def read_run(run_dir: Path) -> RecordedRun:
    """The run in ``run_dir``.

    Raises:
        UserError: there is no log, a rank's is missing or damaged, nothing was recorded, or no step was ended.
    """
    processes = _last_process(run_dir)
    start = processes[0].start
    assert start is not None
    steps = {rank: _Steps(events) for rank, events in processes.items()}
    ended = set.intersection(*(set(each.losses) for each in steps.values()))
    last = start.step - 1
    while last + 1 in ended:
        last += 1
    if last < start.step:
        raise UserError(
            "a replay needs a step that was recorded and ended",
            got=f"none in the last process of {run_dir}",
            remedy="name the directory of a run with telemetry.record: true",
        )
    return RecordedRun(
        directory=run_dir,
        run_id=start.run_id,
        world_size=start.world_size,
        first_step=start.step,
        last_step=last,
        config=start.config,
        surroundings=start.surroundings,
        steps={rank: tuple(map(each.step, range(start.step, last + 1))) for rank, each in steps.items()},
    )


def _last_process(run_dir: Path) -> dict[int, RankEvents]:
    """By rank, the last process that every rank began."""
    by_rank: dict[int, dict[str, Process]] = {
        rank: {run_id: process for process in split_by_process(log) if (run_id := run_of(process))}
        for rank, log in read_logs([run_dir]).items()
    }
    common = [run_id for run_id in by_rank.get(0, ()) if all(run_id in every for every in by_rank.values())]
    if not common:
        raise UserError(
            "a replay needs a process that every rank began",
            got=f"none in {run_dir}",
            remedy="bring the logs of all ranks here",
        )
    found = {rank: RankEvents(rank, [every[common[-1]]]) for rank, every in by_rank.items()}
    start = found[0].start
    assert start is not None
    if missing := set(range(start.world_size)) - set(found):
        raise UserError(
            f"a replay needs the logs of all {start.world_size} ranks",
            got=f"none of rank {min(missing)} in {run_dir}",
            remedy="bring it here",
        )
    if damaged := [rank for rank, events in found.items() if events.of(Damaged)]:
        raise UserError(
            f"the log of rank {damaged[0]} in {run_dir} is damaged",
            remedy="bring the file here as the run wrote it",
        )
    return found


class _Steps:
    """One rank's events, by what they tell of."""

    def __init__(self, events: RankEvents) -> None:
        self.plans: dict[int, Step] = events.steps
        self.losses = {each.step: each.losses for each in events.of(Losses)}
        self._completions: dict[Key, RecordedCompletion] = {
            each.sample: each for each in events.of(RecordedCompletion)
        }
        self._advantages: dict[Key, tuple[float, ...]] = {}
        for each in events.of(Advantages):
            self._advantages.update(zip(each.samples, each.advantages, strict=True))
        self._packed = {each.pack_id: each for each in events.of(Packed)}
        self._trained: dict[int, list[str]] = defaultdict(list)
        for trained in events.of(Trained):
            self._trained[trained.step].append(trained.pack_id)

    def step(self, step: int) -> RecordedStep:
        plan = self.plans[step]
        packed = [self._packed[pack_id] for pack_id in self._trained[step]]
        packs = tuple(
            RecordedPack(each.pack_id, each.num_tokens, tuple(map(self._completion, each.samples)))
            for each in packed
        )
        return RecordedStep(step, plan.channel, plan.version, packs, self.losses[step])

    def _completion(self, sample: Key) -> Rollout:
        told = self._completions[sample]
        columns: dict[str, Any] = {**told.columns}
        return Rollout(
            sample=Sample(SampleKey(*sample), {}),
            text=told.text,
            token_ids=told.token_ids,
            prompt_token_ids=(),
            truncated=told.truncated,
            seed=0,
            server="the record",
            spans=tuple(VersionSpan(*span) for span in told.spans),
            advantages=self._advantages.get(sample),
            turns=told.turns,
            **columns,
        )
