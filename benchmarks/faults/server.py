"""The rollout server that a fault breaks: started, killed in part or as a whole, and started again on its port."""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import psutil

from benchmarks.faults.leftovers import Held, kill_all, tree_of
from benchmarks.processes import Processes
from benchmarks.servers import ServerKind, server_arguments, server_environment
from swift_stage2 import wire
from swift_stage2.demo.demo_config import STAGE1
from swift_stage2.errors import ChildFailed
from swift_stage2.runtime.network import is_free, is_quiet
from swift_stage2.runtime.supervisor import ProcessTree

_START_DEADLINE_S = 600.0
_GRACE_S = 20.0
_KILL_DEADLINE_S = 20.0
_QUIET_DEADLINE_S = 150.0  # the system keeps connections for a minute after they closed
_ASK_TIMEOUT_S = 2.0
_ASK_EVERY_S = 0.5
_LOWEST_PORT = 20000
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def lasting_port() -> int:
    """A free port that no outgoing connection is given while its server is away: a stock server that found it taken
    would silently move to the next one. Raises ChildFailed when there is none."""
    lowest, _ = map(int, _EPHEMERAL_PORTS.read_text(encoding="ascii").split())
    for port in random.sample(range(_LOWEST_PORT, lowest), lowest - _LOWEST_PORT):
        if is_free("127.0.0.1", port):
            return port
    raise ChildFailed(f"a server needs a free port from {_LOWEST_PORT} to {lowest - 1}, got none")


class TestedServer:
    """One port, and the server that answers there; at most one is alive at a time."""

    __test__ = False
    _numbers = itertools.count(1)
    """Of all that are started."""

    def __init__(self, kind: ServerKind, processes: Processes, *, sleeps: bool = False) -> None:
        self.kind, self._sleeps = kind, sleeps
        self.port = lasting_port()
        self._owner = processes
        self._tree: ProcessTree | None = None
        self._held = Held()

    @property
    def is_alive(self) -> bool:
        return self._tree is not None and self._tree.poll() is None

    def start(self) -> None:
        """Starts it; a stock server once it would get its port, and not silently the next one."""
        if self.kind is ServerKind.STOCK:
            what = f"port {self.port} is quiet"
            self._owner.wait_for(lambda: is_quiet(self.port), what, _QUIET_DEADLINE_S)
        words = server_arguments(self.kind, STAGE1, self.port)
        words += ["--sleep-level", "2"] if self._sleeps else []
        argv, environment = (sys.executable, "-u", *words), server_environment(self.kind)
        name = f"{self.kind}-server{next(self._numbers)}"
        self._tree = self._owner.start_process(name, argv, environment, _GRACE_S)

    def wait_until_it_answers(self, meanwhile: Callable[[], object] | None = None) -> None:
        """Does ``meanwhile`` until the server says that it is up. Raises ChildFailed: it ended, or it took too long."""
        asked = 0.0

        def answers() -> bool:
            nonlocal asked
            if time.monotonic() - asked < _ASK_EVERY_S:
                return False
            asked = time.monotonic()
            url = f"http://127.0.0.1:{self.port}{wire.HEALTH}"
            with suppress(httpx.HTTPError):
                return httpx.get(url, trust_env=False, timeout=_ASK_TIMEOUT_S).status_code == httpx.codes.OK
            return False

        what = f"the {self.kind} server answers on port {self.port}"
        self._owner.wait_for(answers, what, _START_DEADLINE_S, tree=self._tree, step=meanwhile)

    @property
    def processes(self) -> list[psutil.Process]:
        """Everything of it that runs. The first of the tree is the supervisor, which is the bench's own."""
        return tree_of(self._tree.pid)[1:] if self._tree else []

    def kill(self) -> None:
        """SIGKILL to everything of it at once; returns when it has gone."""
        self._held.look(self.processes)
        if left := kill_all(lambda: self.processes, _KILL_DEADLINE_S):
            raise ChildFailed(f"processes that SIGKILL did not end: {[process.pid for process in left]}")
        self._wait_for_supervisor()

    def end(self) -> tuple[str, ...]:
        """SIGTERM in order, then whatever it takes; names what it, or one that was killed, left behind."""
        if self._tree is not None:
            self._held.look(self.processes)
            self._tree.ask_to_end()
            self._wait_for_supervisor()
        return self._held.left((self.port,))

    def _wait_for_supervisor(self) -> None:
        tree = self._tree
        assert tree is not None
        if tree.end(self._go_on):
            raise ChildFailed(f"the supervisor of the {self.kind} server must end; see {tree.log_path}")

    def _go_on(self) -> bool:
        self._owner.moment()
        return True
