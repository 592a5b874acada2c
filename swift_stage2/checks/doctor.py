"""``swift-stage2 doctor CONFIG.yaml [--live]``: runs every check in order and prints a row for each.

Exit status: 0 nothing failed, 1 a check failed, 2 the user's mistake (no such file, no YAML). A check gets
the results that it needs from the checks before it; nothing is looked at twice. One that rests on a failed one is not
run: its row says which one, and counts as failed with it. What another host alone can know is left out, with a reason:
the other side's by ``--role``, and devices, ports and rendezvous where a run with GPUs is judged on a host without any.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from swift_stage2.checks.checks import (
    Check,
    CheckResult,
    CheckStage,
    ValueT,
    Verdict,
    due_checks,
    failed,
    left_out,
    ok,
    warning,
)
from swift_stage2.config import ServerEngine, Stage2Config, load_config
from swift_stage2.config.root import SECRET
from swift_stage2.config.yaml_text import read_yaml
from swift_stage2.errors import ConfigError, Stage2Error, UserError
from swift_stage2.runtime.environment import has_gpu_driver, select_devices
from swift_stage2.runtime.network import is_here
from swift_stage2.runtime.output import SafeConsole, going_on, quieten_libraries, say
from swift_stage2.runtime.parser import CommandParser, real_number, whole_number

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
_LEARNER, _SERVER, _ALL = "learner", "server", "all"
_SHOWN_AS_JSON = ("section", "check", "verdict", "found", "fix", "counts_as_failed")
_HIDDEN = "***"


class CheckRun:
    """The rows of one run of the doctor, in order. ``secrets`` are replaced wherever they turn up."""

    def __init__(self, *, secrets: Sequence[str] = ()) -> None:
        self.findings: list[CheckResult[Any]] = []
        self.now = ""
        """The check that is under way."""
        self._secrets = tuple(secret for secret in secrets if secret)
        self._section = ""

    def begin_section(self, title: str) -> None:
        """The rows from here on belong together."""
        self._section = title

    def check(
        self,
        name: str,
        work: Callable[[], CheckResult[ValueT]],
        *,
        needs: Sequence[CheckResult[Any]] = (),
        fix: str = "",
    ) -> CheckResult[ValueT]:
        """Runs one check unless one that it needs has not passed.

        ``fix`` is the remedy for an error that carries none of its own.
        """
        held = next((need for need in needs if not need.passed), None)
        if held is None:
            self.now = name
            result = self._result(work, fix)
        elif held.verdict is Verdict.NOT_CHECKED:
            result = left_out(held.found)
        else:
            elsewhere = f" ({held.section})" if held.section != self._section else ""
            result = left_out(f"since {held.check}{elsewhere} failed")
        result = replace(
            result,
            section=self._section,
            check=name,
            found=self._clean(result.found),
            fix=self._clean(result.fix),
            counts_as_failed=held.counts_as_failed if held else result.verdict is Verdict.FAILED,
        )
        if result.verdict is not Verdict.OK or result.found:  # what has nothing to say has no row
            self.findings.append(result)
        return result

    def show(
        self, config: Stage2Config, known: CheckStage, *, needs: Sequence[CheckResult[Any]] = ()
    ) -> dict[str, CheckResult[None]]:
        """The results of the checks whose needs are ``known``, by name. Those with nothing to say have no row."""
        return {
            check.name: self.check(check.name, partial(_look, check, config, known), needs=needs)
            for check in due_checks(known)
        }

    @property
    def num_failed(self) -> int:
        """Rows that failed, those that could not be checked because of another left out."""
        return sum(finding.verdict is Verdict.FAILED for finding in self.findings)

    def _result(self, work: Callable[[], CheckResult[ValueT]], fix: str) -> CheckResult[ValueT]:
        try:
            return work()
        except UserError as error:
            return failed(error.found, error.remedy or fix)
        except Stage2Error as error:
            return failed(str(error), fix)
        except Exception as error:  # top of a check: whatever a library raises is a finding
            logger.debug("a check ended with an unexpected error", exc_info=True)
            return failed(f"{type(error).__name__}: {error}", fix or "mend what this error names")

    def _clean(self, text: str) -> str:
        """One line without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, _HIDDEN)
        return " ".join(text.split())


def _look(check: Check, config: Stage2Config, known: CheckStage) -> CheckResult[None]:
    return check.find(config, known) or ok("")


_STYLES = {
    Verdict.OK: "green",
    Verdict.WARNING: "yellow",
    Verdict.FAILED: "bold red",
    Verdict.NOT_CHECKED: "dim",
}
_CHECK_COLUMNS = 20
_FIX_INDENT = 4


