"""Stage *nccl-rollout*: rounds to the unmodified ``swift rollout`` on devices of its own, and two that are disturbed.

The server is killed, or frozen, when a push is about to send; the round must fail by its deadline and leave the
learner's device free. The server is then started again on the same ports and must be proven by the next round. The
demo's trained weights: random ones would make the canary's greedy answer a coin's throw in half precision.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch

from benchmarks.gpu_check.stage import CheckFailed, CheckSkipped, Context
from benchmarks.gpu_check.training import vllm_options
from benchmarks.servers import BenchServer, BenchServers
from benchmarks.sync_learner import TextCanary
from swift_stage2.config import ServerEngine
from swift_stage2.config.rollout import ServerConfig, SyncConfig
from swift_stage2.config.swift_arguments import as_argv
from swift_stage2.demo.demo_config import STAGE1, server_entry
from swift_stage2.records import RoundOutcome
from swift_stage2.runtime.network import free_ports
from swift_stage2.runtime.supervisor import ProcessTree
from swift_stage2.servers.session import Deadline, ServerSession
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.publisher import ThreadPublisher
from swift_stage2.weights.stock_transport import StockTransport
from swift_stage2.weights.waited_updates import WaitedUpdates

_NUM_ROUNDS = 3
_ROUND_TIMEOUT_S = 40.0
_BUCKET_MIB = 512
_MIB = 1 << 20


class _DisturbedTransport(StockTransport):
    """The real transport; ``before_send``, if set, is called once, right before bytes leave."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.before_send: Callable[[], None] | None = None

    def send(self, flat: torch.Tensor, deadline: Deadline) -> None:
        disturb, self.before_send = self.before_send, None
        if disturb is not None:
            disturb()
        super().send(flat, deadline)


def run(context: Context) -> None:
    """Raises ``CheckSkipped`` without two GPUs, ``CheckFailed`` where a round is not what it must be."""
    num_devices = 0 if context.rehearsal else torch.cuda.device_count()
    if not context.rehearsal and num_devices < 2:
        raise CheckSkipped(f"needs two GPUs, one for the server alone, got {num_devices}")
    with BenchServers(context.logs) as processes:
        _rounds_at(context, processes, 1)
        if num_devices > 2:
            _rounds_at(context, processes, 2)
        else:
            context.note("tp2", "left out: needs three GPUs")


def _rounds_at(context: Context, processes: BenchServers, tensor_parallel: int) -> None:
    from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

    device = torch.device(context.device)
    module = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        STAGE1, dtype=getattr(torch, context.dtype), device_map=context.device
    ).train(False)
    ports = free_ports(2)
    transports: list[_DisturbedTransport] = []

    def make_transport(_: Any) -> _DisturbedTransport:
        transports.append(_DisturbedTransport(device))
        return transports[-1]

    server = _start(context, processes, ports, tensor_parallel)
    config = ServerConfig(base_url=server.base_url, group_port=server.group_port)
    sync = WaitedUpdates(
        1,
        export=WeightExport(module),
        canary=TextCanary(module, AutoTokenizer.from_pretrained(STAGE1)),
        publisher=ThreadPublisher([config], make_transport),
        run_id="gpu-check",
        sync=SyncConfig(timeout_s=_ROUND_TIMEOUT_S),
        bucket_mib=_BUCKET_MIB,
    )
    note = context.note
    for _ in range(_NUM_ROUNDS):
        outcome = sync.run([0])
        _require_proven(outcome)
        note(f"tp{tensor_parallel}_round_s", outcome.seconds)
    note(f"tp{tensor_parallel}_free_before_mib", _free_mib(context))
    for number in (signal.SIGKILL, signal.SIGSTOP):
        tree = server.tree
        transports[-1].before_send = lambda tree=tree, number=number: _signal_below(tree, number)
        started = time.monotonic()
        report = sync.run([0]).reports[0]
        note(f"tp{tensor_parallel}_{number.name}_round_s", time.monotonic() - started)
        if report.proven:
            raise CheckFailed(f"a round whose server got {number.name} must fail, it was proven")
        _signal_below(tree, signal.SIGKILL)
        processes.end(server)
        server = _start(context, processes, ports, tensor_parallel)
        _require_proven(sync.run([0]))
        note(f"tp{tensor_parallel}_free_after_{number.name}_mib", _free_mib(context))
    sync.close()
    processes.end(server)


def _start(
    context: Context, processes: BenchServers, ports: tuple[int, ...], tensor_parallel: int
) -> BenchServer:
    options: dict[str, Any] = {"model": str(STAGE1), "host": "127.0.0.1"}
    if context.rehearsal:
        entry = server_entry(ServerEngine.SWIFT)
        options |= {**entry["args"], "vllm_max_num_seqs": 16}
        environment = {name: str(value) for name, value in entry["env"].items()}
    else:
        options |= vllm_options(context)
        options |= {"vllm_tensor_parallel_size": tensor_parallel, "vllm_gpu_memory_utilization": 0.3}
        named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        devices = named[1:] if len(named) > 1 else [str(n) for n in range(1, torch.cuda.device_count())]
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(devices[:tensor_parallel])}
    words = ("-m", "swift.cli.rollout", *as_argv(options))
    server = processes.start_program(
        "stock", lambda port: (*words, "--port", str(port)), environment, ports=ports
    )
    with ServerSession(server.base_url) as session:
        session.get("/health/", Deadline(_ROUND_TIMEOUT_S))
    return server


def _signal_below(tree: ProcessTree, number: int) -> None:
    """To every process of the server, its supervisor excepted."""
    for process in psutil.Process(tree.pid).children(recursive=True):
        process.send_signal(number)


def _require_proven(outcome: RoundOutcome) -> None:
    report = outcome.reports.get(0)
    if report is None or not report.proven:
        raise CheckFailed(f"a round must be proven, got {report.error if report else outcome}")


def _free_mib(context: Context) -> int:
    """Of the learner's device, with nothing kept in torch's own cache; 0 in a rehearsal."""
    if context.rehearsal:
        return 0
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(context.device)[0]) // _MIB
