"""``swift-stage2 rollout``: binds the port, loads the model, serves until SIGTERM, leaves nothing behind.

The port is bound first and answers at once (``/health/`` says 503 while the model loads), so a busy port or a
missing model is one line and exit status 2, never another port and never a late surprise.
"""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import uvicorn

from swift_stage2.errors import UserError
from swift_stage2.rollout_server.engine import EngineState
from swift_stage2.rollout_server.routes import create_app
from swift_stage2.rollout_server.service import RolloutService
from swift_stage2.rollout_server.transformers_engine import TransformersRolloutEngine

if TYPE_CHECKING:
    from swift_stage2.rollout_server.swift_generator import SwiftGenerator

_log = logging.getLogger(__name__)
_EXIT_USER_ERROR = 2
_LISTEN_BACKLOG = 128
_GRACE_S = 5
_KEEP_ALIVE_S = 120
_LOAD_POLL_S = 3600.0


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


def bind(host: str, port: int) -> socket.socket:
    """A listening socket on exactly that address; port 0 takes any. Raises UserError when it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_LISTEN_BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise UserError(f"the server cannot listen on {host}:{port}: {error}; choose a free port") from error
    return listener


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server. Exit status: 0 after SIGTERM or Ctrl-C, 2 for a mistake of the user, 1 if it broke."""
    arguments = _parse(argv)
    try:
        _check_paths(arguments)
        listener = bind(arguments.host, arguments.port)
    except UserError as error:
        print(f"swift-stage2 rollout: {error}", file=sys.stderr)
        return _EXIT_USER_ERROR
    _configure_logging()
    api_key = os.environ.get(arguments.api_key_env) or None
    _warn_when_open(arguments.host, api_key)
    engine = TransformersRolloutEngine(
        _loader(arguments), model=arguments.model, max_batch_size=arguments.max_batch_size
    )
    server = RolloutServer(RolloutService(engine), api_key)
    host, port = listener.getsockname()[:2]
    watcher = threading.Thread(
        target=_announce, args=(engine, server, f"{host}:{port}"), name="load-watcher", daemon=True
    )
    watcher.start()
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn raises the signal again when it has shut down; the exit status stays ours.
        signal.signal(number, lambda *_: setattr(server, "should_exit", True))
    server.run(sockets=[listener])
    broken = engine.status()
    engine.close(timeout_s=_GRACE_S)
    if broken.state is not EngineState.BROKEN:
        return 0
    print(f"swift-stage2 rollout: the engine broke: {broken.detail}", file=sys.stderr)
    return _EXIT_USER_ERROR if not engine.manifest() else 1


def _announce(engine: TransformersRolloutEngine, server: uvicorn.Server, address: str) -> None:
    engine.wait_loaded(_LOAD_POLL_S)
    if engine.status().state is EngineState.READY:
        _log.info("serving %s on http://%s", engine.model, address)
    else:
        server.should_exit = True


def _loader(arguments: argparse.Namespace) -> Callable[[], SwiftGenerator]:
    def load() -> SwiftGenerator:
        if arguments.num_threads:
            torch.set_num_threads(arguments.num_threads)
        from swift_stage2.rollout_server.swift_generator import SwiftGenerator, import_external_file

        for plugin in arguments.external_plugins:
            import_external_file(plugin)
        options: dict[str, Any] = {"model_type": arguments.model_type, "template_type": arguments.template}
        if arguments.torch_dtype != "auto":
            options["torch_dtype"] = getattr(torch, arguments.torch_dtype)
        return SwiftGenerator(arguments.model, device_map=arguments.device, **options)

    return load


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="swift-stage2 rollout", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="directory of the checkpoint to serve")
    parser.add_argument("--engine", choices=("transformers",), default="transformers")
    parser.add_argument("--model-type", help="ms-swift model type, when the checkpoint does not tell")
    parser.add_argument("--template", help="ms-swift template type, when the model type does not tell")
    parser.add_argument("--external-plugins", nargs="*", default=[], metavar="FILE")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes any free port")
    parser.add_argument("--torch-dtype", choices=("float32", "bfloat16", "float16", "auto"), default="auto")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--max-batch-size", type=_positive, default=64)
    parser.add_argument("--num-threads", type=_positive, help="CPU threads of the engine")
    parser.add_argument("--api-key-env", default="SWIFT_ROLLOUT_API_KEY", metavar="NAME")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _check_paths(arguments: argparse.Namespace) -> None:
    if not (Path(arguments.model) / "config.json").is_file():
        raise UserError(
            f"the model must be a checkpoint directory with a config.json, got model={arguments.model}"
        )
    for plugin in arguments.external_plugins:
        if not Path(plugin).is_file():
            raise UserError(f"an external plugin must be a Python file, got external_plugins={plugin}")


def _configure_logging() -> None:
    """Handlers of our own: ms-swift silences the root logger's."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("swift_stage2", "uvicorn"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        logger.propagate = False


def _warn_when_open(host: str, api_key: str | None) -> None:
    if api_key is None and not _is_loopback(host):
        _log.warning(
            "listening on %s without a key: whoever reaches this port can replace the weights; set the "
            "variable named by --api-key-env, or listen on 127.0.0.1",
            host,
        )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
