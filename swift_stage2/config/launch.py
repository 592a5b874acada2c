"""Section ``launch``: the processes that ``swift-stage2 launch`` starts, and who has which device, or a part of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from swift_stage2.config.rules import Count, NotNegative
from swift_stage2.errors import ConfigError

_WRITTEN_BY_LAUNCH = frozenset(
    {"host", "group_bind", "port", "model", "engine", "weights_root", "api_key", "api_key_env"}
)


class ServerEngine(StrEnum):
    """Which program serves rollouts."""

    TRANSFORMERS = "transformers"
    VLLM = "vllm"
    SWIFT = "swift"


class RestartPolicy(StrEnum):
    """Whether a server that ends while the learner runs is started again."""

    NEVER = "never"
    ON_FAILURE = "on_failure"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerProcess:
    engine: ServerEngine = ServerEngine.SWIFT
    """Our own server on ms-swift's transformers or vLLM engine, or ``swift``: stock ``swift rollout`` (vLLM)."""
    model: str | None = None
    """Model that the server starts with; ``swift.model`` when absent."""
    devices: tuple[int | str, ...] = ()
    """GPUs that it sees: numbers within launch's CUDA_VISIBLE_DEVICES, or names GPU-… or MIG-…; none means CPU only."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Further options of the server's command line: name without dashes, value."""
    env: Mapping[str, str | int | float] = field(default_factory=dict)
    """Environment variables of this server, on top of the launcher's own."""
    merge: bool = False
    """Start a merger on ``base_url``'s port in front of a stock server."""
    upstream_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port of the stock server behind its merger; required with ``merge``, unused without."""

    def __post_init__(self) -> None:
        _check_devices(self.devices, self.env)
        for name in self.args:
            if name.lstrip("-").replace("-", "_") in _WRITTEN_BY_LAUNCH:
                told = "launch takes it from section rollout and the keys beside args"
                raise ConfigError(f"args must not set {name}", remedy=told)
        if self.merge and self.engine is not ServerEngine.SWIFT:
            raise ConfigError(
                "merge is for stock servers (engine: swift)",
                got=f"engine={str(self.engine)!r}",
                remedy="our own server merges by itself: remove merge",
            )
        if self.merge != (self.upstream_port is not None):
            raise ConfigError(
                "merge and upstream_port go together",
                got=f"merge={self.merge} upstream_port={self.upstream_port}",
                remedy="write both or neither",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerProcess:
    nproc_per_node: Count = 1
    """Learner ranks that torchrun starts on each of its hosts."""
    nnodes: Count = 1
    """Hosts of the learner, each with a ``launch --learner-only`` of its own."""
    node_rank: int | None = None
    """Which of them this is, from 0; ``launch --node-rank`` overrides it, so that one file serves all."""
    rdzv_endpoint: str | None = None
    """HOST:PORT of the learner's host 0, as the others reach it; required with ``nnodes`` above 1."""
    devices: tuple[int | str, ...] = ()
    """GPUs that the learner sees, as a server's."""
    env: Mapping[str, str | int | float] = field(default_factory=dict)
    """Environment variables of its ranks alone, on top of the launcher's own."""
    shutdown_timeout_s: Count = 300
    """Seconds between SIGTERM and SIGKILL of the ranks: long enough to save a checkpoint."""

    def __post_init__(self) -> None:
        if self.node_rank is not None:
            self.check_node_rank(self.node_rank)
        self._check_rendezvous()
        _check_devices(self.devices, self.env)
        if self.devices and self.nproc_per_node > len(self.devices):
            raise ConfigError(
                "nproc_per_node must be at most the number of devices",
                got=f"nproc_per_node={self.nproc_per_node} devices={list(self.devices)}",
                remedy=f"write nproc_per_node: {len(self.devices)}, or name more devices",
            )

    def check_node_rank(self, node_rank: int) -> None:
        """Raises ConfigError unless it is one of the learner's hosts."""
        if not 0 <= node_rank < self.nnodes:
            raise ConfigError(
                "node_rank must be at least 0 and below nnodes",
                got=f"node_rank={node_rank} nnodes={self.nnodes}",
                remedy="correct launch.learner.nnodes or --node-rank",
            )

    def _check_rendezvous(self) -> None:
        endpoint = self.rdzv_endpoint
        if (endpoint is None) != (self.nnodes == 1):
            raise ConfigError(
                "nnodes above 1 and rdzv_endpoint go together",
                got=f"nnodes={self.nnodes} rdzv_endpoint={endpoint!r}",
                remedy="write both or neither",
            )
        host, _, port = (endpoint or "host:1").rpartition(":")
        has_host = bool(re.fullmatch(r"[\w.-]+|\[[0-9a-fA-F:.]+\]", host))
        if not has_host or not port.isdecimal() or not 1 <= int(port) <= 65535:
            raise ConfigError(
                "rdzv_endpoint must be HOST:PORT of the learner's host 0",
                got=f"rdzv_endpoint={endpoint!r}",
                remedy="write it like rdzv_endpoint: learner-0:29400, or [fd00::1]:29400",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartConfig:
    policy: RestartPolicy = RestartPolicy.ON_FAILURE
    """on_failure: a server that ends with another status than 0 is started again; it rejoins after a proven round."""
    max_restarts: Count = 3
    """Restarts of one server in a run."""
    backoff_s: NotNegative = 5.0
    """Seconds before a server's first restart; doubles each time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    servers: tuple[ServerProcess, ...] = ()
    """One entry for each of ``rollout.servers``, in that order; none when they are started elsewhere."""
    share_devices: bool = False
    """Servers and learner may name the same devices; each server on vLLM then states its part of a shared one."""
    offload_optimizer: bool = False
    """The learner moves its optimizer states to main memory while servers on its devices are awake. Needs
    ``stage2_ab.mode: inline``."""
    learner: LearnerProcess = field(default_factory=LearnerProcess)
    server_shutdown_timeout_s: Count = 30
    """Seconds between SIGTERM and SIGKILL of a server."""
    restart: RestartConfig = field(default_factory=RestartConfig)
    """Whether servers that end are started again."""


def _check_devices(devices: tuple[int | str, ...], env: Mapping[str, Any]) -> None:
    if "CUDA_VISIBLE_DEVICES" in env:
        raise ConfigError("env must not set CUDA_VISIBLE_DEVICES", remedy="write devices")
    sound = [
        device.startswith(("GPU-", "MIG-")) if isinstance(device, str) else device >= 0 for device in devices
    ]
    if not all(sound) or len(set(devices)) != len(devices):
        raise ConfigError(
            "devices must be different numbers of at least 0, or names GPU-… or MIG-…",
            got=f"devices={list(devices)}",
            remedy="write each once, and numbers without quotes",
        )


UTILIZATION = "vllm_gpu_memory_utilization"
"""Argument of a server on vLLM: the part of each of its devices that it takes."""


class DeviceAssignment(NamedTuple):
    """The devices of one process. Devices are numbered host by host."""

    server: int | None
    """Its number in ``launch.servers``; None is the learner."""
    host: str
    devices: Sequence[int | str]

    @property
    def name(self) -> str:
        return "learner" if self.server is None else f"servers[{self.server}]"


def check_devices(launch: LaunchConfig, placements: Iterable[DeviceAssignment]) -> None:
    """Checks that each process may have the devices it names.

    Raises:
        ConfigError: two share one without ``launch.share_devices``, the parts of a shared one are not stated or too
            much together, or a stock server is on rank 0's, where NCCL cannot reach it.
    """
    users: dict[tuple[str, int | str], list[DeviceAssignment]] = {}
    for placement in placements:
        for device in placement.devices:
            users.setdefault((placement.host, device), []).append(placement)
    for (_, device), who in users.items():
        if len(who) > 1 and not launch.share_devices:
            raise ConfigError(
                "launch: learner and servers need devices of their own",
                got=f"device {device} for both {who[0].name} and {who[1].name}",
                remedy="give each its own, or write launch.share_devices: true",
            )
        if len(who) > 1:
            _refuse_stock_beside_rank_0(launch, device, who)
            _check_shares(launch, device, who)


def even_share(num_users: int) -> float:
    """A part for each of so many processes, which two digits hold, rounded down."""
    return int(100 / num_users + 1e-6) / 100


def _refuse_stock_beside_rank_0(
    launch: LaunchConfig, device: int | str, who: Sequence[DeviceAssignment]
) -> None:
    has_rank_0 = any(each.server is None and each.devices[0] == device for each in who)
    for each in who if has_rank_0 else ():
        if each.server is not None and launch.servers[each.server].engine is ServerEngine.SWIFT:
            raise ConfigError(
                "weights reach a stock server over NCCL, which refuses two members on one device",
                got=f"device {device} for the learner's rank 0 and {each.name} with engine='swift'",
                remedy="write engine: vllm or transformers, which read the learner's memory, or give it "
                "another device",
            )


def _check_shares(launch: LaunchConfig, device: int | str, who: Sequence[DeviceAssignment]) -> None:
    servers = [launch.servers[each.server] for each in who if each.server is not None]
    shares: list[Any] = []
    for server in servers:
        if server.engine is not ServerEngine.TRANSFORMERS:  # which takes what it needs
            args = {name.lstrip("-").replace("-", "_"): value for name, value in server.args.items()}
            shares.append(args.get(UTILIZATION))
    are_parts = all(type(share) in (int, float) and share > 0 for share in shares)
    if not are_parts or sum(shares) >= 1:
        raise ConfigError(
            f"every server on vLLM must state its part of device {device}, which it shares, all below 1 together",
            got=f"{UTILIZATION} {', '.join(map(str, shares))}",
            remedy=f"write {UTILIZATION}: {even_share(len(who)):g} into args of each, or give one another device",
        )
