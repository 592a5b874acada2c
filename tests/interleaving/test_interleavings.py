"""Seeded schedules of the real parts, and the predecessor's mistakes, which the same seeds find.

100 seeds are among the fast tests, 4,000 run with ``scripts/test --all``. ``python -m tests.interleaving`` runs more:
``--seeds 0:20000``, or with ``--seed N`` one that fails, with its schedule printed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from interleaving.mutations import FAILURES, OTHERS
from interleaving.scene import run_seed, virtual_world
from interleaving.scheduler import Violation

# The first of each are for every change. Not every 500 full scenes meet an evaluation that finds no server.
FULL_BATCHES = [
    range(100),
    pytest.param(range(100, 900), marks=pytest.mark.slow),
    pytest.param(range(900, 4_000), marks=pytest.mark.slow),
]
FEWEST_TO_MEET_ALL = 500
LONGEST_SEARCH = 1_000  # seeds within which each mistake is found
# What found the mistakes that few seeds find is tried first; a change of the scene costs a search from seed 0.
TRIED_FIRST = {
    "UnpurgedQueue": 519,
    "LateTelling": 230,
    "ForgottenPosts": 153,
    "UnconfirmedKept": 66,
    "ClockBeforePacks": 53,
    "VersionsAfterEvaluations": 45,
    FAILURES[2].__name__: 91,
    FAILURES[3].__name__: 28,
    FAILURES[4].__name__: 106,
}


@pytest.fixture(autouse=True, scope="module")
def _world() -> Iterator[None]:
    with virtual_world():
        yield


def run_batch(run: Callable[[int], Any], seeds: range) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        counts += run(seed)[0]
    return counts


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seeds", FULL_BATCHES, ids=str)
def test_every_invariant_holds_in_the_full_scene(seeds: range) -> None:
    counts = run_batch(run_seed, seeds)
    for what in (
        "steps A", "steps B", "versions", "pushes", "pushes proven", "pushes failed", "pushes again", "pushes ignored",
        "pushes after a drain", "posts during a push", "steps with a push", "steps with a drain",
        "steps with a version held", "rollouts",
        "posts abandoned", "suspicions", "samples returned", "quarantined", "packs dropped_stale",
        "packs dropped_oldest", "reservations released", "runs ended by PipelineFailed",
        "runs ended by WeightSyncError", "evaluation answers", "posts beside others of their server",
        "steps with rollouts held", "rollouts unconfirmed", "evaluation rows given up",
        "evaluations complete", "evaluations round_due", "evaluations no_server", "evaluations training_ends",
        "final evaluations complete", "final evaluations no_server", "final evaluations left out",
        "groups compared", "groups compared at the last call", "groups trained", "steps with groups waiting",
        "rollouts unused no_variance", "rollouts unused too_small", "rollouts unused dropped",
        "rollouts of several versions", "rollouts told to be lost",
    ):  # fmt: skip
        assert counts[what] or len(seeds) < FEWEST_TO_MEET_ALL, f"no seed of this batch met it: {what}"


def first_violation(run: Callable[..., Any], parts: Any) -> tuple[int, str]:
    for seed in (TRIED_FIRST.get(parts.__name__, 0), *range(LONGEST_SEARCH)):
        try:
            run(seed, parts=parts)
        except Violation as violation:
            return seed, str(violation).splitlines()[0]
    pytest.fail(f"not found within {LONGEST_SEARCH} seeds: {parts.__name__}")


@pytest.mark.parametrize(
    ("failure", "found_as"),
    [
        (2, "is drained for|waits for ever|a group waits"),
        (3, "a rollout says version|suspects a server that nothing is wrong with"),
        (4, "is reserved|was promised"),
    ],
)
def test_the_full_scene_finds_what_broke_before(failure: int, found_as: str) -> None:
    seed, message = first_violation(run_seed, FAILURES[failure])
    print(f"failure {failure}: found by seed {seed}: {message}")
    assert any(part in message for part in found_as.split("|")), message


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(("parts", "found_as"), OTHERS)
def test_the_full_scene_finds_other_mistakes(parts: Any, found_as: str) -> None:
    seed, message = first_violation(run_seed, parts)
    print(f"{parts.__name__}: found by seed {seed}: {message}")
    assert any(part in message for part in found_as.split("|")), message
