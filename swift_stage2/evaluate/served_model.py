"""The server that is asked: one that runs already, or our own, started for a model and ended with the command.

Our own listens on loopback, under a supervisor: whatever becomes of this process, nothing of it stays.
Its log lies in the output folder. Every wait has a deadline.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from swift_stage2 import wire
from swift_stage2.checks.servers import foreign
from swift_stage2.config import RolloutConfig, ServerConfig, ServerEngine
from swift_stage2.config.swift_arguments import as_argv
from swift_stage2.errors import ServerFault, ServerUnavailable, UserError
from swift_stage2.launch.job import last_cause
from swift_stage2.launch.managed_server import why_not_ready
from swift_stage2.launch.plan import without_rank
from swift_stage2.rollout_server.command_line import require_vllm
from swift_stage2.runtime.network import free_ports
from swift_stage2.runtime.output import going_on, say
from swift_stage2.runtime.supervisor import Command, ProcessTree, adopt_orphans, end_descendants
from swift_stage2.servers.session import Deadline, ServerSession
from swift_stage2.servers.stock import ask_world_size

ENGINES = (ServerEngine.TRANSFORMERS, ServerEngine.VLLM)
_HOST = "127.0.0.1"
_NAME = "server"
CONNECT_TIMEOUT_S = 10.0
_GRACE_S = 20.0
_DEATH_S = 5.0  # from a lost connection until the process that held it is seen to have ended
_POLL_S = 0.1
_FOR_BOTH = ("external_plugins", "model_type", "template", "max_pixels", "torch_dtype")
_OF_VLLM = "vllm_"


def require_answer(base_url: str) -> wire.ServerInfo:
    """The server's word of itself.

    Raises:
        ConfigError: ``base_url`` is none.
        ServerUnavailable: it does not answer in time, or not as a rollout server does. Whatever knows no ``/stage2/``
            path may be a stock one, and is asked what only that answers.
    """
    ServerConfig(base_url=base_url)
    with ServerSession(base_url, RolloutConfig().api_key()) as session:
        try:
            info = session.info(Deadline(CONNECT_TIMEOUT_S))
            if info.is_swift_rollout:
                ask_world_size(session, Deadline(CONNECT_TIMEOUT_S))
            return info
        except ServerFault as fault:
            if fault.is_foreign:
                remedy = "correct --server, or name --model alone, and one is started for it"
                raise foreign(session, fault, remedy).at("--server") from fault
            raise ServerUnavailable(
                "--server must be a rollout server that answers",
                got=str(fault),
                remedy="wait until it has loaded, or name --model alone, and one is started for it",
            ) from fault


@contextmanager
def own_server(model: str, engine: ServerEngine, swift: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """The address of a server of ``model``, once it has loaded; it ends with the block. ``folder`` gets its log.

    ``swift`` are the user's further arguments of ms-swift, of which the server takes what it knows.

    Raises:
        UserError: vLLM is not installed, or an argument is of another engine.
        ServerUnavailable: it did not load in time, or the block was lost because it ended.
    """
    (port,) = free_ports(1)
    argv = server_command(model, engine, swift, port)
    environment = without_rank(os.environ) | {"PYTHONUNBUFFERED": "1"}
    folder.mkdir(parents=True, exist_ok=True)
    before = [child.pid for child in psutil.Process().children()]
    adopt_orphans()
    tree = ProcessTree(Command(_NAME, argv, environment, _GRACE_S), folder / f"{_NAME}.log")
    base_url = f"http://{_HOST}:{port}"
    try:
        _say(f"starting a server of {model}, log {tree.log_path}")
        with going_on("evaluate", "waiting for the server to load", _say):
            _wait_until_ready(tree, base_url, RolloutConfig().start_timeout_s)
        try:
            yield base_url
        except ServerUnavailable:
            end = time.monotonic() + _DEATH_S
            while tree.poll() is None and time.monotonic() < end:
                _pause()
            _refuse_ended(tree)  # says more than a lost connection does
            raise
    finally:
        if tree.end(_pause):
            end_descendants(0.0, spare=before)


def server_command(model: str, engine: ServerEngine, swift: Mapping[str, Any], port: int) -> tuple[str, ...]:
    """The command line of ``swift-stage2 rollout``; keys ``vllm_…`` are for the server alone.

    Raises:
        UserError: vLLM is not installed, or an argument is of another engine.
    """
    chosen = {key: value for key, value in swift.items() if key in _FOR_BOTH}
    of_vllm = of_server_alone(swift)
    if engine is ServerEngine.VLLM:
        require_vllm("--engine vllm")
        chosen |= of_vllm
    else:
        if of_vllm:
            raise UserError(
                f"--swift {next(iter(of_vllm))} is vLLM's", remedy="add --engine vllm, or remove it"
            )
        chosen = {key.replace("_", "-"): value for key, value in chosen.items()}
    words = ["rollout", "--engine", engine.value, model, "--host", _HOST, "--port", str(port)]
    return (sys.executable, "-u", "-m", "swift_stage2", *words, *as_argv(chosen))


def of_server_alone(swift: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the user's arguments that training does not have."""
    return {key: value for key, value in swift.items() if key.startswith(_OF_VLLM)}


def _wait_until_ready(tree: ProcessTree, base_url: str, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while cause := why_not_ready(base_url):
        _refuse_ended(tree)
        if time.monotonic() >= end:
            raise ServerUnavailable(
                f"the server of --model must answer within {timeout_s:g} s, got: {cause}",
                remedy=f"see {tree.log_path}",
            )
        _pause()


def _refuse_ended(tree: ProcessTree) -> None:
    """Raises ServerUnavailable with its last words if it has ended."""
    if (status := tree.poll()) is not None:
        raise ServerUnavailable(
            "the server of --model must answer to the end",
            got=f"exit status={status}: {last_cause(tree.log_path, tree.log_offset)}",
            remedy=f"its log is {tree.log_path}",
        )


def _pause() -> bool:
    time.sleep(_POLL_S)
    return True


def _say(text: str) -> None:
    say(text, is_error=True)
