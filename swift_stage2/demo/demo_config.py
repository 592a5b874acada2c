"""Writes the configuration that a user would write by hand to train the tiny model on one machine without a GPU.

One YAML per job, complete and checked by ``load_config``, so that it can be read, changed and started again
with ``swift-stage2 launch``. Called by the demo and the benches.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from swift_stage2.config import Mode, Objective, ServerEngine, load_config
from swift_stage2.config.yaml_text import write_yaml
from swift_stage2.rollout_server.command_line import CPU_SUPPORT, require_vllm

TEMPLATE_FILE = Path(__file__).parent / "tiny_template.py"
MODEL_TYPE = "stage2_tiny_vl"
STAGE1 = Path(__file__).parent / "stage1"
CHILD_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "QWENVL_BBOX_FORMAT": "new",
    "TOKENIZERS_PARALLELISM": "false",
}
"""For every process of a job: nothing is looked up outside, and ranks and server share the cores."""

PER_DEVICE_BATCH_SIZE = 8
GRADIENT_ACCUMULATION_STEPS = 2
_LOOPBACK = "127.0.0.1"
_NUM_GENERATIONS = 4  # of a row, where its rollouts are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoJob:
    directory: Path
    """Gets ``config.yaml`` and the run directory ``run``."""
    rows: Path
    num_steps: int
    b_ratio: float
    seed: int = 0
    num_ranks: int = 2
    model: Path = STAGE1
    plugins: tuple[Path, ...] = ()
    """Further files for ms-swift's ``external_plugins``."""
    engine: ServerEngine = ServerEngine.TRANSFORMERS
    """The rollout server's engine."""
    mode: Mode = Mode.ASYNC
    max_new_tokens: int = 128
    temperature: float = 0.3
    objective: Objective = Objective.CORRECTED_TARGET
    record: bool = False
    """So that the run can be replayed."""
    swift: dict[str, Any] = field(default_factory=dict)
    """ms-swift arguments that differ from the demo's."""

    @property
    def config_path(self) -> Path:
        return self.directory / "config.yaml"

    @property
    def run_dir(self) -> Path:
        """ms-swift's output directory: logs, events, TensorBoard and checkpoints."""
        return self.directory.absolute() / "run"

    @property
    def checkpoint(self) -> Path:
        """Where the weights are after the last step."""
        return self.run_dir / f"checkpoint-{self.num_steps}"


def write_config(job: DemoJob, ports: tuple[int, int]) -> Path:
    """Writes the job's YAML and checks it; ``ports`` are those of the server's HTTP and of its weight group.

    Raises:
        ConfigError: a value of the job is refused, for instance ``b_ratio``.
    """
    job.directory.mkdir(parents=True, exist_ok=True)
    environment = " ".join(f"{name}={value}" for name, value in CHILD_ENVIRONMENT.items())
    command = f"{environment} swift-stage2 launch {job.config_path}"
    text = write_yaml(config_of(job, ports))
    job.config_path.write_text(f"# {command}\n{text}", encoding="utf-8")
    load_config(job.config_path)
    return job.config_path


def config_of(job: DemoJob, ports: tuple[int, int]) -> dict[str, Any]:
    """The settings that differ from the defaults. Without channel B there is no server."""
    config: dict[str, Any] = {
        "swift": _swift_arguments(job),
        "stage2_ab": {"schedule": {"b_ratio": job.b_ratio}, "mode": job.mode.value},
        "launch": {"learner": {"nproc_per_node": job.num_ranks, "shutdown_timeout_s": 60}},
    }
    if job.record:
        config["telemetry"] = {"record": True}
    if job.b_ratio == 0:
        return config
    config["stage2_ab"]["channel_b"] = {
        "prefetch": {
            "queue_limit": 8,
            "version_window": 2,
            "sync_every_steps": 4,
            "prefetch_target_packs": 4,
        },
        "packing": {"packing_length": 512},
    }
    compares = job.objective is not Objective.CORRECTED_TARGET
    if compares:
        config["stage2_ab"]["objective"] = job.objective.value
    config["rollout"] = {
        "servers": [{"base_url": f"http://{_LOOPBACK}:{ports[0]}", "group_port": ports[1]}],
        "decoding": {
            "temperature": 1.0 if compares else job.temperature,
            "top_p": 1.0 if compares else 0.95,
            "max_new_tokens": job.max_new_tokens,
        },
        **({"num_generations": _NUM_GENERATIONS} if compares else {}),
        "max_inflight_per_server": 64,
        "request_timeout_s": 30.0,
        "start_timeout_s": 300.0,
        "sync": {"timeout_s": 60.0},
    }
    config["launch"]["servers"] = [server_entry(job.engine)]
    config["control_timeout_s"] = 240.0
    return config


