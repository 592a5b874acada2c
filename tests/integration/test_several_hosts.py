"""Server and learner on hosts of their own, as network namespaces: weights travel, or a message names what is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from network_hosts import INTERFACE, Host, network_hosts
from torchrun_job import ENVIRONMENT, MODEL, TEMPLATE, write_config

pytestmark = [pytest.mark.namespaces, pytest.mark.timeout(600)]

TESTS = Path(__file__).resolve().parents[1]
HTTP_PORT, GROUP_PORT, RENDEZVOUS_PORT = 8000, 51216, 29400
_START_S, _RUN_S = 120.0, 400.0
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
def our_server(host: Host, log: Path, *options: str) -> Iterator[Address]:
    """On the transformers engine, from the moment it serves."""
    words = [
        "-m", "swift_stage2", "rollout", str(MODEL), "--model-type", "stage2_tiny_vl",
        "--external-plugins", str(TEMPLATE), "--host", host.name, "--port", str(HTTP_PORT),
        "--torch-dtype", "float32", "--num-threads", "1", *options,
    ]  # fmt: skip
    process = start(host, log, words)
    pause, end = threading.Event(), time.monotonic() + _START_S
    while "serving " not in log.read_text(errors="replace"):
        assert process.poll() is None, log.read_text(errors="replace")[-2000:]
        assert time.monotonic() < end, log.read_text(errors="replace")[-2000:]
        pause.wait(0.2)
    yield Address(f"http://{host.name}:{HTTP_PORT}")


def rounds(
    learner: Host, log: Path, endpoints: Sequence[dict[str, Any]], timeout_s: float = 60.0
) -> list[Any]:
    """How one round to each endpoint ended, run by a learner's process on its host."""
    words = [TESTS / "one_round.py", str(timeout_s), *(json.dumps(endpoint) for endpoint in endpoints)]
    status, output = ended(start(learner, log, words), log)
    assert status == 0, output[-3000:]
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def audit(directory: Path, rank: int, kind: str) -> list[dict[str, Any]]:
    lines = (directory / "audit" / f"rank{rank}.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def assert_trained_on_both_channels(directory: Path, num_ranks: int) -> None:
    for rank in range(num_ranks):
        steps = audit(directory, rank, "step")
        assert sum(step["channel"] == "B" for step in steps) >= 3, [step["skip_reason"] for step in steps]
    proofs = [server["proof"] for each in audit(directory, 0, "round") for server in each["servers"].values()]
    assert set(proofs) == {"checksums+canary"}


def test_both_sides_of_a_weight_group_over_gloo_bind_an_address_of_their_own(tmp_path: Path) -> None:
    with network_hosts("server", "learner") as (server, learner):
        for number, bound in enumerate((server.name, "0.0.0.0")):
            logs = [tmp_path / f"{number}-{rank}.log" for rank in range(2)]
            port = str(GROUP_PORT + number)
            members = [
                start(server, logs[0], [TESTS / "gloo_member.py", "0", bound, port]),
                start(learner, logs[1], [TESTS / "gloo_member.py", "1", server.name, port]),
            ]
            told = [ended(member, log, 60.0) for member, log in zip(members, logs, strict=True)]
            assert [status for status, _ in told] == [0, 0], told
            assert told[0][1].splitlines()[-1] == told[1][1].splitlines()[-1]


def test_two_ranks_train_both_channels_with_our_server_on_another_host(
    tmp_path: Path, rows_file: Path
) -> None:
    directory = tmp_path / "run"
    with network_hosts("server", "learner") as (server, learner):
        weights = server.second_address  # weights may take another network than HTTP
        with our_server(server, tmp_path / "server.log", "--group-bind", weights) as address:
            path = write_config(directory, rows_file, address, b_ratio=0.5, swift={"max_steps": 16})
            config = yaml.safe_load(path.read_text())
            config["rollout"]["servers"][0]["group_host"] = weights
            path.write_text(yaml.safe_dump(config))
            words = ["-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "swift_stage2", "train", path]
            log = tmp_path / "learner.log"
            status, output = ended(start(learner, log, words, RECORD_DIR=str(tmp_path / "micro")), log)
    assert status == 0, output[-3000:]
    assert_trained_on_both_channels(directory, 2)


def test_a_learner_over_two_hosts_trains_with_a_server_on_a_third(tmp_path: Path, rows_file: Path) -> None:
    directory = tmp_path / "run"
    with network_hosts("server", "node0", "node1", own_name_is_loopback=True) as (server, *nodes):
        with our_server(server, tmp_path / "server.log", "--group-bind", server.address) as address:
            path = write_config(directory, rows_file, address, b_ratio=0.5, swift={"max_steps": 16})
            given = {"RECORD_DIR": str(tmp_path / "micro")}
            status, output = _learner_over(nodes, tmp_path / "refused", path, **given)
            assert status != 0
            assert "set GLOO_SOCKET_IFNAME=" in output
            assert f"{INTERFACE} (10.77.0.2)" in output or f"GLOO_SOCKET_IFNAME={INTERFACE}" in output
            status, output = _learner_over(
                nodes, tmp_path / "run", path, GLOO_SOCKET_IFNAME=INTERFACE, **given
            )
    assert status == 0, output[-3000:]
    assert_trained_on_both_channels(directory, 2)


def _learner_over(nodes: Sequence[Host], logs: Path, config: Path, **environment: str) -> tuple[int, str]:
    """The worst status of one torchrun per host, and all output."""
    running = []
    for rank, node in enumerate(nodes):
        words = [
            "-m", "torch.distributed.run", f"--nnodes={len(nodes)}", f"--node-rank={rank}", "--nproc-per-node=1",
            f"--master-addr={nodes[0].address}", f"--master-port={RENDEZVOUS_PORT}",
            "-m", "swift_stage2", "train", config,
        ]  # fmt: skip
        log = logs.with_suffix(f".{rank}.log")
        running.append((start(node, log, words, **environment), log))
    told = [ended(process, log) for process, log in running]
    return max(abs(status) for status, _ in told), "".join(output for _, output in told)


def test_a_message_tells_name_route_port_and_firewall_apart(tmp_path: Path) -> None:
    with network_hosts("server", "learner") as (server, learner):
        server.answer_nothing_to(learner.second_address)
        with our_server(server, tmp_path / "server.log") as address:
            endpoint = {"base_url": address.base_url, "group_port": GROUP_PORT}
            wrong = {
                "nowhere.invalid": "write rollout.servers[].group_host",
                "10.99.0.1": "this machine has no route there",
                "localhost": "nothing listens there: group_bind must be the address that group_host leads to",
                server.second_address: "open group_port in every firewall between the two machines",
            }
            hosts = [*wrong, server.name]
            told = rounds(
                learner,
                tmp_path / "rounds.log",
                [endpoint | {"group_host": host} for host in hosts],
                timeout_s=20.0,
            )
    for (host, remedy), report in zip(wrong.items(), told[:-1], strict=True):
        assert not report["proven"]
        assert f"the weight group did not form at {host}:{GROUP_PORT}" in report["error"]
        assert remedy in report["error"], report["error"]
    assert told[-1]["proven"], told[-1]["error"]
