"""``swift-stage2 launch``: servers, the learner beside those that load last, nothing left at the end."""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

from swift_stage2.checks.checks import CheckStage, run_checks
from swift_stage2.config import load_config
from swift_stage2.data.files import local_files
from swift_stage2.errors import EXIT_STARVED, EXIT_USER_MISTAKE, ConfigError, UserError
from swift_stage2.launch.job import Job, last_cause
from swift_stage2.launch.managed_server import ManagedServer
from swift_stage2.launch.plan import LaunchPart, LaunchPlan, devices_of, plan_launch
from swift_stage2.launch.rank import end_left_in, take_room
from swift_stage2.runtime.checkpoints import checkpoints_in
from swift_stage2.runtime.network import is_here
from swift_stage2.runtime.output import going_on, print_error
from swift_stage2.runtime.run_directory import resumed, run_lock
from swift_stage2.runtime.supervisor import Command, ProcessTree, StopSignals, adopt_orphans

_NO_SERVER_LEFT = 1
_SIGNALLED = 128
_SAY_EVERY_S = 5.0
_BEGUN = "args.json"  # ms-swift's, written at every start
_LINK = "last-checkpoint"  # ms-swift's, to what was saved last


def launch(
    config_path: str,
    *,
    nproc_per_node: int | None = None,
    show: Callable[[str], None] = print,
    resume: bool = False,
    verbose: bool = True,
    part: LaunchPart = LaunchPart.ALL,
    node_rank: int | None = None,
    check_options: Sequence[str] = (),
) -> int:
    """Runs the whole job of one configuration, this machine's part of it, or a check. Main thread only.

    Args:
        part, node_rank, check_options: see ``plan_launch``.
        show: gets every line for the user.
        resume: go on from the last whole checkpoint in the run directory.
        verbose: show every line of servers and ranks, not only how the run goes.

    Returns:
        The learner's exit status, or the doctor's, or 128 + n when signal n ended the launch; of servers alone 1 when
        all have ended.

    Raises:
        ConfigError: the configuration is refused, a checkpoint is missing, a port is in use, or an earlier run would
            be written over.
        DatasetError: a data set is refused.
        ServerUnavailable: a server ended, or did not answer within ``rollout.start_timeout_s``.
        UserError: what a rank of the learner refused, or another run goes on in the run directory.
    """
    config = load_config(config_path)
    width = str(get_terminal_size().columns - len("[doctor] "))
    plan = plan_launch(
        config,
        Path(config_path),
        os.environ | ({"COLUMNS": width} if part is LaunchPart.CHECK else {}),
        nproc_per_node,
        resume=resume,
        part=part,
        node_rank=node_rank,
        is_here=is_here if part in (LaunchPart.SERVERS, LaunchPart.CHECK) else None,
        check_options=check_options,
    )
    run_checks(config, CheckStage(addresses=True), lambda advice: show(f"[launch] warning: {advice}"))
    where = f"[launch] logs in {plan.log_dir}{'' if verbose else '; --verbose shows them here'}"
    if part in (LaunchPart.SERVERS, LaunchPart.CHECK):
        if part is LaunchPart.SERVERS and not plan.servers:
            hosts = ", ".join(server.host for server in config.rollout.servers[: len(config.launch.servers)])
            raise ConfigError(
                "launch --servers-only starts those of launch.servers whose base_url has a host of this machine",
                got=f"hosts={hosts or 'none'}",
                remedy="write an address or name of this machine into rollout.servers[].base_url, and "
                "an entry for it into launch.servers",
            )
        run_checks(config, CheckStage(started_servers=plan.server_indices))
        show(where)
        return run_plan(plan, config.rollout.start_timeout_s, show, verbose=verbose)
    os.environ.update(
        {name: str(value) for name, value in config.launch.learner.env.items()}
    )  # rows are its own
    with going_on("launch", "checking the data set", lambda text: show(f"[launch] {text}")):
        run_checks(config, CheckStage(starts_learner=True, files=True, rows=True))
    output_dir, since = plan.log_dir.parent, time.time()
    role = plan.exit_status_file.stem.replace("learner", "launch")  # of several hosts' each has its own
    with run_lock(output_dir, role):
        config, notes = resumed(config) if resume else (config, ())
        num_ranks = config.launch.learner.nnodes * (nproc_per_node or config.launch.learner.nproc_per_node)
        held = CheckStage(run_directory=not resume, num_ranks=num_ranks, started_servers=plan.server_indices)
        run_checks(config, held)
        for note in (*(f"warning: {warning}" for warning in config.warnings), *notes):
            show(f"[launch] {note}")
        show(f"[launch] output directory {output_dir}")
        show(where)
        status = run_plan(plan, config.rollout.start_timeout_s, show, verbose=verbose)
        run_dir = newest_run(output_dir, since)
        if run_dir and status in (0, EXIT_STARVED):
            show(f"[launch] see what it did: swift-stage2 report {shlex.quote(str(run_dir))}")
            for told in next_commands(run_dir, config.swift):
                show(f"[launch] {told}")
        elif status > _SIGNALLED and plan.learner is not None:
            show(f"[launch] go on: swift-stage2 launch {shlex.quote(str(config_path))} --resume")
        how = "finished" if status == 0 else f"ended with status {status}"
        show(f"[launch] {how}; run directory {run_dir or 'was not made'}; logs in {plan.log_dir}")
        if status and (left := end_left_in(plan.exit_status_file)) and left[1]:
            print_error("launch", left[1])  # the last line names the cause, however much was told after it
        return status


