"""Server and learner on hosts of their own, as network namespaces: weights travel, or a message names what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs_on_hosts import (
    GROUP_PORT,
    TESTS,
    RunOnHost,
    assert_trained_on_both_channels,
    ended,
    our_server,
    start,
)
from network_hosts import INTERFACE, Host, network_hosts
from torchrun_job import write_config

pytestmark = [pytest.mark.slow, pytest.mark.namespaces, pytest.mark.timeout(1800)]

RENDEZVOUS_PORT = 29400


def test_both_sides_of_a_weight_group_over_gloo_bind_an_address_of_their_own(tmp_path: Path) -> None:
    with network_hosts("server", "learner") as (server, learner):
        for number, bound in enumerate((server.name, "0.0.0.0")):
            logs = [tmp_path / f"{number}-{rank}.log" for rank in range(2)]
            port = str(GROUP_PORT + number)
            members = [
                start(server, logs[0], [TESTS / "gloo_member.py", "0", bound, port]),
                start(learner, logs[1], [TESTS / "gloo_member.py", "1", server.name, port]),
            ]
            told = [ended(member, log, 120.0) for member, log in zip(members, logs, strict=True)]
            assert [status for status, _ in told] == [0, 0], told
            assert told[0][1].splitlines()[-1] == told[1][1].splitlines()[-1]


@pytest.mark.parametrize("transport", ["disk", pytest.param("tcp", marks=pytest.mark.slow)])
def test_two_ranks_train_both_channels_with_our_server_on_another_host_which_catches_up_after_a_restart(
    tmp_path: Path, rows_file: Path, transport: str
) -> None:
    """Weights travel by a network of their own, or by a directory that both hosts see."""
    directory, shared = tmp_path / "run", tmp_path / "shared"
    shared.mkdir()
    # Else the server would map the memory of a learner whose processes it sees.
    with network_hosts("server", "learner", own_processes=("server",)) as (server, learner):
        weights = server.second_address
        words = {"tcp": ("--group-bind", weights), "disk": ("--weights-root", str(shared))}[transport]
        with our_server(server, tmp_path / "server.log", *words) as address:
            path = write_config(directory, rows_file, address, b_ratio=0.5, swift={"max_steps": 100_000})
            config = yaml.safe_load(path.read_text())
            # So that no round comes before the catch-up.
            config["stage2_ab"]["channel_b"]["prefetch"]["sync_every_steps"] = 50_000
            if transport == "disk":
                config["rollout"]["sync"] |= {"transport": "disk", "disk_directory": str(shared)}
            else:
                config["rollout"]["servers"][0]["group_host"] = weights
            path.write_text(yaml.safe_dump(config))
            run = RunOnHost(learner, directory, path)
            run.wait_until(lambda: trains_b(run, since=0.0), "channel B")
        for process in server.processes():
            process.kill()
        with our_server(server, tmp_path / "restarted.log", *words):
            run.wait_until(lambda: proven(run.audit("catch_up")), "a catch-up of the restarted server")
            run.wait_until(lambda: trains_b(run, proven(run.audit("catch_up"))[0]["time"]), "channel B")
            status, output = run.stop()
    assert status == 0, output[-3000:]
    assert_trained_on_both_channels(directory, 2)
    (first,), caught_up = run.audit("round"), proven(run.audit("catch_up"))[0]
    assert caught_up["version"] == first["version"]
    reports = [record["servers"]["0"] for record in (first, caught_up)]
    # The stream says in brackets why no memory is mapped.
    assert {report["transport"].partition(" (")[0] for report in reports} == {transport}
    assert {report["proof"] for report in reports} == {"checksums+canary"}
    (start,) = run.audit("start")
    kept = f"{start['run_id']}-{first['version']}.safetensors"
    assert [path.name for path in shared.iterdir()] == [kept] * (transport == "disk")


def trains_b(run: RunOnHost, since: float) -> bool:
    """Rollouts have come since then, and a step of channel B after them."""
    answered = [record["time"] for record in run.audit("finished", since) if record["end"] == "answered"]
    return bool(answered) and any(step["channel"] == "B" for step in run.audit("step", answered[0]))


def proven(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if record["servers"]["0"]["proven"]]


def test_a_learner_over_two_hosts_trains_with_a_server_on_a_third(tmp_path: Path, rows_file: Path) -> None:
    directory = tmp_path / "run"
    with network_hosts("server", "node0", "node1", own_name_is_loopback=True) as (server, *nodes):
        with our_server(server, tmp_path / "server.log") as address:
            path = write_config(directory, rows_file, address, b_ratio=0.5, swift={"max_steps": 16})
            given = {"RECORD_DIR": str(tmp_path / "micro"), "INJECT": "*:1:await_packs"}
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
