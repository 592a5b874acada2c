"""One run of a learner of ``bench peer`` as its clock tells it, and the tables and notes of all of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any

from benchmarks.benches import STAND_IN
from benchmarks.clocks import Clock, since
from benchmarks.learner_job import COMPLETIONS_PER_STEP, MICRO_BATCH
from benchmarks.learning import SCORES
from benchmarks.results import ResultTable, spread_table
from benchmarks.stand_in_server import LOG_PROB, SLOW_FACTOR
from swift_stage2.config import Objective
from swift_stage2.demo.scoring import DetectionScore


class LoopArm(StrEnum):
    """Whose loop, and whether steps wait for their rollouts."""

    OURS = "ours, asynchronous"
    PEER = "ms-swift GRPO, async_generate"
    OURS_INLINE = "ours, inline"
    PEER_INLINE = "ms-swift GRPO, inline"


ASYNCHRONOUS = (LoopArm.OURS, LoopArm.PEER)
INLINE_OF = {LoopArm.OURS: LoopArm.OURS_INLINE, LoopArm.PEER: LoopArm.PEER_INLINE}


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerLoop:
    """One run after its warm-up. Seconds are sums over its steps."""

    arm: LoopArm
    num_steps: int
    seconds: float
    on_core: float
    queued: float
    """Ready to run without a core, which other programs had."""
    in_rollout: float
    """Main thread in a rollout call, or waiting for one."""
    in_push: float
    """Main thread in a push of weights or in a sync round."""
    num_rollout_steps: int
    """Steps that trained on rollouts; the others of ours trained channel A."""
    num_completions: int
    num_tokens: int
    """Supervised ones, of steps on rollouts."""
    num_a_steps: int
    """Of the whole run, warm-up included, as are the next two."""
    num_all_steps: int
    all_seconds: float
    """From the end of the first step."""
    server_idle_share: float = 0.0
    """Of the time in which no request ran on a server, by its own clock; the mean over servers. 0 to 1."""

    @classmethod
    def of(cls, arm: LoopArm, clock: Clock, num_warmup: int, **rest: Any) -> LearnerLoop:
        """From a clock's nanoseconds at the end of every step; ``rest`` is what it does not tell."""
        return cls(
            arm=arm,
            num_steps=len(clock["end_ns"]) - num_warmup,
            seconds=since(clock, "end_ns", num_warmup),
            on_core=since(clock, "main_ns", num_warmup),
            queued=since(clock, "queued_ns", num_warmup),
            num_all_steps=len(clock["end_ns"]),
            all_seconds=since(clock, "end_ns", 1),
            **rest,
        )

    @property
    def idle_share(self) -> float:
        """0 to 1."""
        return 1 - (self.on_core + self.queued) / self.seconds

    @property
    def idle_share_less_queued(self) -> float:
        """The same of the time in which nobody else had its core: on a shared machine it says more."""
        return 1 - self.on_core / (self.seconds - self.queued)

    @property
    def step_s_without_rollouts(self) -> float:
        """Mean seconds of a step less what it was in rollouts."""
        return (self.seconds - self.in_rollout) / self.num_steps


def share_of_bound(loop: LearnerLoop, inline: LearnerLoop, *, less_queued: bool = False) -> float:
    """Steps/s of ``loop`` over those that the same learner would have if rollouts took no time, by its inline run.

    ``less_queued``: as if nobody had ever waited for a core, which on a shared machine says more.
    """
    bound_s = inline.step_s_without_rollouts - less_queued * inline.queued / inline.num_steps
    step_s = (loop.seconds - less_queued * loop.queued) / loop.num_steps
    return bound_s / step_s


Repetition = dict[LoopArm, LearnerLoop]


def _by_arm(repetitions: Sequence[Repetition]) -> dict[str, list[LearnerLoop]]:
    return {str(arm): [each[arm] for each in repetitions] for arm in LoopArm}


def loop_table(repetitions: Sequence[Repetition], *, reads_servers: bool = True) -> ResultTable:
    """Idle shares, and what the main threads waited in; of servers where their load was read."""
    num_steps = "/".join(str(repetitions[0][arm].num_steps) for arm in LoopArm)
    servers = {"server idle, %": (1, lambda loop: 100 * loop.server_idle_share)} if reads_servers else {}
    return spread_table(
        f"Learners beside the same kind of server, {num_steps} steps after the warm-up, repetitions: "
        f"{len(repetitions)}; median (quartiles)",
        "learner",
        _by_arm(repetitions),
        {
            "idle, % of wall time": (1, lambda loop: 100 * loop.idle_share),
            "less waits for a core, %": (1, lambda loop: 100 * loop.idle_share_less_queued),
            "in rollouts, ms/step": (0, lambda loop: 1e3 * loop.in_rollout / loop.num_steps),
            "in weights, ms/step": (0, lambda loop: 1e3 * loop.in_push / loop.num_steps),
            "step, ms": (0, lambda loop: 1e3 * loop.seconds / loop.num_steps),
            "of it without a core, ms": (0, lambda loop: 1e3 * loop.queued / loop.num_steps),
            **servers,
        },
    )


