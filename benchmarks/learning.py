"""``swift-stage2 bench learning``: whether channel B pays, on scenes whose truth is known, and what it pays for.

Every arm starts from the same stage-1 weights and trains the same scenes with the same seed. The learning rate stays
the same, so a longer run is a shorter one resumed (to the last bit on channel A; on B with a version more), and one run
is scored at several steps. Each score is a line of ``--results``, never measured again; tables are made of it alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.processes import Processes
from benchmarks.results import ResultTable, cpu_model, project_state, publish
from benchmarks.scored_arms import ScoredArm, correct, first_job, score, score_table, scores_of, train
from swift_stage2.config import Mode, Objective
from swift_stage2.demo.demo_config import STAGE1, DemoJob
from swift_stage2.demo.scenes import SceneKind
from swift_stage2.errors import UserError
from swift_stage2.telemetry.summary import summarise

_CONSTANT_RATE = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 30, "warmup_ratio": 0.0}
_STEPS_OF_ALL_SCENES = 64  # of two ranks
_NEVER = 1_000_000
_NEAR = 0.1  # of --core-seconds
_WORD = re.compile(
    r"(?P<name>a|once|first|(?:renew|first)(?P<every>[1-9]\d*)|b(?P<ratio>1|0?\.\d+)(?:/(?P<objective>grpo|mixed))?)"
    r"(?:@(?P<more>[1-9]\d*))?"
)
Line = Mapping[str, Any]  # of the results


@dataclass(frozen=True, slots=True)
class Arm:
    """What ``--arms`` names; ``bench learning --help`` tells what each trains."""

    name: str
    steps: tuple[int, ...]  # at which it is scored
    b_ratio: float = 0.0
    objective: Objective = Objective.CORRECTED_TARGET
    corrects_every: int = 0  # steps from one correction of all rows to the next; 0 is none at all
    sync_every: int = 4  # steps from one version to the next, on channel B; 4 is the demo's

    @property
    def changes(self) -> dict[str, Any]:
        """Of the configuration."""
        target, prefetch = {"missed_order": "reading"}, {"sync_every_steps": self.sync_every}
        return {"stage2_ab": {"channel_b": {"target": target, "prefetch": prefetch}}} if self.b_ratio else {}

    def job(self, base: DemoJob) -> DemoJob:
        directory = base.directory / self.name.replace("/", "-")
        rows = directory / "rows.jsonl" if self.corrects_every else base.rows
        return replace(base, directory=directory, rows=rows, b_ratio=self.b_ratio, objective=self.objective)


def check(options: argparse.Namespace) -> list[Arm]:
    """The arms. Raises UserError: a word names none."""
    arms = []
    for word in options.arms:
        if not (found := _WORD.fullmatch(word)):
            what = "a, once, renewN, bR, bR/grpo, bR/mixed, first or firstN, each perhaps with @STEPS"
            raise UserError(f"--arms must be {what}", got=word, remedy="write renew150, b0.3 or a@1400")
        name, ratio, objective, more = found.group("name", "ratio", "objective", "more")
        steps = tuple(sorted({options.steps, int(more or options.steps)}))
        every = int(found["every"] or (_NEVER if name in ("once", "first") else 0))
        b_ratio = float(ratio or name.startswith("first"))
        objective = Objective(objective or Objective.CORRECTED_TARGET)
        arms.append(Arm(name, steps, b_ratio, objective, 0 if b_ratio else every, every or 4))
    return arms


def run(options: argparse.Namespace, directory: Path) -> int:
    """Trains and scores every arm whose lines are not there yet. Raises ChildFailed: a process did not end well."""
    path, model = options.results or directory / "learning.jsonl", options.model or STAGE1
    weights = b"".join(file.read_bytes() for file in sorted(model.glob("*.safetensors")))
    same = {
        "model": hashlib.sha256(weights).hexdigest(),
        "kind": options.kind,
        "learning_rate": options.learning_rate,
    }
    machine = {"state": project_state(), "cpu": cpu_model()}
    path.parent.mkdir(exist_ok=True)
    path.touch()
    with Processes(directory / "logs") as processes:
        for seed in range(options.seeds):
            base = None
            for arm in [*[Arm("before", (0,))][seed:], *check(options)]:
                place, lines = {**same, "seed": seed, "arm": arm.name}, read_lines(path)
                if missing := [steps for steps in arm.steps if not _of(lines, **place, steps=steps)]:
                    base = base or base_job(directory, seed, model, options)
                    for line in measure(processes, arm, base, missing):
                        with path.open("a", encoding="utf-8") as file:
                            file.write(json.dumps({**place, **line, **machine}) + "\n")
                            file.flush()
                            os.fsync(file.fileno())
    publish(directory, "learning", *tables(_of(read_lines(path), **same), options))
    return 0


def base_job(directory: Path, seed: int, model: Path, options: argparse.Namespace) -> DemoJob:
    """Of one seed's arms; writes its scenes."""
    base = first_job(directory, _STEPS_OF_ALL_SCENES, seed, 0.0, SceneKind(options.kind))
    swift = {"learning_rate": options.learning_rate, **_CONSTANT_RATE}
    return replace(base, model=model, mode=Mode.INLINE, swift=swift, num_ranks=1)


