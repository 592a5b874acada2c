"""Where a server is said to be: its host resolves, no proxy matters, its ports are free or taken as they should be."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from urllib.request import proxy_bypass

from swift_stage2.config import RolloutConfig, ServerConfig, Stage2Config
from swift_stage2.doctor.examination import Checked, Examination, Outcome, failed, ok, warning
from swift_stage2.preflight.addresses import refuse_busy_group_port
from swift_stage2.preflight.checks import Known
from swift_stage2.process.ports import holder_of, is_here
from swift_stage2.process.route import is_loopback

_RESOLVE_TIMEOUT_S = 5.0
_CONNECT_TIMEOUT_S = 5.0


def examine_addresses(exam: Examination, config: Stage2Config, *, live: bool) -> list[Checked[str]]:
    """The rows of all servers; one check per server hands on its address once a connection can be made."""
    exam.begin_section("Addresses")
    exam.check("API key", lambda: check_api_key(config.rollout))
    servers = config.rollout.servers
    # On another machine another launch starts it; here it is looked at as any server that runs already.
    launched = [
        index for index in range(0 if live else len(config.launch.servers)) if is_here(servers[index].host)
    ]
    exam.show(config, Known(addresses=True, starts_learner=not live, started_servers=launched or None))
    return [
        _examine_server(exam, config, index, live=live, is_launched=index in launched)
        for index in range(len(servers))
    ]


def _examine_server(
    exam: Examination, config: Stage2Config, index: int, *, live: bool, is_launched: bool
) -> Checked[str]:
    server, key = config.rollout.servers[index], f"rollout.servers[{index}]"
    host = exam.check(f"server {index}: host", lambda: check_host(server))
    if is_launched:
        return host
    route = exam.check(
        f"server {index}: {'answers' if live else 'port open'}",
        lambda: check_reachable(server, host.result, key, must_answer=live),
        needs=[host],
    )
    if live:
        exam.check(
            f"server {index}: group port",
            lambda: check_group_port_free(server, host.result, key),
            needs=[host],
        )
    return route


def check_api_key(rollout: RolloutConfig) -> Outcome[None]:
    """Whether there is a key; never what it is."""
    name, key = rollout.api_key_env, rollout.api_key()
    if key is not None:
        if not (key.isascii() and key.isprintable() and " " not in key):
            return failed(
                f"{name} is set to something that cannot be a bearer token",
                f"set {name} to printable ASCII without spaces",
            )
        return ok(f"{name} is set; it is sent to every server")
    remote = [server.base_url for server in rollout.servers if not is_loopback(server.host)]
    if remote:
        return warning(
            f"{name} is not set, and {remote[0]} is not on loopback: whoever reaches it can replace the weights",
            f"start the servers with a key and set {name} to it",
        )
    return ok(f"{name} is not set: right for servers without a key")


def check_host(server: ServerConfig) -> Outcome[str]:
    """The host's address; which proxies of the environment are ignored for it."""
    addresses = _resolve(server.host, server.port)
    if isinstance(addresses, str):
        return failed(
            f"{server.host} has no address: {addresses}",
            f"correct base_url {server.base_url}, or make the name {server.host} known to this machine",
        )
    address = addresses[0]
    proxies = _catching_proxies(server)
    told = f"; {', '.join(proxies)} would catch it and is ignored, as always for servers" if proxies else ""
    return ok(f"{server.host} is {address}{' (this machine)' if is_here(address) else ''}{told}", address)


def check_group_port_free(server: ServerConfig, address: str, key: str) -> Outcome[None]:
    """With servers running: the port that weights will travel over. Raises ConfigError as ``refuse_busy`` does."""
    if not is_here(address):
        return ok(
            f"port {server.group_port} is on another machine; the dry round shows whether it can be used"
        )
    refuse_busy_group_port(server, key)
    return ok(f"port {server.group_port} is free")


def check_reachable(server: ServerConfig, address: str, key: str, *, must_answer: bool) -> Outcome[str]:
    """A TCP connection, and how long it took; hands the address on. A server may not run yet, unless it must answer."""
    started = time.perf_counter()
    try:
        socket.create_connection((address, server.port), _CONNECT_TIMEOUT_S).close()
    except OSError as error:
        found = f"nothing answers at {server.base_url}: {error}"
        fix = f"start the server there (swift-stage2 rollout, swift rollout or launch), or correct {key}.base_url"
        return failed(found, fix) if must_answer else warning(f"{found}; training needs it", fix, address)
    seconds = time.perf_counter() - started
    holder = holder_of(server.port) if is_here(address) else ""
    return ok(
        f"port {server.port} is open{holder.replace(' by ', ', held by ')}; connected in {1e3 * seconds:.1f} ms",
        address,
    )


def _resolve(host: str, port: int) -> list[str] | str:
    """IP addresses, or why there are none; a resolver that hangs is given up."""
    answers: queue.Queue[list[str] | str] = queue.Queue()

    def ask() -> None:
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            answers.put([str(info[4][0]) for info in infos])
        except (OSError, UnicodeError) as error:
            answers.put(str(error))

    threading.Thread(target=ask, name=f"resolve {host}", daemon=True).start()
    try:
        return answers.get(timeout=_RESOLVE_TIMEOUT_S)
    except queue.Empty:
        return f"no answer from the resolver within {_RESOLVE_TIMEOUT_S:g} s"


def _catching_proxies(server: ServerConfig) -> list[str]:
    """Names of the variables that would send this URL to a proxy; their values may hold a password."""
    scheme = server.base_url.partition(":")[0]
    if proxy_bypass(server.host):
        return []
    wanted = {f"{scheme}_proxy", "all_proxy"}
    return sorted(name for name, value in os.environ.items() if name.lower() in wanted and value)
