"""Stages *learner-lora*, *learner-full*, *zero3*, *two-ranks*, *one-gpu-vllm*: learner beside our server.

On one device, started one by one beside the transformers engine, and by ``launch`` on vLLM. Weights of real widths with
one rank; the demo's with two, over gloo, with CUDA tensors of one device in every hook.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from benchmarks.gpu_check.device import free_memory, used_gib
from benchmarks.gpu_check.real_shapes import WIDE_4_LAYERS, checkpoint
from benchmarks.gpu_check.stage import CheckFailed, CheckSkipped, Context
from benchmarks.servers import BenchServer, BenchServers, write_job
from swift_stage2.config import Mode, ServerEngine
from swift_stage2.config.swift_arguments import as_argv
from swift_stage2.demo.demo_config import MODEL_TYPE, STAGE1, TEMPLATE_FILE, DemoJob, server_entry
from swift_stage2.demo.scenes import SceneKind, Split, write_dataset
from swift_stage2.launch.job import last_cause
from swift_stage2.runtime.network import free_ports
from swift_stage2.runtime.supervisor import ProcessTree
from swift_stage2.telemetry.event_log import event_path, read_events
from swift_stage2.telemetry.summary import summarise
from swift_stage2.telemetry.timing import NANOSECONDS

_LEAST_ROUNDS = 3
_LORA: dict[str, Any] = {"tuner_type": "lora", "lora_rank": 8, "target_modules": ["all-linear"],
                         "freeze_vit": True, "freeze_aligner": True}  # fmt: skip
_MOST_STEPS = 2000


def one_rank(context: Context, tuner: str, swift: dict[str, Any] | None = None) -> None:
    """Trains beside a server until some rounds are proven.

    Raises CheckFailed: a process did not end well, or the run was not what it must be.
    """
    model = checkpoint(WIDE_4_LAYERS, context)
    context.at("model")
    settings = {**(_LORA if tuner == "lora" else {}), **(swift or {})}
    _train_for_rounds(context, f"run-{context.logs.name}", model, 1, sync_every_steps=3, swift=settings)


def zero3(context: Context) -> None:
    """Every parameter partitioned over one rank, as DeepSpeed holds it.

    Raises CheckSkipped: DeepSpeed cannot be imported. Also what ``one_rank`` raises.
    """
    try:
        import deepspeed  # noqa: F401
    except Exception as error:  # it builds and probes while it is imported, and raises whatever that raises
        raise CheckSkipped(f"DeepSpeed cannot be imported: {type(error).__name__}: {error}") from error
    one_rank(context, "full", {"deepspeed": "zero3"})


def two_ranks(context: Context) -> None:
    """Rank 1 is asked to end once some rounds are proven; both must stop after the same step.

    Raises CheckFailed: the ranks disagree, a round is not proven, or SIGTERM does not end both alike.
    """
    job = _train_for_rounds(
        context, "run-two-ranks", STAGE1, 2, sync_every_steps=4, swift={"ddp_backend": "gloo"}
    )
    last = [_records(job, rank, "step")[-1]["step"] for rank in range(2)]
    if last[0] != last[1]:
        raise CheckFailed(f"both ranks must stop after the same step, got last steps {last}")


def _train_for_rounds(
    context: Context, name: str, model: Path, num_ranks: int, *, sync_every_steps: int, swift: dict[str, Any]
) -> DemoJob:
    """The last rank is asked to end after ``_LEAST_ROUNDS`` rounds and a step of channel B, however long they take."""
    end = time.monotonic() + 0.9 * context.deadline_s
    with BenchServers(context.logs) as processes:
        server = start_server(context, processes, model)
        job = _write_job(context, name, model, server.ports, sync_every_steps, num_ranks, swift)
        learner = start_learner(context, processes, job)
        asked: list[float] = []

        def look() -> None:
            if server.tree.poll() is not None:
                cause = last_cause(server.tree.log_path, server.tree.log_offset)
                raise CheckFailed(f"the server ended: {cause}")
            _look(context, job)
            if (
                not asked
                and len(_records(job, 0, "round")) >= _LEAST_ROUNDS
                and any(step["channel"] == "B" for step in _records(job, 0, "step"))
            ):
                _rank_below(learner, str(num_ranks - 1)).send_signal(signal.SIGTERM)
                asked.append(time.monotonic())

        await_end(processes, learner, end, look)
        if not asked:
            raise CheckFailed("the learner ended before anybody asked it to")
        context.note("sigterm_to_end_s", time.monotonic() - asked[0])
    _account(context, job)
    return job


_NUM_STEPS = 12
_PARTS = {"start": "learner_loaded", "round": "first_round", "step": "first_step"}
"""Kind of the event with which the learner is at a part."""


def one_gpu_vllm(context: Context) -> None:
    """``launch`` starts both, a learner with adapters and our server on vLLM, as with ``configs/one-gpu.yaml``.

    Mode inline: a B step waits for its rollouts and the steps for every round, so that twelve steps always have both.

    Raises CheckFailed: it did not end well, or the run was not what it must be.
    """
    end = time.monotonic() + 0.9 * context.deadline_s
    model = checkpoint(WIDE_4_LAYERS, context)
    free_memory(context.device)
    context.at("model")
    port, group_port = free_ports(2)
    devices = {} if context.rehearsal else {"devices": [0]}
    launch = {"share_devices": True, "learner": devices, "servers": [{**_vllm_entry(context), **devices}]}
    job = _write_job(
        context, "run-one-gpu-vllm", model, (port, group_port), sync_every_steps=3, num_ranks=1, swift=_LORA,
        num_steps=_NUM_STEPS, mode=Mode.INLINE, launch=launch,
    )  # fmt: skip
    with BenchServers(context.logs) as processes:
        # Verbose: all logs in one that is kept, unlike the run directory.
        argv = (sys.executable, "-u", "-m", "swift_stage2", "launch", str(job.config_path), "--verbose")
        tree = processes.start_process("launch", argv, _threads(context))

        def look() -> None:
            if "[launch] server0 answers" in tree.log_path.read_text(encoding="utf-8", errors="replace"):
                context.at("server_answers")
            _look(context, job)

        await_end(processes, tree, end, look)
    context.at("end")
    _account(context, job)


def _vllm_entry(context: Context) -> dict[str, Any]:
    """Of ``launch.servers``. Without videos, which vLLM would try how large they can get before it serves."""
    if context.rehearsal:
        entry = server_entry(ServerEngine.VLLM)
    else:
        part = {"vllm_gpu_memory_utilization": 0.4, "vllm_engine_kwargs": attention_options()}
        args = {**vllm_options(context), **part}
        entry = {"engine": ServerEngine.VLLM.value, "args": args, "env": {"VLLM_NO_USAGE_STATS": 1}}
    entry["args"]["vllm_limit_mm_per_prompt"] = {"image": 1, "video": 0}
    return entry


def vllm_options(context: Context) -> dict[str, Any]:
    """Arguments of a server on vLLM on a GPU, of the tiny model's kind; it captures no graphs, which takes a minute."""
    return {
        "external_plugins": str(TEMPLATE_FILE), "model_type": MODEL_TYPE, "template": MODEL_TYPE,
        "torch_dtype": context.dtype, "vllm_max_model_len": 1024, "vllm_enforce_eager": True,
    }  # fmt: skip


