"""``swift-stage2 merge``: one process in front of one stock server, on the server's own machine.

The port is bound first and is never another one. SIGTERM cuts what runs, so that callers hear at once, and ends
within seconds.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
from collections.abc import Sequence
from functools import partial
from urllib.parse import urlsplit

from swift_stage2.config.rollout import MAX_REQUESTS_PER_POST
from swift_stage2.config.rules import variable_option, without_credentials
from swift_stage2.errors import UserError
from swift_stage2.rollout_merger.dispatcher import Dispatcher
from swift_stage2.rollout_merger.merged_post import SeedLayout
from swift_stage2.rollout_merger.routes import create_app
from swift_stage2.rollout_merger.silence_watch import SilenceWatch
from swift_stage2.rollout_merger.upstream import Upstream
from swift_stage2.servers.listener import (
    SHUTDOWN_GRACE_S,
    HttpServer,
    bind,
    configure_logging,
    warn_when_open,
)
from swift_stage2.servers.request_checks import add_limits, read_limits
from swift_stage2.terminal.parser import CommandParser

_log = logging.getLogger(__name__)


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
    parser.add_argument("--max-batch-size", type=_batch_size, default=64, help="requests of one POST at most")
    parser.add_argument(
        "--upstream-timeout-s",
        type=_seconds,
        default=600.0,
        help="deadline of one call to the server; longer than rollout.request_timeout_s",
    )
    parser.add_argument(
        "--data-parallel-size", type=_positive, default=1, help="the server's --vllm_data_parallel_size"
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


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _batch_size(text: str) -> int:
    number = _positive(text)
    if number > MAX_REQUESTS_PER_POST:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_REQUESTS_PER_POST}, got {number}")
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not math.isfinite(number) or number <= 0:
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, got {text}")
    return number


def _check_upstream(arguments: argparse.Namespace) -> None:
    if "@" in arguments.upstream:
        raise UserError(
            "--upstream must hold scheme, host and port only, got credentials in "
            f"{without_credentials(arguments.upstream)!r}; give the key in the variable that --api-key-env names"
        )
    try:
        parts = urlsplit(arguments.upstream)
        port = parts.port
    except ValueError as error:
        raise UserError(
            f"--upstream must be a URL, got {arguments.upstream!r} ({error}); write it like http://127.0.0.1:8000"
        ) from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise UserError(
            f"--upstream must hold scheme, host and port only, got {arguments.upstream!r}; "
            "write it like http://127.0.0.1:8000"
        )
    if port is None:
        raise UserError(
            f"--upstream must hold the server's port, got {arguments.upstream!r}; write it like http://127.0.0.1:8000"
        )
    if parts.hostname == arguments.host and port == arguments.port:
        raise UserError(f"the merger needs a port of its own, got {port} for both; change --port")
