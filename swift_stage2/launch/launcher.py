"""``swift-stage2 launch``: servers first, the learner once every server has answered, nothing left at the end."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from swift_stage2.config import load_config
from swift_stage2.dataset_check import check_datasets
from swift_stage2.errors import ConfigError, ServerUnavailable, UserError
from swift_stage2.launch.descendants import adopt_orphans
from swift_stage2.launch.job import Job
from swift_stage2.launch.plan import LaunchPlan, PlannedServer, plan_launch
from swift_stage2.launch.ports import refuse_busy_ports
from swift_stage2.launch.process_tree import ProcessTree
from swift_stage2.launch.readiness import ReadinessProbe
from swift_stage2.launch.stop_signals import StopSignals
from swift_stage2.model_check import check_model


def launch(
    config_path: str, *, nproc_per_node: int | None = None, show: Callable[[str], None] = print
) -> int:
    """Runs the whole job of one configuration. Main thread only.

    Returns:
        The learner's exit status, or 128 + n when signal n ended the launch.

    Raises:
        ConfigError: the configuration is refused, a checkpoint is missing, or a port is in use.
        DatasetError: a data set is refused.
        ServerUnavailable: a server ended, or did not answer within ``rollout.start_timeout_s``.
        UserError: what a rank of the learner refused.
    """
    config = load_config(config_path)
    plan = plan_launch(config, Path(config_path), os.environ, nproc_per_node)
    check_model(config.swift)
    check_datasets(config.swift)
    refuse_busy_ports(plan.servers)
    for warning in config.warnings:
        show(f"[launch] warning: {warning}")
    return run_plan(plan, config.rollout.api_key(), config.rollout.start_timeout_s, show)


def run_plan(
    plan: LaunchPlan, api_key: str | None, start_timeout_s: float, show: Callable[[str], None]
) -> int:
    """Starts, waits, follows and ends everything that ``plan`` names; see ``launch``."""
    try:
        plan.log_dir.mkdir(parents=True, exist_ok=True)
        plan.exit_status_file.unlink(missing_ok=True)
    except OSError as exc:
        raise ConfigError(
            f"swift.output_dir must be a writable directory, got {plan.log_dir.parent} ({exc})"
        ) from exc
    adopt_orphans()
    with StopSignals() as signals, Job(plan.log_dir, signals, show) as job:
        servers = [job.start(server.command) for server in plan.servers]
        _wait_until_answering(job, signals, plan.servers, servers, api_key, start_timeout_s)
        if signals.received is None:
            learner = job.start(plan.learner)
            _follow(job, signals, learner, servers)
        if signals.received is not None:
            job.say(f"ending everything after signal {signals.received}; one more kills at once")
            return 128 + signals.received
        status, mistake = _learner_end(learner, plan.exit_status_file)
    if mistake:
        raise UserError(mistake)  # once more, below torchrun's traceback and everything else
    return status


def _wait_until_answering(
    job: Job,
    signals: StopSignals,
    planned: tuple[PlannedServer, ...],
    trees: list[ProcessTree],
    api_key: str | None,
    start_timeout_s: float,
) -> None:
    with ExitStack() as probes:
        waiting = []
        for server, tree in zip(planned, trees, strict=True):
            probe = ReadinessProbe(server.command.name, server.address.base_url, api_key, start_timeout_s)
            probes.callback(probe.close)
            waiting.append((server, tree, probe))
        while waiting and signals.received is None:
            job.step()
            for server, tree, probe in waiting:
                _refuse_missing(server, tree, probe, start_timeout_s)
                if probe.answered:
                    job.say(f"{server.command.name} answers at {server.address.base_url}")
            waiting = [entry for entry in waiting if not entry[2].answered]


def _refuse_missing(
    server: PlannedServer, tree: ProcessTree, probe: ReadinessProbe, start_timeout_s: float
) -> None:
    name, url = server.command.name, server.address.base_url
    status = tree.poll()
    if status is not None:
        raise ServerUnavailable(
            f"{name} ({url}) must answer before training starts, got exit status={status}; see {tree.log_path}"
        )
    if probe.expired:
        raise ServerUnavailable(
            f"{name} ({url}) must answer an /infer/ within start_timeout_s={start_timeout_s:g}, got: "
            f"{probe.last_error}; see {tree.log_path}, or raise rollout.start_timeout_s"
        )


def _follow(job: Job, signals: StopSignals, learner: ProcessTree, servers: list[ProcessTree]) -> None:
    """Until the learner ends or a signal comes. A server that ends is told of once; the learner runs on."""
    running = list(servers)
    while learner.poll() is None and signals.received is None:
        job.step()
        for server in running:
            if (status := server.poll()) is not None:
                job.end_abandoned(server)
                job.say(f"{server.command.name} ended with status {status}; the learner runs on without it")
        running = [server for server in running if server.poll() is None]


def _learner_end(learner: ProcessTree, exit_status_file: Path) -> tuple[int, str]:
    """The status that a rank gave, where it could (torchrun turns every failure into 1), and a user's mistake."""
    status = learner.poll() or 0
    if status == 0:
        return 0, ""
    try:
        first, _, mistake = exit_status_file.read_text(encoding="utf-8").partition("\n")
        return int(first), mistake
    except (OSError, ValueError):
        return status, ""
