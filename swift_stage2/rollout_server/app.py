"""``swift-stage2 rollout``: binds the port, loads the model, serves until SIGTERM, leaves nothing behind.

The port is bound first and answers while the model loads (``/health/`` says 503 then), so a busy port, a missing
model or a misspelt option is one line and exit status 2, never another port and never a late surprise.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from swift_stage2.error_line import print_error
from swift_stage2.http_listener import bind, configure_logging, warn_when_open
from swift_stage2.rollout_server.command_line import LoadingEngine, ServerCommand, parse_command
from swift_stage2.rollout_server.engine import EngineState
from swift_stage2.rollout_server.routes import create_app
from swift_stage2.rollout_server.server_children import ServerChildren
from swift_stage2.rollout_server.service import RolloutService

_log = logging.getLogger(__name__)
_EXIT_USER_ERROR = 2
_GRACE_S = 5
_KEEP_ALIVE_S = 120
_LOAD_POLL_S = 3600.0
_ENGINE_POLL_S = 0.2
_CLOSE_TIMEOUT_S = 15.0


class RolloutServer(uvicorn.Server):
    """uvicorn that aborts what is being generated before it waits for open connections."""

    def __init__(self, service: RolloutService, api_key: str | None) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(service, api_key),
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=_GRACE_S,
                timeout_keep_alive=_KEEP_ALIVE_S,
            )
        )
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.engine.abort()
        await super().shutdown(sockets)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server. Exit status: 0 after SIGTERM or Ctrl-C, 2 if the model could not be loaded, 1 if it broke.

    Raises:
        UserError: a mistake that is known before the model is loaded.
    """
    return serve(parse_command(argv))


def serve(command: ServerCommand) -> int:
    """Runs what the command line asked for; exit status as ``main``.

    With an engine that has processes of its own it ends this process instead of returning.

    Raises:
        UserError: the address is taken or not this machine's, or the engine's own parser refuses an option.
    """
    with bind(command.host, command.port) as listener:
        configure_logging()
        warn_when_open(command.host, command.api_key)
        if not command.has_children:
            return _serve(command, listener)
        with ServerChildren():
            status = _serve(command, listener)
    # All is closed. What vLLM has imported and started takes many seconds to tear down, and may hang in it.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _serve(command: ServerCommand, listener: socket.socket) -> int:
    engine = command.start_engine()
    server = RolloutServer(RolloutService(engine), command.api_key)
    host, port = listener.getsockname()[:2]
    ended = threading.Event()
    watcher = threading.Thread(
        target=_watch, args=(engine, server, f"{host}:{port}", ended), name="engine-watcher", daemon=True
    )
    watcher.start()
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn raises the signal again when it has shut down; the exit status stays ours.
        signal.signal(number, lambda *_: setattr(server, "should_exit", True))
    server.run(sockets=[listener])
    ended.set()
    broken = engine.status()
    engine.close(timeout_s=_CLOSE_TIMEOUT_S)
    if broken.state is not EngineState.BROKEN:
        return 0
    never_loaded = not engine.manifest()
    where = "" if Path(engine.model).exists() else " (no such directory is here: it was looked for on a hub)"
    what = f"model {engine.model} was not loaded{where}" if never_loaded else "the engine broke"
    print_error("rollout", f"{what}: {broken.detail}")
    return _EXIT_USER_ERROR if never_loaded else 1


def _watch(engine: LoadingEngine, server: uvicorn.Server, address: str, ended: threading.Event) -> None:
    """Tells when the engine is ready, and ends the server when it breaks: only a new process helps then."""
    engine.wait_loaded(_LOAD_POLL_S)
    if engine.status().state is EngineState.READY:
        _log.info("serving %s on http://%s", engine.model, address)
    while engine.status().state is not EngineState.BROKEN and not ended.wait(_ENGINE_POLL_S):
        continue
    server.should_exit = True
