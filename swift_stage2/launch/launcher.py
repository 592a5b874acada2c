"""``swift-stage2 launch``: servers, the learner beside those that load last, nothing left at the end."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

from swift_stage2.checks.checks import Known, run_checks
from swift_stage2.checks.servers import warn_of_lone_servers
from swift_stage2.config import Stage2Config, load_config
from swift_stage2.errors import EXIT_STARVED, EXIT_USER_MISTAKE, ConfigError, ServerUnavailable, UserError
from swift_stage2.launch.job import Job, last_cause
from swift_stage2.launch.managed_server import ManagedServer, ReadinessProbe
from swift_stage2.launch.plan import LaunchPart, LaunchPlan, devices_of, plan_launch
from swift_stage2.launch.process_tree import Command, ProcessTree, StopSignals, adopt_orphans
from swift_stage2.launch.rank import end_left_in, take_room
from swift_stage2.launch.run_end import describe_end, newest_run
from swift_stage2.process.ports import is_here
from swift_stage2.run_directory.claim import resumed
from swift_stage2.run_directory.lock import hold_run_directory
from swift_stage2.run_directory.next_commands import next_commands
from swift_stage2.terminal.output import print_error
from swift_stage2.terminal.progress import WaitNotice, going_on

_NO_SERVER_LEFT = 1
_SIGNALLED = 128


def launch(
    config_path: str,
    *,
    nproc_per_node: int | None = None,
    show: Callable[[str], None] = print,
    resume: bool = False,
    verbose: bool = True,
    part: LaunchPart = LaunchPart.ALL,
    node_rank: int | None = None,
) -> int:
    """Runs the whole job of one configuration, or this machine's part of it. Main thread only.

    Args:
        part, node_rank: see ``plan_launch``.
        show: gets every line for the user.
        resume: go on from the last whole checkpoint in the run directory.
        verbose: show every line of servers and ranks, not only how the run goes.

    Returns:
        The learner's exit status, or 128 + n when signal n ended the launch; of servers alone 1 when all have ended.

    Raises:
        ConfigError: the configuration is refused, a checkpoint is missing, a port is in use, or an earlier run would
            be written over.
        DatasetError: a data set is refused.
        ServerUnavailable: a server ended, or did not answer within ``rollout.start_timeout_s``.
        UserError: what a rank of the learner refused, or another run goes on in the run directory.
    """
    config = load_config(config_path)
    plan = plan_launch(
        config,
        Path(config_path),
        os.environ,
        nproc_per_node,
        resume=resume,
        part=part,
        node_rank=node_rank,
        is_here=is_here if part is LaunchPart.SERVERS else None,
    )
    run_checks(config, Known(addresses=True), lambda advice: show(f"[launch] warning: {advice}"))
    if part is LaunchPart.SERVERS:
        return _serve_this_machine(config, plan, show, verbose=verbose)
    with going_on("launch", "checking the data set", lambda text: show(f"[launch] {text}")):
        run_checks(config, Known(starts_learner=True, files=True, rows=True))
    output_dir, since = plan.log_dir.parent, time.time()
    role = plan.exit_status_file.stem.replace("learner", "launch")  # of several hosts' each has its own
    with hold_run_directory(output_dir, role):
        config, notes = resumed(config) if resume else (config, ())
        num_ranks = config.launch.learner.nnodes * (nproc_per_node or config.launch.learner.nproc_per_node)
        held = Known(run_directory=not resume, num_ranks=num_ranks, started_servers=plan.server_indices)
        run_checks(config, held)
        for note in (*(f"warning: {warning}" for warning in config.warnings), *notes):
            show(f"[launch] {note}")
        show(f"[launch] output directory {output_dir}")
        show(f"[launch] logs in {plan.log_dir}{'' if verbose else '; --verbose shows them here'}")
        start_timeout_s = config.rollout.start_timeout_s
        status = run_plan(plan, config.rollout.api_key(), start_timeout_s, show, verbose=verbose)
        run_dir = newest_run(output_dir, since)
        if run_dir and status in (0, EXIT_STARVED):
            for line in next_commands(run_dir, config.swift):
                show(f"[launch] {line}")
            show(f"[launch] see what it did: swift-stage2 report {shlex.quote(str(run_dir))}")
        elif status > _SIGNALLED and plan.learner is not None:
            for line in islice(next_commands(run_dir, config.swift), 1) if run_dir else ():
                show(f"[launch] {line}")
            show(f"[launch] go on: swift-stage2 launch {shlex.quote(str(config_path))} --resume")
        show(f"[launch] {describe_end(output_dir, status, since)}; logs in {plan.log_dir}")
        if status and (left := end_left_in(plan.exit_status_file)) and left[1]:
            print_error("launch", left[1])  # the last line names the cause, however much was told after it
        return status


def _serve_this_machine(
    config: Stage2Config, plan: LaunchPlan, show: Callable[[str], None], *, verbose: bool
) -> int:
    """The servers whose ``base_url`` is this machine's, until a signal comes; the learner runs elsewhere."""
    if not plan.servers:
        hosts = ", ".join(server.host for server in config.rollout.servers[: len(config.launch.servers)])
        raise ConfigError(
            "launch --servers-only starts the servers whose base_url has a host of this machine, got launch.servers "
            f"with hosts={hosts or 'none'}; "
            + (
                "write an address or name of this machine that it can resolve into rollout.servers[].base_url"
                if hosts
                else "add an entry to launch.servers for each of rollout.servers"
            )
        )
    run_checks(config, Known(started_servers=plan.server_indices))
    for warning in warn_of_lone_servers(config, plan.server_indices):
        show(f"[launch] warning: {warning}")
    show(f"[launch] logs in {plan.log_dir}{'' if verbose else '; --verbose shows them here'}")
    return run_plan(plan, config.rollout.api_key(), config.rollout.start_timeout_s, show, verbose=verbose)


