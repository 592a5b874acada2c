"""``swift-stage2 bench preprocess``: samples/s of parse, match and target, and what the match adds to its bare parts.

All seconds are this thread's own on the processor: nothing here waits or starts a thread, and other programs on the
machine do not count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import linear_sum_assignment

from benchmarks.crowds import AnswerKind, Crowd, make_crowd
from benchmarks.estimates import Spread, pair_ratios, verdict
from benchmarks.results import ResultTable, publish
from swift_stage2.channel_b.detection import DetectionTask
from swift_stage2.channel_b.dialects import OBJECT_LIST
from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.matching import match_objects
from swift_stage2.channel_b.targets import TokenGroup
from swift_stage2.config import MatchingConfig
from swift_stage2.demo.demo_config import STAGE1
from swift_stage2.demo.scenes import answer_text
from swift_stage2.demo.tiny_template import load_tiny_model, tiny_template
from swift_stage2.records import Rollout, Sample, SampleKey, VersionSpan

RATE_BUDGET = 240.0
RATE_BUDGET_OBJECTS = 20
MATCH_BUDGET = 1.5
_NUM_CROWDS = 4
_PACKING_LENGTH = 65536
_SETTINGS = MatchingConfig()


def run(options: argparse.Namespace, directory: Path) -> int:
    torch.set_num_threads(1)
    rates = {number: task_rates(number, options.repeats) for number in options.objects}
    matches = {kind: match_seconds(kind, options.crowd, options.repeats) for kind in AnswerKind}
    publish(directory, "preprocess", rate_table(rates), match_table(matches, options.crowd))
    return 0


def task_rates(num_objects: int, repeats: int) -> list[float]:
    """Samples per second from an answer's text to weighted target tokens, by repetition, after one uncounted."""
    encoder = Encoder(tiny_template(*load_tiny_model(STAGE1)), packing_length=_PACKING_LENGTH)
    weights = dict.fromkeys(TokenGroup, 1.0)
    task = DetectionTask(dialect=OBJECT_LIST, matching=_SETTINGS, weights=weights)
    crowds = [make_crowd(num_objects, AnswerKind.JITTERED, number) for number in range(_NUM_CROWDS)]
    work = [(rollout_of(crowd), tuple(crowd.truth)) for crowd in crowds]
    rates = []
    for _ in range(repeats + 1):
        began = time.thread_time()
        for rollout, truth in work:
            task.correct(rollout, truth, encoder.tokenise)
        rates.append(len(work) / (time.thread_time() - began))
    return rates[1:]


def rollout_of(crowd: Crowd) -> Rollout:
    return Rollout(
        sample=Sample(SampleKey(epoch=0, position=0, index=0), row={}),
        text=answer_text(crowd.answer),
        token_ids=(),
        prompt_token_ids=(),
        truncated=False,
        seed=1,
        server="",
        spans=(VersionSpan(0, 0, 0),),
    )


def match_seconds(kind: AnswerKind, num_objects: int, repeats: int) -> tuple[list[float], list[float]]:
    """Our match and its bare parts by turns, each first every other time, after one of each that does not count."""
    # Boxes without labels have no use for these two.
    options = {
        name: value for name, value in asdict(_SETTINGS).items() if name not in ("same_label", "max_distance")
    }
    ways: tuple[Callable[..., object], ...] = (partial(match_objects, **options), bare_match)
    crowds = [make_crowd(num_objects, kind, number) for number in range(_NUM_CROWDS)]
    boxes = [([box for _, box in crowd.answer], [box for _, box in crowd.truth]) for crowd in crowds]
    seconds: tuple[list[float], list[float]] = ([], [])
    for repetition in range(repeats + 1):
        for which in (0, 1) if repetition % 2 else (1, 0):
            began = time.thread_time()
            for predicted, true in boxes:
                ways[which](predicted, true)
            if repetition:
                seconds[which].append((time.thread_time() - began) / len(boxes))
    return seconds


def bare_match(predicted: ArrayLike, true: ArrayLike, top_k: int = _SETTINGS.top_k) -> NDArray[np.float64]:
    """Does only what no match can do without: IoU, the best ``top_k`` per prediction, one scipy assignment."""
    left = np.asarray(predicted, dtype=np.float64).T[:, :, None]
    right = np.asarray(true, dtype=np.float64).T[:, None, :]
    width = np.minimum(left[2], right[2]) - np.maximum(left[0], right[0])
    height = np.minimum(left[3], right[3]) - np.maximum(left[1], right[1])
    shared = np.maximum(width, 0.0) * np.maximum(height, 0.0)
    areas = [(boxes[2] - boxes[0]) * (boxes[3] - boxes[1]) for boxes in (left, right)]
    ious = shared / (areas[0] + areas[1] - shared)
    best = np.argpartition(-ious, min(top_k, ious.shape[1]) - 1, axis=1)[:, :top_k]
    costs = np.full(ious.shape, 2.0)
    np.put_along_axis(costs, best, 1.0 - np.take_along_axis(ious, best, axis=1), axis=1)
    rows, columns = linear_sum_assignment(costs)
    return costs[rows, columns]


def rate_table(rates: dict[int, list[float]]) -> ResultTable:
    def row(number: int) -> tuple[str, str, str]:
        spread = Spread.of(rates[number])
        judged = verdict(spread.median >= RATE_BUDGET) if number == RATE_BUDGET_OBJECTS else ""
        return str(number), spread.words(0), judged

    return ResultTable(
        "Parse, match and target, samples per processor second of one thread: median (quartiles)",
        ("objects", "samples/s", f"budget {RATE_BUDGET:.0f} at {RATE_BUDGET_OBJECTS} objects"),
        [row(number) for number in rates],
    )


def match_table(matches: dict[AnswerKind, tuple[list[float], list[float]]], num_objects: int) -> ResultTable:
    def row(kind: AnswerKind) -> tuple[str, ...]:
        ratio = Spread.of(pair_ratios(*matches[kind]))
        ours, bare = (Spread.of(seconds).words(2, 1e3) for seconds in matches[kind])
        return kind, ours, bare, ratio.words(3), verdict(ratio.median <= MATCH_BUDGET)

    return ResultTable(
        f"Match of {num_objects} × {num_objects} boxes against bare IoU, top-k and assignment: median (quartiles)",
        ("answer", "match, ms", "bare parts, ms", "ratio", f"budget {MATCH_BUDGET}"),
        [row(kind) for kind in matches],
    )
