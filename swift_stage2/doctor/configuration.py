"""The checks of the configuration alone: its rules with the numbers put in, launch plan, run directory, addresses.

The rules are the configuration's own (``Stage2Config.inequalities``); none is stated here again.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from urllib.request import proxy_bypass

from swift_stage2.config import ServerConfig, ServerEngine, Stage2Config, load_config
from swift_stage2.config.rules import Inequality
from swift_stage2.doctor.examination import Checked, Examination, Outcome, failed, ok, warning
from swift_stage2.launch.plan import LaunchPart, plan_launch
from swift_stage2.preflight.checks import Known
from swift_stage2.preflight.servers import refuse_busy_group_port
from swift_stage2.runtime.ports import holder_of, is_here
from swift_stage2.runtime.route import addresses_of, connection_error, http_remedy
from swift_stage2.weights.disk_manifest import is_proven


def check_configuration(exam: Examination, path: Path) -> Checked[Stage2Config]:
    """The file loads; then one row per rule."""
    exam.begin_section("Configuration")
    loaded = exam.check("configuration loads", lambda: _load(path))
    if not loaded.passed:
        exam.check("rules between numbers", lambda: ok(""), needs=[loaded])
        return loaded
    config = loaded.result
    if not config.b_enabled and config.warnings:
        exam.check("channel B is off", lambda: warning(*config.warnings[0].split("; ", 1)))
    if config.b_enabled:
        _show_rules(exam, config.inequalities(config.gradient_accumulation_steps))
    return loaded


def check_accumulation(exam: Examination, config: Stage2Config, by_swift: int) -> None:
    """The rules about a step's packs, when the file leaves their number to ms-swift (``by_swift`` on one rank)."""
    exam.check(
        "gradient_accumulation_steps",
        lambda: warning(
            f"not written; ms-swift would take {by_swift} on one rank, and another number on more",
            f"write swift.gradient_accumulation_steps: {by_swift}, so that the rules about it can be checked",
        ),
    )
    rules = config.inequalities(by_swift)
    _show_rules(exam, [rule for rule in rules if "gradient_accumulation_steps" in rule.statement])


def _load(path: Path) -> Outcome[Stage2Config]:
    config = load_config(path)
    rollout = f"{len(config.rollout.servers)} server(s)" if config.b_enabled else "channel B is off"
    return ok(f"{path}: b_ratio {config.stage2_ab.schedule.b_ratio:g}, {rollout}", config)


def _show_rules(exam: Examination, rules: Iterable[Inequality]) -> None:
    for rule in rules:
        exam.check(rule.name, partial(_shown, rule))


def _shown(rule: Inequality) -> Outcome[None]:
    if rule.holds:
        return ok(f"{rule.statement}: {rule.numbers}")
    found = f"{rule.refusal} ({rule.numbers})"
    return warning(found, rule.remedy) if rule.is_advice else failed(found, rule.remedy)


def check_launch_plan(config: Stage2Config, path: Path) -> Outcome[None]:
    """The plan that ``launch`` would start, or both of its parts where they are on several machines."""
    launch = config.launch
    hosts = [server.host for server in config.rollout.servers[: len(launch.servers)]]
    is_apart = launch.learner.nnodes > 1 or not all(is_here(host) for host in hosts)
    parts = (LaunchPart.SERVERS, LaunchPart.LEARNER) if is_apart else (LaunchPart.ALL,)
    node_rank = launch.learner.node_rank or 0
    plan = [
        plan_launch(config, path, os.environ, part=part, node_rank=node_rank, is_here=is_here)
        for part in parts
    ][-1]
    engines = [str(server.engine) for server in config.launch.servers]
    servers = ", ".join(engines) if engines else "servers are started elsewhere"
    ranks = launch.learner.nnodes * launch.learner.nproc_per_node
    where = "; on several machines: launch --servers-only and --learner-only" if is_apart else ""
    return ok(f"{servers}; {ranks} learner rank(s){where}; logs in {plan.log_dir}")


def check_devices(config: Stage2Config) -> Outcome[None]:
    """Who gets which devices, and whether this machine has them; those of another host are that one's to count."""
    import torch

    launch = config.launch
    owners = {"learner": launch.learner.devices}
    owners |= {f"server {index}": server.devices for index, server in enumerate(launch.servers)}
    shown = "; ".join(
        f"{owner}: {','.join(map(str, devices)) or 'CPU only'}" for owner, devices in owners.items()
    )
    # Another host's server counts that one's GPUs.
    addresses = config.rollout.servers
    here = {index: each for index, each in enumerate(launch.servers) if is_here(addresses[index].host)}
    compared = (launch.learner.devices, *(server.devices for server in here.values()))
    numbers = [device for devices in compared for device in devices if isinstance(device, int)]
    wants_cpu = config.swift.get("use_cpu") is True
    bare = [] if wants_cpu or launch.learner.devices else ["launch.learner.devices"]
    bare += [
        f"launch.servers[{index}].devices"
        for index, server in here.items()
        if not server.devices and not (wants_cpu and server.engine is ServerEngine.TRANSFORMERS)
    ]
    num_here, how = torch.cuda.device_count(), "may be shared" if launch.share_devices else "disjoint"
    if numbers and max(numbers) >= num_here:
        return failed(
            f"{how} ({shown}), but this machine has {num_here} GPU(s) that are visible here",
            "name devices that exist under launch, or run the doctor on the machine that trains",
        )
    if bare and num_here:
        return warning(
            f"{how} ({shown}); who is given no devices sees none of the {num_here} GPU(s) here",
            f"write numbers of GPUs at {', '.join(bare)}",
        )
    return ok(f"{how} ({shown})")


