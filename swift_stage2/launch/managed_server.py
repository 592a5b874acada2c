"""One server of a job, its merger included: started, asked whether it answers, watched, perhaps started again.

It is up once the processes that were started say that they are healthy, as a server does that has loaded its model. One
that came up anew has to listen: a merger is healthy again when it has been given weights. Nothing else is asked: the
learner may be in the middle of a sync round with it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum, auto

from swift_stage2 import wire
from swift_stage2.config import RestartConfig, RestartPolicy
from swift_stage2.errors import ServerFault, ServerUnavailable
from swift_stage2.launch.job import Job, last_cause
from swift_stage2.launch.plan import PlannedServer
from swift_stage2.runtime.network import is_free, is_quiet
from swift_stage2.runtime.supervisor import ProcessTree
from swift_stage2.runtime.worker import describe_end
from swift_stage2.servers.session import Deadline, ServerSession

_LOOK_INTERVAL_S = 1.0
_ANSWER_S = 2.0
_PORT_PATIENCE_S = 90.0  # Linux keeps a closed connection for 60 s
_KILLED = 128  # and more: by a signal, of which no log tells
_START_IT = "; start it on the same port to have it back"
_START_FAILED = 1  # a status for a start that did not come up


class _State(Enum):
    WAITING = auto()  # for its time, its port, and the end of what is left of it
    LOADING = auto()
    UP = auto()
    GONE = auto()


@dataclass(eq=False)
class ManagedServer:
    """The launcher's loop gives every server that may load by then one ``turn`` after the other."""

    planned: PlannedServer
    restart: RestartConfig
    start_timeout_s: float
    port_patience_s: float = _PORT_PATIENCE_S
    has_come: bool = field(default=False, init=False)
    """True once the server has answered that it is healthy."""
    has_started: bool = field(default=False, init=False)
    _trees: tuple[ProcessTree, ...] = field(default=(), init=False)
    _state: _State = field(default=_State.WAITING, init=False)
    _num_restarts: int = field(default=0, init=False)
    _moment: float = field(default=0.0, init=False)  # when to start, or by when it has to answer
    _port_by: float | None = field(default=None, init=False)  # while it waits for its port
    _next_look: float = field(default=0.0, init=False)

    @property
    def name(self) -> str:
        return self.planned.command.name

    @property
    def is_gone(self) -> bool:
        """Whether it has ended and is not started again."""
        return self._state is _State.GONE

    def turn(self, job: Job) -> None:
        """Starts it, looks whether it has come up, tells of its end once, and starts it again when that is wanted.

        Raises:
            ServerUnavailable: it did not come up for the first time.
        """
        try:
            if self._state is _State.WAITING and time.monotonic() >= self._moment:
                self._start(job)
            elif self._state is _State.LOADING and self._is_up():
                self._state = _State.UP
                place = f"at {self.planned.address.base_url}"
                again = f"{self.name} listens again {place}; it is asked again after a proven round"
                job.say(again if self.has_come else f"{self.name} answers {place}")
                self.has_come = True
            elif self._state is _State.UP and (ended := self._ended()) is not None:
                self._plan_restart(job, *ended)
        except ServerUnavailable as error:
            if not self.has_come:
                raise
            self._plan_restart(job, str(error), _START_FAILED)

    def _start(self, job: Job) -> None:
        """Once nothing of it is left, and, unless it is stock and would take the next port, nobody has its port."""
        if any(tree.poll() is None for tree in self._trees):
            return
        if self._trees:
            job.end_leftovers()
            self._trees = ()
        if not self._may_start(job):
            return
        self._trees = tuple(job.start(command) for command in self.planned.commands(again=self.has_come))
        self._state, self._moment = _State.LOADING, time.monotonic() + self.start_timeout_s
        self.has_started = True

    def _may_start(self, job: Job) -> bool:
        now, port = time.monotonic(), 0
        if now < self._next_look:
            return False
        self._next_look = now + _LOOK_INTERVAL_S
        if self.planned.is_stock:
            port = 0 if is_quiet(self.planned.http_ports[0]) else self.planned.http_ports[0]
        elif self.has_come:  # before the first start it has been looked for
            host = self.planned.address.host
            port = next((port for port in self.planned.http_ports if not is_free(host, port)), 0)
        if not port:
            self._port_by = None
        elif self._port_by is None:
            self._port_by = now + self.port_patience_s
            job.say(
                f"{self.name}: port {port} is still held, or has closed connections of an earlier server, with which "
                f"ms-swift would take the next port; waiting up to {self.port_patience_s:g} s"
            )
        elif now >= self._port_by:
            self._port_by, self._num_restarts = None, self.restart.max_restarts  # this is for good
            raise ServerUnavailable(
                f"port {port} of {self.name} must be free of connections",
                got=f"some after {self.port_patience_s:g} s",
                remedy=f"end what holds it (ss -tan 'sport = :{port}'), or change the port",
            )
        return not port

    def _is_up(self) -> bool:
        """Looks once a second. Raises ServerUnavailable: it has ended, or is late."""
        url, now = self.planned.address.base_url, time.monotonic()
        if self._ended() is not None:
            tree = next(tree for tree in self._trees if tree.poll() is not None)
            raise ServerUnavailable(
                f"{tree.command.name} ({url}) must answer",
                got=f"exit status={tree.poll()}",
                remedy=f"see {tree.log_path}: {last_cause(tree.log_path, tree.log_offset)}",
            )
        if now < self._next_look:
            return False
        self._next_look = now + _LOOK_INTERVAL_S
        error = self._why_not_up()
        if error and now >= self._moment:
            raise ServerUnavailable(
                f"{self.name} ({url}) must answer within start_timeout_s={self.start_timeout_s:g}, got: {error}",
                remedy=f"see {self._trees[0].log_path}, or raise rollout.start_timeout_s",
            )
        return not error

    def _why_not_up(self) -> str:
        if not self.has_come:
            return next(filter(None, map(why_not_ready, self.planned.http_urls)), "")
        host = self.planned.address.host
        return "nothing listens there" if any(is_free(host, port) for port in self.planned.http_ports) else ""

    def _ended(self) -> tuple[str, int] | None:
        """How the first of its trees that has ended did, in words, and its status."""
        for tree in self._trees:
            if (status := tree.poll()) is not None:
                cause = ""
                if status > _KILLED:
                    cause = f" ({describe_end(_KILLED - status)})"
                elif status > 0:
                    cause = f" ({last_cause(tree.log_path, tree.log_offset)})"
                told = f"{tree.command.name} ended with status {status}{cause}"
                return f"{told}; the learner runs on without it", status
        return None

    def _plan_restart(self, job: Job, text: str, status: int) -> None:
        for tree in self._trees:
            tree.ask_to_end()
        delay_s = restart_delay_s(self.restart, status, self._num_restarts)
        if delay_s is None:
            self._state = _State.GONE
            after = f"; it was started again {self._num_restarts} times" if self._num_restarts else ""
            job.say(f"{text}{after}{_START_IT * (status != 0)}")
            return
        self._state, self._moment = _State.WAITING, time.monotonic() + delay_s
        self._num_restarts += 1
        number = f"restart {self._num_restarts} of {self.restart.max_restarts}"
        job.say(f"{text}; it is started again in {delay_s:g} s ({number})")


def restart_delay_s(config: RestartConfig, status: int, num_restarts: int) -> float | None:
    """Seconds until the next start of a server that ended with ``status``; None: it stays ended."""
    if config.policy is RestartPolicy.NEVER or status == 0 or num_restarts >= config.max_restarts:
        return None
    return config.backoff_s * 2.0**num_restarts


def why_not_ready(base_url: str) -> str:
    """Why the server does not say that it is healthy, as it does once it has loaded; empty if it does."""
    with ServerSession(base_url) as session:
        try:
            session.get(wire.HEALTH, Deadline(_ANSWER_S))
        except ServerFault as fault:
            return str(fault)
    return ""
