"""A learner and our server on one device: how they are written, started and accounted.

``launch`` refuses a device for both, so they are started one by one, as a user with one GPU would.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.processes import Server, StageProcesses
from benchmarks.gpu_check.stage import Context
from swift_stage2.config import load_config
from swift_stage2.config.yaml_text import write_yaml
from swift_stage2.demo.demo_config import MODEL_TYPE, TEMPLATE_FILE, DemoJob, config_of, free_ports
from swift_stage2.demo.grounding_dataset import write_dataset
from swift_stage2.demo.scenes import SceneKind, Split
from swift_stage2.errors import CheckFailed
from swift_stage2.launch.process_tree import ProcessTree
from swift_stage2.telemetry.summary import RunSummary, summarise

_NUM_SCENES = 64
_NEW_TOKENS = 24
_ROUND_TIMEOUT_S = 120.0
_CHECKED_PROOF = "checksums+canary"


def start_server(context: Context, processes: StageProcesses, model: Path) -> Server:
    """Our server on the check's device, once it answers. Raises ``ChildFailed`` when it does not."""
    port, group_port = free_ports(2)
    options = ["--external-plugins", str(TEMPLATE_FILE), "--model-type", MODEL_TYPE, "--template", MODEL_TYPE]
    place = ["--port", str(port), "--torch-dtype", context.dtype, "--device", context.device]
    threads = ["--num-threads", "1"] if context.rehearsal else []
    argv = (sys.executable, "-u", "-m", "swift_stage2", "rollout", str(model), *options, *place, *threads)
    tree = processes.start("server", argv, _threads(context))
    base_url = f"http://127.0.0.1:{port}"
    processes.await_answer(base_url, tree)
    return Server(base_url, group_port, tree)


def write_job(
    context: Context,
    name: str,
    model: Path,
    server: Server,
    *,
    num_steps: int,
    sync_every_steps: int,
    num_ranks: int = 1,
    swift: Mapping[str, Any] | None = None,
) -> DemoJob:
    """Scenes and a YAML for a run of ``num_steps``, half of which want channel B."""
    directory = context.scratch / name
    rows = write_dataset(directory / "scenes", SceneKind.SHAPES, _NUM_SCENES, Split.TRAIN, 0)
    on_gpu: dict[str, Any] = {} if context.rehearsal else {"use_cpu": False, "bf16": True}
    job = DemoJob(
        directory=directory,
        rows=rows,
        num_steps=num_steps,
        b_ratio=0.5,
        num_ranks=num_ranks,
        model=model,
        max_new_tokens=_NEW_TOKENS,
        swift={
            "torch_dtype": context.dtype, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1,
            "logging_steps": 1, "report_to": ["none"], "save_strategy": "no", **on_gpu, **(swift or {}),
        },
    )  # fmt: skip
    port = int(server.base_url.rpartition(":")[2])
    config = config_of(job, (port, server.group_port))
    config["launch"].pop("servers")
    channel_b = config["stage2_ab"]["channel_b"]
    channel_b["prefetch"]["sync_every_steps"] = sync_every_steps
    channel_b["max_truncated_ratio"] = 1.0  # random weights never end their turn
    config["rollout"]["sync"]["timeout_s"] = _ROUND_TIMEOUT_S
    job.config_path.write_text(write_yaml(config), encoding="utf-8")
    load_config(job.config_path)
    return job


def start_learner(context: Context, processes: StageProcesses, job: DemoJob) -> ProcessTree:
    """All ranks of the job, each on device 0 as if it were alone on its node."""
    torchrun = (
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={job.num_ranks}",
        "--no-python",
    )
    rank = ("env", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1", sys.executable, "-u", "-m", "swift_stage2", "train")
    argv = (sys.executable, "-u", *torchrun, *rank, str(job.config_path))
    return processes.start("learner", argv, _threads(context))


def _threads(context: Context) -> dict[str, str]:
    """Beside a GPU learner and server sum weights on the CPU, each on half of its cores."""
    num_threads = 1 if context.rehearsal else max(1, len(os.sched_getaffinity(0)) // 2)
    return {"OMP_NUM_THREADS": str(num_threads)}


def account(context: Context, job: DemoJob, *, least_rounds: int) -> RunSummary:
    """Figures of a run, once every round of it is proven by sums and canary and both channels were trained.

    Raises:
        CheckFailed: one of these does not hold.
    """
    summary = summarise(job.run_dir)
    note = context.figures.note
    note("num_steps", summary.num_steps)
    note("num_b_steps", summary.num_b_run)
    note("num_rounds_proven", summary.num_rounds_committed)
    if summary.round_seconds is not None:
        note("round_median_s", summary.round_seconds.median_s)
    for phase, spread in summary.phase_seconds.items():
        note(f"{phase}_median_s", spread.median_s)
    for name, seconds in summary.activity[0].seconds.items():
        note(f"rank0_{name}_s", seconds)
    if summary.num_rounds_failed or summary.num_rounds_committed < least_rounds:
        raise CheckFailed(
            f"at least {least_rounds} rounds and none that failed are wanted, got "
            f"proven={summary.num_rounds_committed} failed={summary.num_rounds_failed} {dict(summary.server_errors)}"
        )
    if set(summary.proofs) != {_CHECKED_PROOF}:
        raise CheckFailed(f"rounds must be proven by sums and canary, got {dict(summary.proofs)}")
    if summary.num_b_run == 0 or summary.num_disagreements or summary.missing_ranks:
        raise CheckFailed(
            f"both channels must be trained and ranks agree, got b_steps={summary.num_b_run} "
            f"{dict(summary.skips)} disagreements={summary.num_disagreements} missing={summary.missing_ranks}"
        )
    return summary
