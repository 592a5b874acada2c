"""``swift-stage2 doctor CONFIG.yaml [--live]``: runs the checks in order, prints the table, and exits with its verdict.

Exit status: 0 nothing failed, 1 a check failed, 2 the user's mistake (no such file, no YAML). What a check needs
is handed on by the check before it; nothing is looked at twice.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from swift_stage2.config import Stage2Config
from swift_stage2.config.yaml_text import read_yaml
from swift_stage2.doctor import address
from swift_stage2.doctor.configuration import check_accumulation, check_configuration, check_launch_plan
from swift_stage2.doctor.examination import Checked, Examination
from swift_stage2.doctor.finding import ok
from swift_stage2.doctor.findings_table import findings_json, findings_table
from swift_stage2.doctor.run_directory import check_run_directory
from swift_stage2.errors import ConfigError
from swift_stage2.preflight.checks import Known
from swift_stage2.process.ports import is_here
from swift_stage2.process.visible_devices import select_devices
from swift_stage2.terminal.parser import CommandParser, rank_count
from swift_stage2.terminal.standard_output import let_go

if TYPE_CHECKING:
    from swift_stage2.doctor.data import Samples
    from swift_stage2.doctor.live_servers import LiveServers
    from swift_stage2.doctor.preparation import LearnerPreparation

EXIT_FAILED = 1
_SECRET_MARKS = ("token", "secret", "password", "api_key")
_NARROWEST_COLUMNS = 80


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the doctor and returns its exit status.

    Raises:
        ConfigError: the configuration file is missing, unreadable, or no YAML mapping.
    """
    options = _parse(argv)
    path = Path(options.config)
    data = read_yaml(path)
    _quieten()
    console = Console(stderr=True)
    with ExitStack() as stack:
        begin = None
        if console.is_terminal:
            status = stack.enter_context(console.status("looking …"))
            begin = lambda check: status.update(f"{check} …")  # noqa: E731
        exam = Examination(secrets=_secrets(data), **({"on_begin": begin} if begin else {}))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swift-stage2-doctor-")))
        hung = examine(exam, path, options, scratch)
    status_code = EXIT_FAILED if exam.num_failed else 0
    _show(exam, options, status_code)
    if hung:  # a thread is stuck in a transfer; a tidy interpreter shutdown could wait for it for ever
        let_go()
        sys.stderr.flush()
        _end_process(status_code)
    return status_code


def _end_process(status: int) -> None:
    os._exit(status)


def examine(exam: Examination, path: Path, options: argparse.Namespace, scratch: Path) -> bool:
    """All checks in order. Returns whether a transfer hangs on a thread of this process."""
    loaded = check_configuration(exam, path)
    if not loaded.passed:
        for name in ("model and data", "servers"):
            exam.check(name, lambda: ok(""), needs=[loaded])
        return False
    config = loaded.result
    exam.check("run directory", lambda: check_run_directory(config))
    learner = config.launch.learner
    num_ranks = learner.nnodes * (options.nproc_per_node or learner.nproc_per_node)
    exam.show(config, Known(run_directory=True, num_ranks=num_ranks))
    if config.launch.servers or config.launch.learner.devices:
        check_launch_plan(exam, config, path)
        _take_learner_device(config)
    prepared, samples = _examine_learner(exam, config, scratch)
    if not config.b_enabled:
        return False
    routes = _examine_addresses(exam, config, live=options.live)
    if not options.live:
        return False
    return _examine_servers(exam, config, options, scratch, routes, prepared, samples)


def _examine_learner(
    exam: Examination, config: Stage2Config, scratch: Path
) -> tuple[Checked[LearnerPreparation], Checked[Samples]]:
    import torch

    from swift_stage2.doctor import data  # loads torch

    exam.begin_section("Model and data")
    found = torch.accelerator.current_accelerator(check_available=True)
    devices = (found.type if found else None, torch.cuda.device_count())
    rows = exam.show(config, Known(devices=devices, files=True, rows=True))
    checkpoint, rows_checked = rows["model directory"], rows["data sets"]

    def prepare() -> Any:
        from swift_stage2.doctor.preparation import prepare_learner  # loads ms-swift

        prepared = prepare_learner(config.swift, scratch, with_weights=False)
        return ok(
            f"ms-swift takes section swift; template {prepared.args.template}, {prepared.vocabulary_size} tokens, "
            f"dtype {prepared.dtype}",
            prepared,
        )

    prepared = exam.check(
        "template", prepare, needs=[checkpoint], fix="mend section swift: ms-swift's own words are beside"
    )
    if not config.b_enabled:
        return prepared, exam.check("channel B", lambda: ok("off (b_ratio 0): no server is needed"))
    samples = exam.check(
        "samples",
        lambda: _usable(config, prepared.result),
        needs=[prepared, rows_checked],
        fix="mend the data set, or section swift",
    )
    exam.check("packing_length", lambda: data.check_packing_length(config, samples.result), needs=[samples])
    if config.stage2_ab.evaluation.every_steps:
        num_rows = prepared.result.num_validation_rows if prepared.passed and rows_checked.passed else 0
        exam.show(config, Known(num_validation_rows=num_rows), needs=[prepared, rows_checked])
        exam.check(
            "evaluations",
            lambda: data.check_evaluation_steps(config, prepared.result.max_steps),
            needs=[prepared],
        )
    if prepared.passed and config.gradient_accumulation_steps is None:
        check_accumulation(exam, config, prepared.result.gradient_accumulation_steps)
    return prepared, samples


