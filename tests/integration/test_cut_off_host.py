"""A server's host drops off the network in the middle of a staged round, and comes back: training never stops."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from jobs_on_hosts import GROUP_PORT, RunOnHost, our_server
from network_hosts import Host, network_hosts
from torchrun_job import write_config

from swift_stage2.telemetry.account import account_of
from swift_stage2.telemetry.event_log import read_logs

pytestmark = [pytest.mark.slow, pytest.mark.namespaces, pytest.mark.timeout(1800)]

CUT_S = 30.0
PUSH_S = 24  # shorter than the cut
REQUEST_TIMEOUT_S = 60  # longer than the cut: no batch may wait so long for what was asked of the lost server
_END_S = 30.0
_SLOW_KBIT_PER_S = 4000  # 6.6 MB of weights take 13 s
_BUCKET_BYTES = 1 << 20
CUT, KEPT = "0", "1"  # servers, as the audit names them

Record = dict[str, Any]


def is_proven(record: Record, server: str) -> bool:
    report = record["servers"].get(server)
    return report is not None and report["proven"]


def config_of(directory: Path, rows: Path, cut: Any, kept: Any) -> Path:
    path = write_config(directory, rows, cut, b_ratio=0.5, swift={"max_steps": 100_000})
    config = yaml.safe_load(path.read_text())
    config["rollout"]["servers"].append({"base_url": kept.base_url, "group_port": kept.group_port})
    config["rollout"] |= {
        "max_inflight_per_server": 12,
        "request_timeout_s": REQUEST_TIMEOUT_S,
        # auto: a server that could see the learner's memory would map it, and there would be no transfer to cut.
        "sync": {
            "timeout_s": PUSH_S,
            "bucket_mib": 1,
            "backoff_steps": 1,
            "transport": "auto",
            "rolling": True,
        },
    }
    path.write_text(yaml.safe_dump(config))
    return path


def test_a_host_that_is_cut_off_in_the_middle_of_a_transfer_is_left_out_and_taken_back(
    tmp_path: Path, rows_file: Path
) -> None:
    # A namespace of the network alone shares /proc and the user with the learner, and its server would map the
    # learner's memory; on hosts of their own servers see none of the learner's processes.
    hosts = network_hosts("learner", "cut", "kept", own_processes=("cut", "kept"))
    with hosts as (learner, cut, kept):
        with (
            our_server(cut, tmp_path / "cut.log") as at_cut,
            our_server(kept, tmp_path / "kept.log") as at_kept,
        ):
            run = RunOnHost(
                learner, tmp_path / "run", config_of(tmp_path / "run", rows_file, at_cut, at_kept)
            )
            both = {at_cut.base_url, at_kept.base_url}
            run.wait_until(
                lambda: any(
                    record["staged"] and all(is_proven(record, server) for server in (CUT, KEPT))
                    for record in run.audit("round")
                ),
                "a staged round that proves both servers",
            )
            assert transports(run.audit("round")) == {(CUT, "tcp"), (KEPT, "tcp")}
            run.wait_until(lambda: run.answering(since=0.0) == both, "answers of both servers")

            with cut.slow(_SLOW_KBIT_PER_S):
                run.wait_until(lambda: cut.received_bytes(GROUP_PORT) > _BUCKET_BYTES, "a bucket of a round")
                with cut.cut_off():
                    since, end = time.time(), time.monotonic() + CUT_S
                    check_what_goes_on(run, since, at_kept.base_url)
                    run.wait_until(lambda: time.monotonic() > end, "the end of the cut")
            back = time.time()
            run.wait_until(
                lambda: any(is_proven(record, CUT) for record in run.audit("round", back)),
                "a proof of the server that was cut off",
            )
            again = next(record["time"] for record in run.audit("round", back) if is_proven(record, CUT))
            run.wait_until(lambda: run.answering(again) == both, "answers of both servers")
            children = psutil.Process(run.torchrun.pid).children(recursive=True)
            status, output = run.stop()
            assert status == 0, output[-3000:]
            assert psutil.wait_procs(children, timeout=_END_S)[1] == []
            assert learner.processes() == []
            serving = [*cut.processes(), *kept.processes()]
            assert len(serving) > 0
    assert not any(process.is_running() for process in serving)
    assert_gone(learner, cut, kept)
    check_rounds(run.audit("round"))
    account = account_of(read_logs([run.directory]))
    assert account.is_balanced, account
    assert [rank.has_ended for rank in account.ranks] == [True, True]
    assert all(rank.trained > 0 and rank.num_void == 0 for rank in account.ranks)


def check_what_goes_on(run: RunOnHost, since: float, kept: str) -> None:
    """While a server cannot be reached: the round fails there alone, both channels train, the other one answers."""
    in_transfer = run.audit("step")[-1]["step"]
    run.wait_until(lambda: run.audit("round", since), "the end of the round that was cut")
    broken = run.audit("round", since)[0]
    assert broken["staged"]
    assert is_proven(broken, KEPT), broken
    assert not is_proven(broken, CUT), broken
    assert "the server was lost while weights were sent" in broken["servers"][CUT]["error"], broken
    assert broken["step"] > in_transfer + 1, "training waited for the round"

    def is_trained_by_the_other_alone() -> bool:
        steps, rounds = run.audit("step", broken["time"]), run.audit("round", broken["time"])
        newest = [
            step for step in steps if any(version >= broken["version"] for version in step["packs"].values())
        ]
        return {step["channel"] for step in steps} == {"A", "B"} and bool(newest) and bool(rounds)

    run.wait_until(is_trained_by_the_other_alone, "both channels and a round with one server")
    assert run.answering(broken["time"]) == {kept}
    assert {end for server, end in run.ends(since) if server != kept} <= {"answered", "lost", "unreachable"}
    later = run.audit("round", broken["time"])
    assert all(record["servers"].keys() == {KEPT} and is_proven(record, KEPT) for record in later), later


def transports(rounds: list[Record]) -> set[tuple[str, str]]:
    """Servers that rounds have proven, and how the weights came to them."""
    return {
        (server, report["transport"].partition(" (")[0])  # without the reason for not mapping
        for record in rounds
        for server, report in record["servers"].items()
        if report["proven"]
    }


def check_rounds(rounds: list[Record]) -> None:
    """Weights travel to both servers, and never as memory that they share with the learner."""
    assert not rounds[0]["staged"]
    reports = [(server, report) for record in rounds for server, report in record["servers"].items()]
    assert transports(rounds) == {(CUT, "tcp"), (KEPT, "tcp")}
    assert [server for server, report in reports if not report["proven"]] == [CUT]
    turns = [
        "turn" in report["seconds"]
        for record in rounds
        if record["staged"]  # not where a server that was away comes back
        for report in record["servers"].values()
        if report["proven"]
    ]
    assert all(turns), "servers install one after another"


def assert_gone(*hosts: Host) -> None:
    """Links go with the namespace that they are in, and a namespace with its name once nothing runs in it."""
    told = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, timeout=30, check=True
    ).stdout
    found = {line.split()[0] for line in told.splitlines()}
    assert found.isdisjoint({hosts[0].switch, *(host.namespace for host in hosts)})
