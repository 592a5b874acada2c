"""The rollout server that a row breaks: started, killed in part or as a whole, and started again on its port.

What a tree held that can outlive it: processes, listening ports, named shared memory. That is attributed to a tree by
what its processes have mapped, because other programs on the machine make segments of the same names.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import psutil

from benchmarks.faults.commit import VARIABLE, Switches
from benchmarks.servers import BenchServers, ServerKind, server_arguments, server_environment
from swift_stage2.demo.demo_config import STAGE1, held_ports
from swift_stage2.errors import ChildFailed
from swift_stage2.launch.process_tree import ProcessTree
from swift_stage2.launch.warden import mapped_by
from swift_stage2.process.ports import is_quiet
from swift_stage2.servers import protocol

_START_DEADLINE_S = 600.0
_GRACE_S = 20.0
_KILL_DEADLINE_S = 20.0
_QUIET_DEADLINE_S = 150.0  # the system keeps connections for a minute after they closed
_ASK_TIMEOUT_S = 2.0
_ASK_EVERY_S = 0.5
_POLL_S = 0.1
_MAX_BATCH_SIZE = 32
_LOWEST_PORT = 20000
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")

Program = Callable[[Path, int], list[str]]
"""The words after ``python`` on the command line of a server of this model, on this port."""


def lasting_port() -> int:
    """A free port that no outgoing connection is given while its server is away: a stock server that found it taken
    would silently move to the next one. Raises ChildFailed when there is none."""
    lowest, _ = map(int, _EPHEMERAL_PORTS.read_text(encoding="ascii").split())
    for port in random.sample(range(_LOWEST_PORT, lowest), lowest - _LOWEST_PORT):
        if not held_ports((port,)):
            return port
    raise ChildFailed(f"a server needs a free port from {_LOWEST_PORT} to {lowest - 1}, got none")


class TestedServer:
    """One port, and the server that answers there; at most one is alive at a time."""

    __test__ = False
    _numbers = itertools.count(1)
    """Of all that are started."""

    def __init__(
        self, kind: ServerKind, bench: BenchServers, switches: Switches, program: Program | None = None
    ) -> None:
        """``program`` serves in place of ``kind``'s."""
        self.kind = kind
        self.port = lasting_port()
        self.switches = switches
        self.weights_root = switches.directory.parent / "weights"
        """A learner may leave weights here for it."""
        self.weights_root.mkdir(parents=True, exist_ok=True)
        self.started_at = 0.0
        """Unix time of the last start."""
        self._program = program or partial(_arguments, kind, self.weights_root)
        self._bench = bench
        self._tree: ProcessTree | None = None
        self._held, self._held_by_killed = Held(), Held()

    @property
    def is_alive(self) -> bool:
        return self._tree is not None and self._tree.poll() is None

    def start(self, model: Path = STAGE1) -> None:
        """Starts it; a stock server once it would get its port, and not silently the next one."""
        if self.kind is ServerKind.STOCK:
            what = f"port {self.port} is quiet"
            self._bench.wait_for(lambda: is_quiet(self.port), what, _QUIET_DEADLINE_S)
        self.started_at = time.time()
        self._held = Held()
        environment = {**server_environment(self.kind), VARIABLE: str(self.switches.directory)}
        argv = (sys.executable, "-u", *self._program(model, self.port))
        name = f"{self.kind}-server{next(self._numbers)}"
        self._tree = self._bench.start_process(name, argv, environment, _GRACE_S)

    def wait_until_it_answers(self, meanwhile: Callable[[], object] | None = None) -> None:
        """Does ``meanwhile`` until the server says that it is up. Raises ChildFailed: it ended, or it took too long."""
        asked = 0.0

        def answers() -> bool:
            nonlocal asked
            if time.monotonic() - asked < _ASK_EVERY_S:
                return False
            asked = time.monotonic()
            url = f"http://127.0.0.1:{self.port}{protocol.HEALTH}"
            with suppress(httpx.HTTPError):
                return httpx.get(url, trust_env=False, timeout=_ASK_TIMEOUT_S).status_code == httpx.codes.OK
            return False

        what = f"the {self.kind} server answers on port {self.port}"
        self._bench.wait_for(answers, what, _START_DEADLINE_S, tree=self._tree, step=meanwhile)

    @property
    def processes(self) -> list[psutil.Process]:
        """Everything of it that runs. The first of the tree is the warden, which is the bench's own."""
        return tree_of(self._tree.pid)[1:] if self._tree else []

    def kill(self) -> None:
        """SIGKILL to everything of it at once; returns when it has gone."""
        self._held.look(self.processes)
        if left := kill_all(lambda: self.processes, _KILL_DEADLINE_S):
            raise ChildFailed(f"processes that SIGKILL did not end: {[process.pid for process in left]}")
        self._wait_for_warden()
        self._held_by_killed.add(self._held)

    def kill_engine_process(self, name: str) -> None:
        """SIGKILL to the one process of the engine whose command line begins with ``name``.

        Raises ChildFailed: there is not exactly one.
        """
        self._held.look(self.processes)
        found = [
            process for process in self._held.processes if " ".join(command_line(process)).startswith(name)
        ]
        if len(found) != 1:
            raise ChildFailed(f"the server must have one process {name}, got {len(found)}")
        found[0].kill()
        psutil.wait_procs(found, timeout=_KILL_DEADLINE_S)

    def end(self) -> Leftovers:
        """SIGTERM in order, then whatever it takes; returns what it left behind."""
        if self._tree is not None:
            self._held.look(self.processes)
            self._tree.ask_to_end()
            self._wait_for_warden()
        return self._held.left((self.port,))

    def what_the_killed_left(self) -> Leftovers:
        """Of servers that were killed since the last call. Their port is their successor's now."""
        held, self._held_by_killed = self._held_by_killed, Held()
        return held.left()

    def _wait_for_warden(self) -> None:
        tree = self._tree
        assert tree is not None
        try:
            self._bench.wait_for(
                lambda: tree.poll() is not None, "its warden ends", _GRACE_S + _KILL_DEADLINE_S
            )
        except ChildFailed:
            tree.kill_warden()
            self._bench.job.end_abandoned(tree, at_once=True)