def findings_table(findings: Sequence[CheckResult[Any]]) -> RenderableType:
    """A section per heading, one row per check with its fix below, and a line that counts the verdicts.

    Checks that were left out one after the other for the same reason are one row.
    """
    parts: list[RenderableType] = []
    look: dict[str, Any] = {"show_header": False, "expand": True, "box": SIMPLE}
    look |= {"show_edge": False, "pad_edge": False}
    for section, rows in groupby(findings, key=lambda finding: finding.section):
        parts.append(Text(section, style="bold italic"))
        for _, alike in groupby(
            rows, lambda row: row.found if row.verdict is Verdict.NOT_CHECKED else id(row)
        ):
            finding, *more = alike
            table = Table(**look)  # one for each, so that a fix has the whole width for its long keys
            table.add_column(width=_CHECK_COLUMNS, overflow="fold")
            table.add_column(width=len(Verdict.WARNING))
            table.add_column(ratio=1, overflow="fold")
            style, is_shown = _STYLES[finding.verdict], finding.verdict is not Verdict.NOT_CHECKED
            others = f"; nor {', '.join(row.check for row in more)}" if more else ""
            found = Text(finding.found)
            if not is_shown:
                found = Text(f"not checked: {finding.found}{others}", style=style)
            table.add_row(finding.check, Text(str(finding.verdict) if is_shown else "-", style=style), found)
            parts.append(table)
            if finding.fix:
                parts.append(Padding(Text(f"fix: {finding.fix}", style=style), (0, 0, 0, _FIX_INDENT)))
        parts.append(Text())
    counts = Counter(finding.verdict for finding in findings)
    counted = [Text(f"{counts[each]} {each}", style=_STYLES[each]) for each in Verdict if counts[each]]
    return Group(*parts, Text(", ").join(counted))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the doctor and returns its exit status.

    Raises:
        ConfigError: the configuration file is missing, unreadable, or no YAML mapping.
    """
    options = _parse(argv)
    path = Path(options.config)
    data = read_yaml(path)
    quieten_libraries()
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # so that it leaves nothing behind, as at SIGINT
    check_run = CheckRun(secrets=_secrets(data))
    with (
        going_on("doctor", lambda: check_run.now),
        tempfile.TemporaryDirectory(prefix="swift-stage2-doctor-") as scratch,
    ):
        examine(check_run, path, options, Path(scratch))
    status_code = EXIT_FAILED if check_run.num_failed else 0
    if options.json:
        facts = {"config": options.config, "live": options.live, "exit_status": status_code}
        rows = [{key: getattr(row, key) for key in _SHOWN_AS_JSON} for row in check_run.findings]
        found = {**facts, "findings": rows}
        say(*json.dumps(found, indent=1).splitlines())
        return status_code
    SafeConsole().print(findings_table(check_run.findings))
    return status_code


def examine(check_run: CheckRun, path: Path, options: argparse.Namespace, scratch: Path) -> None:
    check_run.begin_section("Configuration")
    loaded = check_run.check("configuration loads", partial(_load, path))
    if not loaded.passed:
        for name in ("model and data", "servers"):
            check_run.check(name, lambda: ok(""), needs=[loaded])
        return
    config, role = loaded.result, options.role
    learner = config.launch.learner
    ranks_per_node = options.nproc_per_node or learner.nproc_per_node
    num_ranks = learner.nnodes * ranks_per_node
    if role != _SERVER:
        check_run.show(config, CheckStage(run_directory=True, num_ranks=num_ranks))
    devices = check_run.check("devices", lambda: check_devices(config, role))
    is_host = devices.verdict is not Verdict.NOT_CHECKED
    if config.launch.servers or learner.devices:
        _take_learner_device(config)
    if role == _SERVER:
        check_run.check("model and data", lambda: left_out("the learner's, by --role server"))
        examine_addresses(check_run, config, role, is_started=is_host)
        return
    os.environ.update(
        {name: str(value) for name, value in learner.env.items()}
    )  # what a row is may hang on it
    from swift_stage2.checks.learner import examine_learner  # loads torch

    prepared, samples = examine_learner(check_run, config, scratch, num_ranks, is_host=is_host)
    if not config.b_enabled:
        return
    is_asked = options.live or options.coordinates
    examine_addresses(check_run, config, role, is_started=is_host and not is_asked)
    if not is_asked:
        return
    from swift_stage2.checks.live_servers import LiveServers

    servers = LiveServers(check_run, config, scratch, prepared, samples, with_round=not options.no_sync)
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
        visible = ""  # row devices has told why
    os.environ["CUDA_VISIBLE_DEVICES"] = visible


def _secrets(data: dict[str, Any]) -> tuple[str, ...]:
    """The bearer token, and what section ``swift`` holds under a name that says so."""
    rollout = data.get("rollout")
    name = rollout.get("api_key_env") if isinstance(rollout, dict) else None
    key = os.environ.get(name if isinstance(name, str) else "SWIFT_ROLLOUT_API_KEY", "")
    swift = data.get("swift")
    entries = swift.items() if isinstance(swift, dict) else ()
    hidden = (text for place, text in entries if SECRET.search(place))
    return (key, *(text for text in hidden if isinstance(text, str)))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="swift-stage2 doctor",
        description="Checks everything that can be known before training.",
        exit_statuses="0 nothing failed (warnings are allowed); 1 a check failed",
    )
    parser.add_argument("config", metavar="CONFIG.yaml")
    for flag, meaning in (
        ("--live", "also ask the running servers, with one dry sync round and a few rollouts"),
        ("--no-sync", "with --live: leave the dry sync round out; no server's weights are touched"),
        ("--coordinates", "also ask the running servers in which numbers boxes are written; part of --live"),
        ("--json", "print JSON instead of the table"),
    ):
        parser.add_argument(flag, action="store_true", help=meaning)
    parser.add_argument(
        "--role",
        choices=(_LEARNER, _SERVER, _ALL),
        default=_ALL,
        help="leave out what only a host of the other side can know (default: %(default)s)",
    )
    for option, kind, metavar, meaning in (
        (
            "--step-seconds",
            real_number("a number of seconds above 0"),
            "S",
            "seconds of one optimizer step, to say whether the servers can feed channel B",
        ),
        ("--nproc-per-node", whole_number(1), "N", "learner ranks (default: launch.learner.nproc_per_node)"),
    ):
        parser.add_argument(option, type=kind, metavar=metavar, help=meaning)
    options = parser.parse_args(argv)
    if options.role == _SERVER and (options.live or options.coordinates):
        raise UserError(
            "--live and --coordinates compare servers with the learner",
            got=f"--role {_SERVER}",
            remedy=f"leave it out, or write --role {_LEARNER}",
        )
    return options


def _load(path: Path) -> CheckResult[Stage2Config]:
    config = load_config(path)
    rollout = f"{len(config.rollout.servers)} server(s)" if config.b_enabled else "channel B is off"
    found = f"{path}: b_ratio {config.stage2_ab.schedule.b_ratio:g}, {rollout}"
    if not config.warnings:
        return ok(found, config)
    told, _, remedy = " | ".join(config.warnings).rpartition("; ")
    return warning(f"{found}; {told}", remedy, config)


def check_devices(config: Stage2Config, role: str = _ALL) -> CheckResult[None]:
    """Who gets which devices, and whether this machine has them; those of another host are that one's to count.

    Left out where ``role`` wants a GPU and this machine can have none: it is then no host of the run.
    """
    import torch

    launch, num_here = config.launch, torch.cuda.device_count()
    on_cpu = config.swift.get("use_cpu") is True
    here = {} if role == _SERVER else {"launch.learner": (launch.learner.devices, on_cpu)}
    for index, server in enumerate(() if role == _LEARNER else launch.servers):
        if is_here(config.rollout.servers[index].host):
            needs_none = on_cpu and server.engine is ServerEngine.TRANSFORMERS
            here[f"launch.servers[{index}]"] = server.devices, needs_none
    if not here:
        return left_out("no base_url of launch.servers has an address of this host")
    wants_gpu = any(devices for devices, _ in here.values()) or (role != _SERVER and not on_cpu)
    if wants_gpu and not num_here and not has_gpu_driver():
        return left_out(
            "this host has no GPU: devices, ports and rendezvous are for the run's own hosts to check"
        )
    if not (launch.servers or launch.learner.devices):
        return ok("")
    told, bare = [], []
    for owner, (devices, needs_none) in here.items():
        select_devices(os.environ, devices, f"{owner}.devices")
        told.append(f"{owner}: {','.join(map(str, devices)) or 'CPU only'}")
        bare += [f"{owner}.devices"] * (not devices and not needs_none)
    found = f"{'may be shared' if launch.share_devices else 'disjoint'} ({'; '.join(told)})"
    if num_here and bare:
        return warning(
            f"{found}; who is given no devices sees none of the {num_here} GPU(s) here",
            f"write numbers of GPUs at {', '.join(bare)}",
        )
    return ok(found)


def examine_addresses(check_run: CheckRun, config: Stage2Config, role: str, *, is_started: bool) -> None:
    """The rows of names and ports. ``is_started``: a launch of this ``role`` is still to be started on this host."""
    check_run.begin_section("Addresses")
    servers = config.launch.servers if is_started and role != _LEARNER else ()
    launched = [index for index in range(len(servers)) if is_here(config.rollout.servers[index].host)]
    starts_learner = is_started and role != _SERVER
    check_run.show(
        config, CheckStage(addresses=True, starts_learner=starts_learner, started_servers=launched or None)
    )
    if role == _LEARNER and config.launch.servers:
        check_run.check("launch.servers", lambda: left_out("the servers' own, by --role learner"))
