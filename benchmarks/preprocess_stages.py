"""The process that ``bench preprocess`` measures: every stage of channel B after the rollout, on one core and thread.

``python -m benchmarks.preprocess_stages SETTINGS.json OUT.json`` measures stages by object count, encode and
pack against the bare template, and the match of a crowd against its bare parts. All seconds are the thread's own on
the processor: nothing here waits or starts a thread, and other programs on the machine do not count.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import linear_sum_assignment

from benchmarks.crowds import AnswerKind, Crowd, draw_crowd, make_crowd
from swift_stage2.channel_b.detection import DetectionTask
from swift_stage2.channel_b.dialects import OBJECT_LIST
from swift_stage2.channel_b.encoding import Encoder, PromptEncoding
from swift_stage2.channel_b.matching import match_objects
from swift_stage2.channel_b.packing import decide_pack
from swift_stage2.channel_b.parsing import parse_rollout, read_ground_truth
from swift_stage2.channel_b.preprocessing import make_pack
from swift_stage2.channel_b.targets import TokenGroup, order_ground_truth, render_target, weigh_tokens
from swift_stage2.config import MatchingConfig
from swift_stage2.demo.demo_config import STAGE1
from swift_stage2.demo.grounding_dataset import PROMPT, answer_text, grounding_row
from swift_stage2.demo.tiny_template import load_tiny_model, tiny_template
from swift_stage2.records import Rollout, Sample, SampleKey, Segment, Target, VersionSpan

STAGES = ("parse", "match", "target", "parse+match+target", "encode", "pack")
TOGETHER = "parse+match+target"
NUM_SAMPLES = 4
_PACKING_LENGTH = 65536
_SETTINGS = MatchingConfig()
_WEIGHTS = dict.fromkeys(TokenGroup, 1.0)
_DIALECT = OBJECT_LIST

Boxes = Sequence[tuple[int, int, int, int]]


class Subject:
    """One sample with its answer, and everything that a stage needs of the stages before it."""

    def __init__(self, crowd: Crowd, number: int, directory: Path, encoder: Encoder, task: DetectionTask):
        path = directory / f"{len(crowd.truth)}-{number}.png"
        draw_crowd(crowd, path)
        row = grounding_row(crowd.truth, path)
        truth = read_ground_truth(row)
        self.sample = Sample(SampleKey(epoch=0, position=number, index=number), row, truth)
        self.prompt: PromptEncoding = encoder.encode_prompt(self.sample)
        self.rollout = Rollout(
            sample=self.sample,
            text=answer_text(crowd.answer),
            token_ids=(),
            prompt_token_ids=self.prompt.token_ids,
            truncated=False,
            seed=1,
            server="",
            spans=(VersionSpan(0, 0, 0),),
        )
        self.truth = task.to_space(truth, self.prompt.convert)
        self.target: Target = task.correct(self.rollout, self.truth, encoder.tokenise)
        conversation = [
            {"role": "user", "content": PROMPT},
            {"role": "assistant", "content": self.target.text},
        ]
        self.bare_row: dict[str, Any] = {"messages": conversation, "images": row["images"]}


class StageBench:
    """Real template, tokenizer and task, and the clock that reads each stage."""

    def __init__(self, directory: Path) -> None:
        model, processor = load_tiny_model(STAGE1)
        ours, bare = (tiny_template(model, processor) for _ in range(2))
        for template in (ours, bare):
            template.max_length = _PACKING_LENGTH  # the tiny model's own is too short for a crowd
        self._directory = directory
        self._encoder = Encoder(ours, packing_length=_PACKING_LENGTH)
        # One row without padding, as channel B has it.
        bare.padding_free, bare.packing, bare.sequence_parallel_size = True, False, 1
        self._bare = bare
        self._task = DetectionTask(dialect=_DIALECT, matching=_SETTINGS, weights=_WEIGHTS)

    def subjects(self, num_objects: int, num_samples: int = NUM_SAMPLES) -> list[Subject]:
        return [
            Subject(
                make_crowd(num_objects, AnswerKind.JITTERED, number),
                number,
                self._directory,
                self._encoder,
                self._task,
            )
            for number in range(num_samples)
        ]

    def stage_seconds(self, subjects: Sequence[Subject]) -> dict[str, float]:
        spent = dict.fromkeys(STAGES, 0.0)
        segments = []
        for subject in subjects:
            truth = subject.truth
            with _adding_to(spent, "parse"):
                parsed = parse_rollout(subject.rollout.text, _DIALECT)
            with _adding_to(spent, "match"):
                match = match_objects(
                    [found.box for found in parsed.objects], [box for _, box in truth], **_matching_options()
                )
            with _adding_to(spent, "target"):
                order = order_ground_truth(match.pairs, len(truth))
                matched = {number for _, number in match.pairs}
                rendered = render_target(
                    [truth[number] for number in order],
                    [number in matched for number in order],
                    self._task.answer_format,
                )
                _, offsets = self._encoder.tokenise(rendered.text)
                weigh_tokens(offsets, rendered.spans, _WEIGHTS)
            with _adding_to(spent, TOGETHER):
                target = self._task.correct(subject.rollout, truth, self._encoder.tokenise)
            with _adding_to(spent, "encode"):
                segments.append(self._segment(subject, target))
        with _adding_to(spent, "pack"):
            self._pack(segments)
        return {stage: seconds / len(subjects) for stage, seconds in spent.items()}

    def ours(self, subjects: Sequence[Subject]) -> tuple[float, list[int]]:
        """Seconds from prompts and finished target texts to one pack, and the tokens of that pack."""
        began = time.thread_time()
        segments = []
        for subject in subjects:
            self._encoder.tokenise(subject.target.text)  # the bare template tokenises the answer as well
            segments.append(self._segment(subject, subject.target))
        batch = self._pack(segments)
        return time.thread_time() - began, batch["input_ids"].flatten().tolist()

    def bare(self, subjects: Sequence[Subject]) -> tuple[float, list[int]]:
        """The same through nothing but the template's own ``encode`` and collator."""
        rows = [copy.deepcopy(subject.bare_row) for subject in subjects]  # the template changes its row
        began = time.thread_time()
        batch = self._bare.data_collator([self._bare.encode(row, return_length=True) for row in rows])
        return time.thread_time() - began, batch["input_ids"].flatten().tolist()

    def _segment(self, subject: Subject, target: Target) -> Segment:
        prompt = self._encoder.encode_prompt(subject.sample)
        closed = [(target, self._task.closing_weight)]
        return self._encoder.encode_segment(subject.rollout, prompt, closed)

    def _pack(self, segments: list[Segment]) -> Mapping[str, Any]:
        chosen = decide_pack([segment.num_tokens for segment in segments], _PACKING_LENGTH, 0.0, True)
        assert chosen is not None
        return make_pack("bench", [segments[i] for i in chosen], self._encoder, _PACKING_LENGTH).batch


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


