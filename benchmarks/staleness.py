"""``swift-stage2 bench staleness``: does it matter how old a rollout is when it is trained?

Every arm makes its packs at the same steps from the same stage-1 weights and trains as many B steps; only the versions
between making and training differ. All checkpoints are scored on the same held-out scenes, beside one that trained
channel A alone.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.clocks import PLUGINS
from benchmarks.plugins.lagging import FIRST_VERSION_VARIABLE, LAG_VARIABLE
from benchmarks.results import publish
from benchmarks.scored_arms import ScoredArm, first_job, score_table, train_and_score
from swift_stage2.config import Mode
from swift_stage2.demo.demo_config import DemoJob
from swift_stage2.demo.scenes import SceneKind
from swift_stage2.errors import ChildFailed, UserError
from swift_stage2.telemetry.event_log import event_path, read_events
from swift_stage2.telemetry.events import Step

_B_RATIO = 0.25  # one B step per version of four steps, so that no version has two or none


def check(options: argparse.Namespace) -> None:
    """A version lasts four steps here; an arm that trains no B step says nothing."""
    least = 4 * (max(options.lags) + 2)
    if options.steps < least:
        raise UserError(
            f"--steps must be at least {least} for a lag of {max(options.lags)} versions, got {options.steps}; write "
            f"--steps {least}, or smaller --lags"
        )


def run(options: argparse.Namespace, directory: Path) -> int:
    """Trains every arm and scores all.

    Raises ChildFailed: a job did not end well, or arms trained different numbers of B steps.
    """
    jobs = list(plan_arms(directory, options.steps, options.seeds, options.lags))
    lagging = [(job, _environment(lag, max(options.lags))) for lag, job in jobs]
    start, scores = train_and_score(directory, lagging)
    arms = [_arm(lag, job, score) for (lag, job), score in zip(jobs, scores, strict=True)]
    references = {"F1 over the first lag": _name_of(options.lags[0])}
    publish(directory, "staleness", score_table(f"after {options.steps} steps", start, arms, references))
    trained = [arm for arm in arms if arm.name != _name_of(None)]
    if len({arm.score["b_steps"] for arm in trained}) > 1:
        found = ", ".join(f"{arm.name} of seed {arm.seed}: {arm.score['b_steps']}" for arm in trained)
        raise ChildFailed(
            f"arms must train as many B steps to be compared, got {found}; the logs are in {directory}/logs"
        )
    return 0


def plan_arms(
    directory: Path, num_steps: int, num_seeds: int, lags: Sequence[int]
) -> Iterator[tuple[int | None, DemoJob]]:
    """Lag and job of every arm, seeds outermost."""
    for seed in range(num_seeds):
        base = first_job(directory, num_steps, seed, _B_RATIO, SceneKind.SHAPES)
        yield None, replace(base, directory=base.directory / "a", b_ratio=0.0)
        base = replace(base, mode=Mode.INLINE, plugins=(PLUGINS / "lagging.py",))
        for lag in lags:
            yield lag, replace(base, directory=base.directory / f"lag{lag}")


def _name_of(lag: int | None) -> str:
    return "A only" if lag is None else f"lag {lag}"


def _environment(lag: int | None, longest_lag: int) -> dict[str, str]:
    if lag is None:
        return {}
    # The first round makes version 1; what is made under it has the longest lag so many versions later.
    return {LAG_VARIABLE: str(lag), FIRST_VERSION_VARIABLE: str(1 + longest_lag)}


def _arm(lag: int | None, job: DemoJob, score: Mapping[str, float]) -> ScoredArm:
    steps = [event for event in read_events(event_path(job.run_dir, 0)) if isinstance(event, Step)]
    behind = [
        step.version - version for step in steps for version in step.packs.values()
    ]  # as the learner saw it
    found = {"versions_behind": statistics.fmean(behind)} if behind else {}
    found |= {**score, "b_steps": sum(step.channel == "B" for step in steps)}
    return ScoredArm(name=_name_of(lag), seed=job.seed, score=found)