_GIB = 1024**3
_FIX = "write a swift.output_dir that this user can write"


def check_run_directory(config: Stage2Config) -> Outcome[None]:
    """Makes a directory beside what is there already, and removes it; of the run's own directory nothing is left."""
    written = config.swift.get("output_dir")
    if written is not None and not (isinstance(written, str) and written.strip()):
        return failed(f"swift.output_dir must be a path, got output_dir={written!r}", _FIX)
    directory = Path(written or "output").expanduser().absolute()  # as ms-swift does
    there = next(place for place in (directory, *directory.parents) if place.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".swift-stage2-doctor-", dir=there):
            free = shutil.disk_usage(there).free
    except OSError as error:
        return failed(f"{directory} cannot be written: {error}", _FIX)
    needed = _weights_bytes(config)
    found = f"{directory} can be written, {free / _GIB:.1f} GiB free"
    if needed and free < needed:
        return warning(
            f"{found}, and the weights alone of one checkpoint take {needed / _GIB:.1f} GiB",
            "free room there, or write another swift.output_dir",
        )
    return ok(found)


def check_disk_room(config: Stage2Config, directory: str) -> Outcome[None]:
    """Room for the versions that stay and one more, which is written before the oldest goes."""
    num_versions, needed = config.rollout.sync.disk_keep + 1, _model_bytes(config)
    try:
        with tempfile.TemporaryDirectory(prefix=".swift-stage2-doctor-", dir=directory):
            free, others = shutil.disk_usage(directory).free, sum(map(is_proven, Path(directory).iterdir()))
    except OSError as error:
        return failed(f"{directory} cannot be written: {error}", "mend rollout.sync.disk_directory")
    found = (
        f"{free / _GIB:.1f} GiB free in {directory}, weights take {num_versions} x {needed / _GIB:.1f} GiB"
    )
    found += f"; {others} versions of earlier runs lie there" if others else ""
    if not needed:
        return ok(f"{found}: the size of a model that is named by a hub id is not known")
    if free < num_versions * needed:
        return warning(
            found, "free room there, remove versions of runs that have ended, or lower sync.disk_keep"
        )
    return ok(found)


def _weights_bytes(config: Stage2Config) -> int:
    """Of one checkpoint; with LoRA it is far smaller than the model."""
    return _model_bytes(config) if config.swift.get("tuner_type") == "full" else 0


def _model_bytes(config: Stage2Config) -> int:
    """Of the model's own files; a hub id tells nothing."""
    model = config.swift.get("model")
    if not isinstance(model, str):
        return 0
    return sum(file.stat().st_size for file in Path(model).expanduser().glob("*.safetensors"))


_CONNECT_TIMEOUT_S = 5.0


def examine_addresses(exam: Examination, config: Stage2Config, *, live: bool) -> list[Checked[str]]:
    """The rows of all servers; one check per server hands on its address once a connection can be made."""
    exam.begin_section("Addresses")
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


def check_host(server: ServerConfig) -> Outcome[str]:
    """The host's address; which proxies of the environment are ignored for it."""
    addresses = addresses_of(server.host, server.port)
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
    if (error := connection_error(address, server.port, _CONNECT_TIMEOUT_S)) is not None:
        found, fix = (
            f"nothing answers at {server.base_url}: {error}",
            f"{http_remedy(error)}, or correct {key}.base_url",
        )
        return failed(found, fix) if must_answer else warning(f"{found}; training needs it", fix, address)
    seconds = time.perf_counter() - started
    holder = holder_of(server.port) if is_here(address) else ""
    return ok(
        f"port {server.port} is open{holder.replace(' by ', ', held by ')}; connected in {1e3 * seconds:.1f} ms",
        address,
    )


def _catching_proxies(server: ServerConfig) -> list[str]:
    """Names of the variables that would send this URL to a proxy; their values may hold a password."""
    scheme = server.base_url.partition(":")[0]
    if proxy_bypass(server.host):
        return []
    wanted = {f"{scheme}_proxy", "all_proxy"}
    return sorted(name for name, value in os.environ.items() if name.lower() in wanted and value)
