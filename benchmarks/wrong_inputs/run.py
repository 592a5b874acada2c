"""``swift-stage2 bench wrong-inputs``: every case as a real process in a folder of its own, two at a time.

Each has a deadline; what is left of one that misses it is ended with its process group. Exit status 0: every
command said what it must, 1: at least one did not.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import swift_stage2
from benchmarks.attacks.hostile_server import HostileServer
from benchmarks.results import ResultTable, grouped, publish
from benchmarks.wrong_inputs.case import Case, SetupMaker
from benchmarks.wrong_inputs.cases import all_cases
from swift_stage2.errors import UserError
from swift_stage2.process.ports import free_ports

_AT_ONCE = 2
_DEADLINE_S = 240.0
_END_GRACE_S = 20.0
_NO_PAGE = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
"""Of a web server that is no rollout server: it has no page for anything."""
_ROOT = Path(swift_stage2.__file__).parents[1]
_SHOWN_CHARACTERS = 300
_TORCHRUN_SETS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NOT_PASSED_ON = (*_TORCHRUN_SETS, "SWIFT_ROLLOUT_API_KEY", "PYTHONSAFEPATH")


@dataclass(frozen=True, slots=True)
class Met:
    case: Case
    status: int | None
    output: str

    @property
    def problems(self) -> tuple[str, ...]:
        return self.case.problems(self.status, self.output)

    @property
    def says(self) -> str:
        """The line that tells, without places that differ from run to run."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()] or ["nothing"]
        told = " ".join(self.case.told.split())
        line = next((line for line in reversed(lines) if told and told in line), lines[-1])
        line = re.sub(r"/tmp/\S*?/case-\d+", "…", line).replace(str(_ROOT), "…")
        line = re.sub(r"[^\x20-\x7e…–’“”]", "?", line)  # a table must stay readable whatever was echoed
        return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS].rpartition(' ')[0]} …"


def run(options: argparse.Namespace, directory: Path) -> int:
    """Runs the cases and writes the table. Raises UserError when no case has such a name, or nothing can be written."""
    cases = _chosen(options.only)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--output must be a directory that can be written, got {error}; name another"
        ) from error
    with (
        tempfile.TemporaryDirectory(prefix="swift-stage2-wrong-inputs-") as scratch,
        HostileServer(lambda path: [_NO_PAGE]) as foreign,
    ):
        maker = SetupMaker(Path(scratch), foreign.port, free_ports(1)[0])
        folders = [Path(scratch) / f"case-{number}" for number in range(len(cases))]
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="wrong-input") as pool:
            met = []
            for done in pool.map(lambda pair: meet(maker, *pair), zip(cases, folders, strict=True)):
                met.append(done)
                sign = "; ".join(done.problems) or "ok"
                print(f"[{len(met)}/{len(cases)}] {done.case.area}: {done.case.wrong}: {sign}", flush=True)
    _publish(directory, met)
    return 1 if any(one.problems for one in met) else 0


def meet(maker: SetupMaker, case: Case, folder: Path) -> Met:
    """Makes the scene, spoils it, and runs the command in it."""
    scene = maker.make(folder)
    case.spoil(scene)
    scene.save()
    outer = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
    process = subprocess.Popen(
        [sys.executable, "-m", "swift_stage2", *case.words],
        cwd=folder,
        env=outer | {"PYTHONPATH": str(_ROOT), "COLUMNS": "200"} | scene.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    status: int | None = None
    try:
        told, _ = process.communicate(timeout=_DEADLINE_S)
        status = process.returncode
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        try:
            told, _ = process.communicate(timeout=_END_GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            told, _ = process.communicate(timeout=_END_GRACE_S)
    return Met(case, status, told.decode("utf-8", "replace"))


def _publish(directory: Path, met: Sequence[Met]) -> None:
    areas = grouped(met, lambda one: one.case.area)
    good = {area: sum(not one.problems for one in mine) for area, mine in areas.items()}
    counts: Mapping[str, Callable[[str], str]] = {
        "area": str,
        "kinds": lambda area: str(len(areas[area])),
        "as they should": lambda area: str(good[area]),
    }
    title = f"# Wrong inputs: {len(met)} kinds, {sum(good.values())} told as they should"
    tables = [ResultTable.of(f"## {area}", mine, _COLUMNS) for area, mine in areas.items()]
    facts = [
        {
            "area": one.case.area,
            "wrong": _without_root(one.case.wrong),
            "words": [_without_root(word) for word in one.case.words],
            "status": one.status,
            "says": one.says,
            "problems": one.problems,
        }
        for one in met
    ]
    publish(directory, "wrong_inputs", facts, ResultTable.of(title, areas, counts), *tables)


def _without_root(text: str) -> str:
    return text.replace(str(_ROOT), "…")


_COLUMNS: Mapping[str, Callable[[Met], str]] = {
    "what is wrong": lambda one: _without_root(one.case.wrong),
    "command": lambda one: " ".join(map(_without_root, one.case.words)),
    "exit status": lambda one: "none in time" if one.status is None else str(one.status),
    "what it says": lambda one: one.says,
    "problems": lambda one: "; ".join(one.problems) or "–",
}


def _chosen(only: str) -> list[Case]:
    known = list(all_cases())
    cases = [case for case in known if only in f"{case.area}: {case.wrong}"]
    if not cases:
        areas = ", ".join(dict.fromkeys(case.area for case in known))
        raise UserError(f"--only must be part of a case's name, got {only!r}; the areas are {areas}")
    return cases
