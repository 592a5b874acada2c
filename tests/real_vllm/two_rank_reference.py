"""One of two ranks whose adapter is held by the model under it, partitioned by ZeRO-3; started by ``test_zero.py``.

Each takes one micro_step: rank 0 of sampled tokens, rank 1 of a corrected answer alone.
"""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from deepspeed.utils import safe_get_full_grad
from detection_task import make_task
from real_model import make_encoder, objects_of, read_rows, rollout_of, sample_of
from sft_run import our_trainer

from swift_stage2.channel_b.answer_templates import standard_template
from swift_stage2.channel_b.dialects import DIALECTS
from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.preprocessing import make_segment
from swift_stage2.collectives import leave_job
from swift_stage2.compat import start_communication
from swift_stage2.config import Stage2Config
from swift_stage2.config.binding import bind
from swift_stage2.training.losses import POLICY_SUMS

PARTITIONED = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "fp16": {"enabled": False},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 64},
}
_ADVANTAGES = ((0.75,), (0.0, 3.0))  # sampled tokens; a corrected answer alone


def make_trainer(rows_file: Path, output: Path, **swift: Any) -> Any:
    """After a step that has set it up and changed nothing."""
    channel_b = {"grpo": {"kl_weight": 0.3}}
    stage2_ab = {"schedule": {"b_ratio": 0}, "objective": "mixed", "channel_b": channel_b}
    rollout = {"decoding": {"temperature": 1.0}}
    config = bind(Stage2Config, {"stage2_ab": stage2_ab, "rollout": rollout})
    swift |= {"tuner_type": "lora", "lora_dropout": 0, "learning_rate": 0.0, "fp16": False}
    swift |= {"gradient_checkpointing": True, "per_device_train_batch_size": 1}
    trainer = our_trainer(rows_file, output, config, **swift)
    trainer.train()
    return trainer


def pack(number: int, rows_file: Path, encoder: Encoder) -> dict[str, Any]:
    sample = sample_of(read_rows(rows_file)[number], number)
    text = standard_template(DIALECTS["object_list"]).write([objects_of(encoder, sample)[0]] * 2)
    prompt, (ids, _) = encoder.encode_prompt(sample), encoder.tokenise(text)
    rollout = replace(
        rollout_of(sample, text, prompt.token_ids),
        token_ids=ids,
        log_probs=(-1.5,) * len(ids),
        advantages=_ADVANTAGES[number],
    )
    return encoder.collate([make_segment(rollout, prompt, encoder, make_task())[0]])


def take_step(trainer: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Its loss, the divergence of its tokens, and the gradients of an adapter whose weights are the same everywhere."""
    generator = torch.Generator().manual_seed(0)
    adapter = {name: each for name, each in trainer.model.named_parameters() if each.requires_grad}
    engine, gradients = trainer.model_wrapped, {}
    is_partitioned = trainer.is_deepspeed_enabled
    for each in adapter.values():
        with deepspeed.zero.GatheredParameters([each], modifier_rank=0) if is_partitioned else nullcontext():
            each.data.copy_(torch.randn(each.shape, generator=generator) * 0.02)

    def keep() -> None:
        for name, each in adapter.items():
            gradients[name] = safe_get_full_grad(each) if is_partitioned else each.grad

    trainer._policy_sums = None
    trainer.model.train()
    engine.zero_grad()
    if is_partitioned:
        engine.step = keep  # DeepSpeed's backward ends in it
    loss = trainer.training_step(engine, batch, torch.tensor(1.0))
    if not is_partitioned:
        keep()
    return {
        "loss": float(loss),
        "divergence": trainer._policy_sums.tolist()[POLICY_SUMS.index("policy_kl")],
        "gradients": {name: each.flatten().tolist() for name, each in gradients.items()},
    }


def main() -> None:
    rows_file, output = Path(os.environ["ROWS"]), Path(os.environ["OUTPUT"])
    start_communication({"deepspeed": PARTITIONED, "use_cpu": True})
    # Before DeepSpeed knows that models are to be partitioned.
    batch = pack(int(os.environ["RANK"]), rows_file, make_encoder())
    trainer = make_trainer(rows_file, output, deepspeed=json.dumps(PARTITIONED))
    result = take_step(trainer, batch)
    print(json.dumps(result), flush=True)
    leave_job()


if __name__ == "__main__":
    main()
