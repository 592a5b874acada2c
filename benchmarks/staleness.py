"""``swift-stage2 bench staleness``: does it matter how old a rollout is when it is trained?

Every arm makes its packs at the same steps from the same stage-1 weights and trains as many B steps; only the versions
between making and training differ, and the loss where several are asked for. All checkpoints are scored on the same
held-out scenes, beside one that trained channel A alone.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.clocks import PLUGINS
from benchmarks.estimates import mean_and_range
from benchmarks.faults.accounting import of_kind
from benchmarks.learning import Columns, ScoredArm, first_job, score_table, train_and_score
from benchmarks.plugins.pipeline import FIRST_VERSION_VARIABLE, LAG_VARIABLE, LAGGING, PIPELINE_VARIABLE
from benchmarks.results import ResultTable, grouped, publish
from swift_stage2.config import Mode, Objective, Proximal
from swift_stage2.demo.demo_config import DemoJob
from swift_stage2.demo.scenes import SceneKind
from swift_stage2.demo.scoring import DetectionScore
from swift_stage2.errors import ChildFailed, UserError
from swift_stage2.telemetry.audit import audit_path
from swift_stage2.telemetry.reading import read_audit

_B_RATIO = 0.25  # one B step per version of four steps, so that no version has two or none
_STEPS = 150
_LOSSES: Mapping[str, Mapping[str, dict[str, Any]]] = {
    Objective.CORRECTED_TARGET: {Objective.CORRECTED_TARGET: {}},
    Objective.GRPO: {f"{Objective.GRPO}-{proximal}": {"proximal": proximal.value} for proximal in Proximal},
}
"""Of each objective, by name, with their settings of ``channel_b.grpo``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleArm(ScoredArm):
    """One loss and forced lag; channel A alone has none of both."""

    loss: str
    lag: int | None
    num_b_steps: int
    mean_lag: float | None
    """Of the packs that were trained, as the learner saw it."""
    max_lag: int | None


def check(options: argparse.Namespace) -> None:
    """A version lasts four steps here; an arm that trains no B step says nothing."""
    least = 4 * (max(options.lags) + 2)
    if options.steps < least:
        raise UserError(
            f"--steps must be at least {least} for a lag of {max(options.lags)} versions, got {options.steps}; write "
            f"--steps {max(least, _STEPS)}, or smaller --lags"
        )


def run(options: argparse.Namespace, directory: Path) -> int:
    """Trains every arm and scores all.

    Raises ChildFailed: a job did not end well, or arms trained different numbers of B steps.
    """
    jobs = list(plan_arms(directory, options.steps, options.seeds, options.lags, options.objective))
    named = [(job, _name(loss, lag), _environment(lag, max(options.lags))) for loss, lag, job in jobs]
    start, scores, _ = train_and_score(directory, named)
    arms = [_arm(loss, lag, job, result) for (loss, lag, job), result in zip(jobs, scores, strict=True)]
    facts = {"steps": options.steps, "stage1": asdict(start), "arms": [asdict(arm) for arm in arms]}
    publish(directory, "staleness", facts, staleness_table(start, arms, options.steps))
    trained = [arm for arm in arms if arm.lag is not None]
    if len({arm.num_b_steps for arm in trained}) > 1:
        found = ", ".join(
            f"{_name(arm.loss, arm.lag)} of seed {arm.seed}: {arm.num_b_steps}" for arm in trained
        )
        raise ChildFailed(
            f"arms must train as many B steps to be compared, got {found}; the logs are in {directory}/seed*/*/logs"
        )
    return 0


def plan_arms(
    directory: Path, num_steps: int, num_seeds: int, lags: Sequence[int], objectives: Sequence[str]
) -> Iterator[tuple[str, int | None, DemoJob]]:
    """Loss, lag and job of every arm, seeds outermost."""
    losses = [(each, *loss) for each in dict.fromkeys(objectives) for loss in _LOSSES[each].items()]
    for seed in range(num_seeds):
        base = first_job(directory, num_steps, seed, _B_RATIO, SceneKind.SHAPES)
        yield "", None, replace(base, directory=base.directory / "a", b_ratio=0.0)
        base = replace(base, mode=Mode.INLINE, plugins=(PLUGINS / "pipeline.py",))
        for objective, loss, grpo in losses:
            for lag in lags:
                place = base.directory / f"{loss}-lag{lag}"
                yield loss, lag, replace(base, directory=place, objective=Objective(objective), grpo=grpo)


def staleness_table(start: DetectionScore, arms: Sequence[StaleArm], num_steps: int) -> ResultTable:
    """One row per loss and lag, beside the first lag of the same loss; channel A alone beside the first row."""
    alone = [arm for arm in arms if arm.lag is None]
    columns: Columns[StaleArm] = {
        "arm": lambda group: _name(group[0].loss, group[0].lag),
        "B steps": lambda group: mean_and_range([arm.num_b_steps for arm in group], ".0f"),
        "versions behind": lambda group: mean_and_range(
            [arm.mean_lag for arm in group if arm.mean_lag is not None], ".1f"
        ),
    }
    over = "F1 over the first lag of the same seed"
    tables: list[ResultTable] = []
    for of_loss in grouped([arm for arm in arms if arm.lag is not None], lambda arm: arm.loss).values():
        groups = list(grouped(of_loss, lambda arm: arm.lag).values())
        shown = groups if tables or not alone else [alone, *groups]
        tables.append(score_table(num_steps, start, shown, groups[0], columns, over))
    rows = [row for number, table in enumerate(tables) for row in table.rows[min(number, 1) :]]
    return replace(tables[0], rows=rows)


def _name(loss: str, lag: int | None) -> str:
    return "A only" if lag is None else f"{loss}, lag {lag}"


def _environment(lag: int | None, longest_lag: int) -> dict[str, str]:
    if lag is None:
        return {}
    # The first round makes version 1; what is made under it has the longest lag so many versions later.
    return {PIPELINE_VARIABLE: LAGGING, LAG_VARIABLE: str(lag), FIRST_VERSION_VARIABLE: str(1 + longest_lag)}


def _arm(loss: str, lag: int | None, job: DemoJob, result: DetectionScore) -> StaleArm:
    steps = of_kind(read_audit(audit_path(job.run_dir, 0)), "step")
    trained = [step["version"] - pack["version"] for step in steps for pack in step["packs"]]
    return StaleArm(
        loss=loss,
        lag=lag,
        seed=job.seed,
        num_b_steps=sum(step["channel"] == "B" for step in steps),
        mean_lag=statistics.fmean(trained) if trained else None,
        max_lag=max(trained, default=None),
        score=result,
    )
