"""``swift-stage2 merge``: one process in front of one stock server, on the server's own machine.

The port is bound first and is never another one. SIGTERM cuts what runs, so that callers hear at once, and ends
within seconds.
"""

from __future__ import annotations

import argparse
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from urllib.parse import urlsplit

from swift_stage2.config.rollout import MAX_REQUESTS_PER_POST
from swift_stage2.config.rules import variable_option, without_credentials
from swift_stage2.errors import UserError
from swift_stage2.rollout_merger.dispatcher import Dispatcher, Upstream
from swift_stage2.rollout_merger.merged_post import SeedLayout
from swift_stage2.rollout_merger.routes import create_app
from swift_stage2.runtime.network import why_deaf
from swift_stage2.runtime.parser import CommandParser, whole_number
from swift_stage2.servers.http_app import (
    SHUTDOWN_GRACE_S,
    HttpServer,
    bind,
    configure_logging,
    warn_when_open,
)
from swift_stage2.servers.request_checks import add_limits, number_above_zero, read_limits

_log = logging.getLogger(__name__)
_LOOK_INTERVAL_S = 1.0
_CONNECT_TIMEOUT_S = 2.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the merger; returns 0 after SIGTERM or Ctrl-C.

    Raises:
        UserError: an upstream that is none, or an address that is taken or not this machine's.
    """
    arguments = _parse(argv)
    _check_upstream(arguments)
    listener = bind(arguments.host, arguments.port)
    configure_logging()
    api_key = os.environ.get(arguments.api_key_env) or None
    warn_when_open(arguments.host, api_key)
    upstream = Upstream(arguments.upstream, api_key=api_key, timeout_s=arguments.upstream_timeout_s)
    layout = SeedLayout(arguments.data_parallel_size, arguments.async_engine)
    dispatcher = Dispatcher(
        upstream,
        max_batch_size=arguments.max_batch_size,
        layout=layout,
        needs_weights=arguments.needs_weights,
    )
    app = create_app(dispatcher, api_key, limits=read_limits(arguments))
    server = HttpServer(app, partial(dispatcher.close, SHUTDOWN_GRACE_S))
    host, port = listener.getsockname()[:2]
    _log.info("merging calls to %s on http://%s:%s", upstream.base_url, host, port)
    dispatcher.start()
    with SilenceWatch(upstream.base_url, _log.warning):
        server.serve_on(listener)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="swift-stage2 merge",
        exit_statuses="0 after SIGTERM or Ctrl-C",
        description="One process in front of one stock server: the ranks' calls leave as one.",
    )
    parser.add_argument("--upstream", required=True, metavar="URL", help="base URL of the stock server")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9000, help="0 takes any free port")
    most = whole_number(1, MAX_REQUESTS_PER_POST)
    parser.add_argument("--max-batch-size", type=most, default=64, help="requests of one POST at most")
    parser.add_argument(
        "--upstream-timeout-s",
        type=number_above_zero,
        default=600.0,
        help="deadline of one call to the server; longer than rollout.request_timeout_s",
    )
    parser.add_argument(
        "--data-parallel-size",
        type=whole_number(1),
        default=1,
        help="the server's --vllm_data_parallel_size",
    )
    parser.add_argument("--async-engine", action="store_true", help="the server's --vllm_use_async_engine")
    parser.add_argument(
        "--needs-weights",
        action="store_true",
        help="the server was started again: refuse /infer/ until a caller has loaded weights",
    )
    parser.add_argument(
        "--api-key-env", type=variable_option, default="SWIFT_ROLLOUT_API_KEY", metavar="NAME"
    )
    add_limits(parser)
    return parser.parse_args(argv)


def _check_upstream(arguments: argparse.Namespace) -> None:
    url, example = arguments.upstream, "write it like http://127.0.0.1:8000"
    if "@" in url:
        raise UserError(
            "--upstream must hold scheme, host and port only",
            got=f"credentials in {without_credentials(url)!r}",
            remedy="give the key in the variable that --api-key-env names",
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UserError("--upstream must be a URL", got=f"{url!r} ({error})", remedy=example) from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise UserError("--upstream must hold scheme, host and port only", got=f"{url!r}", remedy=example)
    if port is None:
        raise UserError("--upstream must hold the server's port", got=f"{url!r}", remedy=example)
    if parts.hostname == arguments.host and port == arguments.port:
        raise UserError("the merger needs a port of its own", got=f"{port} for both", remedy="change --port")


class SilenceWatch:
    """Warns while nothing listens at the upstream's address, a few times and ever more rarely.

    Looks at the port only: the merger makes no call of its own. Its thread ends with the first connection, after the
    last warning, or when it is closed. ``moments_s``: how long after the start each warning is due.
    """

    def __init__(
        self, base_url: str, warn: Callable[[str], None], *, moments_s: Sequence[float] = (10, 60, 300, 1800)
    ) -> None:
        self._base_url = base_url
        self._warn = warn
        self._moments_s = moments_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="silence-watch", daemon=True)

    def __enter__(self) -> SilenceWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self.wait(2 * _CONNECT_TIMEOUT_S)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within the time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        begun = time.monotonic()
        for moment_s in self._moments_s:
            while reason := why_deaf(self._base_url, _CONNECT_TIMEOUT_S):
                left_s = begun + moment_s - time.monotonic()
                if left_s <= 0:
                    self._warn(
                        f"nothing listens at {self._base_url} after {moment_s:g} s, and callers get 502: {reason}, or "
                        "correct --upstream"
                    )
                    break
                if self._closing.wait(min(left_s, _LOOK_INTERVAL_S)):
                    return
            else:
                return