def _usable(config: Stage2Config, prepared: LearnerPreparation) -> Any:
    from swift_stage2.channel_b.encoding import Encoder
    from swift_stage2.doctor import data

    encoder = Encoder(prepared.template, packing_length=config.stage2_ab.channel_b.packing.packing_length)
    return data.check_usable(config, encoder, prepared.rows(), int(prepared.args.seed))


def _examine_addresses(exam: Examination, config: Stage2Config, *, live: bool) -> list[Checked[str]]:
    """One check per server that hands on its address once a connection can be made."""
    exam.begin_section("Addresses")
    exam.check("API key", lambda: address.check_api_key(config.rollout))
    # On another machine another launch starts it; here it is looked at as any server that runs already.
    launched = [
        index
        for index in range(0 if live else len(config.launch.servers))
        if is_here(config.rollout.servers[index].host)
    ]
    exam.show(config, Known(addresses=True, starts_learner=not live, started_servers=launched or None))
    return [
        _examine_address(exam, config, index, live=live, is_launched=index in launched)
        for index in range(len(config.rollout.servers))
    ]


def _examine_address(
    exam: Examination, config: Stage2Config, index: int, *, live: bool, is_launched: bool
) -> Checked[str]:
    server, key = config.rollout.servers[index], f"rollout.servers[{index}]"
    host = exam.check(f"server {index}: host", lambda: address.check_host(server))
    if is_launched:
        return host
    route = exam.check(
        f"server {index}: {'answers' if live else 'port open'}",
        lambda: address.check_reachable(server, host.result, key, must_answer=live),
        needs=[host],
    )
    if live:
        exam.check(
            f"server {index}: group port",
            lambda: address.check_group_port_free(server, host.result, key),
            needs=[host],
        )
    return route


def _examine_servers(
    exam: Examination,
    config: Stage2Config,
    options: argparse.Namespace,
    scratch: Path,
    routes: Sequence[Checked[str]],
    prepared: Checked[LearnerPreparation],
    samples: Checked[Samples],
) -> bool:
    from swift_stage2.doctor.live_servers import LiveServers

    servers: LiveServers = LiveServers(
        exam, config, scratch, prepared, samples, routes, with_round=not options.no_sync
    )
    servers.examine()
    servers.examine_feeding(
        options.step_seconds, options.nproc_per_node or config.launch.learner.nproc_per_node
    )
    return servers.hung


def _take_learner_device(config: Stage2Config) -> None:
    """The model is loaded where the learner would have it, never on a server's GPU."""
    first = config.launch.learner.devices[:1]
    try:
        visible = select_devices(os.environ, first, "launch.learner.devices")
    except ConfigError:
        visible = ""  # the launch plan's row has told why
    os.environ["CUDA_VISIBLE_DEVICES"] = visible


def _show(exam: Examination, options: argparse.Namespace, status_code: int) -> None:
    if options.json:
        facts = {"config": options.config, "live": options.live, "exit_status": status_code}
        print(json.dumps(findings_json(exam.findings, **facts), indent=1))
        return
    console = Console()
    if not console.is_terminal and console.width < _NARROWEST_COLUMNS:
        console = Console(width=_NARROWEST_COLUMNS)
    console.print(findings_table(exam.findings))


def _quieten() -> None:
    """The table is what is asked for; what ms-swift and Hugging Face tell on the way is not."""
    os.environ.setdefault("LOG_LEVEL", "ERROR")  # ms-swift's
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("swift").setLevel(logging.ERROR)


def _secrets(data: dict[str, Any]) -> tuple[str, ...]:
    """The bearer token, and what section ``swift`` holds under a name that says so."""
    rollout = data.get("rollout")
    name = rollout.get("api_key_env") if isinstance(rollout, dict) else None
    key = os.environ.get(name if isinstance(name, str) else "SWIFT_ROLLOUT_API_KEY", "")
    swift = data.get("swift")
    entries = swift.items() if isinstance(swift, dict) else ()
    hidden = [
        value
        for key, value in entries
        if isinstance(value, str) and any(mark in key for mark in _SECRET_MARKS)
    ]
    return (key, *hidden)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="swift-stage2 doctor",
        description="Checks everything that can be known before training.",
        exit_statuses="0 nothing failed (warnings are allowed); 1 a check failed",
    )
    parser.add_argument("config", metavar="CONFIG.yaml")
    parser.add_argument(
        "--live",
        action="store_true",
        help="also ask the running servers, with one dry sync round and a few rollouts",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument(
        "--step-seconds",
        type=_positive,
        metavar="S",
        help="seconds of one optimizer step, to say whether the servers can feed channel B",
    )
    parser.add_argument(
        "--nproc-per-node",
        type=rank_count,
        metavar="N",
        help="learner ranks (default: launch.learner.nproc_per_node)",
    )
    parser.add_argument(
        "--no-sync",
        action="store_true",
        help="with --live: leave the dry sync round out; no server's weights are touched",
    )
    return parser.parse_args(argv)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text!r}")
    return value
