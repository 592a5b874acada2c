"""Section ``launch``: the processes that ``swift-stage2 launch`` starts, and on which devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from swift_stage2.config import rules
from swift_stage2.errors import ConfigError


class ServerEngine(StrEnum):
    """Which program serves rollouts."""

    TRANSFORMERS = "transformers"
    SWIFT = "swift"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerProcess:
    engine: ServerEngine = ServerEngine.SWIFT
    """transformers: our own server (no GPU needed); swift: stock ``swift rollout`` (vLLM)."""
    model: str | None = None
    """Model that the server starts with; ``swift.model`` when absent."""
    devices: tuple[int, ...] = ()
    """GPU numbers that it sees as CUDA_VISIBLE_DEVICES; none means CPU only."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Further options of the server's command line: name without dashes, value."""

    def __post_init__(self) -> None:
        _check_devices(self.devices)


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerProcess:
    nproc_per_node: int = 1
    """Learner ranks that torchrun starts."""
    devices: tuple[int, ...] = ()
    """GPU numbers that the learner sees as CUDA_VISIBLE_DEVICES; none means CPU only."""
    shutdown_timeout_s: int = 300
    """Seconds between SIGTERM and SIGKILL of the ranks: long enough to save a checkpoint."""

    def __post_init__(self) -> None:
        rules.at_least("nproc_per_node", self.nproc_per_node, 1)
        rules.deadline("shutdown_timeout_s", self.shutdown_timeout_s)
        _check_devices(self.devices)
        if self.devices and self.nproc_per_node > len(self.devices):
            raise ConfigError(
                "nproc_per_node must be at most the number of devices, got "
                f"nproc_per_node={self.nproc_per_node} devices={list(self.devices)}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    servers: tuple[ServerProcess, ...] = ()
    """One entry for each of ``rollout.servers``, in that order; none when they are started elsewhere."""
    learner: LearnerProcess = field(default_factory=LearnerProcess)
    server_shutdown_timeout_s: int = 30
    """Seconds between SIGTERM and SIGKILL of a server."""

    def __post_init__(self) -> None:
        rules.deadline("server_shutdown_timeout_s", self.server_shutdown_timeout_s)
        owners: dict[int, str] = dict.fromkeys(self.learner.devices, "learner")
        for index, server in enumerate(self.servers):
            for device in server.devices:
                if device in owners:
                    raise ConfigError(
                        f"learner and servers need devices of their own, got device {device} for both "
                        f"{owners[device]} and servers[{index}]"
                    )
                owners[device] = f"servers[{index}]"


def _check_devices(devices: tuple[int, ...]) -> None:
    if any(device < 0 for device in devices) or len(set(devices)) != len(devices):
        raise ConfigError(f"devices must be different numbers of at least 0, got devices={list(devices)}")
