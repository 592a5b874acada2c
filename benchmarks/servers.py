"""Rollout servers for benches: started on free ports, waited for, and ended with everything below them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Self

from swift_stage2.config import ServerEngine
from swift_stage2.config.swift_arguments import as_argv
from swift_stage2.demo.demo_config import CHILD_ENVIRONMENT, STAGE1, free_ports, server_entry
from swift_stage2.errors import ChildFailed
from swift_stage2.launch.job import Job
from swift_stage2.launch.managed_server import ReadinessProbe
from swift_stage2.launch.process_tree import Command, ProcessTree, StopSignals, adopt_orphans
from swift_stage2.process.visible_devices import split_cores, started_on

_GRACE_S = 30.0
_START_S = 300.0


class ServerKind(StrEnum):
    """Which program serves."""

    STOCK = "stock"
    """The unmodified ``swift rollout``."""
    VLLM = "vllm"
    """``swift-stage2 rollout --engine vllm``."""
    TRANSFORMERS = "transformers"
    """``swift-stage2 rollout --engine transformers``."""


_ENGINES = {
    ServerKind.STOCK: ServerEngine.SWIFT,
    ServerKind.VLLM: ServerEngine.VLLM,
    ServerKind.TRANSFORMERS: ServerEngine.TRANSFORMERS,
}


@dataclass(frozen=True, slots=True)
class BenchServer:
    """One running server."""

    kind: ServerKind
    base_url: str
    group_port: int
    tree: ProcessTree


class BenchServers:
    """Owns the servers of one bench. SIGINT, SIGTERM and SIGHUP end them all."""

    def __init__(self, log_dir: Path, show: Callable[[str], None] = lambda line: None) -> None:
        self._log_dir = log_dir
        self._show = show
        self._stack = ExitStack()
        self._job: Job | None = None
        self._signals = StopSignals()

    def __enter__(self) -> Self:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        adopt_orphans()
        self._stack.enter_context(self._signals)
        self._job = self._stack.enter_context(Job(self._log_dir, self._signals, self._show))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    @property
    def job(self) -> Job:
        """Runs the processes, inside the context."""
        if self._job is None:
            raise RuntimeError("servers are started inside the context")
        return self._job

    def moment(self) -> None:
        """Waits a little. Raises KeyboardInterrupt when a signal asked for the end."""
        self.job.step()
        if self._signals.received is not None:
            raise KeyboardInterrupt

    def start(self, kind: ServerKind, *, model: Path = STAGE1, max_batch_size: int = 64) -> BenchServer:
        """Starts one server and waits until it answers.

        Raises:
            UserError: what the server needs is not installed.
            ChildFailed: it ended, or did not answer in time; names its log.
            KeyboardInterrupt: a signal asked for the end.
        """
        port, group_port = free_ports(2)
        argv = (sys.executable, "-u", *server_arguments(kind, model, port, max_batch_size))
        tree = self.start_process(kind.value, argv, server_environment(kind))
        base_url = f"http://127.0.0.1:{port}"
        self.await_answer(base_url, tree)
        return BenchServer(kind, base_url, group_port, tree)

    def start_process(
        self, name: str, argv: tuple[str, ...], environment: Mapping[str, str] | None = None
    ) -> ProcessTree:
        """Starts a command, with ``environment`` on top of this process's, and returns at once."""
        whole = {**os.environ, **CHILD_ENVIRONMENT, **(environment or {})}
        return self.job.start(Command(name=name, argv=argv, environment=whole, grace_s=_GRACE_S))

    def await_answer(self, base_url: str, tree: ProcessTree) -> None:
        """Waits until ``/infer/`` answers there. Raises as ``start``."""
        probe = ReadinessProbe(tree.command.name, base_url, None, _START_S)
        with ExitStack() as stack:
            stack.callback(probe.close)
            while not probe.answered:
                self.moment()
                if tree.poll() is not None or probe.expired:
                    raise ChildFailed(
                        f"{tree.command.name} must answer before anything is measured, it did not "
                        f"({probe.last_error}); see {tree.log_path}"
                    )

    def end(self, server: BenchServer) -> None:
        """Ends one server before the others."""
        server.tree.ask_to_end()
        end = time.monotonic() + _GRACE_S
        while server.tree.poll() is None and time.monotonic() < end:
            self.job.step()


def stand_in_arguments(
    rows: Path, latency_s: float, model: Path, port: int, *, stock: bool = False
) -> list[str]:
    """What follows ``python`` on the stand-in's command line."""
    place = ["--model", str(model), "--port", str(port), "--rows", str(rows)]
    return [
        "-m",
        "benchmarks.stand_in_server",
        *place,
        "--latency-s",
        str(latency_s),
        *(["--stock"] if stock else []),
    ]


def start_stand_in(
    servers: BenchServers, rows: Path, latency_s: float, *, stock: bool = False
) -> tuple[int, int]:
    """Starts the server on the cores that are not the learner's, and returns its ports once it answers.

    ``stock``: for ms-swift's own client.

    Raises:
        ChildFailed: it did not answer in time.
    """
    port, group_port = free_ports(2)
    argv = (sys.executable, "-u", *stand_in_arguments(rows, latency_s, STAGE1, port, stock=stock))
    with started_on(split_cores()[1]):
        tree = servers.start_process("stock_stand_in" if stock else "stand_in_server", argv)
    servers.await_answer(f"http://127.0.0.1:{port}", tree)
    return port, group_port


def server_environment(kind: ServerKind) -> dict[str, str]:
    """What a server needs in its environment besides the children's. Raises as ``server_arguments``."""
    added = server_entry(_ENGINES[kind]).get("env", {})
    return {name: str(value) for name, value in added.items()}


def server_arguments(kind: ServerKind, model: Path, port: int, max_batch_size: int) -> list[str]:
    """What follows ``python`` on the command line of a server of the demo's kind of model.

    Raises:
        UserError: vLLM, or what it needs on a machine without a GPU, is not installed.
    """
    place = ["--host", "127.0.0.1", "--port", str(port)]
    options = as_argv(server_entry(_ENGINES[kind])["args"])
    if kind is ServerKind.TRANSFORMERS:
        batch = ["--max-batch-size", str(max_batch_size)]
        return ["-m", "swift_stage2", "rollout", str(model), *place, *options, *batch]
    batch = ["--vllm_max_num_seqs", str(max_batch_size)]
    ours = ["-m", "swift_stage2", "rollout", "--engine", "vllm"]
    program = ["-m", "swift.cli.rollout"] if kind is ServerKind.STOCK else ours
    return [*program, "--model", str(model), *place, *options, *batch]
