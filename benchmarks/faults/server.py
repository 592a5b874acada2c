"""The rollout server that a row breaks: started, killed in part or as a whole, and started again on its port.

A thin use of the launcher's process trees, so that nothing outlives the bench; and what a tree held that can outlive
it: processes, listening ports, named shared memory. That is attributed to a tree by what its processes have mapped,
because other programs on the machine make segments of the same names.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import psutil

from benchmarks.faults.commit import VARIABLE, Switches
from benchmarks.servers import ServerKind, server_arguments, server_environment
from swift_stage2.demo.demo_config import CHILD_ENVIRONMENT, STAGE1, held_ports
from swift_stage2.errors import ChildFailed
from swift_stage2.launch.job import Job
from swift_stage2.launch.process_tree import Command, ProcessTree
from swift_stage2.launch.shared_memory import mapped_by
from swift_stage2.process.ports import is_quiet
from swift_stage2.servers import protocol

START_DEADLINE_S = 600.0
_GRACE_S = 20.0
_KILL_DEADLINE_S = 20.0
_QUIET_DEADLINE_S = 150.0  # the system keeps connections for a minute after they closed
_ASK_TIMEOUT_S = 2.0
_ASK_EVERY_S = 0.5
_POLL_S = 0.1
_HOST = "127.0.0.1"
_MAX_BATCH_SIZE = 32
_LOWEST_PORT = 20000
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


Program = Callable[[Path, int], list[str]]
"""What follows ``python`` on the command line of a server of this model, on this port."""


def engine_processes(kind: ServerKind) -> tuple[str, ...]:
    """How the command lines of the engine's own processes begin."""
    return () if kind is ServerKind.TRANSFORMERS else ("VLLM::Worker", "VLLM::EngineCore")


def lasting_port() -> int:
    """A free port that no outgoing connection is given while its server is away: a stock server that found it taken
    would silently move to the next one.

    Raises:
        ChildFailed: there is none.
    """
    lowest, _ = map(int, _EPHEMERAL_PORTS.read_text(encoding="ascii").split())
    candidates = list(range(_LOWEST_PORT, lowest))
    random.shuffle(candidates)
    for port in candidates:
        if not held_ports((port,)):
            return port
    raise ChildFailed(f"a server needs a free port from {_LOWEST_PORT} to {lowest - 1}, got none")


