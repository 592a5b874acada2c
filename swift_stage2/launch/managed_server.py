"""One server of a job, its merger included: started, asked whether it answers, watched, perhaps started again.

``/health/`` proves nothing, for it outlives the engine: a server counts as up once it has answered an ``/infer/``. A
restarted one comes up with old weights, and the learner may be in the middle of a sync round with it, so that it is
asked nothing: that the started processes listen is all that is looked at. The same holds for a stock server beside a
learner of another launch.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from enum import Enum, auto

from swift_stage2.config import RestartConfig, RestartPolicy
from swift_stage2.errors import ProtocolError, ServerFault, ServerUnavailable
from swift_stage2.launch.job import Job, last_cause
from swift_stage2.launch.plan import PlannedServer
from swift_stage2.process.ports import Listener, is_quiet, listener_at
from swift_stage2.process.supervisor import Command, ProcessTree
from swift_stage2.process.worker import describe_end
from swift_stage2.servers import protocol
from swift_stage2.servers.session import Deadline, ServerSession

_LOOK_INTERVAL_S = 1.0
_PORT_PATIENCE_S = 60.0
QUIET_PATIENCE_S = 90.0  # Linux keeps a closed connection for 60 s
_KILLED = 128  # and more: by a signal, of which no log tells
_START_IT = "; start it on the same port to have it back"
_START_FAILED = 1  # a status for a start that did not come up


class _State(Enum):
    UP = auto()
    ENDING = auto()  # what is left of it is being ended; it starts again after its delay
    COMING = auto()  # started again, not listening yet
    GONE = auto()


@dataclass(eq=False)
class ManagedServer:
    """Call ``start``, ``refuse_foreigner`` until it answers, then ``watch`` in every turn of the launcher's loop."""

    planned: PlannedServer
    restart: RestartConfig
    start_timeout_s: float
    quiet_patience_s: float = QUIET_PATIENCE_S
    trees: tuple[ProcessTree, ...] = field(default=(), init=False)
    _num_restarts: int = field(default=0, init=False)
    _quiet_by: float | None = field(default=None, init=False)  # while it waits for its port
    _state: _State = field(default=_State.UP, init=False)
    _moment: float = field(default=0.0, init=False)  # when to start again, or by when it has to listen
    _next_look: float = field(default=0.0, init=False)

    @property
    def name(self) -> str:
        return self.planned.command.name

    @property
    def is_gone(self) -> bool:
        """Whether it has ended and is not started again."""
        return self._state is _State.GONE

    def start(self, job: Job) -> None:
        """Starts the server, and its merger. Wait for ``may_start`` first."""
        self.trees = tuple(job.start(command) for command in self.planned.commands)

    def may_start(self, job: Job) -> bool:
        """Whether a stock server would take its own port now; says once what is waited for.

        Raises:
            ServerUnavailable: the port did not become quiet in time.
        """
        port = self.planned.quiet_port
        if port is None or is_quiet(port):
            self._quiet_by = None
            return True
        now = time.monotonic()
        if self._quiet_by is None:
            self._quiet_by = now + self.quiet_patience_s
            job.say(
                f"{self.name}: port {port} still has closed connections of an earlier server; waiting up to "
                f"{self.quiet_patience_s:g} s, because ms-swift would take the next port"
            )
        elif now >= self._quiet_by:
            self._quiet_by = None
            raise ServerUnavailable(
                f"port {port} of {self.name} must be free of connections, got some after "
                f"{self.quiet_patience_s:g} s; end what holds it (ss -tan 'sport = :{port}'), or change the port"
            )
        return False

    def ended(self) -> tuple[ProcessTree, int] | None:
        """The first of its trees that has ended, and its status."""
        for tree in self.trees:
            if (status := tree.poll()) is not None:
                return tree, status
        return None

    def refuse_foreigner(self, *, at_once: bool = False) -> bool:
        """Whether all ports are held by what was started here; looks once a second unless ``at_once``.

        Raises:
            ServerUnavailable: another process holds a port: a stock server silently takes the next one then.
        """
        if not at_once and time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + _LOOK_INTERVAL_S
        held = True
        for command, tree, port, listener in self._listeners():
            if listener is not None and not listener.is_below(tree.pid):
                raise ServerUnavailable(
                    f"port {port} must be held by {command.name}, got process {listener.pid} ({listener.name}), which "
                    f"answers in its place; end that process, or change the port; see {tree.log_path}"
                )
            held = held and listener is not None
        return held

    def watch(self, job: Job) -> None:
        """Tells of an end once, and starts it again when that is wanted.

        Waits only where a supervisor was killed, until its tree has ended: 20 s at most.
        """
        now = time.monotonic()
        if self._state in (_State.UP, _State.COMING) and (ended := self.ended()) is not None:
            self._note_end(job, *ended, now)
        elif self._state is _State.COMING:
            self._look_whether_it_came(job, now)
        elif self._state is _State.ENDING:
            self._start_again(job, now)

    def _note_end(self, job: Job, tree: ProcessTree, status: int, now: float) -> None:
        for other in self.trees:
            other.ask_to_end()
        job.end_abandoned(tree)
        cause = ""
        if status > _KILLED:
            cause = f" ({describe_end(_KILLED - status)})"
        elif status > 0:
            cause = f" ({last_cause(tree.log_path, tree.log_offset)})"
        text = f"{tree.command.name} ended with status {status}{cause}; the learner runs on without it"
        self._plan_restart(job, text, status, now)

    def _plan_restart(self, job: Job, text: str, status: int, now: float) -> None:
        delay_s = restart_delay_s(self.restart, status, self._num_restarts)
        if delay_s is None:
            self._state = _State.GONE
            after = f"; it was started again {self._num_restarts} times" if self._num_restarts else ""
            job.say(f"{text}{after}{_START_IT * (status != 0)}")
            return
        self._state, self._moment, self._num_restarts = _State.ENDING, now + delay_s, self._num_restarts + 1
        number = f"restart {self._num_restarts} of {self.restart.max_restarts}"
        job.say(f"{text}; it is started again in {delay_s:g} s ({number})")

    def _start_again(self, job: Job, now: float) -> None:
        if now < self._moment or now < self._next_look:
            return
        self._next_look = now + _LOOK_INTERVAL_S
        running = [tree for tree in self.trees if tree.poll() is None]
        if running:
            job.end_late(running)
            return
        busy = [port for _, _, port, listener in self._listeners() if listener is not None]
        if busy and now < self._moment + _PORT_PATIENCE_S:
            return
        if busy:
            self._state = _State.GONE
            job.say(f"{self.name} is not started again: port {busy[0]} is still held")
            return
        try:
            if not self.may_start(job):
                return
        except ServerUnavailable as error:
            self._state = _State.GONE
            job.say(f"{self.name} is not started again: {error}")
            return
        self._state, self._moment = _State.COMING, now + self.start_timeout_s
        self.trees = tuple(job.start(command) for command in self.planned.restart_commands)

    def _look_whether_it_came(self, job: Job, now: float) -> None:
        problem = ""
        try:
            if self.refuse_foreigner():
                self._state = _State.UP
                url = self.planned.address.base_url
                job.say(f"{self.name} listens again at {url}; it is asked again after a proven round")
                return
        except ServerUnavailable as error:
            problem = str(error)
        if now >= self._moment:
            problem = f"{self.name} must listen within start_timeout_s={self.start_timeout_s:g}"
        if problem:
            for tree in self.trees:
                tree.ask_to_end()
            self._plan_restart(job, problem, _START_FAILED, now)

    def _listeners(self) -> list[tuple[Command, ProcessTree, int, Listener | None]]:
        host = self.planned.address.host
        return [
            (command, tree, port, listener_at(host, port))
            for command, tree, port in zip(
                self.planned.commands, self.trees, self.planned.http_ports, strict=True
            )
        ]


