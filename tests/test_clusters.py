"""Scripts, manifests and the image of ``clusters/``: their commands exist, the YAML that they make is one of ours."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_pages import options_of

from swift_stage2.config import load_config

ROOT = Path(__file__).parents[1]
CLUSTERS = ROOT / "clusters"
SCRIPTS = ("slurm-pair.sbatch", "slurm-several.sbatch")
TOLD = f'#!{sys.executable}\nimport os, sys\nprint(*sys.argv, len(os.environ["SWIFT_ROLLOUT_API_KEY"]), sep="\\t")\n'


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((CLUSTERS / name).read_text()))


def submit(tmp_path: Path, script: str, config: str, *hosts: str) -> list[list[str]]:
    """What the script has srun do, on an allocation of these hosts; its words, and how long the key is."""
    (tmp_path / "bin").mkdir()
    for name, text in {"srun": TOLD, "scontrol": "#!/bin/sh\nprintf '%s\\n' " + " ".join(hosts)}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "x", "SLURM_CPUS_PER_TASK": "1"}
    slurm["PATH"] = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    words = ["bash", str(CLUSTERS / script), str(ROOT / "configs" / config)]
    done = subprocess.run(
        words, cwd=tmp_path, env=os.environ | slurm, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    told = [line.split("\t")[1:] for line in done.stdout.splitlines()]
    return sorted(told, key=lambda each: "--learner-only" in " ".join(each))


def test_slurm_gives_one_node_to_each_side(tmp_path: Path) -> None:
    servers, learner = submit(tmp_path, "slurm-pair.sbatch", "cluster-pair.yaml", "n1", "n2")
    one = ["--nodes=1", "--ntasks=1"]
    assert servers == [*one, "--nodelist=n1", "swift-stage2", "launch", "run-7.yaml", "--servers-only", "64"]
    assert learner[:6] == [*one, "--nodelist=n2", "swift-stage2", "launch", "run-7.yaml"]
    assert learner[6:] == ["--learner-only", "--resume", "64"]
    config = load_config(tmp_path / "run-7.yaml")
    assert [server.host for server in config.rollout.servers] == ["n1", "n1"]


@pytest.mark.parametrize("num_learners", [2, 3])
def test_slurm_gives_as_many_nodes_to_servers_as_the_yaml_names(tmp_path: Path, num_learners: int) -> None:
    hosts = ["server-1", "server-0", "n3", "n4", "n5"][
        : 2 + num_learners
    ]  # names as the scripts' own, mixed up
    servers, learner = submit(tmp_path, "slurm-several.sbatch", "cluster-several.yaml", *hosts)
    assert servers[:3] == ["--nodes=2", "--ntasks=2", "--nodelist=server-1,server-0"]
    count = [f"--nodes={num_learners}", f"--ntasks={num_learners}"]
    assert learner[:3] == [*count, f"--nodelist={','.join(hosts[2:])}"]
    assert learner[3:6] == ["--kill-on-bad-exit=1", "bash", "-c"]
    config = load_config(tmp_path / "run-7.yaml")
    assert [server.host for server in config.rollout.servers] == ["server-1"] * 2 + ["server-0"] * 2
    assert config.launch.learner.nnodes == num_learners
    assert config.launch.learner.rdzv_endpoint == "n3:29400"


def test_the_names_that_kubernetes_gives_make_a_configuration(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "clusters.md").read_text()
    (edits,) = re.findall(r"^sed ('.*') configs/cluster-pair.yaml", page, re.M)
    for name in ("cluster-pair", "cluster-several"):
        made = subprocess.run(
            ["sed", *shlex.split(edits), ROOT / "configs" / f"{name}.yaml"], capture_output=True, timeout=60
        ).stdout
        (tmp_path / "run.yaml").write_bytes(made)
        config = load_config(tmp_path / "run.yaml")
        assert {server.host for server in config.rollout.servers} <= {"server-0.server", "server-1.server"}
        assert config.launch.learner.rdzv_endpoint in (None, "learner-0.learner:29400")


def test_bash_can_read_every_script_and_its_commands_exist_with_their_options() -> None:
    (task,) = documents("skypilot.yaml")
    texts = [*((CLUSTERS / name).read_text() for name in SCRIPTS), task["run"]]
    for text in texts:
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
    for name in ("kubernetes-servers.yaml", "kubernetes-learner.yaml"):
        (container,) = documents(name)[1]["spec"]["template"]["spec"]["containers"]
        texts.append(" ".join(container["args"]))
    found = [words for text in texts for words in re.findall(r"swift-stage2 (\w+) (.*)", text)]
    assert [command for command, _ in found] == ["launch"] * 8
    for command, words in found:
        written = re.findall(r"--[\w-]+", words)
        assert written
        assert set(written) <= options_of((command,))


@pytest.mark.parametrize("name", ["servers", "learner"])
def test_a_manifest_mounts_what_it_has_and_finds_its_pods(name: str) -> None:
    service, workload = documents(f"kubernetes-{name}.yaml")
    template = workload["spec"]["template"]
    (container,) = template["spec"]["containers"]
    mounted, held = container["volumeMounts"], template["spec"]["volumes"]
    assert {each["name"] for each in mounted} == {each["name"] for each in held}
    assert service["spec"]["selector"] == template["metadata"]["labels"]
    found_by = template["spec"].get("subdomain") or workload["spec"]["serviceName"]
    assert service["metadata"]["name"] == found_by
    user = template["spec"]["securityContext"]["runAsUser"]
    assert f"USER {user}\n" in (CLUSTERS / "Dockerfile").read_text()


def test_the_image_copies_and_installs_what_there_is() -> None:
    text = (CLUSTERS / "Dockerfile").read_text()
    for words in re.findall(r"^COPY (.*) \S+$", text, re.M):
        assert all((ROOT / word).exists() for word in words.split())
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    (installed,) = re.findall(r"-c (constraints/\S+) '\.\[(.*)\]'", text)
    assert (ROOT / installed[0]).exists()
    assert set(installed[1].split(",")) <= set(setup["options.extras_require"])
    assert f"-c {installed[0]} '.[{installed[1]}]'" in documents("skypilot.yaml")[0]["setup"]
