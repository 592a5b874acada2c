"""Rollout servers before a run: addresses that lead there, ports that are free, and the wait for their answers.

A stock server would silently take the next free port, and an old server that still holds one would answer in its place.
Imports no torch.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from swift_stage2.channel_b.task import needed_columns
from swift_stage2.checks.model import check_model
from swift_stage2.columns import request_options
from swift_stage2.config import ServerEngine, Stage2Config
from swift_stage2.errors import ConfigError, FaultKind, ServerFault, ServerUnavailable
from swift_stage2.runtime.network import ANY_ADDRESS, is_here, refuse_busy, resolve
from swift_stage2.servers import vllm_serve
from swift_stage2.servers.health_check import ServerKind
from swift_stage2.servers.session import Deadline, ServerSession
from swift_stage2.servers.stock import GYM_OPTION, TURNS_OPTION, ask_turns_options, ask_world_size
from swift_stage2.wire import ServerInfo


def refuse_busy_ports(config: Stage2Config, indices: Iterable[int]) -> None:
    """Checks the HTTP and weight-group ports of the servers of ``launch.servers`` with these numbers.

    Raises:
        ConfigError: a port is in use, or its host is not this machine; names the port and the key to change.
    """
    for index in indices:
        server, key = config.rollout.servers[index], f"rollout.servers[{index}]"
        refuse_busy(server.host, server.port, f"{key}.base_url")
        refuse_busy(server.group_bind or server.host, server.group_port, f"{key}.group_port")
        if (upstream_port := config.launch.servers[index].upstream_port) is not None:
            refuse_busy(server.host, upstream_port, f"launch.servers[{index}].upstream_port")


def refuse_unservable(config: Stage2Config, indices: Iterable[int]) -> None:
    """Checks that this host can serve the servers of ``launch.servers`` with these numbers.

    Raises:
        ConfigError: vLLM is not installed, or a model is not here or not whole.
    """
    for index in indices:
        process, key = config.launch.servers[index], f"launch.servers[{index}]."
        has_own_packages = "PYTHONPATH" in process.env
        if process.engine is not ServerEngine.TRANSFORMERS and not (vllm_is_installed() or has_own_packages):
            raise ConfigError(
                f"{key}engine needs vLLM in this host's environment",
                got=f"engine={str(process.engine)!r} and no such package",
                remedy="install the extra swift-stage2[gpu], or write engine: transformers",
            )
        check_model({"model": process.model or config.swift.get("model")}, of=key)


def refuse_lone_addresses(config: Stage2Config) -> None:
    """Checks that a learner of several hosts can reach its servers.

    Raises:
        ConfigError: a ``base_url`` means each host itself.
    """
    nnodes = config.launch.learner.nnodes
    for index, server in enumerate(config.rollout.servers if nnodes > 1 else ()):
        address = _lone_address(server.host)
        # A server that launch does not start may listen on more than its name means here.
        if address and (config.launch.servers or server.host in (address, "localhost")):
            raise ConfigError(
                f"rollout.servers[{index}].base_url must lead every host of the learner to the server",
                got=f"host={server.host!r}, which is {address} here, and launch.learner.nnodes={nnodes}",
                remedy="write an address of the server's host in the network",
            )


def refuse_deaf_endpoint(config: Stage2Config) -> None:
    """Checks ``launch.learner.rdzv_endpoint``, if there is one, which torchrun would wait for without a word.

    Raises:
        ConfigError: its host has no address here, or it is this machine's and its port is in use.
    """
    host, _, port = (config.launch.learner.rdzv_endpoint or "").rpartition(":")
    host, key = host.strip("[]"), "launch.learner.rdzv_endpoint"
    if not host:
        return
    try:
        resolve(host, int(port))
    except OSError as exc:
        raise ConfigError(
            f"{key} must have a name that this machine can resolve",
            got=f"host={host!r} ({exc})",
            remedy="correct it, or write an address",
        ) from exc
    if is_here(host):
        refuse_busy(host, int(port), key)


def warn_of_open_servers(config: Stage2Config) -> list[str]:
    """A warning for each server that others in the network reach and can use, because there is no key."""
    return [
        f"rollout.servers[{index}].base_url listens on {server.host} without a key: whoever reaches it can replace the "
        "weights; set the variable that rollout.api_key_env names for the server and for the learner"
        for index, server in enumerate(config.rollout.servers)
        if config.rollout.api_key() is None and _lone_address(server.host) in ("", *ANY_ADDRESS)
    ]


def _lone_address(host: str) -> str:
    """The address of ``host`` where that means every machine itself, loopback or a wildcard; else nothing."""
    try:
        address = str(resolve(host)[0][4][0]).partition("%")[0]
    except OSError:
        return ""
    is_lone = ipaddress.ip_address(address).is_loopback or address in ANY_ADDRESS
    return address if is_lone else ""


_POLL_S = 0.5
_LOOK_S = 5.0
_JOIN_S = 2.0  # for an absent server, which has just answered the probe


@dataclass(slots=True)
class FoundServers:
    """The servers of a run, by base URL."""

    kinds: dict[str, ServerKind] = field(default_factory=dict)
    """Of those that have answered."""
    absent: dict[str, str] = field(default_factory=dict)
    """Servers that did not answer, and how that showed."""
    names: dict[str, str] = field(default_factory=dict)
    """By incarnation of a server of ours: its base URL."""

    def look_for(self, config: Stage2Config, base_url: str, until: float) -> str:
        """What was heard of a server until then (a moment of ``time.monotonic``); empty if it was found.

        Raises:
            UserError: the run cannot have it, it refuses the key, or it is named twice.
        """
        said: ServerFault | None = None
        with ServerSession(base_url, config.rollout.api_key()) as session:
            while True:
                try:
                    info = identify(session, config, Deadline(max(0.1, until - time.monotonic())))
                    break
                except ServerFault as fault:
                    # The last look has next to no time: an answer from before says more.
                    said = said if said is not None and fault.kind is FaultKind.LATE else fault
                    is_over = time.monotonic() >= until  # until then it may be one odd answer
                    if said.refuses_key or (is_over and said.is_foreign):
                        raise explain(said, session, config) from fault
                    if is_over:
                        return str(said)
                time.sleep(_POLL_S)
        # Two pushes to one process end each other.
        if not info.stock and (name := self.names.setdefault(str(info.incarnation), base_url)) != base_url:
            raise ConfigError(
                "every server must be named once",
                got=f"base_url={base_url!r}, which is {name} by another name",
                remedy="remove one of them from rollout.servers",
            )
        self.kinds[base_url] = ServerKind(not info.stock, info.chat_model)
        return ""


def examine(config: Stage2Config, found: FoundServers, base_url: str) -> ServerKind | None:
    """Who a server that was absent at the start is, by the checks of a start; None while it does not answer in full.

    Raises:
        UserError: the run cannot have it.
    """
    found.look_for(config, base_url, time.monotonic() + _JOIN_S)
    return found.kinds.get(base_url)


def identify(session: ServerSession, config: Stage2Config, deadline: Deadline) -> ServerInfo:
    """Who answers there, for a start, a server that joins, and the doctor.

    Raises:
        ServerFault: nobody does, or not as a rollout server does.
        ConfigError: the run cannot have this server.
    """
    info = session.info(deadline)
    if info.stock:  # for the whole run, so one odd answer shall not decide it
        info = session.info(deadline)
    base_url = session.base_url
    if info.is_swift_rollout:
        ask_world_size(session, deadline)
        turns = ask_turns_options(session, deadline)
        if GYM_OPTION in turns:
            raise ConfigError(
                "a rollout server must be asked the learner's prompt, and a gym's is its environment's",
                got=f"{GYM_OPTION} at {base_url}",
                remedy="start it without --use_gym_env",
            )
        info = replace(info, takes_turns=TURNS_OPTION in turns)
    is_known = info.stock or info.manifest  # one of ours that has not loaded does not know yet
    if is_known and info.takes_turns != (config.rollout.max_turns > 1):
        does = "several turns" if info.takes_turns else "one turn"
        raise ConfigError(
            "a rollout server must run a scheduler of several turns iff rollout.max_turns is above 1",
            got=f"{does} at {base_url} and max_turns={config.rollout.max_turns}",
            remedy="start it with --multi_turn_scheduler NAME and write max_turns: 2 or more, or do neither",
        )
    if info.stock and not vllm_is_installed():
        raise ConfigError(
            f"{base_url} is no server of ours and takes weights over vLLM's own group: vLLM must be installed beside "
            "the learner",
            got="none",
            remedy="install it, or serve with swift-stage2 rollout",
        )
    if info.chat_model is not None and (options := request_options(needed_columns(config))):
        raise ConfigError(
            f"{base_url} is a plain vllm serve, which tells log-probabilities of the model and not of what it draws "
            "from",
            got=f"a run that asks for {', '.join(options)}",
            remedy="serve with swift-stage2 rollout or swift rollout, or leave telemetry.log_probs out",
        )
    return info


def explain(fault: ServerFault, session: ServerSession, config: Stage2Config) -> ServerUnavailable:
    """The words for a call that failed, and what to do."""
    name = config.rollout.api_key_env
    if fault.refuses_key:
        told = "another key than the server's" if config.rollout.api_key() else "no key"
        return ServerUnavailable(
            f"the server refuses this caller (status {fault.status}): {name} holds {told}",
            remedy=f"export {name}=<the key that the server was started with>",
        )
    if fault.is_foreign:
        return foreign(session, fault)
    if fault.kind is FaultKind.UNREACHABLE:
        return ServerUnavailable(str(fault))
    return ServerUnavailable(
        str(fault),
        remedy="wait if it is loading or busy with rollouts, and run the doctor again; else read the server's log and "
        "restart it",
    )


def foreign(
    session: ServerSession, fault: ServerFault, remedy: str = "correct rollout.servers"
) -> ServerUnavailable:
    """The words for a program that is no rollout server, as ``fault.is_foreign`` tells."""
    missing = vllm_serve.missing_routes_remedy(session, Deadline(_LOOK_S))
    got = "" if missing else f"an answer of another program ({str(fault)[:200]})"
    end = f"end what listens there, or {remedy}"
    return ServerUnavailable(f"{session.base_url} must be a rollout server", got=got, remedy=missing or end)


def vllm_is_installed() -> bool:
    """True if vLLM can be imported here, which a learner needs to send weights to a stock server."""
    return importlib.util.find_spec("vllm") is not None