def attention_options() -> dict[str, str]:
    """Engine arguments of a vLLM whose kernels of flash attention 2 are left out, being large; it does not see that."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0], "vllm_flash_attn")
    if any(folder.glob("_vllm_fa2_C*")):
        return {}
    language = {} if any(folder.glob("_vllm_fa3_C*")) else {"attention_backend": "TRITON_ATTN"}
    return {"mm_encoder_attn_backend": "TORCH_SDPA", **language}


def _look(context: Context, job: DemoJob) -> None:
    """Notes how far the learner is, and the most that was in use of the device."""
    kinds = {event.kind for event in read_events(event_path(job.run_dir, 0))}
    for kind, part in _PARTS.items():
        if kind in kinds:
            context.at(part)
    if (used := used_gib(context.device)) > float(context.figures.get("device_peak_gib", 0.0)):
        context.note("device_peak_gib", used)


def await_end(
    processes: BenchServers, tree: ProcessTree, end: float, each_moment: Callable[[], object] = lambda: None
) -> None:
    """Waits until the process has ended well.

    Raises CheckFailed: it has not, or still runs at ``end`` (monotonic seconds).
    """
    while (status := tree.poll()) is None:
        each_moment()
        if time.monotonic() >= end:
            said = last_cause(tree.log_path, tree.log_offset)
            raise CheckFailed(f"{tree.command.name} must end within the stage's time, it did not: {said}")
        processes.moment()
    if status != 0:
        cause = last_cause(tree.log_path, tree.log_offset)
        raise CheckFailed(f"{tree.command.name} ended with status {status}: {cause}")


def _records(job: DemoJob, rank: int, kind: str) -> list[dict[str, Any]]:
    """A rank's whole events so far."""
    events = read_events(event_path(job.run_dir, rank))
    return [event.model_dump(mode="json") for event in events if event.kind == kind]


def _rank_below(tree: ProcessTree, rank: str) -> psutil.Process:
    """The process of one rank below a torchrun below a supervisor. Raises CheckFailed: it is not there."""
    for process in psutil.Process(tree.pid).children(recursive=True):
        try:
            # A rank's own children have its environment too; parents come first.
            if process.environ().get("RANK") == rank:
                return process
        except psutil.Error:
            continue
    raise CheckFailed(f"rank {rank}, which is to be asked to end, is not there")


_NUM_SCENES = 64
_NEW_TOKENS = 24
_ROUND_TIMEOUT_S = 120.0
_CHECKED_PROOF = "checksums+canary"


