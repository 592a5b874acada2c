"""The configuration into the commands that ``launch`` starts: pure, nothing is run or opened here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from swift_stage2.config import (
    LearnerProcess,
    RestartConfig,
    ServerConfig,
    ServerEngine,
    ServerProcess,
    Stage2Config,
)
from swift_stage2.config.launch import DeviceAssignment, check_devices
from swift_stage2.config.swift_arguments import as_argv
from swift_stage2.errors import ConfigError
from swift_stage2.runtime.environment import select_devices
from swift_stage2.runtime.supervisor import Command

EXIT_STATUS_FILE = "SWIFT_STAGE2_EXIT_STATUS_FILE"
"""Environment variable: where ``swift-stage2 train`` writes its exit status; torchrun replaces every failure by 1."""

# An outer torchrun or ms-swift launcher may have left these in the environment; they would be taken for ours.
_FOREIGN = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("NPROC_PER_NODE", "NNODES", "NODE_RANK"),
)
_FLAGS = ("insecure", "trust-remote-code")  # options of `rollout` without a value
_RUN_ID = "stage2"
_MERGER_GRACE_S = _DOCTOR_GRACE_S = 10.0
_LEAST_MERGED_BATCH = 64
_LEAST_UPSTREAM_TIMEOUT_S = 600.0
_KILL_MARGIN_S = 30  # torchrun needs its own time after the ranks' SIGKILL


class LaunchPart(StrEnum):
    """The part of a configuration that one ``launch`` starts."""

    ALL = "all"
    """Servers and learner, on one machine."""
    SERVERS = "servers"
    """The servers of the machine that it runs on."""
    LEARNER = "learner"
    """The learner's ranks of one of its hosts."""
    CHECK = "check"
    """The servers of the machine that it runs on, and the doctor, which asks all servers, in the learner's place."""


