"""What the jobs train on and what the foreign server serves: scenes, one of them poisonous, and another model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from swift_stage2.bench.faults.training_job import NUM_RANKS
from swift_stage2.channel_b.detection import DetectionTask
from swift_stage2.channel_b.sample_source import SampleSource
from swift_stage2.config import Stage2Config
from swift_stage2.config.binding import bind
from swift_stage2.demo.demo_config import STAGE1
from swift_stage2.demo.grounding_dataset import write_dataset
from swift_stage2.demo.scenes import SceneKind, Split

NUM_SCENES = 1024
POISON_POSITION = 45
"""Where rank 0's stream meets the poisonous row: late enough for the job to be warm."""
_SEED = 0


def write_rows(directory: Path) -> Path:
    """Sound scenes; returns their JSONL."""
    return write_dataset(directory / "scenes", SceneKind.SHAPES, NUM_SCENES, Split.TRAIN, _SEED)


def write_poisonous_rows(rows: Path) -> Path:
    """The same scenes, but that one row's image is no image; returns another JSONL beside the first."""
    lines = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    task = DetectionTask.from_config(bind(Stage2Config, {"stage2_ab": {"schedule": {"b_ratio": 0}}}))
    source = SampleSource(lines, task, rank=0, world_size=NUM_RANKS, seed=_SEED)
    index = source.draw(POISON_POSITION + 1)[-1].key.index
    image = rows.parent / "poison.png"
    whole = Path(lines[index]["images"][0]).read_bytes()
    image.write_bytes(whole[: len(whole) // 2])  # its head is sound, so that no check at the start refuses it
    lines[index]["images"] = [str(image)]
    poisoned = rows.parent / "poisoned_rows.jsonl"
    poisoned.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return poisoned


def write_foreign_model(directory: Path) -> Path:
    """An untrained model of the same family with another width; returns its directory."""
    from swift_stage2.compat.torchvision_on_cpu import declare_operators

    declare_operators()  # before transformers imports torchvision
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    foreign = directory / "foreign_model"
    shutil.copytree(STAGE1, foreign, ignore=shutil.ignore_patterns("*.safetensors"))
    config: Any = Qwen2_5_VLConfig.from_pretrained(STAGE1)
    config.text_config.intermediate_size //= 2
    torch.manual_seed(_SEED)
    model: Any = Qwen2_5_VLForConditionalGeneration(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(foreign)
    return foreign
