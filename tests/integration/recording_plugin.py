"""An ``--external_plugins`` file: the real trainer, which also writes down what it trained and its last weights.

One JSON line per micro-batch of each rank into ``RECORD_DIR``; faults are injected through ``INJECT``.
"""

import atexit
import contextlib
import hashlib
import json
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from swift_stage2 import Stage2Trainer
from swift_stage2.scheduling.bresenham import wants_channel_b
from swift_stage2.training.stage2_trainer import register_trainer

WORKER = "multiprocessing.spawn"


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
        _inject(self, step, num_batches)
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
            weights = {name: _digest(_unsharded(parameter)) for name, parameter in module.named_parameters()}
        sharded = any(isinstance(parameter, DTensor) for parameter in module.parameters())
        self._trainer.write(step=state.global_step, weights=weights, is_sharded=sharded)


def _is_b(batch):
    return batch["input_ids"].shape[0] == 1 and "cu_seq_lens_q" in batch


def _whole(parameters):
    """Under ZeRO-3 a rank holds whole tensors only in DeepSpeed's own context."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters)


def _unsharded(parameter):
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _inject(trainer, step, num_packs):
    """``INJECT`` is RANK:STEP:FAULT, with * for all ranks, or several of these with commas between.

    A signal comes at STEP; written as SIGTERM/6 at the first step from there on that has one of channel B before it in
    its block of 6 steps. ``await_packs`` waits for the packs of the first B step from STEP on; ``await_packs/6``, for
    those of one in every block of 6 steps. ``await_rounds`` lets no round last longer than the steps that it needs.
    """
    for each in filter(None, os.environ.get("INJECT", "").split(",")):
        rank, at, fault = each.split(":")
        if rank in ("*", str(trainer.args.process_index)) and step >= int(at):
            _commit(trainer, step, num_packs, int(at), fault, rank)


def _commit(trainer, step, num_packs, at, fault, rank):
    name, _, block = fault.partition("/")
    block_start = step - step % int(block) if block else -1
    if name == "await_packs" and trainer.latest_b < max(at, block_start):
        learner = trainer.stage2.learner
        if wants_channel_b(step, learner.b_ratio):
            _await(lambda: _has_packs(learner.channel_b, num_packs), f"{num_packs} packs")
    if fault == "await_rounds":
        b = trainer.stage2.learner.channel_b
        _await(lambda: _may_go_on(b, step, trainer.args.process_index), "what a round waits for")
    if name in signal.Signals.__members__ and (not block or trainer.latest_b >= block_start):
        os.environ["INJECT"] = ""
        os.killpg(0, signal.Signals[name])  # as torchrun sends it: data-loader workers and ours hear it, too
    if fault == "kill_preprocessing":
        os.environ["INJECT"] = os.environ["INJECT"].replace(f"{rank}:{at}:{fault},", "")
        (worker,) = [child for child in psutil.Process().children() if WORKER in " ".join(child.cmdline())]
        worker.kill()
    if fault == "raise" and step == at:
        raise ValueError(f"what only rank {rank} meets")
    if fault == "nan" and step == at:
        with torch.no_grad():
            next(trainer.accelerator.unwrap_model(trainer.model).parameters()).view(-1)[0] = float("nan")


def _has_packs(b, num_packs):
    """Also where a drain keeps rollouts out, which only goes on with the steps."""
    return not b.client.is_open or b.queue.num_fresh(b.clock.current) >= num_packs


def _may_go_on(b, step, rank):
    """Whether the next step brings the version that is due or pushed further."""
    servers = b.client._servers.values()
    if any(not each.fence.is_open and each.is_busy for each in servers):
        return False
    if b.schedule.pending_step is not None and b.evaluation is not None and b.evaluation.wanted:
        return False
    return b.updates is None or b.updates.publisher.wait(0.0)


def _await(holds, what):
    pause, end = threading.Event(), time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end, f"{what} did not come within 120 s"
        pause.wait(0.05)


register_trainer(RecordingTrainer)
