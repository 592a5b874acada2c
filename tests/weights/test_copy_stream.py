"""Copies beside training: every kind of optimizer step waits for them once, and pushes begin after them.

The stand-in for a GPU's stream copies as late as one may: when something waits for it, or when the test lets it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recorded_publisher import RecordedPublisher
from torch import nn
from torch.optim import optimizer as torch_optimizer
from weight_updates import make_updates

from swift_stage2.compat import declare_operators
from swift_stage2.errors import WeightSyncError
from swift_stage2.records import RoundOutcome
from swift_stage2.weights import copy_stream
from swift_stage2.weights.copy_stream import Copy, CudaCopyStream
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.snapshot import SnapshotFile
from swift_stage2.weights.tensors import snapshot_bytes
from swift_stage2.wire import TensorSpec

Weights = dict[str, torch.Tensor]
Step = Callable[[], object]


class LateCopies:
    """A ``CopyStream`` on the CPU. The host hears that the copies are done by ``finish`` alone, or waits for it."""

    def __init__(self) -> None:
        self.num_waits_before_write = 0
        self.failure: str | None = None
        self._work: Callable[[], None] | None = None
        self._is_done = True

    def copy(self, work: Callable[[Copy], None]) -> None:
        self._work, self._is_done = partial(work, torch.Tensor.copy_), False

    def wait_before_write(self) -> None:
        self.num_waits_before_write += 1
        self._do()

    def finish(self) -> None:
        self._do()
        self._is_done = True

    def is_done(self) -> bool:
        return self._is_done

    def wait(self) -> None:
        self.finish()
        if self.failure is not None:
            raise RuntimeError(self.failure)

    def _do(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work()


class Learner:
    """A module whose versions are copied late, and proven at once."""

    def __init__(self, module: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.module = module or nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.copies = LateCopies()
        self.publisher = RecordedPublisher(at_once=True)
        self.export = WeightExport(self.module)
        self.sync = make_updates(self.export, self.publisher, timeout_s=20.0, copy_stream=self.copies)
        self.sync.lives[0].stages = True

    def weights(self) -> Weights:
        (names,) = self.export.plan(1 << 30)
        return {name: tensor.clone() for name, tensor in self.export.read(names)}

    def loss(self) -> torch.Tensor:
        loss: torch.Tensor = self.module(torch.ones(2, 3)).square().sum()
        return loss

    def end(self) -> RoundOutcome:
        """Of the version that was begun last: pushed at one look at the latest, taken at the next."""
        self.copies.finish()
        outcome = self.sync.look() or self.sync.look()
        assert outcome is not None
        return outcome

    def close(self) -> None:
        self.sync.close()


@pytest.fixture
def learner() -> Iterator[Learner]:
    built = Learner()
    yield built
    built.close()


def same(first: Weights, second: Weights) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def plain(learner: Learner) -> Step:
    optimizer = torch.optim.AdamW(learner.module.parameters(), lr=0.1)

    def step() -> None:
        learner.loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def in_backward(learner: Learner) -> Step:
    """An optimizer for each parameter, stepped as soon as its gradient is there."""
    for parameter in learner.module.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def write(_: object, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(write)
    return lambda: learner.loss().backward()


def accelerated(learner: Learner, precision: str = "no") -> Step:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    optimizer = accelerator.prepare(torch.optim.AdamW(learner.module.parameters(), lr=0.1))
    if precision == "no":
        assert optimizer.scaler is None
    else:
        optimizer.scaler = torch.amp.GradScaler("cpu")  # Accelerate makes one on devices only
        optimizer.__setstate__(optimizer.__getstate__())  # as it does with one

    def step() -> None:
        loss = learner.loss()
        (loss if optimizer.scaler is None else optimizer.scaler.scale(loss)).backward()
        optimizer.step()
        assert not optimizer.step_was_skipped
        optimizer.zero_grad()

    return step


def scaled(learner: Learner) -> Step:
    return accelerated(learner, "bf16")


class ZeroEngine:
    """DeepSpeed's calls under ZeRO-1 and 2, in their order, over Accelerate's own wrapper of an engine.

    In ``step`` each group's optimizer steps a copy in full precision, which then goes into the weights.
    """

    def __init__(self, module: nn.Module) -> None:
        self._groups = [
            (parameter, parameter.detach().clone().requires_grad_()) for parameter in module.parameters()
        ]
        self.optimizer = torch.optim.AdamW([{"params": [copy]} for _, copy in self._groups], lr=0.1)
        self.is_boundary = True

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self.is_boundary = is_boundary

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        assert self.is_boundary
        every_group = self.optimizer.param_groups
        for (parameter, copy), group in zip(self._groups, every_group, strict=True):
            copy.grad, parameter.grad = parameter.grad, None
            self.optimizer.param_groups = [group]
            self.optimizer.step()
            parameter.data.copy_(copy.data)
        self.optimizer.param_groups = every_group


def deepspeed(learner: Learner) -> Step:
    from accelerate import Accelerator
    from accelerate.utils.deepspeed import DeepSpeedEngineWrapper, DeepSpeedOptimizerWrapper

    Accelerator(cpu=True)  # its state is there whenever its wrappers are
    engine = ZeroEngine(learner.module)
    wrapped, optimizer = DeepSpeedEngineWrapper(engine), DeepSpeedOptimizerWrapper(engine.optimizer)

    def step() -> None:
        for is_last in (False, True):
            wrapped.backward(learner.loss(), sync_gradients=is_last)
        optimizer.step()  # the loop's own call does nothing there

    return step


@pytest.fixture(autouse=True)
def _own_accelerator() -> Iterator[None]:
    yield
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


ways_to_step = pytest.mark.parametrize("way", [plain, in_backward, accelerated, scaled, deepspeed])


def first_version_and_step(learner: Learner, way: Callable[[Learner], Step]) -> Step:
    step = way(learner)
    assert learner.sync.run([0]).proven == (0,)
    step()
    return step


@ways_to_step
def test_an_optimizer_that_steps_beside_a_copy_waits_for_it_once(
    learner: Learner, way: Callable[[Learner], Step]
) -> None:
    step = first_version_and_step(learner, way)
    for number in (1, 2):
        weights = learner.weights()
        learner.sync.begin([0])
        step()
        step()
        assert not same(weights, learner.weights())
        assert learner.copies.num_waits_before_write == number
        assert learner.sync.look() is None
        assert len(learner.publisher.carried) == number  # of the versions before
        outcome = learner.end()
        assert same(learner.publisher.carried[-1], weights)
        assert (outcome.version, outcome.proven) == (1 + number, (0,))


@ways_to_step
def test_without_the_hook_a_step_writes_into_the_copy(
    learner: Learner, way: Callable[[Learner], Step]
) -> None:
    """The test above sees what it looks for."""
    step = first_version_and_step(learner, way)
    weights = learner.weights()
    learner.sync.begin([0])
    torch_optimizer._global_optimizer_pre_hooks.clear()
    step()
    assert learner.end().proven == (0,)
    assert not same(learner.publisher.carried[-1], weights)


def test_a_push_begins_at_the_optimizers_step_after_the_copy(learner: Learner) -> None:
    step = first_version_and_step(learner, plain)
    learner.sync.begin([0])
    step()
    learner.copies.finish()
    assert len(learner.publisher.carried) == 1
    step()
    assert len(learner.publisher.carried) == 2


def test_before_an_optimizer_was_seen_copies_are_waited_for(learner: Learner) -> None:
    """One that writes without the hook, as LOMO does in the backward pass, never spoils a copy."""
    for _ in range(2):
        weights = learner.weights()
        learner.sync.begin([0])
        with torch.no_grad():
            for parameter in learner.module.parameters():
                parameter.add_(1.0)
        assert same(learner.publisher.carried[-1], weights)
        assert learner.end().proven == (0,)
    assert learner.copies.num_waits_before_write == 0


class LoraLinear(nn.Module):
    """As PEFT's, as far as the export knows it."""

    active_adapters = ("default",)

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(3, 2)
        self.base_layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(3, 1, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(1, 2, bias=False)})

    def get_delta_weight(self, adapter: str) -> torch.Tensor:
        return self.lora_B[adapter].weight @ self.lora_A[adapter].weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.base_layer(inputs) + self.lora_B["default"](self.lora_A["default"](inputs))


