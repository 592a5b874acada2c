"""``swift-stage2 bench pending``: how long sync rounds wait for running rollouts, with aborts and without.

The same job twice per repetition, in turns, with rollouts so long that a due round usually meets one. Everything is
read from the audit of rank 0: waits of the rounds, phases of the learner's pause, what was aborted, what B ran.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from swift_stage2.command_parser import CommandParser
from swift_stage2.config import OnPending, ServerEngine
from swift_stage2.demo.child_runs import ChildRuns
from swift_stage2.demo.demo_config import DemoJob, free_ports, write_config
from swift_stage2.demo.scene_files import num_train_samples, write_scenes
from swift_stage2.demo.scenes import SceneKind
from swift_stage2.demo.training import train
from swift_stage2.errors import UserError
from swift_stage2.output_directory import claim_directory
from swift_stage2.telemetry.live_view import LiveView

_PHASES = ("push", "acknowledge", "prove")


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingArm:
    """What one job's audit says. Seconds."""

    on_pending: str
    pending: list[float]
    """Of every round but the first: from the step at which it fell due to the step at which it ran."""
    steps_pending: list[int]
    """The same in optimizer steps: 0 when nothing was in flight."""
    pauses: list[dict[str, float]]
    """The main thread's pause of each of these rounds: phases of the push, ``total``."""
    num_aborted: int
    num_rollouts: int
    num_b_wanted: int
    num_b_run: int


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all jobs, prints a table and writes ``pending.json``.

    Raises:
        UserError: an option is out of range, or the output directory cannot be used.
        ChildFailed: a job did not end well.
    """
    arguments = _parse(argv)
    directory = claim_directory(arguments.output, keep=arguments.keep)
    arms: list[PendingArm] = []
    with ChildRuns() as children:
        for repetition in range(arguments.repeats):
            order = list(OnPending) if repetition % 2 == 0 else list(OnPending)[::-1]
            for on_pending in order:
                print(f"[bench] repetition {repetition + 1}: on_pending {on_pending}", flush=True)
                place = directory / f"{repetition}-{on_pending}"
                arms.append(
                    _run(children, place, arguments.steps, ServerEngine(arguments.engine), on_pending)
                )
    (directory / "pending.json").write_text(
        json.dumps([asdict(arm) for arm in arms]) + "\n", encoding="utf-8"
    )
    Console().print(pending_table(arms))
    return 0


def arm_of(on_pending: str, records: Iterable[dict[str, Any]]) -> PendingArm:
    """Reads one rank's audit records. The first round is left out: nothing can be in flight before it."""
    rounds: list[dict[str, Any]] = []
    batches: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    for record in records:
        {"round": rounds, "batch": batches, "step": steps}.get(record["kind"], []).append(record)
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
        num_aborted=sum(batch["num_aborted"] for batch in batches),
        num_rollouts=sum(batch["num_rollouts"] for batch in batches),
        num_b_wanted=sum(bool(step["wants_b"]) for step in steps),
        num_b_run=sum(step["channel"] == "B" for step in steps),
    )


def pending_table(arms: Sequence[PendingArm]) -> Table:
    """One column per policy, all repetitions together; a spread is median (quartiles), max."""
    policies = list(dict.fromkeys(arm.on_pending for arm in arms))
    table = Table(title="sync rounds: how long they wait, how long the learner pauses", title_justify="left")
    table.add_column("")
    for policy in policies:
        table.add_column(f"on_pending: {policy}", justify="right")
    of = [[arm for arm in arms if arm.on_pending == policy] for policy in policies]

    def row(name: str, cell: Callable[[list[PendingArm]], str]) -> None:
        table.add_row(name, *map(cell, of))

    row("rounds", lambda arms: str(sum(len(arm.pending) for arm in arms)))
    row("pending, s", lambda arms: _spread([value for arm in arms for value in arm.pending]))
    row(
        "pending, steps",
        lambda arms: _spread([value for arm in arms for value in arm.steps_pending], digits=1),
    )
    for phase in (*_PHASES, "total"):
        row(f"pause, {phase}, s", partial(_spread_of_pauses, phase=phase))
    row("rollouts aborted / made", lambda arms: _share(arms, "num_aborted", "num_rollouts"))
    row("B steps run / wanted", lambda arms: _share(arms, "num_b_run", "num_b_wanted"))
    return table


def _pause(record: dict[str, Any]) -> dict[str, float]:
    (report,) = record["servers"].values()
    return {**{phase: report["seconds"].get(phase, 0.0) for phase in _PHASES}, "total": record["seconds"]}


def _spread_of_pauses(arms: Sequence[PendingArm], *, phase: str) -> str:
    return _spread([pause[phase] for arm in arms for pause in arm.pauses])


def _share(arms: Sequence[PendingArm], part: str, whole: str) -> str:
    return f"{sum(getattr(arm, part) for arm in arms)} / {sum(getattr(arm, whole) for arm in arms)}"


def _spread(values: Sequence[float], digits: int = 3) -> str:
    if not values:
        return "none"
    low, middle, high = np.percentile(values, (25, 50, 75))
    return f"{middle:.{digits}f} ({low:.{digits}f}..{high:.{digits}f}), {max(values):.{digits}f}"


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
    ports = free_ports(2)
    write_config(job, (ports[0], ports[1]))
    write_scenes(place, SceneKind.SHAPES, num_train=num_train_samples(job), num_held_out=1, seed=0)
    train(children, job, LiveView(sys.stdout))
    lines = (job.run_dir / "audit" / "rank0.jsonl").read_text(encoding="utf-8").splitlines()
    return arm_of(on_pending.value, map(json.loads, lines))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="swift-stage2 bench pending", description="How long sync rounds wait, with and without aborts."
    )
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps per job (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="jobs per policy (default %(default)s)")
    parser.add_argument(
        "--engine", default=ServerEngine.TRANSFORMERS.value, help="stock servers cannot abort",
        choices=[ServerEngine.TRANSFORMERS.value, ServerEngine.VLLM.value],
    )  # fmt: skip
    parser.add_argument("--output", type=Path, default=Path("runs/bench-pending"), metavar="DIR")
    parser.add_argument("--keep", action="store_true", help="keep earlier results; take DIR-2, … instead")
    arguments = parser.parse_args(argv)
    for name, least in (("steps", 10), ("repeats", 1)):
        if (value := getattr(arguments, name)) < least:
            raise UserError(f"--{name} must be at least {least}, got {name}={value}")
    return arguments