def measure(processes: Processes, arm: Arm, base: DemoJob, missing: Sequence[int]) -> Iterator[Line]:
    """Trains an arm piece by piece, each a run that the next one resumes; lines of the steps that are missing."""
    job, checkpoint, last = arm.job(base), base.model, max(missing)
    renewals = range(0, last, arm.corrects_every or _NEVER)
    core_seconds, wall_seconds, start = 0.0, 0.0, 0
    for end in sorted({last, *renewals[1:], *missing}):
        used, began = _seconds_of_children(), time.monotonic()
        if arm.corrects_every and start in renewals:
            correct(processes, base.rows, checkpoint, job.rows)
        if end:
            job = replace(job, num_steps=end)
            train(processes, job, {}, arm.changes)
            checkpoint, start = job.checkpoint, end
        core_seconds += _seconds_of_children() - used
        wall_seconds += time.monotonic() - began
        if end in missing:
            took = {"core_seconds": round(core_seconds, 1), "wall_seconds": round(wall_seconds, 1)}
            b_steps = summarise(job.run_dir).num_b_run if end else 0
            held_out = base.directory / "held_out" / "rows.jsonl"
            found = score(processes, held_out, checkpoint, job.directory / f"scores-{end}")
            yield {"steps": end, "b_steps": b_steps, **took, **found}


def read_lines(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _of(lines: Sequence[Line], **wanted: Any) -> list[Line]:
    return [line for line in lines if wanted.items() <= line.items()]


def tables(lines: Sequence[Line], options: argparse.Namespace) -> Iterator[ResultTable]:
    """Arms and seeds that were asked for at equal steps and, where that was asked, at about equal core seconds."""
    start, arms = scores_of(_of(lines, arm="before")[0]), check(options)
    kinds = ("steps", options.steps, 0.0), ("core_seconds", options.core_seconds, _NEAR)
    for name, wanted, near in kinds if options.core_seconds else kinds[:1]:
        found = list[ScoredArm]()
        for arm, seed in product((arm.name for arm in arms), range(options.seeds)):
            off = {abs(line[name] / wanted - 1): line for line in _of(lines, arm=arm, seed=seed)}
            if off and min(off) <= near:
                found.append(ScoredArm(name=arm, seed=seed, score=scores_of(off[min(off)])))
        references = {f"F1 over {arm}": arm for arm in ("a", "once")}
        yield score_table(f"at {wanted:g} {name.replace('_', ' ')}", start, found, references)


def _seconds_of_children() -> float:
    """Processor seconds of all that have ended and were waited for, and of theirs."""
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
