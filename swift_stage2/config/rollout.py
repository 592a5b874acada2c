"""Section ``rollout``: where the rollout servers are, how they decode, and how weights reach them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field

from swift_stage2.config import rules
from swift_stage2.config.rules import Count, NotNegative, Positive
from swift_stage2.errors import ConfigError

MAX_REQUESTS_PER_POST = 4096
"""Of one rank to one server: every POST's seeds leave room for as many requests."""

ROUND_MARGIN_S = 10.0
"""Over ``sync.timeout_s``, for each part of a round on a main thread: then the process ends, for nothing else can."""

_FIRST_FREE_PORT = 1024  # lower ones belong to the system
_DEFAULT_GROUP_PORT = 29600  # outside 32768..60999, from which Linux takes the ports of whoever calls out
_HOST = re.compile(r"[\w.-]+|[0-9a-fA-F.]*:[0-9a-fA-F.]*:[0-9a-fA-F:.]*(%\w+)?")


class Transport(StrEnum):
    """The way that weights take to a server of ours. A stock one always gets them over vLLM's own group."""

    AUTO = "auto"
    TCP = "tcp"
    DISK = "disk"


class Proof(StrEnum):
    """The proof that a server must give of new weights before it is asked under them."""

    AUTO = "auto"
    CHECKSUM = "checksum"
    CANARY = "canary"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    base_url: str
    """Scheme, host and port of one server, without a path."""
    group_port: Annotated[int, Field(ge=_FIRST_FREE_PORT, le=65535)] = _DEFAULT_GROUP_PORT
    """Port on the server's host, of a plain ``vllm serve`` on the learner's, that the weight group meets at; one of its
    own for each server there."""
    group_host: str | None = None
    """Name or address that the learner connects to for weights; by default the host of ``base_url``."""
    group_bind: str | None = None
    """Address that the server binds for weights; by default its --host, of a stock server the host of ``base_url``.
    Of a plain ``vllm serve`` the learner's own, by default the one on its route to ``base_url``."""

    def __post_init__(self) -> None:
        _check_base_url(self.base_url)
        for key, host in (("group_host", self.group_host), ("group_bind", self.group_bind)):
            if host is not None and not _HOST.fullmatch(host):
                raise ConfigError(
                    f"{key} must be a name or an address without scheme and port",
                    got=f"{key}={host!r}",
                    remedy="write it like 10.0.0.5",
                )

    @property
    def host(self) -> str:
        return urlsplit(self.base_url).hostname or ""

    @property
    def port(self) -> int:
        """HTTP port; a URL without one is refused."""
        return urlsplit(self.base_url).port or 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodingConfig:
    temperature: NotNegative = 0.01
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; 0.95 is a good value, 1 turns it off."""
    top_k: int = -1
    """Tokens that may be sampled; -1 means all."""
    max_new_tokens: Count = 1024
    """Tokens that an answer may have before it counts as truncated."""
    repetition_penalty: Positive = 1.0
    """Above 1 discourages what was said before; 1 turns it off."""

    def __post_init__(self) -> None:
        if self.top_k != -1 and self.top_k < 1:
            raise ConfigError("top_k must be -1 (all tokens) or at least 1", got=f"top_k={self.top_k}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncConfig:
    mode: Literal["full"] = "full"
    """Weights go in full; no other mode exists. How often: stage2_ab.channel_b.prefetch.sync_every_steps."""
    timeout_s: Positive = 300.0
    """Deadline of a push to one server; calls and transfers in it end at 80 % of that."""
    rolling: bool = True
    """Servers of ours install new weights one after another, so that the others go on answering."""
    transport: Transport = Transport.AUTO
    """To servers of ours. auto: they map the learner's memory where they can, and get a TCP stream elsewhere; disk:
    the learner writes a directory that they read."""
    disk_directory: str | None = None
    """Absolute path of the directory for transport disk, which learner and servers see."""
    disk_keep: Count = 2
    """Proven versions of this run that stay in ``disk_directory``."""
    straggler_s: Positive = 60.0
    """Seconds that pushes still have once newer weights are due, beside request_timeout_s where servers wait for
    rollouts before they install; who is later is suspect."""
    proof: Proof = Proof.AUTO
    """auto: checksums where the server can show them, with a canary at first and after a fault; else a canary."""
    bucket_mib: Count = 512
    """Weights sent in one message at most, MiB."""
    backoff_steps: Count = 4
    """Optimizer steps before the first retry with a suspect server that answers again; doubles each time."""
    max_backoff_steps: Count = 256
    """Where the doubling ends."""

    def __post_init__(self) -> None:
        if self.max_backoff_steps < self.backoff_steps:
            raise ConfigError(
                "max_backoff_steps must be at least backoff_steps, from which waits double up to it",
                got=f"max_backoff_steps={self.max_backoff_steps} backoff_steps={self.backoff_steps}",
            )
        self._check_disk()

    def _check_disk(self) -> None:
        is_wanted, directory = self.transport is Transport.DISK, self.disk_directory
        if is_wanted != (directory is not None):
            raise ConfigError(
                "transport: disk and disk_directory must be written together",
                got=f"transport={str(self.transport)!r} disk_directory={directory!r}",
                remedy="write both, the directory like /shared/weights, or none of them",
            )
        if directory is not None and not os.path.isabs(directory):
            raise ConfigError(
                "disk_directory must be an absolute path, because learner and servers may work in other "
                "directories",
                got=f"disk_directory={directory!r}",
                remedy="write it like /shared/weights",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    servers: tuple[ServerConfig, ...] = ()
    """The rollout servers; at least one when b_ratio is above 0."""
    api_key_env: str = "SWIFT_ROLLOUT_API_KEY"
    """Environment variable that holds the bearer token; unset means no token."""
    decoding: DecodingConfig = field(default_factory=DecodingConfig)
    num_generations: Annotated[int, Field(ge=1, le=1024)] = 1
    """Rollouts of every row that channel B draws, to be compared with each other by their rewards."""
    max_inflight_per_server: Annotated[int, Field(ge=1, le=MAX_REQUESTS_PER_POST)] = 16
    """Prompts that all ranks together may have running on one server."""
    max_turns: Count = 1
    """Turns that a rollout may have; above 1 every server must run one of ms-swift's schedulers."""
    request_timeout_s: Positive = 240.0
    """Deadline of one POST to ``/infer/``, of all its turns."""
    start_timeout_s: Positive = 600.0
    """The longest wait at the start of a run for all servers. A server that is absent then joins when it answers."""
    sync: SyncConfig = field(default_factory=SyncConfig)

    def __post_init__(self) -> None:
        rules.variable_name("api_key_env", self.api_key_env)
        _refuse_shared_ports(self.servers)

    def api_key(self) -> str | None:
        """The bearer token from the environment, or None. It is never written to a file."""
        return os.environ.get(self.api_key_env) or None


