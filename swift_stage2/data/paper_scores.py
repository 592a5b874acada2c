"""Numbers that papers on detection by language models print, under their names. Pure.

No number here has an interval. An image without an answer has predicted nothing, as everywhere in ``evaluate``.
"""

from __future__ import annotations

import numpy as np

from swift_stage2.channel_b.matching import iou_matrix
from swift_stage2.data.scores import DetectionScores

MEANINGS = {
    "eval/f1_95": "at IoU 0.95, of all objects, not a mean over classes",
    "eval/false_empty": "images without objects on which something is predicted / those images",
    "eval/false_empty_boxes": "boxes predicted on an image without objects, mean",
    "eval/false_absent": "pairs of an image and a true class that it does not show, predicted / all such pairs",
    "eval/acc_50": "images with exactly one true object: the first box has an IoU of at least 0.5, whatever its label",
}


def all_points(scores: DetectionScores) -> dict[str, float]:
    """``scores.points()`` and each of ``MEANINGS``; absent where nothing was counted."""
    data = scores.data
    said, true = sides = data.predicted, data.truth
    num_said, num_true = (np.bincount(each.images, minlength=data.num_images) for each in sides)
    begins, true_begins = (np.searchsorted(each.images, np.arange(data.num_images)) for each in sides)
    single, on_empty = np.flatnonzero(num_true == 1), num_said[num_true == 0]
    firsts = [(begins[each], true_begins[each]) for each in single if num_said[each]]
    num_right = sum(iou_matrix(said.boxes[[n]], true.boxes[[m]])[0, 0] >= 0.5 for n, m in firsts)
    # An image and a class as one number; of what was predicted only labels that some image has.
    said_pairs, true_pairs = (np.unique(each.images * len(data.classes) + each.labels) for each in sides)
    said_pairs = said_pairs[np.isin(said_pairs % max(1, len(data.classes)), true.labels)]
    num_absent = data.num_images * len(np.unique(true.labels)) - len(true_pairs)
    quotients = {
        "eval/f1_95": (2 * scores.num_matched[-1], len(said) + len(true)),
        "eval/false_empty": (np.count_nonzero(on_empty), len(on_empty)),
        "eval/false_empty_boxes": (on_empty.sum(), len(on_empty)),
        "eval/false_absent": (len(np.setdiff1d(said_pairs, true_pairs, assume_unique=True)), num_absent),
        "eval/acc_50": (num_right, len(single)),
    }
    return scores.points() | {name: float(part / whole) for name, (part, whole) in quotients.items() if whole}
