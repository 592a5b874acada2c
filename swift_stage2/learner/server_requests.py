"""Hears, only on rank 0, who shall join the run as a server, and tells in the run directory how all servers stand.

Its thread alone touches those files and asks a server that is to be added. Who is admitted waits for the main thread:
rank 0 says so in the step's vector, and all ranks take the server in the same step. Owned by the learner.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from swift_stage2.config import ServerConfig
from swift_stage2.errors import Stage2Error
from swift_stage2.process.background import BackgroundFailures
from swift_stage2.run_directory.server_board import (
    ServerBoard,
    ServerStanding,
    clear_requests,
    take_requests,
)

_STOP_TIMEOUT_S = 5.0
_MOST_REFUSALS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedServer:
    """A server that joins a run, as all ranks learn of it; a checkpoint keeps it."""

    address: ServerConfig
    is_ours: bool
    chat_model: str | None = None
    """The name that a plain ``vllm serve`` answers to."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> AddedServer:
        return cls(**{**data, "address": ServerConfig(**data["address"])})


Admit = Callable[[ServerConfig, Collection[ServerConfig]], AddedServer]
"""Asks a server that wants to join those that were added before. Raises Stage2Error when it must not."""


@dataclass(eq=False, repr=False)
class ServerRequests:
    """Looks every ``interval_s`` seconds, only on rank 0. What goes wrong on its thread is noted in ``failures``."""

    run_dir: Path
    admit: Admit
    rank: int
    failures: BackgroundFailures
    interval_s: float = 1.0

    def __post_init__(self) -> None:
        self.added: list[AddedServer] = []
        """Servers that all ranks have taken in."""
        self._admitted: list[AddedServer] = []
        self._waiting: deque[AddedServer] = deque()
        self._board = self._written = ServerBoard(())
        self._lock = threading.Lock()  # of the board
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server-requests", daemon=True)

    def start(self) -> None:
        if self.rank == 0:
            self._thread.start()

    @property
    def has_one(self) -> bool:
        """True once rank 0 has admitted a server that ``take`` has not returned yet."""
        return bool(self._waiting)

    def take(self) -> AddedServer:
        """The next server that was admitted, once."""
        return self._waiting.popleft()

    def show(self, servers: tuple[ServerStanding, ...]) -> None:
        """Has the run directory tell how the servers stand; does not wait for that."""
        with self._lock:
            self._board = replace(self._board, servers=servers)

    def stop(self) -> None:
        """Ends the thread, or leaves it behind in a call, and tells that the run has ended. May be called again."""
        self._stopped.set()
        if self._thread.ident is None:
            return
        self._thread.join(_STOP_TIMEOUT_S)
        with self._lock:
            self._board = replace(self._board, has_ended=True)
        with suppress(OSError):
            self._write()

    def _run(self) -> None:
        try:
            # Whoever left it may wait: a killed run is resumed in a moment
            for name in clear_requests(self.run_dir):
                self._refuse(
                    name,
                    "a server is added to a run that trains, got a request from before; add it once more",
                )
        except OSError as error:
            self.failures.note(self._thread.name, error)
        while not self._stopped.wait(self.interval_s):
            try:
                self._look()
            except Exception as error:  # top of the thread: the next look may go well
                self.failures.note(self._thread.name, error)

    def _look(self) -> None:
        for name, asked in take_requests(self.run_dir):
            try:
                if not isinstance(asked, ServerConfig):
                    raise asked
                others = {each.address.base_url: each.address for each in (*self.added, *self._admitted)}
                server = self.admit(asked, others.values())
            except Stage2Error as refusal:
                self._refuse(name, str(refusal))
            except Exception as error:  # the request is taken, and so are those behind it: all are answered
                self.failures.note(self._thread.name, error)
                self._refuse(name, f"the run could not ask the server: {type(error).__name__}: {error}")
            else:
                self._admitted.append(server)
                self._waiting.append(server)
        self._write()

    def _refuse(self, name: str, reason: str) -> None:
        with self._lock:
            refusals = {**self._board.refusals, name: reason}
            kept = dict(list(refusals.items())[-_MOST_REFUSALS:])
            self._board = replace(self._board, refusals=kept)

    def _write(self) -> None:
        board = self._board
        if board.servers and board != self._written:
            board.write(self.run_dir)
            self._written = board
