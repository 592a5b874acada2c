"""Rollout servers before a run: addresses that lead there, ports that are free, and the wait for their answers.

A stock server would silently take the next free port, and an old server that still holds one would answer in its place.
Imports no torch.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from swift_stage2.channel_b.task import needed_columns
from swift_stage2.columns import request_options
from swift_stage2.config import OnPending, Stage2Config
from swift_stage2.errors import ConfigError, FaultKind, ServerFault, ServerUnavailable
from swift_stage2.runtime.network import ANY_ADDRESS, is_here, refuse_busy, resolve
from swift_stage2.runtime.output import going_on
from swift_stage2.servers import vllm_serve
from swift_stage2.servers.health_check import ServerKind
from swift_stage2.servers.session import Deadline, ServerSession
from swift_stage2.servers.stock import ask_turns_option, ask_world_size
from swift_stage2.wire import ServerInfo

if TYPE_CHECKING:
    from swift_stage2.collectives import ControlGroup  # loads torch, which launch never does


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
_WAIT_SLICE_S = 10.0
_LOOK_S = 5.0
_JOIN_S = 2.0  # for an absent server, which has just answered the probe


@dataclass(frozen=True, slots=True)
class FoundServers:
    """The servers of a run, by base URL."""

    kinds: dict[str, ServerKind] = field(default_factory=dict)
    """Of those that have answered."""
    absent: dict[str, str] = field(default_factory=dict)
    """Servers that did not answer, and how that showed."""
    names: dict[str, str] = field(default_factory=dict)
    """By incarnation of a server of ours: its base URL."""

    def take(self, base_url: str, told: Mapping[str, Any]) -> None:
        """Notes what ``look_for`` told of a server that answers.

        Raises:
            UserError: it cannot be given weights from here, or is named twice.
        """
        if told["refused"]:
            raise ConfigError(**told["refused"])
        # Two pushes to one process end each other.
        if told["ours"] and (name := self.names.setdefault(told["incarnation"], base_url)) != base_url:
            raise ConfigError(
                "every server must be named once",
                got=f"base_url={base_url!r}, which is {name} by another name",
                remedy="remove one of them from rollout.servers",
            )
        self.kinds[base_url] = ServerKind(told["ours"], told["chat_model"])


def wait_for_servers(
    config: Stage2Config,
    control: ControlGroup,
    warn: Callable[[str], None] = lambda message: None,
) -> FoundServers:
    """Returns once every server answers and can be given weights, or ``rollout.start_timeout_s`` is over.

    ``warn`` is told on rank 0 of servers that are absent, and of one that cannot abort although ``sync.on_pending``
    asks for it.

    Raises:
        UserError: a server cannot be given weights from here, or is named twice; on every rank.
        ServerUnavailable: none has answered in time, or one refuses the key; on every rank.
    """
    end = time.monotonic() + config.rollout.start_timeout_s
    most_s = config.rollout.start_timeout_s
    waiting = {
        server.base_url: "" for server in config.rollout.servers
    }  # with what was heard instead of an answer

    def what() -> str:
        shown = (f"{url} ({heard})" if heard else url for url, heard in tuple(waiting.items()))
        return f"waiting up to {most_s:g} s for {', '.join(shown)} to answer"

    with going_on("train", what):
        found = _find_servers(config, control, warn, waiting, end)
    if found.absent and control.rank == 0:
        warn(
            f"{len(found.absent)} of {len(config.rollout.servers)} servers did not answer within rollout."
            f"start_timeout_s={config.rollout.start_timeout_s:g} and join when they do: {', '.join(found.absent)}"
        )
    return found


def _find_servers(
    config: Stage2Config,
    control: ControlGroup,
    warn: Callable[[str], None],
    waiting: dict[str, str],
    end: float,
) -> FoundServers:
    found = FoundServers()
    while waiting:
        # In slices, each with a broadcast: no rank waits in one collective for as long as a server may take.
        base_url = next(iter(waiting))
        told = control.broadcast(look_for(config, base_url, end) if control.rank == 0 else None)
        waiting.pop(base_url)
        if told["answers"] or told["refused"]:
            found.take(base_url, told)
            wants_abort = control.rank == 0 and config.rollout.sync.on_pending is OnPending.ABORT
            if wants_abort and not told["ours"]:
                warn(
                    f"{base_url} cannot abort rollouts, so that a pending round waits for those in flight there; "
                    "rollout.sync.on_pending: abort needs swift-stage2 rollout"
                )
        elif told["is_over"]:
            found.absent[base_url] = told["missing"]
        else:
            waiting[base_url] = told["missing"].partition("; ")[0]  # the others may answer meanwhile
        if told["refuses_key"] or len(found.absent) == len(config.rollout.servers):
            raise ServerUnavailable(
                f"a rollout server must answer within rollout.start_timeout_s={config.rollout.start_timeout_s:g}",
                got=f"no answer: {told['missing']}, or correct rollout.servers",
            )
    return found


def examine(config: Stage2Config, found: FoundServers, base_url: str) -> ServerKind | None:
    """Who a server that was absent at the start is, by the checks of a start; None while it does not answer in full.

    Raises:
        UserError: the run cannot have it.
    """
    told = look_for(config, base_url, time.monotonic() + _JOIN_S)
    if not (told["answers"] or told["refused"]):
        return None
    found.take(base_url, told)
    return found.kinds[base_url]


def look_for(config: Stage2Config, base_url: str, end: float) -> dict[str, Any]:
    """One slice of the wait for one server, at most until ``end``, a moment of ``time.monotonic``."""
    told: dict[str, Any] = {"answers": False, "ours": False, "missing": "", "refused": None}
    told |= {"chat_model": None, "incarnation": None, "refuses_key": False, "is_over": False}
    # One that is absent leaves each of the others time to answer.
    slice_s = min(_WAIT_SLICE_S, config.rollout.start_timeout_s / max(1, len(config.rollout.servers)))
    slice_ends = min(end, time.monotonic() + slice_s)
    said: ServerFault | None = None
    with ServerSession(base_url, config.rollout.api_key()) as session:
        while True:
            try:
                info = identify(session, config, Deadline(max(0.1, slice_ends - time.monotonic())))
            except ConfigError as refusal:
                return told | {"answers": True, "refused": refusal.fields}
            except ServerFault as fault:
                if fault.refuses_key:
                    return told | {"missing": str(fault), "refuses_key": True, "is_over": True}
                # The last look has next to no time: an answer from before says more.
                said = said if said is not None and fault.kind is FaultKind.LATE else fault
                if time.monotonic() >= slice_ends:  # until then it may be one odd answer
                    told |= {"missing": str(said), "is_over": time.monotonic() >= end}
                    told["refused"] = foreign(session, said).fields if said.is_foreign else None
                    return told
            else:
                told |= {"answers": True, "ours": not info.stock}
                return told | {"chat_model": info.chat_model, "incarnation": info.incarnation}
            time.sleep(_POLL_S)


def identify(session: ServerSession, config: Stage2Config, deadline: Deadline) -> ServerInfo:
    """Who answers there, for a start, a server that joins, and the doctor.

    Raises:
        ServerFault: nobody does, or not as a rollout server does.
        ConfigError: the run cannot have this server.
    """
    info = session.info(deadline)
    if info.stock:  # for the whole run, so one odd answer shall not decide it
        info = session.info(deadline)
    base_url, kind = session.base_url, "swift-stage2 rollout of an earlier release"
    if info.is_swift_rollout:
        ask_world_size(session, deadline)
        if option := ask_turns_option(session, deadline):
            raise ConfigError(
                "a rollout server must answer in one turn, of several the last would be trained as if it were all",
                got=f"{option} at {base_url}",
                remedy="start it without --multi_turn_scheduler and --use_gym_env",
            )
    if info.stock:
        kind = "stock swift rollout" if info.chat_model is None else "a plain vllm serve"
    if config.rollout.sync.on_pending is OnPending.RESUME and not info.resume:
        raise ConfigError(
            "rollout.sync.on_pending: resume needs servers that resume aborted rollouts",
            got=f"{base_url}, {kind}",
            remedy="serve with swift-stage2 rollout of this release, or write on_pending: "
            + ("wait" if info.stock else "abort"),
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
