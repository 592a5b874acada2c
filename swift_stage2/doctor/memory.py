"""Estimates the memory that learner, courier and servers need: on a device they share, and in RAM on this machine."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from swift_stage2.config import Preprocessing, ServerEngine, ServerProcess, Stage2Config, Transport
from swift_stage2.config.device_shares import UTILIZATION, share_of
from swift_stage2.doctor.examination import Checked, Examination, Outcome, failed, left_out, ok, warning
from swift_stage2.runtime.memory import available_memory_bytes
from swift_stage2.runtime.ports import is_here
from swift_stage2.whole_file import read_regular_text

if TYPE_CHECKING:
    from swift_stage2.doctor.preparation import LearnerPreparation

_ADAPTER_BYTES = 16  # of a parameter in float32: itself, its gradient, Adam's two moments
# Resident, without any weights, as seen in the demo (torch 2.13 for CPU; CUDA's libraries take more).
_RANK_BYTES = 0.7e9
_PREPROCESSING_BYTES = 0.6e9
_COURIER_BYTES = 0.25e9
_SERVER_BYTES = 0.7e9


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Bytes that one model takes; activations are not known."""

    weights: int
    """Whole, in the learner's dtype: of rank 0's copy, and about of a server."""
    on_rank: float
    """Of those, on each rank's device."""
    training: float
    """Gradients and Adam's states there."""


def examine_memory(
    exam: Examination, config: Stage2Config, prepared: Checked[LearnerPreparation], ranks_per_node: int
) -> None:
    """The rows on memory; a device's only where ``launch.share_devices`` shares it."""
    exam.begin_section("Memory")
    num_ranks = ranks_per_node * config.launch.learner.nnodes
    model = exam.check("model's size", lambda: _count(config, prepared.result, num_ranks), needs=[prepared])
    if config.launch.share_devices:
        found = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
        exam.check("device memory", lambda: check_device_memory(config, model.result, found), needs=[model])
    room = available_memory_bytes()
    exam.check(
        "main memory", lambda: check_main_memory(config, model.result, ranks_per_node, room), needs=[model]
    )


def _count(config: Stage2Config, prepared: LearnerPreparation, num_ranks: int) -> Outcome[ModelMemory]:
    shapes: list[Sequence[int]] = []
    for path in prepared.model_directory.glob("*.safetensors"):
        with safe_open(path, framework="np") as file:
            shapes += [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118 (no mapping)
    if not shapes:
        return left_out(f"{prepared.model_directory} holds no .safetensors to count")
    memory = estimate_memory(config.swift, shapes, prepared.args.torch_dtype.itemsize, num_ranks)
    return ok(
        f"{sum(map(math.prod, shapes)):.3g} parameters, estimated {_gb(memory.on_rank)} of weights and "
        f"{_gb(memory.training)} of gradients and Adam's states on each of {num_ranks} rank(s)",
        memory,
    )


def estimate_memory(
    swift: Mapping[str, Any], shapes: Sequence[Sequence[int]], itemsize: int, num_ranks: int
) -> ModelMemory:
    """The most that this model takes with Adam: with every parameter trained, or LoRA at every matrix."""
    num_parameters = sum(map(math.prod, shapes))
    weights = itemsize * num_parameters
    stage = 3 if swift.get("fsdp") else _zero_stage(swift.get("deepspeed"))  # FSDP2 takes what ZeRO-3 does
    of_states, of_gradients, of_weights = (num_ranks if (stage or 0) >= least else 1 for least in (1, 2, 3))
    if swift.get("tuner_type") == "full":
        # DeepSpeed keeps Adam's states, and a copy of half-precision weights, in float32.
        state = 2 * itemsize if stage is None else 8 if itemsize == 4 else 12
        training = weights / of_gradients + state * num_parameters / of_states
    else:
        rank = swift.get("lora_rank") or 8
        training = _ADAPTER_BYTES * rank * sum(sum(shape) for shape in shapes if len(shape) == 2)
    return ModelMemory(weights, weights / of_weights, training)


def check_device_memory(config: Stage2Config, model: ModelMemory, gpu_bytes: int) -> Outcome[None]:
    """The memory that servers leave on the learner's fullest device, and the learner's need."""
    devices, here = config.launch.learner.devices, _servers_here(config)
    if not devices:
        return ok("the learner has no device; see main memory")
    if not gpu_bytes:
        return left_out("no GPU is visible here; run the doctor on the machine that trains")
    taken = {
        device: sum(
            (share_of(each) or 0) * gpu_bytes or model.weights for each in here if device in each.devices
        )
        for device in devices
    }
    device = max(devices, key=lambda each: taken[each])
    left, need = gpu_bytes - taken[device], model.on_rank + model.training
    found = (
        f"servers leave {_gb(left)} of {_gb(gpu_bytes)} on device {device}; the learner needs an estimated "
        f"{_gb(need)} of it, activations not counted"
    )
    fix = (
        f"lower {UTILIZATION}, write swift.tuner_type: lora, or give servers and learner devices of their own"
    )
    if model.on_rank > left:
        return failed(found, fix)
    return warning(found, fix) if need > left else ok(found)


def check_main_memory(
    config: Stage2Config, model: ModelMemory, num_ranks: int, available: int
) -> Outcome[None]:
    """The processes of ``num_ranks`` ranks and of servers here, and the weights that each of them holds in RAM."""
    rollout, channel_b = config.rollout, config.stage2_ab.channel_b
    here = _servers_here(config)
    num_copies = 0
    if rollout.sync.transport in (Transport.TCP, Transport.DISK):  # else they read rank 0's in place
        num_copies = sum(server.engine is not ServerEngine.SWIFT for server in here)
    on_cpu = 0 if config.launch.learner.devices else model.on_rank + model.training
    own = _PREPROCESSING_BYTES * (channel_b.preprocessing is Preprocessing.PROCESS)
    needs = {
        f"{num_ranks} rank(s)": num_ranks * (_RANK_BYTES + own + on_cpu),
        "rank 0's copy of the weights": model.weights,
        "its courier": _COURIER_BYTES,
        f"{len(here)} server(s)": sum(
            _SERVER_BYTES + (0 if server.devices else model.weights) for server in here
        ),
        "weights sent to them": num_copies * model.weights,
    }
    total = sum(needs.values())
    parts = ", ".join(f"{name} {_gb(need)}" for name, need in needs.items() if need)
    found = f"an estimated {_gb(total)} of {_gb(available)} available: {parts}"
    if total <= available:
        return ok(found)
    fix = "give the machine or container more main memory, or train a smaller model"
    return warning(found, f"write rollout.sync.transport: auto, {fix}" if num_copies else fix)


def _servers_here(config: Stage2Config) -> list[ServerProcess]:
    addresses = config.rollout.servers
    return [server for server, at in zip(config.launch.servers, addresses, strict=False) if is_here(at.host)]


def _zero_stage(deepspeed: Any) -> int | None:
    """Of one of ms-swift's names, a file or settings; None without DeepSpeed. Offloading is not looked at."""
    text = str(deepspeed or "")
    if text.endswith(".json"):
        text = read_regular_text(Path(text).expanduser())
    found = re.search(r"zero(\d)|['\"]stage['\"]: *(\d)", text)
    return int(found[1] or found[2]) if found else None


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB"