@dataclass(frozen=True, slots=True)
class PlannedServer:
    """A server to start, where it will answer, and its number in ``launch.servers``.

    With a ``merger`` that is what answers at ``address``, and the server listens on ``upstream_port``. One that
    ``sleeps`` must not load beside a learner that trains.
    """

    command: Command
    address: ServerConfig
    index: int
    merger: Command | None = None
    upstream_port: int | None = None
    is_stock: bool = False
    sleeps: bool = False

    def commands(self, *, again: bool = False) -> tuple[Command, ...]:
        """In the order in which they are started; ``again``: a merger must not believe weights that came up anew."""
        command, merger = self.command, self.merger
        if again and self.sleeps:
            command = replace(command, argv=(*command.argv, "--load-when-asked"))
        if merger is None:
            return (command,)
        merger = replace(merger, argv=(*merger.argv, "--needs-weights")) if again else merger
        return command, merger

    @property
    def http_ports(self) -> tuple[int, ...]:
        """The port that each of ``commands`` listens on."""
        return (self.address.port,) if self.upstream_port is None else (self.upstream_port, self.address.port)

    @property
    def http_urls(self) -> list[str]:
        return [_url(self.address.host, port) for port in self.http_ports]


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Everything that ``launch`` starts. Without a ``learner`` there is one on other machines.

    ``is_check``: the doctor is in its place, once all servers answer.
    """

    servers: tuple[PlannedServer, ...]
    learner: Command | None
    log_dir: Path
    exit_status_file: Path
    restart: RestartConfig = field(default_factory=RestartConfig)
    is_check: bool = False

    @property
    def server_indices(self) -> list[int]:
        """Numbers of the planned servers in ``launch.servers``."""
        return [server.index for server in self.servers]


def plan_launch(
    config: Stage2Config,
    config_path: Path,
    environment: Mapping[str, str],
    nproc_per_node: int | None = None,
    *,
    resume: bool = False,
    part: LaunchPart = LaunchPart.ALL,
    node_rank: int | None = None,
    is_here: Callable[[str], bool] | None = None,
    check_options: Sequence[str] = (),
) -> LaunchPlan:
    """Commands, environments and devices of all processes. ``resume``: the ranks go on from their last checkpoint.
    ``check_options`` are the doctor's, for a check.

    Only servers whose host ``is_here`` are planned, by default all. ``node_rank``: which host of the learner this is.

    Raises:
        ConfigError: no ``swift.output_dir``, no model for a server, more ranks than learner devices, no such
            ``node_rank``, servers and a learner of several hosts in one launch, or a device that the environment does
            not leave visible or that processes may not share.
    """
    learner, output_dir = config.launch.learner, config.swift.get("output_dir")
    if nproc_per_node is not None:
        learner = replace(learner, nproc_per_node=nproc_per_node)
    if not isinstance(output_dir, str) or not output_dir.strip():
        raise ConfigError(
            "swift.output_dir must name the run directory",
            got=f"output_dir={output_dir!r}",
            remedy="launch keeps its logs there",
        )
    rank = learner.node_rank if node_rank is None else node_rank
    learner.check_node_rank(rank or 0)
    outer = without_rank(environment)
    with_servers = config.b_enabled and part is not LaunchPart.LEARNER
    pairs = zip(config.launch.servers, config.rollout.servers, strict=False) if with_servers else ()
    servers = tuple(
        _plan_server(config, index, process, address, outer)
        for index, (process, address) in enumerate(pairs)
        if is_here is None or is_here(address.host)
    )
    if learner.nnodes > 1 and (
        (part is LaunchPart.ALL and servers)
        or (rank is None and part in (LaunchPart.ALL, LaunchPart.LEARNER))
    ):
        raise ConfigError(
            "the hosts of a learner are launched one by one, apart from servers",
            got=f"launch.learner.nnodes={learner.nnodes}",
            remedy="run launch --servers-only on the servers' hosts, and on each of the learner's launch "
            "--learner-only --node-rank N, with 0 on the host that rdzv_endpoint names",
        )
    log_dir = Path(output_dir).expanduser().absolute() / "logs"
    name = "learner" if learner.nnodes == 1 else f"learner.node{rank or 0}"
    status_file = log_dir / f"{name}.exit_status"
    words = ["train", str(config_path.absolute()), *(["--resume"] if resume else [])]
    ranks = None
    if part is not LaunchPart.SERVERS:
        ranks = _plan_learner(learner, name, words, rank or 0, outer, status_file)
    placements = [DeviceAssignment(None, "", devices_of(ranks))] if ranks else []
    for server in servers:
        place = "" if part is LaunchPart.ALL else server.address.host
        placements.append(DeviceAssignment(server.index, place, devices_of(server.command)))
    check_devices(config.launch, placements)  # again: a number and a name may be one device here
    is_check = part is LaunchPart.CHECK
    if is_check:
        ranks = _plan_doctor(config_path, learner, check_options, outer)
    return LaunchPlan(servers, ranks, log_dir, status_file, config.launch.restart, is_check)


def _plan_doctor(
    config_path: Path, learner: LearnerProcess, options: Sequence[str], outer: Mapping[str, str]
) -> Command:
    """It sees all devices, counts them, and takes the learner's first by itself."""
    words = (str(config_path.absolute()), "--live", f"--nproc-per-node={learner.nproc_per_node}", *options)
    return Command(
        name="doctor",
        argv=(sys.executable, "-u", "-m", "swift_stage2", "doctor", *words),
        environment={**outer, "PYTHONUNBUFFERED": "1"},
        grace_s=_DOCTOR_GRACE_S,
    )


def _plan_server(
    config: Stage2Config, index: int, process: ServerProcess, address: ServerConfig, outer: Mapping[str, str]
) -> PlannedServer:
    model = process.model or config.swift.get("model")
    if not model:
        raise ConfigError(
            f"launch.servers[{index}] needs a model", got="none", remedy="write its model, or swift.model"
        )
    port = process.upstream_port or address.port
    own = {name: str(value) for name, value in process.env.items()}
    command = Command(
        name=f"server{index}",
        argv=(sys.executable, "-u", *_server_arguments(config, process, str(model), address, port)),
        environment=_environment(outer, process.devices, f"launch.servers[{index}].devices") | own,
        grace_s=config.launch.server_shutdown_timeout_s,
    )
    return PlannedServer(
        command=command,
        address=address,
        index=index,
        merger=_plan_merger(config, index, process, address, outer),
        upstream_port=process.upstream_port,
        is_stock=process.engine is ServerEngine.SWIFT,
        sleeps=config.alternates and process.engine is not ServerEngine.SWIFT,
    )


def _plan_merger(
    config: Stage2Config, index: int, process: ServerProcess, address: ServerConfig, outer: Mapping[str, str]
) -> Command | None:
    if process.upstream_port is None:
        return None
    options = {
        "upstream": _url(address.host, process.upstream_port),
        "host": address.host,
        "port": address.port,
        "max-batch-size": max(_LEAST_MERGED_BATCH, config.rollout.max_inflight_per_server),
        "upstream-timeout-s": max(_LEAST_UPSTREAM_TIMEOUT_S, 2 * config.rollout.request_timeout_s),
        "api-key-env": config.rollout.api_key_env,
    }
    return Command(
        name=f"merger{index}",
        argv=(sys.executable, "-u", "-m", "swift_stage2", "merge", *as_argv(options)),
        environment=_environment(outer),
        grace_s=_MERGER_GRACE_S,
    )


