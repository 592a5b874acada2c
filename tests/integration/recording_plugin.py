"""An ``--external_plugins`` file: the real trainer, which also writes down what it trained and its last weights.

One JSON line per micro-batch of each rank into ``RECORD_DIR``; faults are injected through ``INJECT``.
"""

import atexit
import contextlib
import hashlib
import json
import os
import signal
from pathlib import Path

import psutil
import torch
from transformers import TrainerCallback

from swift_stage2 import Stage2Trainer
from swift_stage2.training.stage2_trainer import register_trainer

WORKER = "swift_stage2.channel_b.preprocessing_worker"


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
        self.latest_b = -1  # step of channel B
        atexit.register(lambda: self.write(left_the_job=not torch.distributed.is_initialized()))

    def write(self, **fields):
        self._record.write(json.dumps(fields) + "\n")
        self._record.flush()

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        step = self.state.global_step
        _inject(self, step)
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.latest_b = step if _is_b(batches[0]) else self.latest_b
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
    """``INJECT`` is RANK:STEP:FAULT. A signal comes at STEP; written as SIGTERM/6 at the first step from there on that
    has one of channel B before it in its block of 6 steps, however late rollouts are."""
    if not os.environ.get("INJECT"):
        return
    rank, at, fault = os.environ["INJECT"].split(":")
    if trainer.args.process_index != int(rank) or step < int(at):
        return
    name, _, block = fault.partition("/")
    if name in signal.Signals.__members__ and (not block or trainer.latest_b >= step - step % int(block)):
        os.environ["INJECT"] = ""
        os.kill(os.getpid(), signal.Signals[name])
    if fault == "kill_preprocessing":
        os.environ["INJECT"] = ""
        (worker,) = [child for child in psutil.Process().children() if WORKER in " ".join(child.cmdline())]
        worker.kill()
    if fault == "raise" and step == int(at):
        raise ValueError(f"what only rank {rank} meets")
    if fault == "nan" and step == int(at):
        with torch.no_grad():
            next(trainer.accelerator.unwrap_model(trainer.model).parameters()).view(-1)[0] = float("nan")


register_trainer(RecordingTrainer)
