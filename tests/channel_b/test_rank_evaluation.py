"""This rank's part of an evaluation: real encoder and task; the server side is a stand-in, or a real HTTP server."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import rollout_batch
from as_sampled import AsSampled
from fake_rollout_server import FakeRolloutServer
from real_model import Rows, make_encoder, make_task, rollout_of
from rollout_batch import Requests

from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.preprocessing import Preprocessor
from swift_stage2.channel_b.rollouts import RequestSettings, RolloutClient
from swift_stage2.channel_b.task import Task
from swift_stage2.columns import LOG_PROBS
from swift_stage2.config import DecodingConfig
from swift_stage2.evaluation import MAX_ASKS, RankEvaluation
from swift_stage2.records import (
    BatchOutcome,
    EvaluationCounts,
    MatchQuality,
    Rollout,
    Sample,
    SampleKey,
    Target,
)

PATIENCE_S = 60.0
NUM_SAMPLES = 9  # of the 12 rows
DECODING = DecodingConfig(temperature=0.7, top_p=0.9, max_new_tokens=64)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return make_encoder()


class Recorder:
    def __init__(self) -> None:
        self.posts: list[tuple[str, int]] = []

    def sent(self, keys: Sequence[SampleKey], *, server: str, seed: int, version: int) -> None:
        self.posts.append((server, version))

    def finished(self, keys: Sequence[SampleKey], *, server: str, end: str, seconds: float) -> None: ...


class StandInClient:
    """Answers as told; by default with the ground truth, sampled under ``version``."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.version = 5
        self.answer: Callable[[Sequence[Sample]], BatchOutcome] = self.answer_all
        self.asked: list[list[int]] = []
        self.settings: list[RequestSettings | None] = []
        self._finished: deque[BatchOutcome] = deque()

    def submit(
        self, samples: Sequence[Sample], requests: Requests, settings: RequestSettings | None = None
    ) -> None:
        assert len(samples) == len(requests) > 0
        self.asked.append([sample.key.index for sample in samples])
        self.settings.append(settings)
        self._finished.append(replace(self.answer(samples), settings=settings))

    def next_finished(self, timeout_s: float) -> BatchOutcome | None:
        return self._finished.popleft() if self._finished else None

    def answer_all(self, samples: Sequence[Sample]) -> BatchOutcome:
        return BatchOutcome(rollouts=tuple(map(self.rollout, samples)), num_posts=1)

    def rollout(self, sample: Sample) -> Rollout:
        text = self._encoder.answer_of(sample)
        return rollout_of(sample, text, self._encoder.encode_prompt(sample).token_ids, version=self.version)


class Scene:
    def __init__(
        self,
        encoder: Encoder,
        rows: Sequence[Any],
        *,
        rank: int = 0,
        client: Any = None,
        task: Task | None = None,
        **settings: Any,
    ) -> None:
        task = make_task() if task is None else task
        self.client: Any = StandInClient(encoder) if client is None else client
        defaults: dict[str, Any] = {"num_samples": NUM_SAMPLES, "world_size": 2}
        self.part = RankEvaluation(
            rows,
            task,
            rank=rank,
            client=self.client,
            make_request=encoder.request,
            preprocessor=Preprocessor(encoder, task),
            decoding=DECODING,
            **(defaults | settings),
        )

    def ask(self, most: int) -> bool:
        """Asks, and takes all that comes of it; False when nothing does."""
        missing = self.part.ask(most)
        before = self._num_ended()
        while missing:
            outcome = self.client.next_finished(PATIENCE_S)
            assert outcome is not None
            missing -= len(outcome.samples)
            self.part.take(outcome)
        return self._num_ended() > before

    def _num_ended(self) -> int:
        progress = self.part._progress
        return progress.counts.num_answered + progress.counts.num_failed if progress else 0


MakeScene = Callable[..., Scene]


@pytest.fixture
def make_scene(encoder: Encoder, rows: Rows) -> MakeScene:
    return partial(Scene, encoder, rows)


# --- what is asked -----------------------------------------------------------------------------------


def test_ranks_share_the_first_rows_and_ask_them_greedily_under_one_version(make_scene: MakeScene) -> None:
    asked = []
    for rank in (0, 1):
        scene = make_scene(rank=rank)
        scene.part.begin(5)
        while scene.ask(3):
            pass
        assert scene.part.is_finished
        assert {each.only_version for each in scene.client.settings} == {5}
        assert {each.decoding for each in scene.client.settings} == {replace(DECODING, temperature=0.0)}
        asked.append([index for batch in scene.client.asked for index in batch])
    assert asked == [[0, 2, 4, 6, 8], [1, 3, 5, 7]]


