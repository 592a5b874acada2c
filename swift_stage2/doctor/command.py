"""``swift-stage2 doctor CONFIG.yaml [--live]``: runs the checks in order, prints the table, and exits with its verdict.

Exit status: 0 nothing failed, 1 a check failed, 2 the user's mistake (no such file, no YAML). A check gets
the results that it needs from the checks before it; nothing is looked at twice.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from swift_stage2.config import Stage2Config
from swift_stage2.config.yaml_text import read_yaml
from swift_stage2.doctor.configuration import (
    check_configuration,
    check_devices,
    check_launch_plan,
    check_run_directory,
    examine_addresses,
)
from swift_stage2.doctor.examination import Examination, Finding, Verdict, ok
from swift_stage2.errors import ConfigError
from swift_stage2.preflight.checks import Known
from swift_stage2.runtime.output import SafeConsole, quieten_libraries, say
from swift_stage2.runtime.parser import CommandParser, whole_number
from swift_stage2.runtime.visible_devices import select_devices

EXIT_FAILED = 1
_SECRET_MARKS = ("token", "secret", "password", "api_key")
_NARROWEST_COLUMNS = 80
_STYLES = {
    Verdict.OK: "green",
    Verdict.WARNING: "yellow",
    Verdict.FAILED: "bold red",
    Verdict.NOT_CHECKED: "dim",
}

_CHECK_COLUMNS = 20
_FIX_INDENT = 4


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the doctor and returns its exit status.

    Raises:
        ConfigError: the configuration file is missing, unreadable, or no YAML mapping.
    """
    options = _parse(argv)
    path = Path(options.config)
    data = read_yaml(path)
    quieten_libraries()
    console = SafeConsole(stderr=True)
    with _ended_in_order(), ExitStack() as stack:
        status = stack.enter_context(console.status("looking …")) if console.is_terminal else None
        exam = Examination(
            secrets=_secrets(data), on_begin=lambda check: status.update(f"{check} …") if status else None
        )
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swift-stage2-doctor-")))
        examine(exam, path, options, scratch)
    status_code = EXIT_FAILED if exam.num_failed else 0
    _show(exam, options, status_code)
    return status_code


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """SIGTERM and SIGHUP leave by way of every ``finally``, as Ctrl-C does, so that no folder is left behind."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    # One that is ignored, as under nohup, stays ignored.
    heard = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def examine(exam: Examination, path: Path, options: argparse.Namespace, scratch: Path) -> None:
    loaded = check_configuration(exam, path)
    if not loaded.passed:
        for name in ("model and data", "servers"):
            exam.check(name, lambda: ok(""), needs=[loaded])
        return
    config = loaded.result
    exam.check("run directory", lambda: check_run_directory(config))
    learner = config.launch.learner
    ranks_per_node = options.nproc_per_node or learner.nproc_per_node
    num_ranks = learner.nnodes * ranks_per_node
    exam.show(config, Known(run_directory=True, num_ranks=num_ranks))
    if config.launch.servers or config.launch.learner.devices:
        exam.check("launch plan", lambda: check_launch_plan(config, path))
        exam.check("devices", lambda: check_devices(config))
        _take_learner_device(config)
    from swift_stage2.doctor.data import examine_learner  # loads torch

    prepared, samples = examine_learner(exam, config, scratch, num_ranks)
    if not config.b_enabled:
        return
    from swift_stage2.doctor.memory import examine_memory

    examine_memory(exam, config, prepared, ranks_per_node)
    routes = examine_addresses(exam, config, live=options.live or options.coordinates)
    if not (options.live or options.coordinates):
        return
    from swift_stage2.doctor.live_servers import LiveServers

    servers = LiveServers(exam, config, scratch, prepared, samples, routes, with_round=not options.no_sync)
    if not options.live:
        servers.examine_coordinates()
        return
    servers.examine()
    servers.examine_feeding(options.step_seconds, num_ranks)


def _take_learner_device(config: Stage2Config) -> None:
    """The model is loaded where the learner would have it, never on a GPU that is a server's alone."""
    first = config.launch.learner.devices[:1]
    try:
        visible = select_devices(os.environ, first, "launch.learner.devices")
    except ConfigError:
        visible = ""  # the launch plan's row has told why
    os.environ["CUDA_VISIBLE_DEVICES"] = visible


def _show(exam: Examination, options: argparse.Namespace, status_code: int) -> None:
    if options.json:
        facts = {"config": options.config, "live": options.live, "exit_status": status_code}
        say(*json.dumps(findings_json(exam.findings, **facts), indent=1).splitlines())
        return
    console = SafeConsole()
    if not console.is_terminal and console.width < _NARROWEST_COLUMNS:
        console = SafeConsole(width=_NARROWEST_COLUMNS)
    console.print(findings_table(exam.findings))


def _secrets(data: dict[str, Any]) -> tuple[str, ...]:
    """The bearer token, and what section ``swift`` holds under a name that says so."""
    rollout = data.get("rollout")
    name = rollout.get("api_key_env") if isinstance(rollout, dict) else None
    key = os.environ.get(name if isinstance(name, str) else "SWIFT_ROLLOUT_API_KEY", "")
    swift = data.get("swift")
    entries = swift.items() if isinstance(swift, dict) else ()
    hidden = (text for place, text in entries if any(mark in place for mark in _SECRET_MARKS))
    return (key, *(text for text in hidden if isinstance(text, str)))


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
    parser.add_argument(
        "--coordinates",
        action="store_true",
        help="also ask the running servers in which numbers boxes are written; part of --live",
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
        type=whole_number(1),
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


def findings_table(findings: Sequence[Finding]) -> RenderableType:
    """A section per heading, one row per check with its fix below, and a line that counts the verdicts."""
    parts: list[RenderableType] = []
    look: dict[str, Any] = {"show_header": False, "expand": True, "box": SIMPLE}
    look |= {"show_edge": False, "pad_edge": False}
    for section, rows in groupby(findings, key=lambda finding: finding.section):
        parts.append(Text(section, style="bold italic"))
        for finding in rows:
            table = Table(**look)  # one for each, so that a fix has the whole width for its long keys
            table.add_column(width=_CHECK_COLUMNS, overflow="fold")
            table.add_column(width=len(Verdict.WARNING))
            table.add_column(ratio=1, overflow="fold")
            style, is_shown = _STYLES[finding.verdict], finding.verdict is not Verdict.NOT_CHECKED
            found = Text(finding.found) if is_shown else Text(f"not checked: {finding.found}", style=style)
            table.add_row(finding.check, Text(str(finding.verdict) if is_shown else "-", style=style), found)
            parts.append(table)
            if finding.fix:
                parts.append(Padding(Text(f"fix: {finding.fix}", style=style), (0, 0, 0, _FIX_INDENT)))
        parts.append(Text())
    return Group(*parts, summary_line(findings))


def summary_line(findings: Sequence[Finding]) -> Text:
    """``12 ok, 1 warning, 2 failed, 3 not checked``."""
    counts = Counter(finding.verdict for finding in findings)
    parts = [
        Text(f"{counts[verdict]} {verdict}", style=_STYLES[verdict]) for verdict in Verdict if counts[verdict]
    ]
    return Text(", ").join(parts)


def findings_json(findings: Sequence[Finding], **facts: Any) -> dict[str, Any]:
    """The same for a script; ``facts`` are put beside the rows."""
    return {**facts, "findings": [asdict(finding) for finding in findings]}
