"""Model, data sets, what the real template makes of the rows, and the memory that the learner needs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.sample_source import usable_rows
from swift_stage2.checks.channel_b_parts import make_task, step_sizes
from swift_stage2.checks.checks import CheckResult, CheckStage, left_out, ok, warning
from swift_stage2.checks.samples import MOST_LOOKED_AT, CheckedRows, check_rows
from swift_stage2.config import ServerEngine, Stage2Config
from swift_stage2.config.launch import UTILIZATION, ServerProcess
from swift_stage2.runtime.memory import available_memory_bytes

if TYPE_CHECKING:
    from swift_stage2.checks.doctor import CheckRun
    from swift_stage2.checks.preparation import LearnerPreparation

_NUM_SAMPLES = 16
_OF_4_BITS = 0.3  # of 16, with their scales; vision tower and output layer stay as they are
_OF_SLEEPER = 1.5e9  # context, graphs and workspaces of a server that sleeps
_OF_VLLM = 0.9  # of a device, unless it is told otherwise
_GPU_BYTES = 80e9  # where none is here to ask
_DEEPSPEED_BYTES = 12  # of a trained parameter in 16 bits: its copy and two moments in float32


def examine_learner(
    check_run: CheckRun, config: Stage2Config, scratch: Path, num_ranks: int, *, is_host: bool
) -> tuple[CheckResult[LearnerPreparation], CheckResult[CheckedRows]]:
    """The rows of model and data; hands on what the trainer would start from, and samples of its data.

    ``is_host``: whether the learner's devices may be on this host.
    """
    check_run.begin_section("Model and data")
    found = torch.accelerator.current_accelerator(check_available=True)
    devices = (found.type if found else None, torch.cuda.device_count()) if is_host else None
    rows = check_run.show(config, CheckStage(devices=devices, files=True, rows=True))
    checkpoint, rows_checked = rows["model directory"], rows["data sets"]
    # Without a GPU transformers would refuse 16 bits.
    swift = config.swift if is_host else {**config.swift, "use_cpu": True}
    prepared = check_run.check(
        "template",
        lambda: _prepare(swift, scratch),
        needs=[checkpoint],
        fix="mend section swift: ms-swift's own words are beside",
    )
    check_run.check(
        "memory",
        lambda: check_memory(config, prepared.result, num_ranks, is_host=is_host),
        needs=[prepared],
    )
    if not config.b_enabled:
        return prepared, check_run.check("channel B", lambda: ok("off (b_ratio 0): no server is needed"))
    samples = check_run.check(
        "samples",
        lambda: _check_samples(config, prepared.result),
        needs=[prepared, rows_checked],
        fix="mend the data set, or section swift",
    )
    check_run.check("packing_length", lambda: check_packing_length(config, samples.result), needs=[samples])
    check_run.check(
        "step sizes",
        lambda: check_step_sizes(
            config, samples.result, prepared.result.gradient_accumulation_steps, num_ranks
        ),
        needs=[prepared, samples],
    )
    if config.stage2_ab.evaluation.every_steps:
        num_rows = len(prepared.result.row_sets[1]) if prepared.passed and rows_checked.passed else 0
        check_run.show(config, CheckStage(num_validation_rows=num_rows), needs=[prepared, rows_checked])
    return prepared, samples


def _prepare(swift: Mapping[str, Any], scratch: Path) -> CheckResult[LearnerPreparation]:
    from swift_stage2.checks.preparation import prepare_learner  # loads ms-swift

    prepared = prepare_learner(swift, scratch, with_weights=False)
    return ok(
        f"ms-swift takes section swift; template {prepared.args.template}, {len(prepared.template.tokenizer)} tokens, "
        f"dtype {str(prepared.args.torch_dtype).removeprefix('torch.')}",
        prepared,
    )


def check_memory(
    config: Stage2Config, prepared: LearnerPreparation, num_ranks: int, *, is_host: bool
) -> CheckResult[None]:
    """Compares the memory that a rank needs with its device's; in phases also that of the servers on the device.

    Activations are left out.
    """
    weights = sum(path.stat().st_size for path in prepared.model_directory.glob("*.safetensors"))
    if not weights:
        return left_out(f"{prepared.model_directory} holds no .safetensors to count")
    rank = rank_memory(config.swift, weights, prepared.args.torch_dtype.itemsize, num_ranks)
    takes_turns = config.alternates and bool(config.launch.servers)
    if not is_host and not takes_turns:
        return left_out(
            f"a rank needs {rank.total / 1e9:.3g} GB of a GPU, and more for activations; none is here"
        )
    is_on_cpu = config.swift.get("use_cpu") is True or not torch.cuda.is_available()
    where, room = "of main memory", float(available_memory_bytes())
    if not is_host:
        where, room = "of a GPU", _GPU_BYTES
    elif not is_on_cpu:
        where, room = "of the GPU", torch.cuda.get_device_properties(0).total_memory
    kept = f"rank 0 keeps a copy of {weights / 1e9:.3g} GB in main memory"
    if takes_turns:
        train, rollouts = phase_peaks(config, rank, weights, room, num_ranks)
        found = (
            f"in turns learner and servers need {train / 1e9:.3g} GB while it trains, and more for activations, and "
            f"{rollouts / 1e9:.3g} GB while servers are awake, {where}'s {room / 1e9:.3g} GB; {kept}"
        )
        if not is_host:
            return left_out(f"{found}; no GPU is here to compare with")
        if rollouts > room >= train:
            return warning(found, f"lower {UTILIZATION}, or write launch.offload_optimizer: true")
        need = train
    else:
        need = rank.total
        found = (
            f"a rank needs {need / 1e9:.3g} of {room / 1e9:.3g} GB {where} and more for activations, servers need "
            f"theirs; {kept}"
        )
    if need <= room:
        return ok(found)
    return warning(
        found, "write swift.tuner_type: lora, shard with deepspeed: zero3, or train a smaller model"
    )


class RankMemory(NamedTuple):
    """Bytes on one rank, without activations; Adam's states are two moments, and DeepSpeed's copy of the weights."""

    weights: float
    gradients: float
    states: float

    @property
    def total(self) -> float:
        return sum(self)


def rank_memory(swift: Mapping[str, Any], weights: int, itemsize: int, num_ranks: int) -> RankMemory:
    """Of a model whose ``weights`` have so many bytes; of an adapter gradients and states are left out."""
    zero, is_fsdp = re.search(r"zero(\d)", str(swift.get("deepspeed") or "")), bool(swift.get("fsdp"))
    stage = 3 if is_fsdp else int(zero[1]) if zero else 0
    own = weights / (num_ranks if stage == 3 else 1) * (_OF_4_BITS if swift.get("quant_bits") else 1)
    if swift.get("tuner_type") != "full":
        return RankMemory(own, 0.0, 0.0)
    states = _DEEPSPEED_BYTES * weights / itemsize if zero else 2 * weights
    share = num_ranks if stage else 1
    return RankMemory(own, weights / share, states / share)


def phase_peaks(
    config: Stage2Config, rank: RankMemory, weights: int, room: float, num_ranks: int
) -> tuple[float, float]:
    """Bytes of the fullest device of ``room`` bytes while the learner trains, and while the servers are awake.

    Servers that sleep keep an estimated 1.5 GB each of a GPU. The buckets of DDP are as large as its gradients, which
    otherwise are gone between two steps.
    """
    learner, peaks = config.launch.learner, []
    for device in learner.devices or (None,):
        here = [server for server in config.launch.servers if device in (server.devices or (None,))]
        ranks = 1 if learner.devices else learner.nproc_per_node
        asleep = _OF_SLEEPER * len(here) if learner.devices else 0.0
        is_bucketed = num_ranks > 1 and not any(config.swift.get(name) for name in ("deepspeed", "fsdp"))
        kept = (
            rank.weights + rank.gradients * is_bucketed + rank.states * (not config.launch.offload_optimizer)
        )
        awake = sum(_server_bytes(server, weights, room) for server in here)
        peaks.append((ranks * rank.total + asleep, ranks * kept + awake))
    trains, rollouts = zip(*peaks, strict=True)
    return max(trains), max(rollouts)


def _server_bytes(server: ServerProcess, weights: int, room: float) -> float:
    """vLLM takes the part of a device that it is given; transformers its weights, and a batch beside them."""
    if server.engine is ServerEngine.TRANSFORMERS:
        return weights
    args = {name.lstrip("-").replace("-", "_"): value for name, value in server.args.items()}
    return room * float(args.get(UTILIZATION, _OF_VLLM))


def _check_samples(config: Stage2Config, prepared: LearnerPreparation) -> CheckResult[CheckedRows]:
    """Measures all rows; draws and encodes a few samples, the first of which is checked as at a run's start.

    Raises:
        DatasetError, ConfigError, TaskError: as ``check_rows`` does.
    """
    encoder = Encoder(prepared.template, packing_length=config.stage2_ab.channel_b.packing.packing_length)
    rows, _ = prepared.row_sets
    task = make_task(config)
    usable = usable_rows(rows, task, config.stage2_ab.channel_b.rows_without_objects)
    count = min(len(usable), _NUM_SAMPLES)
    checked = check_rows(
        config, rows, usable, encoder, task, int(prepared.args.seed), measured=usable, count=count
    )
    found = (
        f"{len(checked.samples)} of {len(rows)} rows encoded as the model gets them, the first answered as task "
        f"{config.stage2_ab.task} checks it; prompts of up to {checked.lengths.longest_prompt} tokens"
    )
    if len(checked.samples) < count:
        looked_at = min(MOST_LOOKED_AT, len(usable))
        fix = f"mend the rows; only {len(checked.samples)} of the {looked_at} looked at can be used"
        return warning(found, fix, checked)
    return ok(found, checked)


def check_packing_length(config: Stage2Config, samples: CheckedRows) -> CheckResult[None]:
    """The row that compares ``packing_length`` with the longest prompt and its answer."""
    if troubles := samples.lengths.troubles(config):
        return warning(
            " | ".join(found for found, _ in troubles), "; ".join(remedy for _, remedy in troubles)
        )
    longest, place = samples.lengths.longest_segment
    return ok(
        f"channel B's packing_length {config.stage2_ab.channel_b.packing.packing_length} holds the longest prompt and "
        f"what may follow it; of all {samples.lengths.num_rows:,} rows the longest with its true answer has {longest} "
        f"tokens ({place})"
    )


def check_step_sizes(
    config: Stage2Config, samples: CheckedRows, packs_per_step: int, num_ranks: int
) -> CheckResult[None]:
    """The rows that a step of each channel trains."""
    sizes = step_sizes(config, samples.lengths, packs_per_step * num_ranks)
    if sizes is None:
        if not samples.lengths.num_tokens:
            return left_out("no row could be measured")
        unknown = "swift.packing_length is not written, so ms-swift packs up to the model's own maximum"
        return warning(unknown, "write swift.packing_length, as many tokens as a device has memory for")
    return warning(*sizes) if sizes.remedy else ok(sizes.told)