def in_turns(
    repeats: int, first: Callable[[], float], second: Callable[[], float]
) -> tuple[list[float], list[float]]:
    """Both by turns, each first every other time, after one of each that does not count."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for repetition in range(repeats + 1):
        pair = [0.0, 0.0]
        for which in (0, 1) if repetition % 2 else (1, 0):
            pair[which] = (first, second)[which]()
        if repetition:
            seconds[0].append(pair[0])
            seconds[1].append(pair[1])
    return seconds


def main(argv: Sequence[str]) -> int:
    settings = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    out = Path(argv[1])
    repeats = int(settings["repeats"])
    bench = StageBench(out.parent)
    found = {
        **_measure_template(bench, settings["objects"], repeats),
        "packs": _measure_packs(bench, settings["samples"], settings["sample_objects"], repeats),
        "matches": _measure_matches(settings["crowd"], repeats),
    }
    out.write_text(json.dumps(found) + "\n", encoding="utf-8")
    return 0


def _measure_template(bench: StageBench, counts: Sequence[int], repeats: int) -> dict[str, Any]:
    subjects = {count: bench.subjects(count) for count in counts}
    for each in subjects.values():
        bench.stage_seconds(each)
        _refuse_other_work(bench, each)
    stages: dict[str, dict[str, list[float]]] = {
        str(count): {stage: [] for stage in STAGES} for count in counts
    }
    for _ in range(repeats):
        for count, each in subjects.items():
            for stage, seconds in bench.stage_seconds(each).items():
                stages[str(count)][stage].append(seconds)
    pairs = {}
    for count, each in subjects.items():
        ours, bare = in_turns(
            repeats, partial(_seconds, bench.ours, each), partial(_seconds, bench.bare, each)
        )
        pairs[str(count)] = {"ours": ours, "bare": bare}
    return {"stages": stages, "pairs": pairs}


def _seconds(
    way: Callable[[Sequence[Subject]], tuple[float, list[int]]], subjects: Sequence[Subject]
) -> float:
    return way(subjects)[0]


def _measure_packs(bench: StageBench, sizes: Sequence[int], num_objects: int, repeats: int) -> dict[str, Any]:
    subjects = bench.subjects(num_objects, max(sizes))
    bench.stage_seconds(subjects)
    found: dict[str, dict[str, list[float]]] = {str(size): {stage: [] for stage in STAGES} for size in sizes}
    for _ in range(repeats):
        for size in sizes:
            for stage, seconds in bench.stage_seconds(subjects[:size]).items():
                found[str(size)][stage].append(seconds * size)
    return found


def _refuse_other_work(bench: StageBench, subjects: Sequence[Subject]) -> None:
    if bench.ours(subjects)[1] != bench.bare(subjects)[1]:
        raise RuntimeError("both ways must give the same tokens, else they are no pair; they do not")


def _measure_matches(num_objects: int, repeats: int) -> dict[str, Any]:
    found = {}
    for kind in AnswerKind:
        crowds = [make_crowd(num_objects, kind, number) for number in range(NUM_SAMPLES)]
        boxes = [([box for _, box in crowd.answer], [box for _, box in crowd.truth]) for crowd in crowds]
        ours, bare = in_turns(
            repeats, partial(_seconds_of, boxes, _match), partial(_seconds_of, boxes, bare_match)
        )
        found[kind.value] = {"ours": ours, "bare": bare}
    return found


def _seconds_of(boxes: Sequence[tuple[Boxes, Boxes]], call: Callable[[Boxes, Boxes], object]) -> float:
    began = time.thread_time()
    for predicted, true in boxes:
        call(predicted, true)
    return (time.thread_time() - began) / len(boxes)


def _match(predicted: Boxes, true: Boxes) -> object:
    return match_objects(predicted, true, **_matching_options())


def _matching_options() -> dict[str, Any]:
    """Those of boxes without labels."""
    others = ("same_label", "max_distance")
    return {name: value for name, value in asdict(_SETTINGS).items() if name not in others}


@contextmanager
def _adding_to(spent: dict[str, float], stage: str) -> Iterator[None]:
    began = time.thread_time()
    yield
    spent[stage] += time.thread_time() - began


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
