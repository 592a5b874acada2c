"""The scripts of ``docs/running.md``, as they stand there, on hosts that are network namespaces."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs_on_hosts import Address, assert_trained_on_both_channels
from network_hosts import Host, network_hosts
from torchrun_job import ENVIRONMENT, ROOT, TEMPLATE, write_config

pytestmark = [pytest.mark.slow, pytest.mark.namespaces, pytest.mark.timeout(1800)]

PAGE = (ROOT / "docs" / "running.md").read_text()
NAMES = ("server-0", "learner-0", "learner-1")
_RUN_S = 600.0

# Both take hosts from the file HOSTS: name to the command that runs words there. What ssh is given is a shell's; srun
# starts its tasks in the order of its hosts, tells each its rank and hands SIGTERM on, as the real one does.
SSH = """
host, words = sys.argv[1], ["bash", "-c", " ".join(sys.argv[2:])]
os.execvp("ip", [*hosts[host], *words])
"""
SRUN = """
import signal, subprocess
options = [word for word in sys.argv[1:] if word.startswith("--")][:3]
nodes = next(word for word in options if word.startswith("--nodelist=")).partition("=")[2].split(",")
words = sys.argv[1 + len(options):]
tasks = [subprocess.Popen([*hosts[node], *words], env=os.environ | {"SLURM_PROCID": str(rank)})
         for rank, node in enumerate(nodes)]
signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
sys.exit(max(task.wait(timeout=600) for task in tasks))
"""
SCONTROL = 'print("\\n".join(hosts))\n'


def block(language: str, start: str) -> str:
    """The page's one block of that language with ``start`` in it."""
    (found,) = [text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.S) if start in text]
    return str(found)


def page_config(directory: Path, rows: Path) -> dict[str, Any]:
    """The page's own servers and learner, around the tiny model on CPUs."""
    given = yaml.safe_load(block("yaml", "cluster.yaml"))
    small = write_config(
        directory / "run",
        rows,
        Address("http://unused:1"),
        b_ratio=0.5,
        swift={"max_steps": 16},
        preprocessing="process",
    )
    config: dict[str, Any] = yaml.safe_load(small.read_text())
    config["rollout"] |= {"servers": given["rollout"]["servers"], "start_timeout_s": 240}
    config["launch"] = given["launch"]
    config["launch"]["learner"] |= {"nproc_per_node": 1, "devices": []}
    for server in config["launch"]["servers"]:
        options = {
            "model-type": "stage2_tiny_vl",
            "external-plugins": str(TEMPLATE),
            "torch-dtype": "float32",
        }
        server |= {"engine": "transformers", "devices": [], "args": options | {"num-threads": 1}}
    return config


@pytest.fixture
def hosts() -> Iterator[Sequence[Host]]:
    with network_hosts(*NAMES) as made:
        yield made


@pytest.mark.parametrize("way", ["ssh", pytest.param("slurm", marks=pytest.mark.slow)])
def test_a_job_over_three_hosts_trains_both_channels_and_leaves_nothing(
    tmp_path: Path, rows_file: Path, hosts: Sequence[Host], way: str
) -> None:
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(page_config(tmp_path, rows_file)))
    commands = {host.name: host.command([]) for host in hosts}
    (tmp_path / "hosts.json").write_text(json.dumps(commands))
    (tmp_path / "bin").mkdir()
    for name, body in {"ssh": SSH, "srun": SRUN, "scontrol": SCONTROL}.items():
        start = f"#!{sys.executable}\nimport json, os, sys\nhosts = json.load(open({str(tmp_path / 'hosts.json')!r}))\n"
        (tmp_path / "bin" / name).write_text(start + body)
        (tmp_path / "bin" / name).chmod(0o755)
    script = block("bash", {"ssh": "run-with-ssh", "slurm": "#SBATCH"}[way])
    for place, own in {"/shared/project": str(tmp_path), "/shared/venv": sys.prefix}.items():
        assert script.count(place) == 1
        script = script.replace(place, own)
    (tmp_path / "script").write_text(script)
    (tmp_path / "api_key").write_text("hush\n")
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": ",".join(NAMES), "SLURM_CPUS_PER_TASK": "1"}
    log = tmp_path / "script.log"
    with log.open("wb") as output:
        status = subprocess.run(
            ["bash", tmp_path / "script"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=_RUN_S,
            env=os.environ
            | ENVIRONMENT
            | (slurm if way == "slurm" else {})
            | {"PATH": path, "RECORD_DIR": str(tmp_path / "micro_steps"), "INJECT": "*:1:await_packs"},
        ).returncode
    told = log.read_text(errors="replace") + "".join(
        each.read_text(errors="replace")[-3000:] for each in sorted(tmp_path.glob("*-?.log"))
    )
    assert status == 0, told[-6000:]
    assert_trained_on_both_channels(tmp_path / "run", 2)
    logs = {each.name for each in (tmp_path / "run" / "logs").glob("*.log")}
    assert {"server0.log", "learner.node0.log", "learner.node1.log"} <= logs
    for host in hosts:
        assert host.processes() == []