def work_table(repetitions: Sequence[Repetition]) -> ResultTable:
    return spread_table(
        "What they trained: median (quartiles)",
        "learner",
        _by_arm(repetitions),
        {
            "steps/s": (3, lambda loop: loop.num_steps / loop.seconds),
            "steps on rollouts, %": (1, lambda loop: 100 * loop.num_rollout_steps / loop.num_steps),
            "completions in such a step": (1, lambda it: it.num_completions / max(1, it.num_rollout_steps)),
            "completions trained, 1/s": (2, lambda loop: loop.num_completions / loop.seconds),
            "supervised tokens in such a step": (0, lambda it: it.num_tokens / max(1, it.num_rollout_steps)),
            "supervised tokens, 1/s": (0, lambda loop: loop.num_tokens / loop.seconds),
        },
    )


def score_table(repetitions: Sequence[Repetition], scores: Sequence[DetectionScore]) -> ResultTable:
    """Stage 1 and the arms; ``scores`` as ``_score`` gives them."""
    first, arms = scores[0], iter(scores[1:])
    groups: dict[str, list[tuple[LearnerLoop, DetectionScore]]] = {str(arm): [] for arm in LoopArm}
    for each in repetitions:
        for arm in LoopArm:
            groups[str(arm)].append((each[arm], next(arms)))
    table = spread_table(
        f"Detection on {first.num_images} held-out scenes after training: median (quartiles)",
        "learner",
        groups,
        {
            **{
                name: (3, partial(lambda field, it: getattr(it[1], field), field))
                for name, field in SCORES.items()
            },
            "steps": (0, lambda it: it[0].num_all_steps),
            "of them on channel A": (0, lambda it: it[0].num_a_steps),
            "seconds": (1, lambda it: it[0].all_seconds),
        },
    )
    before = ("stage 1, before", *(f"{getattr(first, field):.3f}" for field in SCORES.values()), "", "", "")
    return replace(table, rows=[before, *table.rows])


def bound_table(repetitions: Sequence[Repetition]) -> ResultTable:
    return spread_table(
        "Steps/s against the bound without generation, by each learner's own inline run: median (quartiles)",
        "learner",
        {str(arm): [(each, arm) for each in repetitions] for arm in ASYNCHRONOUS},
        {
            "bound, steps/s": (3, lambda it: 1 / it[0][INLINE_OF[it[1]]].step_s_without_rollouts),
            "reached, steps/s": (3, lambda it: it[0][it[1]].num_steps / it[0][it[1]].seconds),
            "of the bound": (3, lambda it: shares_of_bound(*it)[0]),
            "less waits for a core": (3, lambda it: shares_of_bound(*it)[1]),
        },
    )


def shares_of_bound(each: Repetition, arm: LoopArm) -> tuple[float, float]:
    """Of an asynchronous arm: as the clock on the wall says, and less waits for a core."""
    loop, inline = each[arm], each[INLINE_OF[arm]]
    return share_of_bound(loop, inline), share_of_bound(loop, inline, less_queued=True)


def notes(options: argparse.Namespace, latencies: Sequence[float]) -> list[str]:
    waits = " or, on the other server, ".join(f"{each:g}" for each in latencies)
    server = (
        f"every rollout waits {waits} s on average, {options.slow_share:.0%} of them {SLOW_FACTOR:g} times as long, "
        "drawn by the same class of stand-in and independent of how many there are; a batch ends with its slowest"
        if options.server == STAND_IN
        else "rollouts are generated by vLLM on the other half of the cores, ours by our server, GRPO's by unmodified "
        "swift rollout"
    )
    same_tokens = (
        f"Both train rollouts by the reward of our detection task, {MICRO_BATCH} of each row, at temperature 1; "
        "supervised tokens stand beside each other. GRPO pads, and computes log-probabilities of a reference model for "
        "its KL term, without which ours trains; ours packs, caps importance weights, and proves by checksums what it "
        f"pushed. A stand-in states {LOG_PROB} as the log-probability of every token."
    )
    other_tokens = (
        f"Not alike: GRPO trains {COMPLETIONS_PER_STEP} completions per step with rewards, advantages and the "
        "log-probabilities of a reference model, several completions of one prompt, padded; ours trains corrected "
        "answers, packed, and proves by checksums what it pushed. So steps/s of the two do not compare; idle shares do."
    )
    return [
        "Alike: model, rows, one rank, one torch thread, optimizer, gradient accumulation; "
        f"{server}; weights really move, over gloo. ms-swift's trainer and client are unmodified but for NCCL, in "
        "whose place gloo sends.",
        same_tokens if options.objective == Objective.GRPO else other_tokens,
        "GRPO asks once per step, one step ahead, and pushes weights before each time; ours asks further ahead, trains "
        f"what is at most 2 versions old, and pushes every {options.sync_every_steps} steps. That difference in design "
        "is what is measured here.",
        f"b_ratio is {options.b_ratio:g}; GRPO trains rollouts at every step. A step for which no packs are ready "
        "trains channel A, true answers, instead of waiting, which takes another time than a step on packs: read ours' "
        "idle share, its bound and its F1 beside its steps on rollouts.",
    ]