def start_server(context: Context, processes: BenchServers, model: Path) -> BenchServer:
    """Our server on the check's device; it loads while the learner does, which waits for it."""
    options = {
        "external-plugins": str(TEMPLATE_FILE), "model-type": MODEL_TYPE, "template": MODEL_TYPE,
        "torch-dtype": context.dtype, "device": context.device, **({"num-threads": 1} if context.rehearsal else {}),
    }  # fmt: skip
    port, group_port = free_ports(2)
    argv = (
        sys.executable,
        "-u",
        "-m",
        "swift_stage2",
        "rollout",
        str(model),
        *as_argv(options),
        "--port",
        str(port),
    )
    tree = processes.start_process("server", argv, _threads(context))
    return BenchServer(f"http://127.0.0.1:{port}", group_port, tree)


def _write_job(
    context: Context, name: str, model: Path, ports: tuple[int, int],
    sync_every_steps: int, num_ranks: int, swift: Mapping[str, Any], *,
    num_steps: int = _MOST_STEPS, mode: Mode = Mode.ASYNC, launch: Mapping[str, Any] = MappingProxyType({}),
) -> DemoJob:  # fmt: skip
    """Scenes and a YAML for a run in which half of the steps want channel B."""
    directory = context.scratch / name
    rows = write_dataset(directory / "scenes", SceneKind.SHAPES, _NUM_SCENES, Split.TRAIN, 0)
    on_gpu: dict[str, Any] = {} if context.rehearsal else {"use_cpu": False, "bf16": True}
    job = DemoJob(
        directory=directory,
        rows=rows,
        num_steps=num_steps,
        b_ratio=0.5,
        mode=mode,
        num_ranks=num_ranks,
        model=model,
        max_new_tokens=_NEW_TOKENS,
        swift={
            "torch_dtype": context.dtype, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1,
            "logging_steps": 1, "report_to": ["none"], "save_strategy": "no", "lr_scheduler_type": "constant",
            **on_gpu, **swift,
        },
    )  # fmt: skip
    # Random weights never end their turn.
    channel_b = {"max_truncated_ratio": 1.0, "prefetch": {"sync_every_steps": sync_every_steps}}
    rollout = {"start_timeout_s": context.deadline_s, "sync": {"timeout_s": _ROUND_TIMEOUT_S}}
    changes = {"stage2_ab": {"channel_b": channel_b}, "rollout": rollout}
    write_job(job, ports, changes | {"launch": launch, "control_timeout_s": 4 * _ROUND_TIMEOUT_S})
    return job


def start_learner(context: Context, processes: BenchServers, job: DemoJob) -> ProcessTree:
    """All ranks of the job, each on device 0 as if it were alone on its node."""
    ranks = ("--standalone", f"--nproc-per-node={job.num_ranks}", "--no-python")
    rank = ("env", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1", sys.executable, "-u", "-m", "swift_stage2", "train")
    argv = (sys.executable, "-u", "-m", "torch.distributed.run", *ranks, *rank, str(job.config_path))
    return processes.start_process("learner", argv, _threads(context))


def _threads(context: Context) -> dict[str, str]:
    """Beside a GPU learner and server sum weights on the CPU, each on half of its cores."""
    num_threads = 1 if context.rehearsal else max(1, len(os.sched_getaffinity(0)) // 2)
    return {"OMP_NUM_THREADS": str(num_threads)}


def _account(context: Context, job: DemoJob) -> None:
    """Figures of a run that trained both channels and proved every round by sums, the first by the canary, too.

    Raises CheckFailed: one of these does not hold.
    """
    summary = summarise(job.run_dir)
    note = context.note
    note("num_steps", summary.num_steps)
    note("num_b_steps", summary.num_b_run)
    note("num_rounds_proven", summary.num_rounds_committed)
    note("proofs", _told(summary.proofs))
    note("transports", _told(summary.transports))
    note("num_rollouts", summary.totals["rollouts_received"])
    if asking_ns := _records(job, 0, "metrics")[-1]["pipeline_ns"]["asking"]:
        note("rollouts_per_s_asked", summary.totals["rollouts_received"] * NANOSECONDS / asking_ns)
    if summary.round_seconds:
        note("round_median_s", statistics.median(summary.round_seconds))
        note("round_longest_s", max(summary.round_seconds))
    for phase, seconds in summary.phase_seconds.items():
        note(f"{phase}_median_s", statistics.median(seconds))
    for name, spent in summary.activity[0].items():
        note(f"rank0_{name}_s", spent)
    if summary.num_rounds_failed or summary.num_rounds_committed < _LEAST_ROUNDS:
        raise CheckFailed(
            f"at least {_LEAST_ROUNDS} rounds and none that failed are wanted, got "
            f"proven={summary.num_rounds_committed} failed={summary.num_rounds_failed} {dict(summary.server_errors)}"
        )
    if _CHECKED_PROOF not in summary.proofs or set(summary.proofs) - {_CHECKED_PROOF, "checksums"}:
        raise CheckFailed(
            f"rounds must be proven by sums, the first by the canary too, got {dict(summary.proofs)}"
        )
    if summary.num_b_run == 0 or summary.num_disagreements:
        raise CheckFailed(
            f"both channels must be trained and ranks agree, got b_steps={summary.num_b_run} "
            f"{dict(summary.skips)} disagreements={summary.num_disagreements}"
        )


def _told(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} by {name}" for name, count in counts.items())
