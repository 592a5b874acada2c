"""Points, a task that is shipped: objects as text with one point each, in a dialect of two coordinates.

All but the measure is detection's. Two points are as close as they are on the picture as the model sees it, whatever
numbers the template writes: their distance is a share of that picture's diagonal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swift_stage2.channel_b.detection import DetectionTask, Objects
from swift_stage2.channel_b.dialects import POINT_LIST
from swift_stage2.channel_b.matching import MatchResult, match_by_similarity
from swift_stage2.channel_b.parsing import TrueObjects
from swift_stage2.channel_b.task import Convert, Tokenise, register_task
from swift_stage2.errors import SampleError
from swift_stage2.records import Rollout, Target


@dataclass(frozen=True, slots=True)
class PointsInSpace:
    """True points in the template's space. ``scale``: by which x and y become shares of the image's diagonal."""

    objects: Objects
    scale: tuple[float, float]


@register_task("point")
class PointTask(DetectionTask):
    """Matches objects by the distance of their points.

    A pair costs its distance divided by ``matching.max_distance``, and beyond that is infeasible; its closeness, 1
    minus that quotient, stands where detection has the IoU.
    """

    metrics = ("mean_distance",)
    similarity = "closeness"
    default_dialect: ClassVar[str] = POINT_LIST.name
    num_coordinates: ClassVar[int] = 2

    def to_space(self, truth: TrueObjects, convert: Convert) -> PointsInSpace:
        if convert.space is None or convert.image_size is None:
            raise SampleError(
                "points are measured by the diagonal of their image", got="a row without images"
            )
        scale = scale_of(convert.space, convert.image_size)
        return PointsInSpace(tuple(zip(truth.labels, convert(truth.boxes), strict=True)), scale)

    def objects_of(self, truth: PointsInSpace) -> Objects:
        return truth.objects

    def match(self, predicted: Objects, truth: PointsInSpace) -> MatchResult:
        found, true = ([point for _, point in objects] for objects in (predicted, truth.objects))
        return match_by_similarity(
            1.0 - distances(found, true, truth.scale) / self._matching.max_distance,
            threshold=0.0,
            allowed=self._allowed(predicted, truth.objects),
            **self._costs,
        )

    def correct(self, rollout: Rollout, truth: Any, tokenise: Tokenise) -> Target:
        """As detection's, with the distance of what was matched."""
        target = super().correct(rollout, truth, tokenise)
        num_pairs, closeness = target.quality.num_pairs, target.quality.sum_iou
        distance = (num_pairs - closeness) * self._matching.max_distance
        return replace(target, metrics={"mean_distance": (distance, float(num_pairs))})


def scale_of(space: tuple[int, int], image_size: tuple[int, int]) -> tuple[float, float]:
    """By which x and y of ``space`` become shares of the image's diagonal; all sizes are width and height."""
    diagonal = math.hypot(*image_size)
    return image_size[0] / space[0] / diagonal, image_size[1] / space[1] / diagonal


def distances(predicted: ArrayLike, true: ArrayLike, scale: tuple[float, float]) -> NDArray[np.float64]:
    """Shape (num_predictions, num_truths), in what ``scale`` gives; points are of shape (n, 2)."""
    one, other = (np.array(points, dtype=np.float64).reshape(-1, 2) for points in (predicted, true))
    steps = (one[:, None, :] - other[None, :, :]) * np.array(scale)
    lengths: NDArray[np.float64] = np.hypot(steps[..., 0], steps[..., 1])
    return lengths