class TestedServer:
    """One port, and the server that answers there; at most one is alive at a time."""

    __test__ = False

    def __init__(
        self,
        kind: ServerKind,
        job: Job,
        moment: Callable[[], None],
        port: int,
        switches: Switches,
        program: Program | None = None,
    ) -> None:
        """``moment`` waits a little, and raises when the bench is to end. ``program`` serves in place of ``kind``'s."""
        self.kind = kind
        self._program = program or partial(_arguments, kind)
        self.port = port
        self.switches = switches
        self.shared_memory: set[str] = set()
        self._job = job
        self._moment = moment
        self._tree: ProcessTree | None = None
        self._seen: list[psutil.Process] = []
        self._killed: list[psutil.Process] = []
        self._killed_shared_memory: set[str] = set()
        self._num_started = 0
        self.started_at = 0.0
        """Unix time of the last start."""

    @property
    def base_url(self) -> str:
        """Where it answers."""
        return f"http://{_HOST}:{self.port}"

    @property
    def is_alive(self) -> bool:
        """Whether anything of it runs."""
        return self._tree is not None and self._tree.poll() is None

    def start(self, model: Path = STAGE1) -> None:
        """Starts it; a stock server once it would get its port, and not silently the next one."""
        self._wait_for_quiet_port()
        self._num_started += 1
        self.started_at = time.time()
        self._seen, self.shared_memory = [], set()
        switches = {VARIABLE: str(self.switches.directory)}
        environment = {**os.environ, **CHILD_ENVIRONMENT, **server_environment(self.kind), **switches}
        name = f"{self.kind}-server{self._num_started}"
        argv = (sys.executable, "-u", *self._program(model, self.port))
        self._tree = self._job.start(Command(name=name, argv=argv, environment=environment, grace_s=_GRACE_S))

    def answers(self) -> bool:
        """Whether it says that it is up; a stock server says so at any time after its start."""
        try:
            reply = httpx.get(self.base_url + protocol.HEALTH, trust_env=False, timeout=_ASK_TIMEOUT_S)
        except httpx.HTTPError:
            return False
        return reply.status_code == httpx.codes.OK

    def wait_until_it_answers(self, meanwhile: Callable[[], object] | None = None) -> None:
        """Does ``meanwhile`` until the server answers.

        Raises:
            ChildFailed: it ended, or did not answer in time.
        """
        end, asked = time.monotonic() + START_DEADLINE_S, 0.0
        while True:
            if time.monotonic() - asked >= _ASK_EVERY_S:
                asked = time.monotonic()
                if self.answers():
                    return
            (meanwhile or self._moment)()
            if not self.is_alive or time.monotonic() >= end:
                log = self._tree.log_path if self._tree else "no log"
                raise ChildFailed(f"the {self.kind} server must answer at {self.base_url}; see {log}")

    @property
    def processes(self) -> list[psutil.Process]:
        """Everything of it that runs."""
        # The first is the warden, which is the bench's own.
        return tree_of(self._tree.pid)[1:] if self._tree else []

    def watch(self) -> None:
        """Notes what the server holds now that can outlive it."""
        self._seen = self.processes or self._seen
        self.shared_memory |= mapped_by(self._seen)

    def kill(self) -> None:
        """SIGKILL to everything of it at once; returns when it has gone."""
        self.watch()
        tree = self._require_tree()
        left = kill_all(lambda: self.processes, _KILL_DEADLINE_S)
        if left:
            raise ChildFailed(f"processes that SIGKILL did not end: {[process.pid for process in left]}")
        self._wait_for_warden(tree)
        self._killed += self._seen
        self._killed_shared_memory |= self.shared_memory

    def kill_engine_process(self, name: str) -> None:
        """SIGKILL to the one process of the engine whose command line begins with ``name``.

        Raises:
            ChildFailed: there is not exactly one.
        """
        self.watch()
        found = [process for process in self._seen if " ".join(_command_line(process)).startswith(name)]
        if len(found) != 1:
            raise ChildFailed(f"the server must have one process {name}, got {len(found)}")
        found[0].kill()
        psutil.wait_procs(found, timeout=_KILL_DEADLINE_S)

    def end(self) -> None:
        """SIGTERM in order, then whatever it takes."""
        if self._tree is None:
            return
        self.watch()
        self._tree.ask_to_end()
        self._wait_for_warden(self._tree)

    def what_is_left(self, patience_s: float = 10.0) -> Leftovers:
        """Of a server that was ended: what it left behind."""
        return look(self._seen, (self.port,), self.shared_memory, patience_s)

    def what_the_killed_left(self, patience_s: float = 10.0) -> Leftovers:
        """Of servers that were killed since the last call. Their port is their successor's now."""
        processes, shared_memory = self._killed, self._killed_shared_memory
        self._killed, self._killed_shared_memory = [], set()
        return look(processes, (), shared_memory, patience_s)

    def _wait_for_quiet_port(self) -> None:
        end = time.monotonic() + _QUIET_DEADLINE_S
        while self.kind is ServerKind.STOCK and not is_quiet(self.port):
            self._moment()
            if time.monotonic() >= end:
                raise ChildFailed(
                    f"port {self.port} must be quiet for a stock server, is not after {_QUIET_DEADLINE_S:.0f} s"
                )

    def _wait_for_warden(self, tree: ProcessTree) -> None:
        end = time.monotonic() + _GRACE_S + _KILL_DEADLINE_S
        while tree.poll() is None:
            self._moment()
            if time.monotonic() >= end:
                tree.kill_warden()
                self._job.end_abandoned(tree, at_once=True)
                return

    def _require_tree(self) -> ProcessTree:
        if self._tree is None:
            raise ChildFailed("the server was never started")
        return self._tree


def _arguments(kind: ServerKind, model: Path, port: int) -> list[str]:
    arguments = server_arguments(kind, model, port, _MAX_BATCH_SIZE)
    if kind is ServerKind.STOCK:
        return arguments
    return ["-m", "benchmarks.faults.commit", *arguments[arguments.index("rollout") + 1 :]]


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What was still there when everything should have gone; names only."""

    processes: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    shared_memory: tuple[str, ...] = ()

    @property
    def num(self) -> int:
        """All of it."""
        return len(self.processes) + len(self.ports) + len(self.shared_memory)


def tree_of(pid: int) -> list[psutil.Process]:
    """A process and everything below it; empty when it has gone."""
    try:
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def look(
    processes: Sequence[psutil.Process], ports: Sequence[int], shared_memory: Iterable[str], patience_s: float
) -> Leftovers:
    """Waits up to ``patience_s`` until nothing is left, and says what is."""
    end = time.monotonic() + patience_s
    while True:
        left = Leftovers(
            tuple(_name(process) for process in processes if _is_alive(process)),
            tuple(held_ports(tuple(ports))),
            tuple(sorted(name for name in shared_memory if Path(name).exists())),
        )
        if left.num == 0 or time.monotonic() >= end:
            return left
        time.sleep(_POLL_S)


def kill_all(find: Callable[[], list[psutil.Process]], deadline_s: float) -> list[psutil.Process]:
    """SIGKILL to whatever ``find`` names until it names nothing; returns what did not end in time."""
    end = time.monotonic() + deadline_s
    while (alive := find()) and time.monotonic() < end:
        for process in alive:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(alive, timeout=0.5)
    return alive


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return "?"
