"""The script of ``docs/running.md`` and those of ``clusters/``, as they stand, on hosts that are network namespaces."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs_on_hosts import Address, assert_trained_on_both_channels, audit
from network_hosts import Host, network_hosts
from torchrun_job import ENVIRONMENT, ROOT, TEMPLATE, write_config
from waiting import wait_for

from swift_stage2.runtime.checkpoints import checkpoints_in, why_not_whole

pytestmark = [pytest.mark.slow, pytest.mark.namespaces, pytest.mark.timeout(1800)]

_RUN_S = 900.0

# They take hosts from the file HOSTS: name to the command that runs words there. What ssh is given is a shell's.
SSH = """
host, words = sys.argv[1], ["bash", "-c", " ".join(sys.argv[2:])]
os.execvp("ip", [*hosts[host], *words])
"""
# As the real one: tasks start in the order of hosts, each told its rank. Slurm's signals, near the limit (here: a file)
# and when the script has ended, go to every process of a step. SIGTERM to srun itself kills the step at once.
SRUN = """
import psutil, signal, subprocess, time
options = [word for word in sys.argv[1:] if word.startswith("--")][:3]
nodes = next(word for word in options if word.startswith("--nodelist=")).partition("=")[2].split(",")
words = sys.argv[1 + len(options):]
tasks = [subprocess.Popen([*hosts[node], *words], env=os.environ | {"SLURM_PROCID": str(rank)})
         for rank, node in enumerate(nodes)]
def send(number, *_):
    for process in psutil.Process().children(recursive=True):
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            pass
signal.signal(signal.SIGTERM, lambda *_: send(signal.SIGKILL))
script, told = os.getppid(), False
while any(task.poll() is None for task in tasks):
    if not told and (os.getppid() != script or os.path.exists("limit")):
        told = True
        send(signal.SIGTERM)
    time.sleep(0.1)