def test_an_evaluation_asks_for_the_columns_without_which_its_task_corrects_nothing(
    make_scene: MakeScene,
) -> None:
    for log_probs in (None, ()):
        scene = make_scene(task=AsSampled())
        client = scene.client
        client.answer = lambda samples, client=client, log_probs=log_probs: BatchOutcome(
            rollouts=tuple(replace(client.rollout(sample), log_probs=log_probs) for sample in samples),
            num_posts=1,
        )
        scene.part.begin(5)
        scene.ask(2)
        assert {each.columns for each in client.settings} == {(LOG_PROBS,)}
        counts = scene.part.end()
        assert (counts.num_answered, counts.num_failed) == ((0, 2) if log_probs is None else (2, 0))


# --- what is counted ---------------------------------------------------------------------------------


def test_every_answer_that_is_counted_leaves_its_row_and_so_does_every_failure(
    encoder: Encoder, rows: Rows, make_scene: MakeScene
) -> None:
    scene = make_scene()

    def scored(rollout: Rollout) -> Rollout:
        ids = encoder.tokenise(rollout.text)[0] + encoder.closing_token_ids
        return replace(rollout, token_ids=ids, log_probs=(-0.5,) * len(ids))

    scene.client.answer = lambda samples: BatchOutcome(
        rollouts=tuple(scored(scene.client.rollout(sample)) for sample in samples[1:]),
        quarantined=((samples[0], "poison"),),
        num_posts=1,
    )
    scene.part.begin(5)
    assert scene.part._progress is not None
    assert scene.part._progress.settings.wished == (LOG_PROBS,)
    assert scene.ask(99)
    scene.part.end()
    lines = {line["row"]: line for line in map(json.loads, scene.part.lines.splitlines())}
    assert lines.keys() == {0, 2, 4, 6, 8}
    assert (lines[0]["finish_reason"], lines[0]["objects"]) == ("failed", {"ref": [], "bbox": []})
    for number in (2, 4, 6, 8):
        line, objects = lines[number], rows[number]["objects"]
        assert (line["image"], line["finish_reason"]) == (rows[number]["images"][0], "stop")
        assert line["truth"] == {"ref": objects["ref"], "bbox": objects["bbox"]}
        assert line["objects"]["ref"] == objects["ref"]
        values = [value for each in line["log_probs"] for part in each.values() for value in part]
        assert (len(line["log_probs"]), set(values)) == (len(objects["ref"]), {-0.5})
        for found, true in zip(line["objects"]["bbox"], objects["bbox"], strict=True):
            assert found == pytest.approx(true, abs=0.002 * max(line["width"], line["height"]) + 1)


def test_an_answer_of_another_version_is_not_counted_and_asked_again(make_scene: MakeScene) -> None:
    scene = make_scene()
    scene.part.begin(5)
    scene.client.version = 6
    assert not scene.ask(2)
    scene.client.version = 5
    assert scene.ask(99)
    assert scene.client.asked == [[0, 2], [4, 6, 8, 0, 2]], "again comes last"
    assert scene.part.end().num_answered == 5


def test_what_is_in_flight_counts_although_no_more_may_be_asked(make_scene: MakeScene) -> None:
    scene = make_scene()

    def cut_meanwhile(samples: Sequence[Sample]) -> BatchOutcome:
        scene.part.ask_no_more()
        assert not scene.part.is_finished, "it waits for this batch"
        answered = BatchOutcome(rollouts=(scene.client.rollout(samples[0]),), returned=tuple(samples[1:]))
        return replace(answered, num_posts=1)

    scene.client.answer = cut_meanwhile
    scene.part.begin(5)
    assert scene.ask(3)
    assert scene.part.is_finished
    assert not scene.ask(3)
    assert scene.client.asked == [[0, 2, 4]]
    counts = scene.part.end()
    assert (counts.num_wanted, counts.num_answered, counts.num_failed) == (5, 1, 0)
    assert not counts.is_whole
    scene.part.begin(6)
    assert not scene.part.is_finished, "the next one asks again"


