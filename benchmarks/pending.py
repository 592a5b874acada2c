"""``swift-stage2 bench pending``: how long sync rounds wait for running rollouts, with aborts and without.

The same job for every policy per repetition, in turns, with rollouts so long that a due round usually meets one.
Everything is read from the audit of rank 0: waits of the rounds, phases of the learner's pause, what was aborted and
what became of its tokens, what B ran.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.child_runs import ChildRuns, train
from benchmarks.estimates import Spread
from benchmarks.faults.accounting import of_kind
from benchmarks.results import ResultTable, grouped, in_turns, publish
from swift_stage2.config import OnPending, ServerEngine
from swift_stage2.demo.demo_config import DemoJob
from swift_stage2.demo.grounding_dataset import num_train_samples, write_scenes
from swift_stage2.demo.scenes import SceneKind
from swift_stage2.telemetry.audit import audit_path
from swift_stage2.telemetry.reading import read_audit

_PHASES = ("canary", "snapshot")


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingArm:
    """One job's audit says this. Seconds."""

    on_pending: str
    pending: list[float]
    """Of every round but the first: from the step at which it fell due to the step at which it ran."""
    steps_pending: list[int]
    """The same in optimizer steps: 0 when nothing was in flight."""
    pauses: list[dict[str, float]]
    """The main thread's pause of each of these rounds: canary, snapshot, ``total``; and the whole ``round``."""
    num_aborted: int
    """Rollouts that servers aborted, those that began anew and those that were resumed together."""
    num_rollouts: int
    tokens_kept: int
    tokens_thrown_away: int
    num_b_wanted: int
    num_b_run: int


def run(options: argparse.Namespace, directory: Path) -> int:
    """Raises ChildFailed when a job did not end well."""
    arms: list[PendingArm] = []
    with ChildRuns() as children:
        for repetition, on_pending in in_turns(OnPending, options.repeats):
            place = directory / f"{repetition}-{on_pending}"
            arms.append(_run(children, place, options.steps, ServerEngine(options.engine), on_pending))
    publish(directory, "pending", [asdict(arm) for arm in arms], pending_table(arms))
    return 0


def arm_of(on_pending: str, records: Iterable[dict[str, Any]]) -> PendingArm:
    """Reads one rank's audit records. The first round is left out: nothing can be in flight before it."""
    every = list(records)
    rounds, batches, steps = (of_kind(every, kind) for kind in ("round", "batch", "step"))
    numbers = ([metrics["numbers"] for metrics in of_kind(every, "metrics")] or [{}])[-1]
    pending_steps = [step["step"] for step in steps if step["round_pending"]]
    later = rounds[1:]
    previous = [each["step"] for each in rounds[:-1]]
    return PendingArm(
        on_pending=on_pending,
        pending=[each["pending_seconds"] for each in later],
        steps_pending=[
            sum(before <= step < each["step"] for step in pending_steps)
            for before, each in zip(previous, later, strict=True)
        ],
        pauses=[_pause(each) for each in later],
        num_aborted=sum(batch["num_aborted"] + len(batch["partial"]) for batch in batches),
        num_rollouts=sum(batch["num_rollouts"] for batch in batches),
        tokens_kept=int(numbers.get("tokens_kept", 0)),
        tokens_thrown_away=int(numbers.get("tokens_aborted", 0) + numbers.get("tokens_partial_dropped", 0)),
        num_b_wanted=sum(bool(step["wants_b"]) for step in steps),
        num_b_run=sum(step["channel"] == "B" for step in steps),
    )


def pending_table(arms: Sequence[PendingArm]) -> ResultTable:
    """One column per policy, all repetitions together; a spread is median (quartiles), max."""
    columns = {}
    for policy, mine in grouped(arms, lambda arm: f"on_pending: {arm.on_pending}").items():
        columns[policy] = {
            "rounds": str(sum(len(arm.pending) for arm in mine)),
            "pending, s": _spread([value for arm in mine for value in arm.pending]),
            "pending, steps": _spread([value for arm in mine for value in arm.steps_pending], 1),
            **{
                f"pause, {phase}, s": _spread([pause[phase] for arm in mine for pause in arm.pauses])
                for phase in (*_PHASES, "total")
            },
            "round, s": _spread([pause["round"] for arm in mine for pause in arm.pauses]),
            "rollouts aborted / made": f"{_sum(mine, 'num_aborted')} / {_sum(mine, 'num_rollouts')}",
            "tokens of these kept / thrown away": (
                f"{_sum(mine, 'tokens_kept')} / {_sum(mine, 'tokens_thrown_away')}"
            ),
            "B steps run / wanted": f"{_sum(mine, 'num_b_run')} / {_sum(mine, 'num_b_wanted')}",
        }
    title = "sync rounds: how long they wait, how long the learner pauses"
    names = next(iter(columns.values()))
    return ResultTable.of(
        title, names, {"": str, **{policy: cells.__getitem__ for policy, cells in columns.items()}}
    )


def _pause(record: dict[str, Any]) -> dict[str, float]:
    phases = {phase: float(record[f"{phase}_seconds"]) for phase in _PHASES}
    return {**phases, "total": sum(phases.values()), "round": record["seconds"]}


def _sum(arms: Sequence[PendingArm], name: str) -> int:
    return sum(getattr(arm, name) for arm in arms)


def _spread(values: Sequence[float], digits: int = 3) -> str:
    return f"{Spread.of(values).words(digits)}, {max(values):.{digits}f}" if values else "none"


def _run(
    children: ChildRuns, place: Path, num_steps: int, engine: ServerEngine, on_pending: OnPending
) -> PendingArm:
    job = DemoJob(
        directory=place,
        rows=place / "train" / "rows.jsonl",
        num_steps=num_steps,
        b_ratio=0.3,
        engine=engine,
        on_pending=on_pending,
        # Hot, so that answers ramble up to their limit: a round then usually meets a rollout.
        temperature=1.5,
        max_new_tokens=384,
        swift={"save_strategy": "no"},
    )
    write_scenes(place, SceneKind.SHAPES, num_train=num_train_samples(job), num_held_out=1, seed=0)
    train(children, job)
    return arm_of(on_pending.value, read_audit(audit_path(job.run_dir, 0)))