def test_adapters_that_are_merged_late_are_merged_as_they_were() -> None:
    with closing(Learner(nn.Sequential(LoraLinear(), nn.Tanh(), nn.Linear(2, 1)))) as learner:
        step = first_version_and_step(learner, plain)
        weights = learner.weights()
        learner.sync.begin([0])
        step()
        assert learner.end().proven == (0,)
        assert same(learner.publisher.carried[-1], weights)
        assert not same(weights, learner.weights())


def test_a_copy_that_fails_is_the_learners_fault(learner: Learner) -> None:
    step = first_version_and_step(learner, plain)
    learner.sync.begin([0])
    step()
    assert learner.sync.look() is None
    learner.copies.failure = "CUDA error: an illegal memory access was encountered"
    learner.copies.finish()
    with pytest.raises(WeightSyncError, match="illegal memory access"):
        learner.sync.look()
    assert len(learner.publisher.carried) == 1


def test_a_run_that_ends_waits_for_its_copy_and_leaves_no_hook(learner: Learner) -> None:
    step = first_version_and_step(learner, plain)
    learner.sync.begin([0])
    assert torch_optimizer._global_optimizer_pre_hooks
    learner.close()
    assert learner.copies.is_done()
    assert not torch_optimizer._global_optimizer_pre_hooks
    step()
    assert learner.copies.num_waits_before_write == 0
    assert len(learner.publisher.carried) == 1


def test_on_a_cpu_nothing_is_hooked() -> None:
    module = nn.Linear(2, 2)
    assert WeightExport(module).gpu is None
    sync = make_updates(module, RecordedPublisher())
    assert not torch_optimizer._global_optimizer_pre_hooks
    sync.close()