def run_plan(
    plan: LaunchPlan,
    api_key: str | None,
    start_timeout_s: float,
    show: Callable[[str], None],
    *,
    verbose: bool = True,
) -> int:
    """Starts, waits, follows and ends everything that ``plan`` names; see ``launch``."""
    try:
        plan.log_dir.mkdir(parents=True, exist_ok=True)
        if plan.learner is not None:
            take_room(plan.exit_status_file)
    except OSError as exc:
        raise ConfigError(
            f"swift.output_dir must be a writable directory, got {plan.log_dir.parent} ({exc})"
        ) from exc
    adopt_orphans()
    servers = [ManagedServer(server, plan.restart, start_timeout_s) for server in plan.servers]
    with StopSignals() as signals, Job(plan.log_dir, signals, show, shows_logs=verbose) as job:
        learner: ProcessTree | None = None
        groups = _loading_together(servers)
        for group in groups:
            if _start_servers(job, signals, group):
                if plan.learner is not None and group is groups[-1] and _may_load_beside(plan.learner, group):
                    learner = job.start(plan.learner)
                waiting = [(server, _probe(server, api_key, start_timeout_s)) for server in group]
                _wait_until_answering(job, signals, waiting, start_timeout_s, learner)
        if signals.received is None and plan.learner is None:
            _watch_servers(job, signals, servers)
        elif signals.received is None and plan.learner is not None:
            learner = learner or job.start(plan.learner)
            _follow(job, signals, learner, servers)
        if signals.received is not None:
            saves = "; a learner that trains saves a checkpoint first" if learner is not None else ""
            job.say(f"ending everything after signal {signals.received}{saves}; one more kills at once")
            return _SIGNALLED + signals.received
        if learner is None:
            return _NO_SERVER_LEFT
        status, mistake = _learner_end(learner, plan.exit_status_file)
        if status and not mistake and not verbose:
            job.say(f"learner: {last_cause(learner.log_path, learner.log_offset)}; see {learner.log_path}")
    if mistake and status == EXIT_USER_MISTAKE:
        raise UserError(mistake)  # once more, below torchrun's traceback and everything else
    return status


def _loading_together(servers: Sequence[ManagedServer]) -> list[list[ManagedServer]]:
    """Groups to load in turn: vLLM takes for its own whatever others allocate on its device meanwhile."""
    groups: list[list[ManagedServer]] = []
    for server in servers:
        devices = set(server.planned.devices)
        free = (g for g in groups if all(devices.isdisjoint(each.planned.devices) for each in g))
        if (group := next(free, None)) is None:
            groups.append(group := [])
        group.append(server)
    return groups


