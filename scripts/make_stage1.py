"""Makes the demo's stage-1 checkpoint from nothing: ``python -m scripts.make_stage1 OUT_DIR``.

Plain supervised training on three quarters shapes and one quarter digits, in the prompt format that the
ms-swift template gives: first with objects in reading order, which is easier to learn, then in shuffled
order, as real data has them. Needs six to twenty minutes on two cores; every checkpoint on the way is a
complete model directory.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.tiny_model import (
    IMAGE_TOKEN_ID,
    PAD_TOKEN_ID,
    build_model,
    build_processor,
    build_tokenizer,
    save_model,
)
from swift_stage2.channel_b.parsing import TrueObjects, parse_rollout
from swift_stage2.data.prediction import Prediction, in_pixels
from swift_stage2.data.scores import DetectionScores, detection_data
from swift_stage2.demo.scenes import (
    Scene,
    SceneKind,
    Split,
    answer_text,
    grounding_row,
    make_scene,
    scene_seed,
)
from swift_stage2.demo.tiny_template import TINY_VL, load_tiny_model, tiny_template

BATCH_SIZE = 32
PEAK_LEARNING_RATE = 1.5e-3
WARMUP_STEPS = 100
DIGITS_EVERY = 4
ORDERED_SHARE = 0.7  # of the steps, with objects in reading order
IGNORED_LABEL = -100
# Scenes of stage 1 lie far from those of data sets, whose streams are small seeds.
STAGE1_STREAM = 1 << 20


class Stage1:
    """A model with its processor, and supervised batches for it, made without a call of the template for each scene.

    Images are 112 x 112, the one size for which the token ids around an answer are read off the ms-swift template.
    """

    def __init__(self, model: Any, processor: Any) -> None:
        self.model = model
        self.processor = processor
        self._prompt, self._closing = _ids_around_answers(tiny_template(model, processor))

    def batch(self, scenes: Sequence[Scene]) -> dict[str, torch.Tensor]:
        """Model inputs of (len(scenes), longest) token ids, right-padded; only answers are supervised."""
        prompt, tokenizer = self._prompt, self.processor.tokenizer
        answers = [tokenizer(answer_text(scene.objects))["input_ids"] + self._closing for scene in scenes]
        ends = [len(prompt) + len(answer) for answer in answers]
        ids = torch.full((len(scenes), max(ends)), PAD_TOKEN_ID)
        labels = torch.full_like(ids, IGNORED_LABEL)
        for row, (answer, end) in enumerate(zip(answers, ends, strict=True)):
            ids[row, :end] = torch.tensor(prompt + answer)
            labels[row, len(prompt) : end] = torch.tensor(answer)
        mask = (torch.arange(max(ends)) < torch.tensor(ends)[:, None]).long()
        images = [scene.image for scene in scenes]
        vision = self.processor.image_processor(images=images, return_tensors="pt", do_resize=False)
        types = (ids == IMAGE_TOKEN_ID).long()
        inputs = {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": types, "labels": labels}
        return {**inputs, **vision}


def evaluate(directory: Path, kind: SceneKind, num_scenes: int) -> dict[str, float]:
    """Scores of a checkpoint's greedy answers to a fixed set of scenes, as ``swift-stage2 evaluate`` defines them."""
    from swift.infer_engine import (  # after torchvision's stand-ins
        InferRequest,
        RequestConfig,
        TransformersEngine,
    )

    engine = TransformersEngine(
        str(directory),
        model_type=TINY_VL,
        template_type=TINY_VL,
        torch_dtype=torch.float32,
        device_map="cpu",
        max_batch_size=2 * BATCH_SIZE,
    )
    seeds = [scene_seed(Split.HELD_OUT, index, stream=STAGE1_STREAM) for index in range(num_scenes)]
    scenes = [make_scene(kind, seed) for seed in seeds]
    truths = [TrueObjects(*zip(*scene.objects, strict=True)) for scene in scenes]
    asked = [grounding_row(scene.objects, "")["messages"][:1] for scene in scenes]
    replies = engine.infer(
        [InferRequest(each, images=[scene.image]) for each, scene in zip(asked, scenes, strict=True)],
        RequestConfig(max_tokens=128, temperature=0.0),
        use_tqdm=False,
    )
    answers = [parse_rollout(reply.choices[0].message.content).counted for reply in replies]
    found = [
        Prediction(
            image="", width=1, height=1, objects=in_pixels([(o.label, o.box) for o in answer], (1, 1), (1, 1))
        )
        for answer in answers
    ]
    return DetectionScores(detection_data(truths, found)).points()


def _ids_around_answers(template: Any) -> tuple[list[int], list[int]]:
    """Token ids of the prompt, and of what closes an answer."""
    scene = make_scene(SceneKind.SHAPES, scene_seed(Split.TRAIN, 0, stream=STAGE1_STREAM))
    encoding = template.encode({**grounding_row(scene.objects, ""), "images": [scene.image]})
    ids = list(encoding["input_ids"])
    start = next(i for i, label in enumerate(encoding["labels"]) if label != IGNORED_LABEL)
    answer = template.tokenizer(answer_text(scene.objects))["input_ids"]
    if ids[start : start + len(answer)] != answer:
        rendered = template.tokenizer.decode(ids[start:])
        raise RuntimeError(f"the template must render answers as answer_text does, got rendered={rendered!r}")
    return ids[:start], ids[start + len(answer) :]