def test_in_hugging_faces_loop_a_step_waits_for_the_copy_of_its_version(
    learner: Learner, tmp_path: Path
) -> None:
    declare_operators()
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = learner.module

        def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.inner(inputs).square().sum()}

    before: list[Weights] = []

    class Rounds(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            before.append(learner.weights())
            if not before[1:]:
                learner.sync.run([0])
                return
            learner.sync.begin([0])

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if before[1:]:
                assert not same(before[-1], learner.weights())
                assert learner.end().proven == (0,)

    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        gradient_accumulation_steps=2,
        learning_rate=0.1,
        per_device_train_batch_size=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    arguments.max_epochs = None  # read by the loop as ms-swift changes it, if a test before has imported that
    rows = [{"inputs": torch.ones(3)} for _ in range(6)]
    trainer = Trainer(Model(), arguments, train_dataset=rows, callbacks=[Rounds()])
    trainer.train()
    assert len(before) == 3
    assert all(same(*each) for each in zip(before, learner.publisher.carried, strict=True))
    assert learner.copies.num_waits_before_write == 2


class Cuda:
    """Notes in ``calls`` what reaches ``torch.cuda``; streams and events are known by name. Copies are done at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
        self.calls: list[str] = []
        self.events = iter(("staged", "copied"))
        training = SimpleNamespace(
            wait_event=lambda event: self.calls.append(f"training waits for {event.name}")
        )
        side = SimpleNamespace(wait_stream=lambda stream: self.calls.append("side waits"))
        for name, stand_in in {
            "Stream": lambda device: side,
            "Event": self._event,
            "current_stream": lambda device: training,
            "stream": lambda stream: nullcontext(),
            "mem_get_info": lambda device: (free, free),
            "memory_reserved": lambda device: 0,
            "max_memory_allocated": lambda device: 0,
            "_sleep": lambda cycles: self.calls.append("pause"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    def _event(self, blocking: bool = False) -> Any:
        name = next(self.events)
        note = self.calls.append
        return SimpleNamespace(
            name=name,
            record=lambda stream: note(f"{name} recorded"),
            synchronize=lambda: note(f"{name} synchronized"),
        )


WEIGHTS = {
    "a": torch.arange(64.0),
    "b": torch.arange(6.0).reshape(2, 3),
    "c": torch.zeros(0),
    "d": torch.arange(3.0).bfloat16(),
    "e": torch.tensor([7, 8]),
    "f": torch.arange(5.0).half(),
}
MANIFEST = [TensorSpec(name, tuple(each.shape), str(each.dtype)[6:]) for name, each in WEIGHTS.items()]
NUM_BYTES = snapshot_bytes(MANIFEST)


def copied(failure: str = "") -> tuple[CudaCopyStream, Weights]:
    """A stream that has been given these weights, and the snapshot's tensors; pieces are of 128 bytes."""
    snapshot = SnapshotFile(MANIFEST, bucket_bytes=1)
    stream = CudaCopyStream(torch.device("cuda", 0), NUM_BYTES)
    stream.piece_bytes = 128

    def work(copy: Copy) -> None:
        snapshot.put(WEIGHTS.items(), copy)
        if failure:
            raise RuntimeError(failure)

    with pytest.raises(RuntimeError, match=failure) if failure else nullcontext():
        stream.copy(work)
    stream.wait_before_write()
    stream.wait()
    return stream, snapshot.tensors


def test_with_room_on_the_device_training_waits_for_the_copy_there_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = Cuda(monkeypatch, free=2 * NUM_BYTES)
    _, arrived = copied()
    assert same(arrived, WEIGHTS)
    calls = [call for call in cuda.calls if call != "pause"]
    last = ["copied recorded", "training waits for staged", "copied synchronized"]
    assert calls == ["side waits", "staged recorded", *last]
    assert (
        cuda.calls.count("pause") == 7
    )  # 280 bytes in three pieces, nothing in one, and one of each other dtype
    assert cuda.calls.index("staged recorded") < cuda.calls.index("pause")


@pytest.mark.parametrize("failure", ["", "a merge without memory"])
def test_without_room_training_waits_until_the_weights_have_left(
    monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    cuda = Cuda(monkeypatch, free=NUM_BYTES)
    _, arrived = copied(failure)
    assert same(arrived, WEIGHTS)
    assert cuda.calls == ["side waits", "copied recorded", "training waits for copied", "copied synchronized"]


@pytest.mark.parametrize("at_once", [1, 40, 1 << 20])
def test_what_is_staged_is_no_view_of_the_weights(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """However many tensors are staged together: the optimizer writes before anything has left."""
    Cuda(monkeypatch, free=2 * NUM_BYTES)
    monkeypatch.setattr(copy_stream, "_STAGED_AT_ONCE", at_once)
    queued: list[tuple[torch.Tensor, torch.Tensor]] = []
    monkeypatch.setattr(copy_stream, "_queue", lambda *pair: queued.append(pair))
    weights = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    snapshot = SnapshotFile(MANIFEST, bucket_bytes=1)
    stream = CudaCopyStream(torch.device("cuda", 0), NUM_BYTES)
    stream.copy(partial(snapshot.put, weights.items()))
    for tensor in weights.values():
        tensor.add_(1)
    for target, source in queued:
        target.copy_(source)
    assert same(snapshot.tensors, WEIGHTS)
