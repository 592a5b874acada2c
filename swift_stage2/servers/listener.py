"""The socket and process of rollout server and merger: binds exactly, warns when it is open, ends in order."""

from __future__ import annotations

import errno
import ipaddress
import logging
import signal
import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from swift_stage2.errors import UserError

_log = logging.getLogger(__name__)
_LISTEN_BACKLOG = 128
_KEEP_ALIVE_S = 120
SHUTDOWN_GRACE_S = 5
"""For open calls, once the server was asked to end."""


class HttpServer(uvicorn.Server):
    """uvicorn that ends the work behind ``app`` before it waits for open connections."""

    def __init__(self, app: FastAPI, end_work: Callable[[], object]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
                timeout_keep_alive=_KEEP_ALIVE_S,
            )
        )
        self._end_work = end_work

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._end_work()
        await super().shutdown(sockets)

    def serve_on(self, listener: socket.socket) -> None:
        """Returns after SIGTERM, Ctrl-C or ``should_exit``; on the process's main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            # uvicorn raises the signal again when it has shut down; the exit status stays ours.
            signal.signal(number, lambda *_: setattr(self, "should_exit", True))
        self.run(sockets=[listener])


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
        raise UserError(f"the server cannot listen on {host}:{port}: {error}; {_remedy(error)}") from error
    return listener


def _remedy(error: Exception) -> str:
    if isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
        return (
            "--host must be an address of this machine: 127.0.0.1 for itself alone, 0.0.0.0 for every network"
        )
    if getattr(error, "errno", None) == errno.EACCES:
        return "ports below 1024 belong to the system: write a --port of 1024 or more"
    if isinstance(error, OverflowError):
        return "--port must be in the range 0..65535"
    return "choose a free --port"


def configure_logging() -> None:
    """Handlers of our own: ms-swift silences the root logger's."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("swift_stage2", "uvicorn"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        logger.propagate = False


def warn_when_open(host: str, api_key: str | None) -> None:
    """Logs a warning when others than this machine can reach ``host`` and no key is wanted."""
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