def _arguments(kind: ServerKind, weights_root: Path, model: Path, port: int) -> list[str]:
    arguments = server_arguments(kind, model, port, _MAX_BATCH_SIZE)
    if kind is ServerKind.STOCK:
        return arguments
    root = ["--weights-root", str(weights_root)]
    return ["-m", "benchmarks.faults.commit", *arguments[arguments.index("rollout") + 1 :], *root]


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Names of all that was still there when everything should have gone."""

    processes: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    shared_memory: tuple[str, ...] = ()

    @property
    def num(self) -> int:
        return len(self.processes) + len(self.ports) + len(self.shared_memory)


def tree_of(pid: int) -> list[psutil.Process]:
    """A process and everything below it; empty when it has gone."""
    with suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    return []


def command_line(process: psutil.Process) -> list[str]:
    """Empty when it has gone."""
    with suppress(psutil.NoSuchProcess):
        return list(process.cmdline())
    return []


class Held:
    """All that a tree held and that may outlive it, as far as it was looked at."""

    def __init__(self, processes: Sequence[psutil.Process] = (), shared_memory: Iterable[str] = ()) -> None:
        self.processes = list(processes)
        self.shared_memory = set(shared_memory)

    def look(self, processes: list[psutil.Process]) -> None:
        """Takes in the processes that are there now, unless all have gone, and what they have mapped."""
        self.processes = processes or self.processes
        self.shared_memory |= mapped_by(self.processes)

    def add(self, other: Held) -> None:
        self.processes += other.processes
        self.shared_memory |= other.shared_memory

    def left(self, ports: Sequence[int] = (), patience_s: float = 10.0) -> Leftovers:
        """Waits up to ``patience_s`` until nothing is left, ports included, and says what is."""
        end = time.monotonic() + patience_s
        while True:
            left = Leftovers(
                tuple(name for process in self.processes if (name := _name_if_alive(process))),
                tuple(held_ports(tuple(ports))),
                tuple(sorted(name for name in self.shared_memory if Path(name).exists())),
            )
            if left.num == 0 or time.monotonic() >= end:
                return left
            time.sleep(_POLL_S)


def kill_all(find: Callable[[], list[psutil.Process]], deadline_s: float) -> list[psutil.Process]:
    """SIGKILL to whatever ``find`` names until it names nothing; returns what did not end in time."""
    end = time.monotonic() + deadline_s
    while (alive := find()) and time.monotonic() < end:
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=0.5)
    return alive


def _name_if_alive(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            return str(process.name())
    return ""
