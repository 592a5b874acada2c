"""The manifest without weights equals what the learner exports with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from live_server import MODEL

from swift_stage2.weights.export import WeightExport


@pytest.mark.parametrize("tied", [True, False])
def test_it_is_the_learners_manifest_in_the_engines_dtype(tmp_path: Path, tied: bool) -> None:
    from swift_stage2.demo import tiny_template
    from swift_stage2.rollout_server.swift_generator import checkpoint_manifest

    tiny_template.register()
    model_dir = tmp_path / "model"
    shutil.copytree(MODEL, model_dir)
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = tied
    (model_dir / "config.json").write_text(json.dumps(config), encoding="utf-8")

    from transformers import Qwen2_5_VLForConditionalGeneration

    learner = Qwen2_5_VLForConditionalGeneration.from_pretrained(model_dir, dtype=torch.float32)
    wanted = {spec.name: spec.shape for spec in WeightExport(learner).manifest()}
    assert ("lm_head.weight" in wanted) is not tied
    told = checkpoint_manifest(str(model_dir), tiny_template.TINY_VL, torch.bfloat16)
    assert {spec.name: spec.shape for spec in told} == wanted
    assert {spec.dtype for spec in told} == {"bfloat16"}
