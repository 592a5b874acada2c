"""Programs on the hosts of ``network_hosts``: a server, a learner's ranks, and what they must have left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from network_hosts import Host
from torchrun_job import ENVIRONMENT, MODEL, TEMPLATE, write_config

from swift_stage2.telemetry.event_log import EventTail, event_path, read_logs
from swift_stage2.telemetry.events import Finished

TESTS = Path(__file__).resolve().parent
HTTP_PORT, GROUP_PORT = 8000, 51216
_START_S, _RUN_S = 300.0, 900.0
_DEADLINE_S = 240.0
_PATHS = os.pathsep.join(str(path) for path in (TESTS, TESTS / "rollout_server"))


@dataclass(frozen=True)
class Address:
    """Where a server of a test answers."""

    base_url: str
    group_port: int = GROUP_PORT


def start(host: Host, log: Path, words: Sequence[str | Path], **environment: str) -> subprocess.Popen[bytes]:
    """A Python program on a host; it ends with the host's namespace at the latest."""
    with log.open("wb") as output:
        return subprocess.Popen(
            host.command([sys.executable, "-u", *words]),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | ENVIRONMENT | {"PYTHONPATH": _PATHS} | environment,
        )


def ended(process: subprocess.Popen[bytes], log: Path, timeout_s: float = _RUN_S) -> tuple[int, str]:
    """Status and output of a program that has to end."""
    status = process.wait(timeout=timeout_s)
    return status, log.read_text(errors="replace")


@contextlib.contextmanager
def running_server(host: Host, log: Path, words: Sequence[str | Path], ready: str) -> Iterator[Address]:
    """A server, from the moment its log says that it is ``ready``."""
    process = start(host, log, words)
    pause, end = threading.Event(), time.monotonic() + _START_S
    while ready not in log.read_text(errors="replace"):
        assert process.poll() is None, log.read_text(errors="replace")[-2000:]
        assert time.monotonic() < end, log.read_text(errors="replace")[-2000:]
        pause.wait(0.2)
    yield Address(f"http://{host.name}:{HTTP_PORT}")


def our_server(host: Host, log: Path, *options: str) -> contextlib.AbstractContextManager[Address]:
    """On the transformers engine."""
    words = [
        "-m", "swift_stage2", "rollout", str(MODEL), "--model-type", "stage2_tiny_vl",
        "--external-plugins", str(TEMPLATE), "--host", host.address, "--insecure", "--port", str(HTTP_PORT),
        "--torch-dtype", "float32", "--num-threads", "1", *options,
    ]  # fmt: skip
    return running_server(host, log, words, "serving ")


def two_ranks(learner: Host, directory: Path, rows: Path, address: Address, **server: Any) -> None:
    """Trains both channels on one host; ``server`` are further keys of ``rollout.servers[0]``."""
    path = write_config(directory, rows, address, b_ratio=0.5, swift={"max_steps": 16})
    config = yaml.safe_load(path.read_text())
    config["rollout"]["servers"][0] |= server
    path.write_text(yaml.safe_dump(config))
    words = ["-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "swift_stage2", "train", path]
    log = directory.with_suffix(".log")
    told = {"RECORD_DIR": str(directory / "micro_steps"), "INJECT": "*:1:await_packs"}
    status, output = ended(start(learner, log, words, **told), log)
    assert status == 0, output[-3000:]


class RunOnHost:
    """Two ranks that train on one host, and their files meanwhile."""

    def __init__(self, learner: Host, directory: Path, config: Path) -> None:
        self.directory, self.log = directory, directory.with_suffix(".log")
        words = ["-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "swift_stage2", "train", config]
        record = {"RECORD_DIR": str(directory / "micro_steps")}
        self.torchrun = start(learner, self.log, words, **record)

    def audit(self, kind: str, since: float = 0.0) -> list[dict[str, Any]]:
        """Rank 0's."""
        records = map(json.loads, EventTail(event_path(self.directory, 0)).lines())
        return [each for each in records if each["kind"] == kind and each["time"] > since]

    def ends(self, since: float) -> set[tuple[str, str]]:
        """Base URL and how a POST to it has ended since then, of either rank."""
        events = [event for log in read_logs([self.directory]).values() for event in log]
        return {
            (each.server, each.end) for each in events if isinstance(each, Finished) and each.time > since
        }

    def answering(self, since: float) -> set[str]:
        """Base URLs of servers that have answered either rank since then."""
        return {server for server, end in self.ends(since) if end == "answered"}

    def wait_until(self, holds: Callable[[], object], what: str) -> None:
        end, pause = time.monotonic() + _DEADLINE_S, threading.Event()
        while not holds():
            told = self.log.read_text(errors="replace")[-3000:]
            assert self.torchrun.poll() is None, f"training ended before {what}:\n{told}"
            assert time.monotonic() < end, f"{what} did not come:\n{told}"
            pause.wait(0.1)

    def stop(self) -> tuple[int, str]:
        """At a step boundary that all ranks agree on."""
        psutil.Process(self.torchrun.pid).children()[0].send_signal(signal.SIGTERM)
        return ended(self.torchrun, self.log)


def audit(directory: Path, rank: int, kind: str) -> list[dict[str, Any]]:
    lines = (directory / "events" / f"rank{rank}.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def assert_trained_on_both_channels(directory: Path, num_ranks: int, proof: str = "checksums+canary") -> None:
    """Every rank ran B steps, and ``proof`` is how the first round proved its server; later ones may ask no canary."""
    for rank in range(num_ranks):
        steps = audit(directory, rank, "step")
        assert {step["channel"] for step in steps} == {"A", "B"}, [step["skip_reason"] for step in steps]
    proofs = [server["proof"] for each in audit(directory, 0, "round") for server in each["servers"].values()]
    assert proofs[0] == proof
    assert set(proofs) <= {proof, proof.removesuffix("+canary")}