def restart_delay_s(config: RestartConfig, status: int, num_restarts: int) -> float | None:
    """Seconds until the next start of a server that ended with ``status``; None: it stays ended."""
    if config.policy is RestartPolicy.NEVER or status == 0 or num_restarts >= config.max_restarts:
        return None
    return config.backoff_s * 2.0**num_restarts


_PAUSE_S = 0.5
_CLOSE_TIMEOUT_S = 2.0


class ReadinessProbe:
    """Asks one server for one token until it answers or the time is over, on a thread of its own.

    One POST may take all the time there is: a stock server computes what was asked even when nobody
    waits for it any more, so short attempts would pile up.
    """

    def __init__(self, name: str, base_url: str, api_key: str | None, timeout_s: float) -> None:
        self.last_error = "no answer yet"
        self.refusal: str | None = None
        """A fault that no waiting mends: another API key, or a fault of the probe itself."""
        self._session = ServerSession(base_url, api_key)
        self._end = time.monotonic() + timeout_s
        self._answered = threading.Event()
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._ask, name=f"readiness-{name}", daemon=True)
        self._thread.start()

    @property
    def answered(self) -> bool:
        return self._answered.is_set()

    def close(self) -> None:
        """Stops asking. A POST in flight ends with its server, or with this process."""
        self._cancelled.set()
        self._thread.join(timeout=_CLOSE_TIMEOUT_S)

    def _ask(self) -> None:
        body = protocol.one_token_request()
        with self._session:
            while not self._cancelled.is_set() and (left_s := self._end - time.monotonic()) > 0:
                try:
                    protocol.parse_infer_reply(self._session.post(protocol.INFER, body, Deadline(left_s)), 1)
                except (ServerFault, ProtocolError) as exc:
                    self.last_error = str(exc)
                    if isinstance(exc, ServerFault) and exc.refuses_key:
                        self.refusal = str(exc)
                        return
                    self._cancelled.wait(timeout=_PAUSE_S)
                except Exception as exc:  # top of the thread: its end would look like a server that is silent
                    self.refusal = f"the probe itself failed: {type(exc).__name__}: {exc}"
                    return
                else:
                    self._answered.set()
                    return
