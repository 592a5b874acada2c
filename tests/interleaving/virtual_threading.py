"""Stands, for modules under test, in place of ``threading``, ``time``, ``concurrent.futures``, ``httpx``'s transport.

Same semantics, on the strands of the run that is ``active``. Every acquire, release, wait, notify, set, start and
sleep is a yield point. ``installed`` puts these names into the modules of the package and takes them out again.
"""

from __future__ import annotations

import threading as real_threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import FIRST_EXCEPTION, CancelledError
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import httpx
from interleaving.scheduler import Scheduler, Strand

from swift_stage2 import evaluation, fence
from swift_stage2.channel_b import attempts, pipeline, ready_queue, sample_source
from swift_stage2.channel_b.rollouts import batch, client, server_client, server_state
from swift_stage2.learner import learner
from swift_stage2.learner import versions as learner_versions
from swift_stage2.scheduling import horizon
from swift_stage2.servers import health_check
from swift_stage2.servers import session as server_session
from swift_stage2.weights import publisher, snapshot, snapshots, updates

_active: Scheduler | None = None


def active() -> Scheduler:
    """The run; virtual threads live only inside one."""
    return _active  # type: ignore[return-value]


@contextmanager
def running(scheduler: Scheduler) -> Iterator[None]:
    """``scheduler`` is the run that virtual things belong to."""
    global _active
    _active = scheduler
    try:
        yield
    finally:
        _active = None


def _await_wake(waiters: list[Strand], what: str, until: float | None) -> bool:
    """Waits among ``waiters``; False if the time was up before anybody took this strand from the list."""
    run = active()
    me = run.current
    assert me is not None
    waiters.append(me)
    run.block(what, until)
    if me not in waiters:  # also when the time was up and somebody came before this strand went on
        return True
    waiters.remove(me)
    return False


def _wake_all(waiters: list[Strand]) -> None:
    for waiter in waiters:
        active().wake(waiter)
    waiters.clear()


class Lock:
    __slots__ = ("_held", "_waiters")

    def __init__(self) -> None:
        self._held = False
        self._waiters: list[Strand] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        run = active()
        run.point("acquire")
        if not self._held:
            self._held = True
            return True
        until = None if timeout < 0 else run.now + timeout
        while self._held:
            if not blocking or (until is not None and run.now >= until):
                return False
            _await_wake(self._waiters, "acquire", until)
        self._held = True
        return True

    def release(self) -> None:
        assert self._held, "released a lock that nobody holds"
        self._held = False
        if self._waiters:
            _wake_all(self._waiters)  # whoever comes first has it
        active().point("release")

    __enter__ = acquire

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.release()


class Condition(Lock):
    """With a plain lock: nothing in the package enters a Condition twice."""

    __slots__ = ("_sleepers",)

    def __init__(self) -> None:
        super().__init__()
        self._sleepers: list[Strand] = []

    def wait(self, timeout: float | None = None) -> bool:
        self._held = False
        _wake_all(self._waiters)
        notified = _await_wake(self._sleepers, "wait", None if timeout is None else active().now + timeout)
        self.acquire()
        return notified

    def wait_for(self, is_over: Callable[[], bool], timeout: float) -> bool:
        end = active().now + timeout
        while not is_over() and active().now < end:
            self.wait(end - active().now)
        return is_over()

    def notify_all(self) -> None:
        _wake_all(self._sleepers)
        active().point("notify")


class Event:
    __slots__ = ("_set", "_waiters")

    def __init__(self) -> None:
        self._set = False
        self._waiters: list[Strand] = []

    def is_set(self) -> bool:
        active().point("is_set")
        return self._set

    def set(self) -> None:
        self._set = True
        _wake_all(self._waiters)
        active().point("set")

    def clear(self) -> None:
        self._set = False
        active().point("clear")

    def wait(self, timeout: float | None = None) -> bool:
        run = active()
        run.point("event wait")
        if not self._set:
            _await_wake(self._waiters, "event wait", None if timeout is None else run.now + timeout)
        return self._set


class Thread:
    def __init__(
        self,
        target: Callable[..., object] | None = None,
        name: str = "thread",
        args: tuple[Any, ...] = (),
        daemon: bool | None = None,
    ) -> None:
        self._target = target
        self._args = args
        self.name = name
        self.daemon = daemon
        self._strand: Strand | None = None

    @property
    def ident(self) -> int | None:
        return None if self._strand is None else self._strand.serial

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args)

    def start(self) -> None:
        self._strand = active().spawn(self.run, self.name)
        active().point("start")

    def is_alive(self) -> bool:
        return self._strand is not None and not self._strand.ended

    def join(self, timeout: float | None = None) -> None:
        assert self._strand is not None
        run = active()
        run.point("join")
        until = None if timeout is None else run.now + timeout
        while not self._strand.ended and (until is None or run.now < until):
            self._strand.joiners.append(run.current)  # type: ignore[arg-type]
            run.block("join", until)