def _check_base_url(base_url: str) -> None:
    try:
        parts = urlsplit(base_url)
        is_sound = parts.scheme in ("http", "https") and bool(parts.hostname) and bool(parts.port)
        is_sound = is_sound and base_url == f"{parts.scheme}://{parts.netloc}" and "@" not in base_url
    except ValueError:
        is_sound = False
    if not is_sound or base_url != "".join(base_url.split()):  # urlsplit leaves breaks out without a word
        raise ConfigError(
            "base_url must hold scheme, host and a port from 1 to 65535, and nothing else",
            got=f"base_url={rules.without_credentials(base_url)!r}",
            remedy="write it like http://127.0.0.1:8000; a key goes into the variable that rollout.api_key_env names",
        )


def _refuse_shared_ports(servers: Sequence[ServerConfig]) -> None:
    """On one host all ports differ, of URLs and of groups."""
    owners: dict[tuple[str, int], str] = {}
    for index, server in enumerate(servers):
        host = "127.0.0.1" if server.host == "localhost" else server.host
        for key, port in (("base_url", server.port), ("group_port", server.group_port)):
            owner = owners.setdefault((host, port), f"servers[{index}].{key}")
            if owner != f"servers[{index}].{key}":
                is_same = owner.endswith(".base_url") and key == "base_url"
                remedy = "remove one, or " * is_same + "give one of them another port"
                raise ConfigError(
                    f"every server needs a {key} of its own",
                    got=f"port {port} of host {server.host} for both {owner} and servers[{index}].{key}",
                    remedy=remedy,
                )