sys.exit(max(task.returncode % 256 for task in tasks))
"""
SCONTROL = 'print("\\n".join(hosts))\n'


def config_of(directory: Path, rows: Path, example: str, **swift: Any) -> dict[str, Any]:
    """Servers and learner of an example, one server a host, around the tiny model on CPUs."""
    given = yaml.safe_load((ROOT / "configs" / example).read_text())
    small = write_config(
        directory / "run",
        rows,
        Address("http://unused:1"),
        b_ratio=0.5,
        swift={"max_steps": 16} | swift,
        preprocessing="process",
    )
    config: dict[str, Any] = yaml.safe_load(small.read_text())
    servers = [each for each in given["rollout"]["servers"] if each["base_url"].endswith(":8000")]
    config["rollout"] |= {"servers": servers, "start_timeout_s": 480}
    config["launch"] = {"learner": given["launch"]["learner"] | {"nproc_per_node": 1, "devices": []}}
    options = {"model-type": "stage2_tiny_vl", "external-plugins": str(TEMPLATE), "torch-dtype": "float32"}
    server = {"engine": "transformers", "args": options | {"num-threads": 1}}
    config["launch"]["servers"] = [server] * len(servers)
    return config


class Job:
    """A script whose programs find the hosts."""

    def __init__(self, directory: Path, hosts: Sequence[Host], script: str, **variables: str) -> None:
        commands = {host.name: host.command([]) for host in hosts}
        (directory / "hosts.json").write_text(json.dumps(commands))
        (directory / "bin").mkdir(exist_ok=True)
        file = str(directory / "hosts.json")
        start = f"#!{sys.executable}\nimport json, os, sys\nhosts = json.load(open({file!r}))\n"
        for name, body in {"ssh": SSH, "srun": SRUN, "scontrol": SCONTROL}.items():
            (directory / "bin" / name).write_text(start + body)
            (directory / "bin" / name).chmod(0o755)
        self.directory, self.log, self.variables = directory, directory / "script.log", variables
        for place, own in {"/shared/project": str(directory), "/shared/venv": sys.prefix}.items():
            script = script.replace(place, own)
        (directory / "script").write_text(script)

    def start(self, *words: str, host: Host | None = None, **variables: str) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(
            [str(self.directory / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
        )
        record = {"RECORD_DIR": str(self.directory / "micro_steps"), "INJECT": "*:1:await_packs"}
        command = ["bash", str(self.directory / "script"), *words]
        with self.log.open("ab") as output:
            return subprocess.Popen(
                command if host is None else host.command(command),
                cwd=self.directory if host is None else self.directory / host.name,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | ENVIRONMENT | self.variables | {"PATH": path} | record | variables,
            )

    def ends(self, *running: subprocess.Popen[bytes]) -> list[int]:
        statuses = [each.wait(timeout=_RUN_S) for each in running]
        if any(statuses):
            for each in [*self.directory.glob("*-?.log"), *self.directory.glob("run/logs/*.log")]:
                print(each.name, each.read_text(errors="replace")[-2500:])
            print(self.log.read_text(errors="replace")[-4000:])
        return statuses


def slurm_job(directory: Path, hosts: Sequence[Host], name: str) -> Job:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "nodes", "SLURM_CPUS_PER_TASK": "1"}
    return Job(directory, hosts, (ROOT / "clusters" / name).read_text(), **slurm)


def nothing_runs(hosts: Sequence[Host]) -> bool:
    """Slurm ends the servers when the script has ended already."""
    wait_for(lambda: not any(host.processes() for host in hosts))
    return True


def write(config: Mapping[str, Any], file: Path, **names: str) -> None:
    text = yaml.safe_dump(config)
    for placeholder, name in names.items():
        text = text.replace(placeholder, name)
    file.write_text(text)


def test_ssh_trains_over_three_hosts(tmp_path: Path, rows_file: Path) -> None:
    config = config_of(tmp_path, rows_file, "cluster-several.yaml")
    del config["rollout"]["servers"][1], config["launch"]["servers"][1]
    write(config, tmp_path / "cluster.yaml", SERVER_0="server-0", LEARNER_0="learner-0")
    (tmp_path / "api_key").write_text("hush\n")
    page = (ROOT / "docs" / "running.md").read_text()
    (script,) = [text for text in re.findall(r"```bash\n(.*?)```", page, re.S) if "run-with-ssh" in text]
    with network_hosts("server-0", "learner-0", "learner-1") as hosts:
        job = Job(tmp_path, hosts, script)
        assert job.ends(job.start()) == [0]
        assert_trained_on_both_channels(tmp_path / "run", 2)
        assert nothing_runs(hosts)


def test_slurm_trains_on_several_hosts_of_each_side(tmp_path: Path, rows_file: Path) -> None:
    write(config_of(tmp_path, rows_file, "cluster-several.yaml"), tmp_path / "run.yaml")
    with network_hosts("server-1", "node-1", "node-2", "node-3") as hosts:
        job = slurm_job(tmp_path, hosts, "slurm-several.sbatch")
        assert job.ends(job.start("run.yaml")) == [0]
        assert_trained_on_both_channels(tmp_path / "run", 2)
        logs = {each.name for each in (tmp_path / "run" / "logs").glob("*.log")}
        assert {"server0.log", "server1.log", "learner.node0.log", "learner.node1.log"} <= logs
        assert nothing_runs(hosts)


def test_a_job_of_slurm_that_comes_to_its_limit_saves_and_goes_on_when_it_is_submitted_again(
    tmp_path: Path, rows_file: Path
) -> None:
    saves = {"save_strategy": "steps", "save_steps": 1000, "max_steps": 5000}
    config = config_of(tmp_path, rows_file, "cluster-pair.yaml", **saves)
    write(config, tmp_path / "run.yaml")
    with network_hosts("node-0", "node-1") as hosts:
        job = slurm_job(tmp_path, hosts, "slurm-pair.sbatch")
        running = job.start("run.yaml")
        events = tmp_path / "run" / "events" / "rank0.jsonl"
        wait_for(lambda: events.is_file() and len(audit(tmp_path / "run", 0, "step")) > 4, _RUN_S)
        (tmp_path / "limit").touch()
        assert job.ends(running) == [143]
        ((step, saved),) = checkpoints_in(tmp_path / "run").items()
        assert not why_not_whole(saved, needs_stage2=True)
        assert nothing_runs(hosts)
        (tmp_path / "limit").unlink()
        config["swift"]["max_steps"] = step + 8
        write(config, tmp_path / "run.yaml")
        assert job.ends(job.start("run.yaml")) == [0]
        steps = [each["step"] for each in audit(tmp_path / "run", 0, "step")]
        assert steps == list(range(step + 8))
        assert nothing_runs(hosts)


def test_skypilot_trains_on_one_node_and_serves_on_the_other_until_it_has_ended(
    tmp_path: Path, rows_file: Path
) -> None:
    (task,) = yaml.safe_load_all((ROOT / "clusters" / "skypilot.yaml").read_text())
    config = config_of(tmp_path, rows_file, "cluster-pair.yaml")
    with network_hosts("node-0", "node-1") as hosts:
        job = Job(tmp_path, hosts, task["run"], SWIFT_ROLLOUT_API_KEY="hush")
        nodes = []
        for rank, host in enumerate(hosts):
            (tmp_path / host.name / "configs").mkdir(parents=True)
            write(config, tmp_path / host.name / "configs" / "cluster-pair.yaml")
            ips = "\n".join(each.address for each in hosts)
            nodes.append(job.start(host=host, SKYPILOT_NODE_RANK=str(rank), SKYPILOT_NODE_IPS=ips))
        assert job.ends(*nodes) == [0, 0]
        assert_trained_on_both_channels(tmp_path / "run", 1)
        assert nothing_runs(hosts)