def new_stage1(seed: int) -> Stage1:
    """An untrained one; it goes through a directory, as every later use of the model does."""
    tokenizer = build_tokenizer()
    model = build_model(seed, vocab_size=len(tokenizer))
    with tempfile.TemporaryDirectory() as directory:
        save_model(model, build_processor(tokenizer), directory)
        return Stage1(*load_tiny_model(directory))


def training_scenes(step: int, *, ordered: bool) -> list[Scene]:
    """The batch of one step, the same whenever it is asked for; ``ordered`` lists objects top to bottom."""
    scenes = []
    for index in range(step * BATCH_SIZE, (step + 1) * BATCH_SIZE):
        kind = SceneKind.DIGITS if index % DIGITS_EVERY == 0 else SceneKind.SHAPES
        scene = make_scene(kind, scene_seed(Split.TRAIN, index, stream=STAGE1_STREAM))
        if ordered:
            objects = sorted(scene.objects, key=lambda item: (item[1][1], item[1][0]))
            scene = replace(scene, objects=tuple(objects))
        scenes.append(scene)
    return scenes


def train(
    stage1: Stage1, out: Path, *, num_steps: int, save_every_steps: int, num_eval_scenes: int, seed: int
) -> None:
    """Trains for ``num_steps`` and writes ``out/step-N`` and a line of ``out/scores.jsonl`` on the way."""
    optimizer = torch.optim.AdamW(
        stage1.model.parameters(), lr=PEAK_LEARNING_RATE, weight_decay=0.01, betas=(0.9, 0.98)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: _learning_rate_factor(step, num_steps)
    )
    stage1.model.train()
    started = time.monotonic()
    for step in range(num_steps):
        scenes = training_scenes(step, ordered=step < ORDERED_SHARE * num_steps)
        loss = stage1.model(**stage1.batch(scenes)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(stage1.model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            elapsed_s = time.monotonic() - started
            print(f"step={step} loss={loss.item():.3f} elapsed_s={elapsed_s:.0f}", flush=True)
        if (step + 1) % save_every_steps == 0 or step + 1 == num_steps:
            directory = out / f"step-{step + 1:05d}"
            save_model(stage1.model, stage1.processor, directory)
            scores = {kind: evaluate(directory, kind, num_eval_scenes) for kind in SceneKind}
            f1 = {f"f1_{kind}": round(score.get("eval/f1", 0.0), 4) for kind, score in scores.items()}
            line = json.dumps({"step": step + 1, **f1})
            print(line, flush=True)
            with open(out / "scores.jsonl", "a", encoding="utf-8") as file:
                file.write(line + "\n")
            (directory / "README.md").write_text(
                _readme(step + 1, num_steps, seed, scores, num_eval_scenes), encoding="utf-8"
            )


def _learning_rate_factor(step: int, num_steps: int) -> float:
    """Linear warm-up, then a cosine down to one twentieth."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * max(0.05, 0.5 * (1 + math.cos(math.pi * step / num_steps)))


def _readme(
    step: int, num_steps: int, seed: int, scores: dict[SceneKind, dict[str, float]], num_scenes: int
) -> str:
    rows = "".join(
        f"| {kind} | {num_scenes} |"
        + "".join(
            f" {score.get(f'eval/{name}', 0.0):.3f} |" for name in ("f1", "precision", "recall", "mean_iou")
        )
        + "\n"
        for kind, score in scores.items()
    )
    return f"""# Stage-1 checkpoint of the demo

A Qwen2.5-VL of 1.66 million parameters in float32, trained from nothing on seeded scenes of coloured
shapes (three quarters) and of handwritten digits (one quarter, scikit-learn's `load_digits`):

    python -m scripts.make_stage1 OUT_DIR --steps {num_steps} --seed {seed}

This is `OUT_DIR/step-{step:05d}`: step {step} of {num_steps}, batch {BATCH_SIZE}, AdamW with a peak
learning rate of {PEAK_LEARNING_RATE} and cosine decay. In the first {ORDERED_SHARE:.0%} of the steps the objects
stand in reading order, then in shuffled order. It is kept short of what the model can learn, so that
stage 2 has room.

Greedy answers on held-out scenes, labels included, at IoU 0.5:

| scenes | n | F1 | precision | recall | mean IoU of the hits |
| --- | --- | --- | --- | --- | --- |
{rows}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--save-every-steps", type=int, default=250)
    parser.add_argument("--eval-scenes", type=int, default=256, help="held-out scenes of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.out.mkdir(parents=True, exist_ok=True)
    train(
        new_stage1(arguments.seed),
        arguments.out,
        num_steps=arguments.steps,
        save_every_steps=arguments.save_every_steps,
        num_eval_scenes=arguments.eval_scenes,
        seed=arguments.seed,
    )


if __name__ == "__main__":
    main()
