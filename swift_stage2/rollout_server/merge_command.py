"""``swift-stage2 merge``: one process in front of one stock server, on the server's own machine.

The port is bound first and is never another one. SIGTERM cuts what runs, so that callers hear at once, and ends
within seconds.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence

from swift_stage2.config.rollout import MAX_REQUESTS_PER_POST, ServerConfig
from swift_stage2.config.rules import variable_option
from swift_stage2.errors import ConfigError
from swift_stage2.rollout_server.merger import Merger
from swift_stage2.runtime.parser import CommandParser, real_number, whole_number
from swift_stage2.servers.http_app import HttpServer, bind, configure_logging, require_key
from swift_stage2.servers.request_checks import add_limits, read_limits
from swift_stage2.servers.session import ServerHttp

_log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the merger; returns 0 after SIGTERM or Ctrl-C.

    Raises:
        UserError: an upstream that is none, or an address that is taken or not this machine's.
    """
    arguments = _parse(argv)
    try:
        upstream = ServerConfig(base_url=arguments.upstream.rstrip("/"))
    except ConfigError as error:
        raise error.at("--upstream") from None
    listener = bind(arguments.host, arguments.port)
    configure_logging()
    api_key = os.environ.get(arguments.api_key_env) or None
    require_key(listener, api_key, is_insecure=True)
    merger = Merger(
        upstream=ServerHttp(upstream.base_url, api_key=api_key),
        max_batch_size=arguments.max_batch_size,
        timeout_s=arguments.upstream_timeout_s,
        limits=read_limits(arguments),
        needs_weights=arguments.needs_weights,
    )
    host, port = listener.getsockname()[:2]
    _log.info("merging calls to %s on http://%s:%s", arguments.upstream, host, port)
    HttpServer(merger.app(api_key), merger.close).serve_on(listener)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="swift-stage2 merge",
        exit_statuses="0 after SIGTERM or Ctrl-C",
        description="One process in front of one stock server: the ranks' calls leave as one.",
    )
    add, most = parser.add_argument, whole_number(1, MAX_REQUESTS_PER_POST)
    add("--upstream", required=True, metavar="URL", help="base URL of the stock server")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=9000, help="0 takes any free port")
    add("--max-batch-size", type=most, default=64, help="requests of one POST at most")
    help_ = "deadline of one call to the server; longer than rollout.request_timeout_s"
    add("--upstream-timeout-s", type=real_number("a number above 0"), default=600.0, help=help_)
    help_ = "the server was started again: refuse /infer/ until a caller has loaded weights"
    add("--needs-weights", action="store_true", help=help_)
    add("--api-key-env", type=variable_option, default="SWIFT_ROLLOUT_API_KEY", metavar="NAME")
    add_limits(parser)
    return parser.parse_args(argv)
