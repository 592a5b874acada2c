"""The configuration into the commands that ``launch`` starts: pure, nothing is run or opened here."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from swift_stage2.config import LearnerProcess, ServerConfig, ServerEngine, ServerProcess, Stage2Config
from swift_stage2.config.swift_arguments import as_argv
from swift_stage2.errors import ConfigError
from swift_stage2.launch.process_tree import Command

EXIT_STATUS_FILE = "SWIFT_STAGE2_EXIT_STATUS_FILE"
"""Environment variable: where ``swift-stage2 train`` writes its exit status; torchrun replaces every failure by 1."""

# What an outer torchrun or ms-swift launcher may have left in the environment; it would be taken for ours.
_FOREIGN_RANK = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_FOREIGN_SIZE = ("NPROC_PER_NODE", "NNODES", "NODE_RANK")
_KILL_MARGIN_S = 30  # torchrun needs its own time after the ranks' SIGKILL


@dataclass(frozen=True, slots=True)
class PlannedServer:
    """A server to start, where it will answer, and the key that says so in the configuration."""

    command: Command
    address: ServerConfig
    key: str


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Everything that ``launch`` starts, in order."""

    servers: tuple[PlannedServer, ...]
    learner: Command
    log_dir: Path
    exit_status_file: Path


def plan_launch(
    config: Stage2Config, config_path: Path, environment: Mapping[str, str], nproc_per_node: int | None = None
) -> LaunchPlan:
    """Commands, environments and devices of all processes.

    Raises:
        ConfigError: no ``swift.output_dir``, no model for a server, or more ranks than learner devices.
    """
    log_dir = _run_dir(config) / "logs"
    status_file = log_dir / "learner.exit_status"
    outer = {key: text for key, text in environment.items() if key not in _FOREIGN_RANK + _FOREIGN_SIZE}
    servers = tuple(
        _plan_server(config, index, process, address, outer)
        for index, (process, address) in enumerate(
            zip(config.launch.servers, config.rollout.servers, strict=False)
        )
    )
    learner = _plan_learner(config.launch.learner, config_path, nproc_per_node, outer, status_file)
    return LaunchPlan(servers=servers, learner=learner, log_dir=log_dir, exit_status_file=status_file)


def _run_dir(config: Stage2Config) -> Path:
    output_dir = config.swift.get("output_dir")
    if not isinstance(output_dir, str) or not output_dir.strip():
        raise ConfigError(
            f"swift.output_dir must name the run directory, got output_dir={output_dir!r}; launch keeps its logs there"
        )
    return Path(output_dir).expanduser().absolute()


def _plan_server(
    config: Stage2Config, index: int, process: ServerProcess, address: ServerConfig, outer: Mapping[str, str]
) -> PlannedServer:
    model = process.model or config.swift.get("model")
    if not model:
        raise ConfigError(f"launch.servers[{index}] needs a model, got none; write its model, or swift.model")
    command = Command(
        name=f"server{index}",
        argv=(sys.executable, "-u", *_server_arguments(config, process, str(model), address)),
        environment=_environment(outer, process.devices),
        grace_s=config.launch.server_shutdown_timeout_s,
    )
    return PlannedServer(command=command, address=address, key=f"rollout.servers[{index}]")


def _server_arguments(
    config: Stage2Config, process: ServerProcess, model: str, address: ServerConfig
) -> list[str]:
    place = ["--host", address.host, "--port", str(address.port)]
    options = as_argv(process.args)
    if process.engine is ServerEngine.TRANSFORMERS:
        key = ["--api-key-env", config.rollout.api_key_env]
        return ["-m", "swift_stage2", "rollout", "--engine", "transformers", model, *place, *key, *options]
    api_key = config.rollout.api_key()
    secret = ["--api_key", api_key] if api_key else []  # the stock server takes it from nowhere else
    return ["-m", "swift.cli.rollout", "--model", model, *place, *secret, *options]


def _plan_learner(
    process: LearnerProcess,
    config_path: Path,
    nproc_per_node: int | None,
    outer: Mapping[str, str],
    status_file: Path,
) -> Command:
    num_ranks = process.nproc_per_node if nproc_per_node is None else nproc_per_node
    if num_ranks < 1 or (process.devices and num_ranks > len(process.devices)):
        raise ConfigError(
            "nproc_per_node must be at least 1 and at most the number of launch.learner.devices, got "
            f"nproc_per_node={num_ranks} devices={list(process.devices)}"
        )
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    grace = f"--shutdown-timeout={process.shutdown_timeout_s}"
    train = ["-m", "swift_stage2", "train", str(config_path.absolute())]
    environment = _environment(outer, process.devices) | {EXIT_STATUS_FILE: str(status_file)}
    return Command(
        name="learner",
        argv=(sys.executable, "-u", *torchrun, grace, *train),
        environment=environment,
        grace_s=process.shutdown_timeout_s + _KILL_MARGIN_S,
    )


def _environment(outer: Mapping[str, str], devices: tuple[int, ...]) -> dict[str, str]:
    """No devices means CPU only: whoever is given none can then never take another one's."""
    visible = ",".join(str(device) for device in devices)
    return {**outer, "CUDA_VISIBLE_DEVICES": visible, "PYTHONUNBUFFERED": "1"}
