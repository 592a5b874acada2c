"""``swift-stage2 rollout``: binds the port, loads the model, serves until SIGTERM, leaves nothing behind.

The port is bound first and answers at once (``/health/`` says 503 while the model loads). A busy port, a missing
model or a misspelt option is one line and exit status 2, never another port and never a late surprise.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

from swift_stage2.process.heap_trim import HeapTrim
from swift_stage2.rollout_server.engine import Engine, EngineState
from swift_stage2.rollout_server.routes import create_app
from swift_stage2.rollout_server.server_children import ServerChildren
from swift_stage2.rollout_server.server_command import ServerCommand
from swift_stage2.rollout_server.service import RolloutService
from swift_stage2.servers.listener import HttpServer, bind, configure_logging, warn_when_open
from swift_stage2.terminal.output import let_go, print_error

_log = logging.getLogger(__name__)
_EXIT_USER_ERROR = 2
_LOAD_POLL_S = 3600.0
_ENGINE_POLL_S = 0.2
_CLOSE_TIMEOUT_S = 15.0


def serve(command: ServerCommand) -> int:
    """Runs what the command line asked for. Exit status: 0 after SIGTERM or Ctrl-C, 2 if the model could not be
    loaded, 1 if it broke.

    It ends this process instead of returning: no thread that still waits for something may hold it up.

    Raises:
        UserError: the address is taken or not this machine's.
    """
    with bind(command.host, command.port) as listener:
        configure_logging()
        warn_when_open(command.host, command.api_key)
        with ServerChildren() if command.has_children else nullcontext():
            status = _serve(command, listener)
    # All is closed. The interpreter would join every thread of a pool, and what vLLM has imported and started takes
    # many seconds to tear down, and may hang in it.
    logging.shutdown()
    let_go()
    sys.stderr.flush()
    os._exit(status)


def _serve(command: ServerCommand, listener: socket.socket) -> int:
    engine = command.start_engine()
    service = RolloutService(engine, command.group_bind or command.host)
    server = HttpServer(create_app(service, command.api_key, command.limits), service.end_work)
    host, port = listener.getsockname()[:2]
    ended = threading.Event()
    watcher = threading.Thread(
        target=_watch, args=(engine, server, f"{host}:{port}", ended), name="engine-watcher", daemon=True
    )
    watcher.start()
    server.serve_on(listener)
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


def _watch(engine: Engine, server: HttpServer, address: str, ended: threading.Event) -> None:
    """Tells when the engine is ready, gives memory back while it idles, and ends the server when the engine breaks:
    only a new process helps then."""
    engine.wait_loaded(_LOAD_POLL_S)
    if engine.status().state is EngineState.READY:
        _log.info("serving %s on http://%s", engine.model, address)
    heap = HeapTrim()
    while (status := engine.status()).state is not EngineState.BROKEN and not ended.wait(_ENGINE_POLL_S):
        if status.num_waiting + status.num_running == 0:
            heap.after_round()  # or after requests: pictures leave heaps behind as pushes do
    server.should_exit = True