def test_what_is_not_answered_is_asked_again_and_fails_after_so_many_requests(make_scene: MakeScene) -> None:
    scene = make_scene()
    scene.client.answer = lambda samples: BatchOutcome(returned=tuple(samples), num_posts=1)
    scene.part.begin(5)
    worked = [scene.ask(99) for _ in range(MAX_ASKS)]
    assert worked == [False] * (MAX_ASKS - 1) + [True], (
        "a server that returns everything is not asked without pause"
    )
    assert scene.part.is_finished
    assert scene.part.end() == EvaluationCounts(num_wanted=5, num_failed=5)
    assert failures_of(scene.part) == dict.fromkeys((0, 2, 4, 6, 8), "no answer to 3 requests")


def test_rows_that_cannot_be_used_fail_and_the_others_count(encoder: Encoder, rows: Rows) -> None:
    spoilt = [*rows[:2], {**rows[2], "images": ["/nowhere/a.png"]}, *rows[3:]]
    scene = Scene(encoder, spoilt)

    def misbehave(samples: Sequence[Sample]) -> BatchOutcome:
        poisonous, other_prompt, *good = samples
        rollouts = [rollout_of(other_prompt, "[]", (1, 2), version=5), *map(scene.client.rollout, good)]
        return BatchOutcome(rollouts=tuple(rollouts), quarantined=((poisonous, "poison"),), num_posts=1)

    scene.client.answer = misbehave
    scene.part.begin(5)
    assert scene.ask(99)
    assert scene.part.is_finished
    counts = scene.part.end()
    assert (counts.num_wanted, counts.num_answered, counts.num_failed) == (5, 2, 3)
    failures = failures_of(scene.part)
    assert failures.keys() == {0, 2, 4}
    assert "poison" in failures[0]
    assert "readable file" in failures[2]
    assert "the server's prompt must equal" in failures[4]


def failures_of(part: RankEvaluation) -> dict[int, str]:
    """Of the evaluation that ended last, by row; each once."""
    told = [json.loads(line) for line in part.lines.splitlines()]
    failed = [(row["row"], row["failure"]) for row in told if "failure" in row]
    assert len(dict(failed)) == len(failed)
    return dict(failed)


def _target(quality: MatchQuality, metrics: dict[str, tuple[float, float]]) -> Target:
    return Target("", (), (), quality, metrics=metrics)


def test_counts_add_up_over_ranks() -> None:
    nothing = {"exact": (0.0, 0.0), "other": (0.0, 0.0)}
    one = EvaluationCounts(num_wanted=3, metrics=nothing).with_answer(
        _target(MatchQuality(4, 5, 2, 1.5, 0, 1), {"exact": (1, 2)})
    )
    two = EvaluationCounts(num_wanted=2, num_failed=1, metrics=nothing).with_answer(
        _target(MatchQuality(1, 1, 1, 0.25, 0, 0), {"exact": (0.5, 1)})
    )
    both = EvaluationCounts.of_ranks([one.to_json(), two.to_json()])
    own = {"exact": (1.5, 3.0), "other": (0.0, 0.0)}
    assert both == EvaluationCounts(5, 2, 1, 1, 5, 6, 3, 1.75, own)
    assert both.ratios == {
        "precision": 3 / 5, "recall": 3 / 6, "f1": 6 / 11, "mean_iou": 1.75 / 3, "truncated_ratio": 0.5,
        "exact": 0.5,
    }  # fmt: skip
    assert EvaluationCounts().ratios == {}


# --- through the real client -------------------------------------------------------------------------


def make_client(server: FakeRolloutServer, events: Recorder) -> RolloutClient:
    client = rollout_batch.make_client(
        server.url,
        decoding=DECODING,
        max_inflight_per_server=99,
        observer=events,
    )
    rollout_batch.prove(client, version=5)
    return client


def test_posts_of_an_evaluation_are_greedy_and_told_apart_from_those_of_training(
    encoder: Encoder, rows: Rows, make_scene: MakeScene
) -> None:
    training = Recorder()
    with FakeRolloutServer() as server, make_client(server, training) as client:
        scene = make_scene(client=client)
        scene.part.begin(5)
        assert scene.ask(2)  # the fake server's prompt is not the learner's, so that both fail
        (call,) = server.calls
        assert call.config["temperature"] == 0.0
        assert call.config["top_p"] == DECODING.top_p
        assert call.config["max_tokens"] == DECODING.max_new_tokens
        assert training.posts == []
        sample = Sample(SampleKey(0, 0, 0), rows[0])
        rollout_batch.generate(client, [sample], [encoder.request(sample)])
        assert server.calls[-1].config["temperature"] == DECODING.temperature
        assert training.posts == [(server.url, 5)]
