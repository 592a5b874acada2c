"""Rollout servers for benches: started on free ports, waited for, and ended with everything below them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from benchmarks.processes import Processes, split_cores, started_on
from swift_stage2.config import ServerEngine, load_config
from swift_stage2.config.swift_arguments import as_argv
from swift_stage2.config.yaml_text import write_yaml
from swift_stage2.demo.demo_config import STAGE1, DemoJob, config_of, server_entry
from swift_stage2.launch.managed_server import why_not_ready
from swift_stage2.runtime.network import free_ports
from swift_stage2.runtime.supervisor import ProcessTree

_GRACE_S = 30.0
_START_S = 600.0
_MAX_BATCH_SIZE = 64
_LOOK_S = 5.0
LONG_SHARE_VARIABLE = "BENCH_LONG_SHARE"
"""Of ``plugins/long_answers.py``."""

Found = TypeVar("Found")


class ServerKind(StrEnum):
    STOCK = "stock"  # the unmodified ``swift rollout``
    VLLM = "vllm"  # ``swift-stage2 rollout --engine vllm``
    TRANSFORMERS = "transformers"  # ``swift-stage2 rollout --engine transformers``

    @property
    def engine(self) -> ServerEngine:
        """Its engine in ``launch.servers``."""
        return ServerEngine.SWIFT if self is ServerKind.STOCK else ServerEngine(self.value)


@dataclass(frozen=True, slots=True)
class BenchServer:
    base_url: str
    group_port: int
    tree: ProcessTree

    @property
    def ports(self) -> tuple[int, int]:
        """Of its HTTP and of its weight group."""
        return int(self.base_url.rsplit(":", 1)[1]), self.group_port


class BenchServers(Processes):
    """Owns the servers of one bench, and what else it starts."""

    def start(
        self,
        kind: ServerKind,
        *,
        model: Path = STAGE1,
        plugins: Sequence[Path] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> BenchServer:
        """Starts one server, with ``plugins`` as ``server_arguments`` has them, and waits until it answers.

        Raises:
            UserError: what the server needs is not installed.
            ChildFailed: it ended, or did not answer in time; names its log.
            KeyboardInterrupt: a signal asked for the end.
        """
        name = "+".join((kind.value, *(plugin.stem for plugin in plugins)))
        return self.start_program(
            name,
            lambda port: server_arguments(kind, model, port, plugins),
            {**server_environment(kind), **environment},
        )

    def start_program(
        self,
        name: str,
        words: Callable[[int], Sequence[str]],
        environment: Mapping[str, str] | None = None,
        *,
        ports: Sequence[int] = (),
    ) -> BenchServer:
        """Starts ``python`` with ``words`` for its port, by default a free one, and waits as ``start`` does."""
        port, group_port = ports or free_ports(2)
        tree = self.start_process(name, (sys.executable, "-u", *words(port)), environment)
        base_url = f"http://127.0.0.1:{port}"
        self.wait_for(lambda: not why_not_ready(base_url), "a server answers", _START_S, tree=tree)
        return BenchServer(base_url, group_port, tree)

    def end(self, server: BenchServer) -> None:
        server.tree.ask_to_end()
        self.wait_for(lambda: server.tree.poll() is not None, "a server ends", 2 * _GRACE_S)


def write_job(
    job: DemoJob, ports: tuple[int, int], changes: Mapping[str, Any] = MappingProxyType({})
) -> Path:
    """Writes and checks the YAML for a learner beside servers: the demo's, with ``changes`` of its sections."""
    config = config_of(job, ports)
    config["launch"].pop("servers", None)
    _change(config, changes)
    job.directory.mkdir(parents=True, exist_ok=True)
    job.config_path.write_text(write_yaml(config), encoding="utf-8")
    load_config(job.config_path)
    return job.config_path


def _change(section: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, Mapping):
            _change(section.setdefault(key, {}), value)
        else:
            section[key] = value


def stand_in_arguments(
    rows: Path, latency_s: float, port: int, *, slow_share: float = 0.0, stock: bool = False
) -> list[str]:
    """The words after ``python`` on the stand-in's command line.

    ``slow_share`` of the requests wait ten times as long. ``stock``: for ms-swift's own client.
    """
    place = ["--model", str(STAGE1), "--port", str(port), "--rows", str(rows)]
    waits = ["--latency-s", str(latency_s), "--slow-share", str(slow_share)]
    return ["-m", "benchmarks.stand_in_server", *place, *waits, *(["--stock"] if stock else [])]


def start_stand_in(
    servers: BenchServers, rows: Path, latency_s: float, *, stock: bool = False, slow_share: float = 0.0
) -> tuple[int, int]:
    """Starts it on the cores that are not the learner's. Returns its ports once it answers.

    Raises ChildFailed when it did not in time.
    """
    words = partial(stand_in_arguments, rows, latency_s, stock=stock, slow_share=slow_share)
    with started_on(split_cores()[1]):
        return servers.start_program("stock_stand_in" if stock else "stand_in_server", words).ports


def start_vllm(servers: BenchServers, *, stock: bool, slow_share: float) -> tuple[int, int]:
    """Starts ours on vLLM, or ``swift rollout``; a share of its answers is long. Returns its ports.

    Raises as ``start``.
    """
    kind = ServerKind.STOCK if stock else ServerKind.VLLM
    plugins = [Path(__file__).parent / "plugins" / "long_answers.py"]
    with started_on(split_cores()[1]):
        return servers.start(kind, plugins=plugins, environment={LONG_SHARE_VARIABLE: str(slow_share)}).ports


def server_environment(kind: ServerKind) -> dict[str, str]:
    """A server needs these variables besides the children's. Raises as ``server_arguments``."""
    return {name: str(value) for name, value in server_entry(kind.engine).get("env", {}).items()}


def server_arguments(kind: ServerKind, model: Path, port: int, plugins: Sequence[Path] = ()) -> list[str]:
    """The words after ``python`` on the command line of a server of the demo's kind of model.

    ``plugins`` are more files for ``external_plugins`` of one on vLLM.

    Raises:
        UserError: vLLM, or what it needs on a machine without a GPU, is not installed.
    """
    place = ["--host", "127.0.0.1", "--port", str(port)]
    options = server_entry(kind.engine)["args"]
    if kind is ServerKind.TRANSFORMERS:
        batch = ["--max-batch-size", str(_MAX_BATCH_SIZE)]
        return ["-m", "swift_stage2", "rollout", str(model), *place, *as_argv(options), *batch]
    options["external_plugins"] += map(str, plugins)
    batch = ["--vllm_max_num_seqs", str(_MAX_BATCH_SIZE)]
    ours = ["-m", "swift_stage2", "rollout", "--engine", "vllm"]
    program = ["-m", "swift.cli.rollout"] if kind is ServerKind.STOCK else ours
    return [*program, "--model", str(model), *place, *as_argv(options), *batch]
