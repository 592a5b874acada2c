"""The reward of an answer: named terms, computed from the counts of its match, and their weighted sum. Pure.

Every term is the larger the better, so no weight is below 0. Rewards of sets of boxes are known from VLM-R1 (Shen et
al., 2025, arXiv:2504.07615: mAP, a penalty of redundant boxes, format) and VisionReasoner (Liu et al.,
2025, arXiv:2505.12081: pairs by the Hungarian method, no repetition). The pairs here are those that targets follow.
"""

from __future__ import annotations

from collections.abc import Mapping

from swift_stage2.records import MatchQuality

TOTAL = "total"


def reward_terms(quality: MatchQuality) -> dict[str, float]:
    """The terms of one answer.

    Returns:
        f1: 0 to 1, 2 * pairs / (predictions + truths).
        iou: 0 to 1, the mean over all truths of their partner's IoU, or closeness of points; 0 of a missed one. The
            mean over pairs alone would rise when an object that is hard to place is left out.
        format: 1 of an answer that was read whole: closed, not truncated, no object dropped; else 0.
        duplicates: -1 to 0, minus the share of predictions without a partner that overlap a truth which has one.
        misses: -1 to 0, minus the share of truths without a partner.
        Of an image without objects f1 and iou are 1 of an answer that was read whole and lists nothing, not even what
        was dropped, and else 0; duplicates and misses 0.
    """
    predictions, truths, pairs = quality.num_predictions, quality.num_ground_truth, quality.num_pairs
    is_unreadable = quality.num_unclosed or sum(quality.dropped.values())
    silent_and_right = float(not (predictions or truths or is_unreadable))
    return {
        "f1": 2 * pairs / (predictions + truths) if predictions + truths else silent_and_right,
        "iou": quality.sum_iou / truths if truths else silent_and_right,
        "format": float(not (is_unreadable or quality.num_truncated)),
        "duplicates": -quality.num_duplicates / predictions if predictions else 0.0,
        "misses": (pairs - truths) / truths if truths else 0.0,
    }


def total_of(terms: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """The weighted sum, by the order of ``weights``, which have the names of all terms."""
    return float(sum(weight * terms[name] for name, weight in weights.items()))
