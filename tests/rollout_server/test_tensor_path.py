"""The page's list of the files that a tensor passes from the learner to the server agrees with a real round."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from live_server import MODEL, free_port, load_learner
from stand_in_canary import UnaskedCanary
from tensor_watch import __file__ as watch_program
from tensor_watch import watched

import swift_stage2
from swift_stage2.collectives import SingleRank
from swift_stage2.config import Proof, Transport
from swift_stage2.demo.tiny_template import TINY_VL
from swift_stage2.servers.session import Deadline
from swift_stage2.weights.courier import Courier, ThreadCourier
from swift_stage2.weights.courier_process import ProcessCourier
from swift_stage2.weights.courier_worker import CourierSetup
from swift_stage2.weights.disk_rounds import DiskRounds
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.sync_round import WeightSync
from swift_stage2.weights.transport import DiskTransport, ServerEndpoint, StreamTransport

PACKAGE = Path(swift_stage2.__file__).parent
PAGE = PACKAGE.parent / "docs" / "design" / "weights.md"
MOST_FILES = 20  # over all ways, a stream, a memory file and a directory; none of them passes more than 16
START_TIMEOUT_S = 240.0


def listed() -> tuple[set[str], set[str], set[str]]:
    """Files of both engines, of the transformers engine, of the one on vLLM."""
    section = PAGE.read_text(encoding="utf-8").split("## One tensor, from the optimizer to the server")[1]
    rows = re.findall(r"^\| `([\w/.]+)` \| (\w+) \|", section.split("\n## ")[0], re.MULTILINE)
    by_engine = [
        {path for path, engine in rows if engine == name} for name in ("both", "transformers", "vllm")
    ]
    assert sum(map(len, by_engine)) == len(rows)
    return by_engine[0], by_engine[1], by_engine[2]


def test_the_path_of_a_tensor_is_short_and_its_files_exist() -> None:
    both, transformers, vllm = listed()
    assert len(both | transformers) <= MOST_FILES
    assert len(both | vllm) <= MOST_FILES
    assert [path for path in both | transformers | vllm if not (PACKAGE / path).is_file()] == []


@pytest.mark.slow
def test_real_rounds_touch_the_files_of_the_page_and_no_others(tmp_path: Path) -> None:
    notes, port, shared = tmp_path / "server", free_port(), tmp_path / "shared"
    shared.mkdir()
    arguments = [
        str(MODEL),
        "--weights-root",
        str(shared),
        "--port",
        str(port),
        "--device",
        "cpu",
        "--num-threads",
        "1",
        "--model-type",
        TINY_VL,
        "--template",
        TINY_VL,
    ]
    plugin = str(PACKAGE / "demo" / "tiny_template.py")
    server = subprocess.Popen(
        [sys.executable, str(watch_program), str(notes), *arguments, "--external-plugins", plugin],
        stdin=subprocess.DEVNULL,
    )
    try:
        await_ready(server, port)
        module = load_learner(seed=1)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.01)
        endpoints = (ServerEndpoint(f"http://127.0.0.1:{port}", free_port()),)
        setup = CourierSetup(
            endpoints=endpoints,
            api_key=None,
            ours=frozenset(),
            device=torch.device("cpu"),
            transport=Transport.SHARED_MEMORY,
            is_traced=False,
        )
        held_here: set[str] = set()
        with watched(held_here.add):
            one_round(module, ThreadCourier(endpoints, lambda info: StreamTransport()), version=1)
            one_round(module, ProcessCourier(setup), version=2)
            rounds = DiskRounds(shared, keep=1)
            by_disk = ThreadCourier(endpoints, lambda info: DiskTransport(rounds, info), disk=rounds)
            one_round(module, by_disk, version=3)
    finally:
        server.terminate()
        server.wait(timeout=30.0)
    both, transformers, _ = listed()
    held_there = set(notes.read_text(encoding="utf-8").split())
    assert held_here | held_there == both | transformers


def one_round(module: torch.nn.Module, courier: Courier, version: int) -> None:
    sync = WeightSync(
        control=SingleRank(),
        export=WeightExport(module),
        canary=UnaskedCanary(),
        courier=courier,
        run_id="run",
        timeout_s=60.0,
        bucket_mib=1,
        proof=Proof.CHECKSUM,
    )
    report = sync.run(version, [0]).reports[0]
    sync.close()
    assert report.proven, report.error


def await_ready(server: subprocess.Popen[bytes], port: int) -> None:
    deadline = Deadline(START_TIMEOUT_S)
    while not deadline.expired and server.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health/", timeout=5.0, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        try:
            server.wait(timeout=0.1)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError(f"the server is not ready, got exit_status={server.poll()}")