def _may_load_beside(learner: Command, servers: Sequence[ManagedServer]) -> bool:
    """True if learner and servers have no device in common: vLLM counts memory that others allocate as its own."""
    return set(devices_of(learner)).isdisjoint(device for each in servers for device in each.planned.devices)


def _start_servers(job: Job, signals: StopSignals, servers: Sequence[ManagedServer]) -> bool:
    """Each as soon as it would take its own port; False when a signal came before all were started."""
    waiting = list(servers)
    while signals.received is None:
        still_waiting = []
        for server in waiting:
            if server.may_start(job):
                server.start(job)
            else:
                still_waiting.append(server)
        waiting = still_waiting
        if not waiting:
            return True
        job.step()
    return False


def _probe(server: ManagedServer, api_key: str | None, start_timeout_s: float) -> ReadinessProbe | None:
    """None for a stock server, which the learner may be giving weights by then: that it listens is enough."""
    if server.planned.is_stock:
        return None
    return ReadinessProbe(server.name, server.planned.address.base_url, api_key, start_timeout_s)


def _watch_servers(job: Job, signals: StopSignals, servers: Sequence[ManagedServer]) -> None:
    """Until a signal comes, or none of them is left or coming back."""
    job.say("all servers of this machine are up; Ctrl-C or SIGTERM ends them")
    while signals.received is None and not all(server.is_gone for server in servers):
        job.step()
        for server in servers:
            server.watch(job)
    if signals.received is None:
        job.say("no server is left on this machine; see the logs above")


def _wait_until_answering(
    job: Job,
    signals: StopSignals,
    waiting: Sequence[tuple[ManagedServer, ReadinessProbe | None]],
    start_timeout_s: float,
    learner: ProcessTree | None,
) -> None:
    """Until every server has answered, from the port and the process that were meant, or the learner has ended."""
    notice, end = WaitNotice(job.say), time.monotonic() + start_timeout_s
    with ExitStack() as probes:
        for _, probe in waiting:
            if probe is not None:
                probes.callback(probe.close)
        while waiting and signals.received is None and (learner is None or learner.poll() is None):
            job.step()
            still_waiting = []
            for server, probe in waiting:
                _refuse_missing(server, probe)
                answered = probe is not None and probe.answered
                listens = server.refuse_foreigner(at_once=answered)
                if answered or (probe is None and listens):
                    job.say(f"{server.name} answers at {server.planned.address.base_url}")
                elif time.monotonic() >= end:
                    _refuse_late(server, probe, start_timeout_s)
                else:
                    still_waiting.append((server, probe))
            waiting = still_waiting
            if waiting:
                names = " and ".join(server.name for server, _ in waiting)
                notice.remind(f"waiting for {names} to load", start_timeout_s)
        job.step()


def _refuse_missing(server: ManagedServer, probe: ReadinessProbe | None) -> None:
    url = server.planned.address.base_url
    if (ended := server.ended()) is not None:
        tree, status = ended
        raise ServerUnavailable(
            f"{tree.command.name} ({url}) must answer before training starts, got exit status={status}; "
            f"see {tree.log_path}: {last_cause(tree.log_path, tree.log_offset)}"
        )
    if probe is not None and probe.refusal is not None:
        raise ServerUnavailable(
            f"{server.name} ({url}) must answer an /infer/, got: {probe.refusal}; see {server.trees[0].log_path}"
        )


def _refuse_late(server: ManagedServer, probe: ReadinessProbe | None, start_timeout_s: float) -> None:
    error = "nothing listens there" if probe is None else probe.last_error
    raise ServerUnavailable(
        f"{server.name} ({server.planned.address.base_url}) must answer within start_timeout_s={start_timeout_s:g}, "
        f"got: {error}; see {server.trees[0].log_path}, or raise rollout.start_timeout_s"
    )


def _follow(
    job: Job,
    signals: StopSignals,
    learner: ProcessTree,
    servers: Sequence[ManagedServer],
) -> None:
    """Until the learner ends or a signal comes. A server that ends is told of; the learner runs on."""
    while learner.poll() is None and signals.received is None:
        job.step()
        for server in servers:
            server.watch(job)


def _learner_end(learner: ProcessTree, exit_status_file: Path) -> tuple[int, str]:
    """The status that a rank gave, where it could (torchrun turns every failure into 1), and a user's mistake."""
    status = learner.poll() or 0
    left = end_left_in(exit_status_file) if status else None
    return left or (status, "")