def server_entry(engine: ServerEngine) -> dict[str, Any]:
    """The server's entry in ``launch.servers``, without ``model``.

    Raises:
        UserError: vLLM, or what it needs without a GPU, is not installed.
    """
    if engine is ServerEngine.TRANSFORMERS:
        options: dict[str, Any] = {
            "external-plugins": str(TEMPLATE_FILE),
            "model-type": MODEL_TYPE,
            "template": MODEL_TYPE,
            "torch-dtype": "float32",
            "num-threads": 1,
        }
        return {"engine": engine.value, "args": options}
    require_vllm(without_gpu=True)
    folder = files(CPU_SUPPORT)
    options = {
        "external_plugins": [str(TEMPLATE_FILE), str(folder / "swift_plugin.py")],
        "model_type": MODEL_TYPE,
        "template": MODEL_TYPE,
        "torch_dtype": "float32",
        "vllm_enforce_eager": True,
        "vllm_max_model_len": 1024,
    }
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": 1,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": 1,
    }
    return {"engine": engine.value, "args": options, "env": environment}


def evaluation_command(rows: Path, checkpoint: Path, output: Path) -> tuple[str, ...]:
    """``swift-stage2 evaluate`` of a checkpoint of the tiny model, which names what an untrained one does not know."""
    arguments = {
        "model_type": MODEL_TYPE,
        "template": MODEL_TYPE,
        "external_plugins": TEMPLATE_FILE,
        "torch_dtype": "float32",
        "use_cpu": True,
    }
    words = ("evaluate", "--data", rows, "--model", checkpoint, "--output", output, "--max-new-tokens", 128)
    more = (word for name, value in arguments.items() for word in ("--swift", f"{name}={value}"))
    return (sys.executable, "-m", "swift_stage2", *map(str, words), "--in-flight", "64", *more)


def _swift_arguments(job: DemoJob) -> dict[str, Any]:
    return {
        "model": str(job.model.absolute()),
        "model_type": MODEL_TYPE,
        "template": MODEL_TYPE,
        "external_plugins": [str(path) for path in (TEMPLATE_FILE, *job.plugins)],
        "dataset": [str(job.rows.absolute())],
        "split_dataset_ratio": 0.0,
        "lazy_tokenize": True,
        "load_from_cache_file": False,
        "dataset_num_proc": 1,
        "tuner_type": "full",
        "freeze_vit": False,
        "freeze_aligner": False,
        "torch_dtype": "float32",
        "fp16": False,  # else ms-swift trains float32 weights in mixed fp16 on a GPU
        "attn_impl": "sdpa",
        "use_cpu": True,
        "ddp_backend": "gloo",
        "ddp_find_unused_parameters": False,  # every scene has an image, so every parameter is used
        "gradient_checkpointing": False,
        "per_device_train_batch_size": PER_DEVICE_BATCH_SIZE,
        "gradient_accumulation_steps": GRADIENT_ACCUMULATION_STEPS,
        "learning_rate": 1e-4,  # more undoes what stage 1 learnt at the end of its decay
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.05,
        "max_steps": job.num_steps,
        "logging_steps": 5,
        "save_strategy": "steps",
        "save_steps": job.num_steps,
        "eval_strategy": "no",
        "report_to": ["tensorboard"],
        "seed": job.seed,
        "data_seed": job.seed,
        "output_dir": str(job.run_dir),
        "add_version": False,
        **job.swift,
    }
