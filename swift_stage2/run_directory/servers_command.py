"""``swift-stage2 servers add|list RUN_DIR``: adds a rollout server to a run that goes on, and tells how all stand.

Speaks with the run's rank 0 by files in the run directory alone, and needs no key: rank 0 asks the server with its own.
Exit status: 0 the server is proven, 2 with the reason where it is not.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from swift_stage2.config import ServerConfig
from swift_stage2.errors import ConfigError, UserError
from swift_stage2.run_directory.lock import is_held
from swift_stage2.run_directory.server_board import (
    ServerBoard,
    ServerStanding,
    in_arguments,
    leave_request,
    withdraw_request,
)
from swift_stage2.terminal.output import say
from swift_stage2.terminal.parser import CommandParser

_TIMEOUT_S = 600.0
_MOST_S = 86400.0
_LOOK_S = 0.2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Raises UserError: run or server cannot be used, or the server was not proven in time."""
    options = _parse(argv)
    run_dir = Path(options.run_dir)
    if options.command == "list":
        # Asked first: at an orderly end the board tells it before the lock is let go.
        goes_on = is_held(run_dir)
        board = ServerBoard.read(run_dir)
        ended = (
            "the run has ended" if board.has_ended else "the run was killed: none of its processes is left"
        )
        say(*map(_line_of, board.servers), *[ended] * (board.has_ended or not goes_on))
        return 0
    try:
        server = ServerConfig(
            base_url=options.url,
            group_port=options.group_port,
            group_host=options.group_host,
            group_bind=options.group_bind,
        )
    except ConfigError as error:
        raise ConfigError(in_arguments(str(error))) from error
    say(_line_of(add_server(run_dir, server, timeout_s=options.timeout_s)))
    return 0


def add_server(run_dir: Path, server: ServerConfig, *, timeout_s: float) -> ServerStanding:
    """Asks the run to add ``server`` and waits until it is proven.

    Raises:
        UserError: no run goes on there, it refuses the server, or could not prove it within ``timeout_s``.
    """
    if not 0 < timeout_s <= _MOST_S:
        raise ConfigError(
            f"--timeout-s must be above 0 and at most {_MOST_S:g}, got --timeout-s={timeout_s:g}"
        )
    if _find(ServerBoard.read(run_dir), server.base_url) is not None:
        raise ConfigError(
            f"a server is added once, got URL={server.base_url}, which is in the run; swift-stage2 servers list "
            f"{run_dir} tells how it stands"
        )
    request, began = leave_request(run_dir, server), time.monotonic()
    try:
        while True:
            goes_on, board, waited_s = is_held(run_dir), ServerBoard.read(run_dir), time.monotonic() - began
            standing = _find(board, server.base_url)
            if standing is not None and standing.state == "proven":
                return standing
            if standing is not None and standing.fault:
                raise UserError(
                    f"{server.base_url} has joined the run and is not proven: {standing.fault}; mend that, the run "
                    "tries again by itself"
                )
            if refusal := board.refusals.get(request.name):
                raise UserError(refusal)
            if board.has_ended or not goes_on:
                raise UserError(
                    "a server is added to a run that goes on, got "
                    f"{run_dir}, whose run {'has ended' if board.has_ended else 'was killed'}; start or resume it, or "
                    "name the directory of another one"
                )
            if waited_s > timeout_s:
                how = "has joined and waits for weights" if standing else "no step has taken in yet"
                remedy = f"the run goes on with it, look again with swift-stage2 servers list {run_dir}"
                if withdraw_request(request):
                    how, remedy = "the learner has not heard of", "add it again with a longer --timeout-s"
                raise UserError(
                    f"a server must be proven within --timeout-s={timeout_s:g}, got {server.base_url}, which {how}; "
                    f"{remedy}"
                )
            time.sleep(_LOOK_S)  # bounded polling of another process's files
    finally:
        withdraw_request(request)  # untaken, it must not be found by a run to come


def _find(board: ServerBoard, base_url: str) -> ServerStanding | None:
    return next((each for each in board.servers if each.base_url == base_url), None)


def _line_of(standing: ServerStanding) -> str:
    why = standing.proof or standing.fault or "waits for weights"
    return f"{standing.base_url}{' (added)' * standing.is_added}: {standing.state}, {why}"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    statuses = "0 done; the server is proven"
    parser = CommandParser(
        exit_statuses=statuses,
        prog="swift-stage2 servers",
        description="The rollout servers of a run that goes on.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add = commands.add_parser(
        "add",
        help="add a rollout server, and wait until it has weights",
        description="Adds a rollout server to a run and waits until it is proven. The server must be up, with the "
        "run's model and the run's key. Checkpoints keep it: a resumed run asks it again.",
        exit_statuses=statuses,
    )
    listing = commands.add_parser(
        "list",
        help="tell how every server of a run stands",
        description="Tells how every server of a run stands.",
        exit_statuses="0 done",
    )
    for command in (add, listing):
        command.add_argument("run_dir", metavar="RUN_DIR", help="the directory that holds the run's audit/")
    add.add_argument("url", metavar="URL", help="of the server, like http://127.0.0.1:8001")
    default = ServerConfig.__dataclass_fields__["group_port"].default
    add.add_argument(
        "--group-port",
        type=int,
        default=default,
        metavar="PORT",
        help="as rollout.servers[].group_port (default %(default)s); one of its own for each server of a host",
    )
    add.add_argument("--group-host", metavar="HOST", help="as rollout.servers[].group_host")
    add.add_argument("--group-bind", metavar="ADDRESS", help="as rollout.servers[].group_bind")
    add.add_argument(
        "--timeout-s",
        type=float,
        default=_TIMEOUT_S,
        metavar="SECONDS",
        help="how long to wait until the server is proven (default %(default)g)",
    )
    return parser.parse_args(argv)
