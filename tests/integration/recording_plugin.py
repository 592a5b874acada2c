"""An ``--external_plugins`` file: the real trainer, which also writes down what it trained and its last weights.

One JSON line per micro-batch of each rank into ``RECORD_DIR``; faults are injected through ``INJECT``.
"""

import contextlib
import hashlib
import json
import os
import signal
from pathlib import Path

import torch
from swift.trainers import TrainerFactory
from transformers import TrainerCallback

from swift_stage2.trainer import Stage2Trainer

STEPS_PER_EPOCH = 6


def _digest(tensor):
    return hashlib.sha256(
        tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    ).hexdigest()[:16]


class RecordingTrainer(Stage2Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        directory = Path(os.environ["RECORD_DIR"])
        directory.mkdir(parents=True, exist_ok=True)
        self._record = (directory / f"rank{self.args.process_index}.jsonl").open("a", encoding="utf-8")
        self.add_callback(_AtTheEnd(self))
        self.num_b_in_epoch = 0  # steps of channel B since the epoch's first step

    def write(self, **fields):
        self._record.write(json.dumps(fields) + "\n")
        self._record.flush()

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        step = self.state.global_step
        if step % STEPS_PER_EPOCH == 0:
            self.num_b_in_epoch = 0
        _inject(self, step)
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.num_b_in_epoch += _is_b(batches[0])
        for batch in batches:
            self.write(
                step=step,
                channel="B" if _is_b(batch) else "A",
                batch=_digest(batch["input_ids"]),
                window=num_batches,
                num_items=int(num_items),
            )
        return batches, num_items


class _AtTheEnd(TrainerCallback):
    def __init__(self, trainer):
        self._trainer = trainer

    def on_train_end(self, args, state, control, **kwargs):
        module = self._trainer.accelerator.unwrap_model(self._trainer.model)
        with _whole(list(module.parameters())):
            weights = {name: _digest(parameter) for name, parameter in module.named_parameters()}
        self._trainer.write(step=state.global_step, weights=weights)


def _is_b(batch):
    return batch["input_ids"].shape[0] == 1 and "cu_seq_lens_q" in batch


def _whole(parameters):
    """Under ZeRO-3 a rank holds whole tensors only in DeepSpeed's own context."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters)


def _inject(trainer, step):
    """``INJECT`` is RANK:STEP:FAULT; ``sigterm_after_b`` comes at the first step from then on that is in mid-epoch
    and has one of channel B before it in its epoch."""
    if not os.environ.get("INJECT"):
        return
    rank, at, fault = os.environ["INJECT"].split(":")
    if trainer.args.process_index != int(rank):
        return
    if fault == "sigterm_after_b" and step >= int(at) and step % STEPS_PER_EPOCH and trainer.num_b_in_epoch:
        os.environ["INJECT"] = ""
        os.kill(os.getpid(), signal.SIGTERM)
    if fault == "sigkill" and step == int(at):
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "nan" and step == int(at):
        with torch.no_grad():
            next(trainer.accelerator.unwrap_model(trainer.model).parameters()).view(-1)[0] = float("nan")


TrainerFactory.TRAINER_MAPPING["causal_lm"] = f"{RecordingTrainer.__module__}.RecordingTrainer"
