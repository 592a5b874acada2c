"""Every metric of one set of predicted points, by name, with the interface of ``DetectionScores`` that commands need.

Points of one label are matched one to one: within a radius, as the task ``point`` does with its default costs; and, for
ratios that end in ``_inside``, to true objects in whose mask or box (``regions``) they lie, as many as can be. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from swift_stage2.channel_b.matching import assign
from swift_stage2.channel_b.points import distances
from swift_stage2.config import MatchingConfig
from swift_stage2.data.counted_scores import CountedScores, Numbers
from swift_stage2.data.prediction import Prediction, TrueRow
from swift_stage2.data.regions import are_inside, regions_of
from swift_stage2.data.scores import Pairs, detection_data
from swift_stage2.errors import DatasetError, SampleError

RADIUS_SHARE = MatchingConfig().max_distance
"""Of the diagonal of the stored image: the radius where none is given in pixels."""


MEANINGS = {
    "eval/precision": "matched / predicted, within the radius",
    "eval/recall": "matched / true, within the radius",
    "eval/f1": "of precision and recall, within the radius",
    "eval/mean_distance": "pixels, of pairs matched within the radius",
    "eval/precision_inside": "points inside of an object of their own / predicted",
    "eval/recall_inside": "objects with a point inside of their mask or box / true: the accuracy of pointing",
    "eval/f1_inside": "of these two",
}


class PointScores(CountedScores):
    """The metrics of predictions beside the rows that they answer.

    Args:
        answers: shares of answers by name, as 0 or 1 per image.
        radius: in pixels.

    Raises:
        DatasetError: a row's regions cannot be read.
    """

    def __init__(
        self,
        rows: Sequence[TrueRow],
        predictions: Sequence[Prediction | None],
        answers: Mapping[str, Numbers],
        radius: float | None = None,
    ) -> None:
        data = detection_data([row.truth for row in rows], predictions, num_coordinates=2)
        self._answers = answers
        self.matched: list[Pairs] = []
        """With closeness in place of the IoU: 1 at no distance, 0 at the radius."""
        self._distances: list[float] = []
        near, inside = list[int](), list[int]()
        begins = data.begins()
        for number, (row, prediction) in enumerate(zip(rows, predictions, strict=True)):
            said, true = (slice(*each[number : number + 2]) for each in begins)
            points, truth = data.predicted.boxes[said], data.truth.boxes[true]
            same = np.equal.outer(data.predicted.labels[said], data.truth.labels[true])
            size = (prediction.width, prediction.height) if prediction else (1, 1)
            most = radius or RADIUS_SHARE * math.hypot(*size)
            apart = distances(points, truth, (1.0, 1.0))
            ones, others = np.nonzero(same & (apart <= most))
            pairs = assign(ones, others, 2 - apart[ones, others] / most)
            self.matched.append(tuple((*pair, 1 - float(apart[pair]) / most) for pair in pairs))
            self._distances += [float(apart[pair]) for pair in pairs]
            near += [begins[1][number] + other for _, other in pairs]
            ones, others = np.nonzero(same & _inside(row, points, same, size))
            inside += [begins[1][number] + other for _, other in assign(ones, others, np.ones(len(ones)))]
        self.has_regions = all(row.row["objects"].get("region") is not None for row in rows if row.truth)
        found = {"near": near, "inside": inside} if self.has_regions else {"near": near}
        images = data.predicted.images, data.truth.images
        super().__init__(
            images,
            len(rows),
            data.kinds(),
            **{name: np.array(numbers, dtype=np.int64) for name, numbers in found.items()},
        )

    def points(self) -> dict[str, float]:
        """Every metric by name; absent where nothing was counted."""
        ratios = self.weighted(np.ones((len(self.matched), 1), dtype=np.int64))
        values = {name: float(of[0]) for name, of in ratios.items() if np.isfinite(of[0])}
        for part, total, pixels in zip(self.parts, self.totals(), self.sums(self._distances), strict=True):
            if total.matched:
                values[f"{part}/mean_distance"] = pixels / total.matched
        return values | {f"eval/{name}": float(flags.mean()) for name, flags in self._answers.items()}


def _inside(
    row: TrueRow, points: NDArray[np.float64], same: NDArray[np.bool_], size: tuple[int, int]
) -> NDArray[np.bool_]:
    """Shape (num_points, num_objects): which lie in which region; regions that no point asks for are not read."""
    found = np.zeros_like(same)
    try:
        for number, region in enumerate(regions_of(row.row) or ()):
            if same[:, number].any():
                found[:, number] = are_inside(points, region, size)
    except SampleError as error:
        raise DatasetError(
            f"row {row.number} ({row.image}): {error}",
            remedy="mend the row, swift-stage2 data check shows all",
        ) from error
    return found