def _server_arguments(
    config: Stage2Config, process: ServerProcess, model: str, address: ServerConfig, port: int
) -> list[str]:
    place = ["--host", address.host, "--port", str(port)]
    is_ours = process.engine is not ServerEngine.SWIFT
    flags = [name for name in _FLAGS if is_ours and process.args.get(name) is True]
    options = [f"--{name}" for name in flags]
    options += as_argv({name: value for name, value in process.args.items() if name not in flags})
    key = ["--api-key-env", config.rollout.api_key_env]
    if address.group_bind:
        key += ["--group-bind", address.group_bind]  # the learner names it to a stock server
    if config.rollout.sync.disk_directory is not None:
        key += ["--weights-root", config.rollout.sync.disk_directory]
    if is_ours:
        options = ["--sleep-level", "2", *options] if config.alternates else options
        named = [model] if process.engine is ServerEngine.TRANSFORMERS else ["--model", model]
        words = ["rollout", "--engine", process.engine.value, *named, *place, *key, *options]
        return ["-m", "swift_stage2", *words]
    program = ["swift.cli.rollout"]
    if config.rollout.api_key():  # which ms-swift takes as an argument only, for everyone to read
        program = ["swift_stage2.rollout_server.stock_program", config.rollout.api_key_env]
    return ["-m", *program, "--model", model, *place, *options]


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _plan_learner(
    process: LearnerProcess,
    name: str,
    words: Sequence[str],
    node_rank: int,
    outer: Mapping[str, str],
    status_file: Path,
) -> Command:
    nodes: tuple[str, ...] = ()
    if (
        process.rdzv_endpoint is not None
    ):  # static, by rank: no host needs to recognise its own name in the endpoint
        nodes = (f"--nnodes={process.nnodes}", f"--node-rank={node_rank}", "--rdzv-backend=static")
        nodes += (f"--rdzv-endpoint={process.rdzv_endpoint}", f"--rdzv-id={_RUN_ID}")
    return torchrun_command(
        name,
        words,
        nodes=nodes,
        num_ranks=process.nproc_per_node,
        shutdown_timeout_s=process.shutdown_timeout_s,
        # Without --log-dir torchrun makes a folder in the temporary directory at every start, and leaves it there.
        environment={"PET_LOG_DIR": str(status_file.with_name("torchrun"))}
        | _environment(outer, process.devices, "launch.learner.devices")
        | {name: str(value) for name, value in process.env.items()}
        | {EXIT_STATUS_FILE: str(status_file)},
    )


def torchrun_command(
    name: str,
    words: Sequence[str],
    *,
    num_ranks: int,
    shutdown_timeout_s: int,
    environment: Mapping[str, str],
    nodes: Sequence[str] = (),
) -> Command:
    """``swift-stage2 WORDS`` in every rank of one machine; ``nodes`` are torchrun's options about others, if any."""
    program = "torch.distributed.run" if nodes else "swift_stage2.collectives"
    torchrun = ["-m", program, *nodes, f"--nproc-per-node={num_ranks}"]
    return Command(
        name=name,
        argv=(sys.executable, "-u", *torchrun, "-m", "swift_stage2", *words),
        # Its --shutdown-timeout; the torchrun of torch 2.11 has none and would refuse the option.
        environment={**environment, "PET_SHUTDOWN_TIMEOUT": str(shutdown_timeout_s)},
        grace_s=shutdown_timeout_s + _KILL_MARGIN_S,
    )


def without_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` without what an outer torchrun or ms-swift launcher may have left in it."""
    return {key: text for key, text in environment.items() if key not in _FOREIGN}


def _environment(
    outer: Mapping[str, str], devices: tuple[int | str, ...] = (), key: str = ""
) -> dict[str, str]:
    """No devices means CPU only: whoever is given none can then never take another one's."""
    visible = select_devices(outer, devices, key)
    return {**outer, "CUDA_VISIBLE_DEVICES": visible, "PYTHONUNBUFFERED": "1"}


def devices_of(command: Command) -> list[str]:
    """The devices that it sees, each by the one name that it has on this machine."""
    return [device for device in command.environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
