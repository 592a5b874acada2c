"""Rollouts that are cut and asked for again: drawn scenes, drawn cuts, and an oracle in plain Hugging Face."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from live_server import MODEL, RunningServer, base64_png, text_request
from PIL import Image, ImageDraw

from swift_stage2.servers.infer_wire import PREFIX, Completion

# Every side is a multiple of 28, so that nothing is resized on any side.
_SIZES = ((112, 112), (56, 84), (140, 56), (168, 168), (196, 28))
_TEXTS = ("find", "hello", "name all objects", "square red 12")
# Ids that stand for images and videos: random weights say them, the oracle looks for their pixels.
MEDIA_IDS = {6, 7}
# By how much two logits of one token may differ between a batch of whole answers and one of their rests.
TOLERANCE = 1e-3
_LOG_PROB_TOLERANCE = 1e-4  # float32
BATCH = 16
# A prefix that no answer has, options of its call, and the cause of the refusal.
REFUSED = [
    ([600_000], {}, r"prefix_token_ids\[0\]=600000"),
    ([270, 2], {}, r"ends an answer, got prefix_token_ids\[1\]=2 "),
    ([270, 6, 270], {}, r"stands for an image.*prefix_token_ids\[1\]=6 "),
    ([270] * 8, {}, "shorter than max_tokens.*num_prefix=8 max_tokens=8"),
    ([-1], {}, "prefix_token_ids"),
    ([True], {}, "prefix_token_ids"),
    ([2**31], {}, "prefix_token_ids"),
    ("270", {}, "prefix_token_ids"),
    (0, {}, "prefix_token_ids"),
]
GREEDY_LIVELY = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.2, "max_tokens": 64}


@dataclass(frozen=True)
class Scene:
    """One request: a text and no, one or several images."""

    text: str
    images: tuple[Image.Image, ...]

    def request(self, prefix: Sequence[int] = ()) -> dict[str, Any]:
        message = {"role": "user", "content": "<image>" * len(self.images) + self.text}
        images = [base64_png(image) for image in self.images]
        return {"messages": [message], "images": images, **({PREFIX: list(prefix)} if prefix else {})}


def draw_scenes(number: int, rng: random.Random) -> list[Scene]:
    return [_scene(rng, rng.choice((0, 1, 1, 2, 3))) for _ in range(number)]


def _scene(rng: random.Random, num_images: int) -> Scene:
    images = []
    for _ in range(num_images):
        size = rng.choice(_SIZES)
        image = Image.new("RGB", size, (rng.randrange(256), rng.randrange(256), 250))
        left, top = rng.randrange(size[0] - 20), rng.randrange(size[1] - 20)
        ImageDraw.Draw(image).rectangle((left, top, left + 18, top + 18), fill=(rng.randrange(256), 10, 10))
        images.append(image)
    return Scene(rng.choice(_TEXTS), tuple(images))


def draw_cuts(answers: Sequence[Completion], rng: random.Random) -> list[int]:
    """How many tokens each had when it was cut: none, all but one, or any number between."""
    kinds = [rng.randrange(4) for _ in answers]
    ends = [len(answer.token_ids) - 1 for answer in answers]
    return [
        (0, end, rng.randint(0, end), rng.randint(0, end))[kind]
        for kind, end in zip(kinds, ends, strict=True)
    ]


class Oracle:
    """The learner's model, asked token by token what it thinks; no server code and no cache."""

    def __init__(self, model: torch.nn.Module) -> None:
        from transformers import AutoImageProcessor

        self._model: Any = model
        self._processor = AutoImageProcessor.from_pretrained(MODEL)

    @torch.no_grad()
    def logits(self, scene: Scene, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """float32, one row for every token of ``answer`` and for the one behind it."""
        ids = torch.tensor([[*prompt, *answer]])
        inputs: dict[str, Any] = {"input_ids": ids}
        if scene.images:
            inputs |= dict(self._processor(images=list(scene.images), do_resize=False, return_tensors="pt"))
            is_image = (ids == self._model.config.image_token_id).long()
            is_image[:, len(prompt) :] = 0
            inputs["mm_token_type_ids"] = is_image
        logits: torch.Tensor = self._model(**inputs).logits[0, len(prompt) - 1 :]
        return logits.float()

    def gap(self, scene: Scene, prompt: Sequence[int], answer: Sequence[int], penalty: float = 1.0) -> float:
        """By how much the best token behind ``answer`` beats the second best, greedy with a repetition penalty."""
        scores = self.logits(scene, prompt, answer)[-1]
        seen = torch.tensor(sorted({*prompt, *answer}))
        seen_scores = scores[seen]
        scores[seen] = torch.where(seen_scores < 0, seen_scores * penalty, seen_scores / penalty)
        best, second = scores.topk(2).values.tolist()
        return best - second


@dataclass
class Comparison:
    """Resumed rollouts beside uninterrupted ones; one that differs must have been undecided where it first does."""

    oracle: Oracle
    tolerance: float
    num_compared: int = 0
    gaps: list[float] = field(default_factory=list)

    def add(self, scene: Scene, whole: Completion, so_far: Sequence[int], rest: Completion) -> None:
        assert rest.prompt_token_ids == whole.prompt_token_ids
        assert rest.images_size == whole.images_size
        self.num_compared += 1
        resumed = (*so_far, *rest.token_ids)
        if resumed == whole.token_ids:
            assert (rest.text, rest.finish_reason) == (whole.text, whole.finish_reason)
            return
        pairs = enumerate(zip(whole.token_ids, resumed, strict=False))
        place = next((i for i, (one, other) in pairs if one != other), None)
        assert place is not None, f"one ended before the other: {len(whole.token_ids)}, {len(resumed)} tokens"
        penalty = float(GREEDY_LIVELY["repetition_penalty"])
        gap = self.oracle.gap(scene, whole.prompt_token_ids, resumed[:place], penalty)
        assert gap <= self.tolerance, f"token {place} differs, {len(so_far)} were given, gap {gap}"
        self.gaps.append(gap)


def resume(
    server: RunningServer, scenes: Sequence[Scene], prefixes: Sequence[Sequence[int]], **options: Any
) -> list[Completion]:
    asked = [scene.request(prefix) for scene, prefix in zip(scenes, prefixes, strict=True)]
    return server.infer(asked, **{**GREEDY_LIVELY, **options})


def compare_cut(server: RunningServer, comparison: Comparison, num_scenes: int, rng: random.Random) -> None:
    """Drawn scenes in one call, uninterrupted and cut at drawn positions."""
    scenes = draw_scenes(num_scenes, rng)
    wholes = resume(server, scenes, [()] * num_scenes)
    cuts = draw_cuts(wholes, rng)
    prefixes = [whole.token_ids[:cut] for whole, cut in zip(wholes, cuts, strict=True)]
    rests = resume(server, scenes, prefixes)
    for scene, whole, prefix, rest in zip(scenes, wholes, prefixes, rests, strict=True):
        comparison.add(scene, whole, prefix, rest)


def compare_aborted(
    server: RunningServer, comparison: Comparison, scenes: Sequence[Scene], answers: Sequence[Completion]
) -> int:
    """Resumes those answers that an abort has cut; returns how many had begun."""
    cut = [
        (scene, each) for scene, each in zip(scenes, answers, strict=True) if each.finish_reason == "abort"
    ]
    if not cut:  # all were finished before the abort
        return 0
    wholes = resume(server, [scene for scene, _ in cut], [()] * len(cut))
    rests = resume(server, [scene for scene, _ in cut], [each.token_ids for _, each in cut])
    for (scene, each), whole, rest in zip(cut, wholes, rests, strict=True):
        comparison.add(scene, whole, each.token_ids, rest)
    return sum(bool(each.token_ids) for _, each in cut)


def abort(server: RunningServer) -> int:
    """Has the engine end all that it is asked for, as an install may; returns how many that were."""
    return int(server.engine.abort())


def log_probs_agree(
    oracle: Oracle, scene: Scene, prefix: Sequence[int], rest: Completion, temperature: float = 1.0
) -> bool:
    logits = oracle.logits(scene, rest.prompt_token_ids, (*prefix, *rest.token_ids))
    learners = torch.log_softmax(logits[len(prefix) : -1] / temperature, -1)
    learners = learners.gather(1, torch.tensor([rest.token_ids]).T)[:, 0]
    assert rest.log_probs is not None
    assert len(rest.log_probs) == len(rest.token_ids)
    difference = float((torch.tensor(rest.log_probs) - learners).abs().max())
    print(f"log-probabilities differ by {difference:.1e}")
    return difference < _LOG_PROB_TOLERANCE


def require_refusal(server: RunningServer, prefix: Any, options: dict[str, Any], cause: str) -> None:
    """The second request of a call has the prefix: the call fails, and names it."""
    reply = server.post_infer([text_request(), {**text_request(), PREFIX: prefix}], **options)
    assert reply.status_code == 500
    (failure,) = reply.json()["failures"]
    assert failure["index"] == 1
    assert re.search(cause, failure["cause"]), failure["cause"]
