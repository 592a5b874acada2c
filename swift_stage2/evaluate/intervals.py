"""Intervals of metrics by the bootstrap over images: images are drawn again with replacement, as many as there are.

Two sets of predictions are compared on the same draws, image by image. Deterministic for a seed. hotcoco's own
comparison keeps an image that was drawn twice once, which makes its intervals a quarter too narrow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from swift_stage2.detections.scores import DetectionScores, Weights

DEFAULT_DRAWS = 1000
_FEWEST_DRAWS = 200
_WORK = 2_000_000_000  # steps of all draws: some twenty seconds of one core
_BOUNDS = (0.025, 0.975)


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95 % interval."""

    low: float
    high: float


def affordable_draws(scores: DetectionScores, wanted: int) -> int:
    """``wanted``, or fewer where a draw costs much, but then at least 200."""
    return min(wanted, max(_FEWEST_DRAWS, _WORK // max(1, scores.work)))


def intervals(
    values: Callable[[Weights], Mapping[str, float]], num_images: int, num_draws: int
) -> dict[str, Interval]:
    """Per metric, over the draws in which it could be computed; none without draws."""
    samples: defaultdict[str, list[float]] = defaultdict(list)
    for weights in _draws(num_images, num_draws):
        for name, value in values(weights).items():
            samples[name].append(value)
    return {name: Interval(*np.quantile(drawn, _BOUNDS).tolist()) for name, drawn in samples.items()}


def difference(first: DetectionScores, second: DetectionScores) -> Callable[[Weights], dict[str, float]]:
    """Metrics of the second minus those of the first, on the same images."""

    def values(weights: Weights) -> dict[str, float]:
        before, after = first.values(weights), second.values(weights)
        return {name: after[name] - before[name] for name in after.keys() & before.keys()}

    return values


def _draws(num_images: int, num_draws: int) -> Iterator[Weights]:
    generator = np.random.default_rng(0)
    for _ in range(num_draws):
        chosen = generator.integers(num_images, size=num_images)
        yield np.bincount(chosen, minlength=num_images).astype(np.int64)