def run_plan(
    plan: LaunchPlan,
    start_timeout_s: float,
    show: Callable[[str], None],
    *,
    verbose: bool = True,
) -> int:
    """Starts, waits, follows and ends everything that ``plan`` names; see ``launch``."""
    try:
        plan.log_dir.mkdir(parents=True, exist_ok=True)
        if plan.learner is not None and not plan.is_check:  # beside a check a run may go on here
            take_room(plan.exit_status_file)
    except OSError as exc:
        raise ConfigError(
            "swift.output_dir must be a writable directory", got=f"{plan.log_dir.parent} ({exc})"
        ) from exc
    adopt_orphans()
    servers = [ManagedServer(each, plan.restart, start_timeout_s) for each in plan.servers]
    with StopSignals() as signals, Job(plan.log_dir, signals, show, shows_logs=verbose) as job:
        learner = _follow(plan, job, signals, servers)
        if signals.received is not None:
            trains = learner is not None and not plan.is_check
            saves = "; a learner that trains saves a checkpoint first" if trains else ""
            job.say(f"ending everything after signal {signals.received}{saves}; one more kills at once")
            return _SIGNALLED + signals.received
        if learner is None:
            job.say("no server is left on this machine; see the logs above")
            return _NO_SERVER_LEFT
        # torchrun turns every failure into 1; a rank tells its own where it could
        status = learner.poll() or 0
        told = end_left_in(plan.exit_status_file) if status and not plan.is_check else None
        status, mistake = told or (status, "")
        if status and not mistake and not verbose and not plan.is_check:
            job.say(f"learner: {last_cause(learner.log_path, learner.log_offset)}; see {learner.log_path}")
    if mistake and status == EXIT_USER_MISTAKE:
        raise UserError(mistake)  # once more, below torchrun's traceback and everything else
    return status


def _follow(
    plan: LaunchPlan, job: Job, signals: StopSignals, servers: Sequence[ManagedServer]
) -> ProcessTree | None:
    """Until the learner, which it returns, has ended, without one every server has, or a signal comes.

    Servers on one device load one after the other, the learner beside the last ones if it may, a check behind them all.
    A server that ends later is told of, and perhaps started again; the learner runs on.

    Raises:
        ServerUnavailable: a server did not come up.
    """
    learner, began = None, time.monotonic()
    say_at = began + _SAY_EVERY_S
    while signals.received is None and (learner is None or learner.poll() is None):
        for server in servers:
            others = [
                each for each in servers if each.has_started and not each.has_come and each is not server
            ]
            if server.has_started or _is_apart(server.planned.command, others):
                server.turn(job)
        loading = [server for server in servers if not server.has_come]
        if plan.learner is None and not loading:
            if say_at < math.inf:
                job.say("all servers of this machine are up; Ctrl-C or SIGTERM ends them")
            if all(server.is_gone for server in servers):
                break
        are_started = all(server.has_started for server in servers)
        is_due = are_started and not (plan.is_check and loading)
        if plan.learner is not None and learner is None and is_due and _is_apart(plan.learner, loading):
            learner = job.start(plan.learner, shows_log=plan.is_check)
        if not loading:
            say_at = math.inf
        elif (now := time.monotonic()) >= say_at:
            say_at = now + _SAY_EVERY_S
            job.say(
                f"waiting for {' and '.join(server.name for server in loading)} to load, {now - began:.0f} s"
            )
        job.step()
    return learner


def _is_apart(command: Command, loading: Sequence[ManagedServer]) -> bool:
    """True if the command sees no device of a loading server: vLLM counts what others allocate meanwhile as its own."""
    taken = {device for server in loading for device in devices_of(server.planned.command)}
    return taken.isdisjoint(devices_of(command))


def newest_run(output_dir: Path, since: float) -> Path | None:
    """Of a run that began after ``since``, in Unix seconds; ms-swift may have made a folder ``vN-DATE`` for it."""
    begun = [*output_dir.glob(_BEGUN), *output_dir.glob(f"v*/{_BEGUN}")]
    newest = max(begun, key=lambda path: path.stat().st_mtime, default=None)
    return None if newest is None or newest.stat().st_mtime < since else newest.parent


def next_commands(run_dir: Path, swift: Mapping[str, Any]) -> Iterator[str]:
    """The last checkpoint, and commands that merge and evaluate it; none without a checkpoint.

    ``swift`` are the run's arguments of ms-swift: without a validation set of its own there is no command to evaluate.
    """
    steps, checkpoint = checkpoints_in(run_dir), run_dir / _LINK
    if not checkpoint.is_dir():
        if not steps:
            return
        checkpoint = steps[max(steps)]
    yield f"last checkpoint: {checkpoint}"
    if (checkpoint / "adapter_config.json").is_file():
        adapter = checkpoint.resolve()
        checkpoint = adapter.with_name(f"{adapter.name}-merged")
        words = ("--adapters", adapter, "--merge_lora", "true", "--output_dir", checkpoint)
        yield f"merge it: {shlex.join(['swift', 'export', *map(str, words)])}"
    with suppress(UserError):  # they have been moved since
        for validation in local_files(swift)["val_dataset"][:1]:
            yield f"evaluate it: {evaluate_command(validation, checkpoint)}"


def evaluate_command(data: Path, checkpoint: Path) -> str:
    """Of the rows of ``data``; its files go beside the checkpoints."""
    output = checkpoint.with_name("evaluation")
    words = ("--data", data.absolute(), "--model", checkpoint, "--output", output)
    return shlex.join(["swift-stage2", "evaluate", *map(str, words)])
