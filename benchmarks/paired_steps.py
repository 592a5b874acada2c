"""Turns step times of paired runs into ratios with bounds. Pure; called by ``bench overhead``.

Step i of both arms of a pair reads the same data, so steps are compared one by one. The bootstrap resamples
pairs and, within a pair, steps (Efron and Tibshirani 1993), because runs differ more than the steps of one run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
NUM_RESAMPLES = 2000
_UPPER_PERCENTILE = 95.0


@dataclass(frozen=True, slots=True)
class Bounded:
    """An estimate, and the value it stays under in 95 % of all resamples."""

    value: float
    upper_95: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedRatio:
    """Arm ``ours`` relative to arm ``plain``."""

    median: Bounded
    """Median of the ratios of single steps: blind to rare slow steps, and to noise."""
    total: Bounded
    """Ratio of the summed times: everything counts, also other programs on the machine."""
    quartiles: tuple[float, float]
    """Of the ratios of single steps."""
    num_pairs: int
    num_steps: int
    """Compared steps per pair."""


def step_seconds(end_ns: Sequence[int], num_warmup: int) -> Floats:
    """Durations from the end of a step to the end of the next, without the first ``num_warmup`` of them.

    Raises:
        ValueError: nothing is left.
    """
    seconds: Floats = np.diff(np.asarray(end_ns, dtype=np.float64))[num_warmup:] / 1e9
    if len(seconds) == 0:
        raise ValueError(
            f"steps are needed after the warm-up, got {len(end_ns)} steps and num_warmup={num_warmup}"
        )
    return seconds


def num_common(ends_ns: Sequence[Sequence[int]]) -> int:
    """How many steps each of these runs, which ran at the same time, ended before the first of them was through."""
    first_end = min(ends[-1] for ends in ends_ns)
    return min(sum(end <= first_end for end in ends) for ends in ends_ns)


def compare(plain: Sequence[Floats], ours: Sequence[Floats], seed: int = 0) -> PairedRatio:
    """``plain[p][i]`` and ``ours[p][i]`` are seconds of step i in pair p; pairs are cut to the shorter arm.

    Raises:
        ValueError: there is no pair, or an arm is missing.
    """
    if len(plain) == 0 or len(plain) != len(ours):
        raise ValueError(f"every pair needs both arms, got {len(plain)} plain and {len(ours)} ours")
    num_steps = min(len(steps) for steps in (*plain, *ours))
    slow = np.stack([steps[:num_steps] for steps in ours])
    base = np.stack([steps[:num_steps] for steps in plain])
    rng = np.random.default_rng(seed)
    medians, totals = [], []
    for _ in range(NUM_RESAMPLES):
        pairs = rng.integers(0, len(base), len(base))[:, None]
        steps = rng.integers(0, num_steps, (len(base), num_steps))
        medians.append(np.median(slow[pairs, steps] / base[pairs, steps]))
        totals.append(slow[pairs, steps].sum() / base[pairs, steps].sum())
    ratios = slow / base
    low, high = np.percentile(ratios, (25, 75))
    return PairedRatio(
        median=Bounded(float(np.median(ratios)), float(np.percentile(medians, _UPPER_PERCENTILE))),
        total=Bounded(float(slow.sum() / base.sum()), float(np.percentile(totals, _UPPER_PERCENTILE))),
        quartiles=(float(low), float(high)),
        num_pairs=len(base),
        num_steps=num_steps,
    )