class Timer:
    def __init__(self, interval: float, function: Callable[..., object], args: Collection[Any] = ()) -> None:
        self._interval = interval
        self._work = lambda: (function(*args), None)[1]
        self.daemon = False
        self._alarm: Any = None

    def start(self) -> None:
        self._alarm = active().at(active().now + self._interval, self._work, "timer")

    def cancel(self) -> None:
        self._alarm.cancelled = True


class ThreadingNames:
    """The module ``threading``, as far as the package uses it."""

    Condition = Condition
    Event = Event
    Lock = Lock
    Thread = Thread
    Timer = Timer
    TIMEOUT_MAX = real_threading.TIMEOUT_MAX


class TimeNames:
    """The module ``time``, as far as the package uses it."""

    @staticmethod
    def monotonic() -> float:
        return active().now

    perf_counter = monotonic

    @staticmethod
    def sleep(seconds: float) -> None:
        active().block("sleep", active().now + max(0.0, seconds))


class Future:
    def __init__(self) -> None:
        self._done = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._waiters: list[Strand] = []

    def done(self) -> bool:
        active().point("done")
        return self._done

    def result(self, timeout: float | None = None) -> Any:
        if not self._done:
            wait([self], timeout=timeout)
        if not self._done:
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._result

    def finish(self, result: Any, error: BaseException | None) -> None:
        self._result, self._error, self._done = result, error, True
        _wake_all(self._waiters)
        active().point("future done")


class Waited(NamedTuple):
    done: set[Future]
    not_done: set[Future]


def wait(
    futures: Collection[Future], timeout: float | None = None, return_when: str = "ALL_COMPLETED"
) -> Waited:
    run = active()
    run.point("wait futures")
    until = None if timeout is None else run.now + timeout
    while True:
        pending = {future for future in futures if not future._done}
        raised = return_when == FIRST_EXCEPTION and any(f._done and f._error for f in futures)
        if not pending or raised or (until is not None and run.now >= until):
            return Waited(set(futures) - pending, pending)
        for future in pending:
            future._waiters.append(run.current)  # type: ignore[arg-type]
        run.block("wait futures", until)
        for future in pending:
            if run.current in future._waiters:
                future._waiters.remove(run.current)  # type: ignore[arg-type]


class Executor:
    """``ThreadPoolExecutor`` with one worker, the only number the package uses."""

    def __init__(self, max_workers: int = 1, thread_name_prefix: str = "worker") -> None:
        assert max_workers == 1
        self._name = thread_name_prefix
        self._jobs: deque[tuple[Future, Callable[..., Any], tuple[Any, ...]]] = deque()
        self._worker: Strand | None = None
        self._shut_down = False

    def submit(self, work: Callable[..., Any], *args: Any) -> Future:
        if self._shut_down:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = Future()
        self._jobs.append((future, work, args))
        if self._worker is None:
            self._worker = active().spawn(self._run, self._name)
        else:
            active().wake(self._worker)
        active().point("submit")
        return future

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        assert not wait
        self._shut_down = True
        while cancel_futures and self._jobs:
            self._jobs.popleft()[0].finish(None, CancelledError())
        if self._worker is not None:
            active().wake(self._worker)
        active().point("shutdown")

    def _run(self) -> None:
        while True:
            if not self._jobs:
                if self._shut_down:
                    return
                active().block("idle worker")
                continue
            future, work, args = self._jobs.popleft()
            try:
                result = work(*args)
            except Exception as error:
                future.finish(None, error)
            else:
                future.finish(result, None)


_WITH_THREADING = (
    attempts, client, evaluation, fence, health_check, pipeline, publisher, ready_queue, sample_source,
    server_client, server_state, snapshot,
)  # fmt: skip
_WITH_TIME = (
    attempts, batch, client, learner, learner_versions, horizon, pipeline, publisher, server_client, server_session,
    snapshots, updates,
)  # fmt: skip


class NoWatch(nullcontext[None]):
    """Ends no process: what would hang for ever, the scheduler finds."""

    def __init__(self, *_: object) -> None:
        super().__init__()

    def begin(self, *_: object) -> None: ...


def run_on(make_loop: Callable[[], Any]) -> Callable[[Any], Any]:
    """In place of ``servers.session.run``."""

    def run(work: Any) -> Any:
        loop = make_loop()
        try:
            return loop.run_until_complete(work)
        finally:
            loop.close()

    return run


@contextmanager
def installed(
    make_async_transport: Callable[..., Any],
    make_loop: Callable[[], Any],
) -> Iterator[None]:
    """The package runs on virtual threads, loops, time and HTTP for as long as the context lasts."""
    changes: list[tuple[Any, str, Any]] = [
        *((module, "threading", ThreadingNames) for module in _WITH_THREADING),
        *((module, "time", TimeNames) for module in _WITH_TIME),
        (httpx, "AsyncHTTPTransport", make_async_transport),
        (client, "CallLoop", make_loop),
        (server_session, "run", run_on(make_loop)),
        (snapshots, "RoundWatch", NoWatch),
        # Bound when these were defined, so that a name put into the module comes too late.
        (server_session.Deadline.__init__, "__defaults__", (TimeNames.monotonic,)),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
