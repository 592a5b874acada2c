"""Ranks on several hosts need an interface, a rank ends with its torchrun, and GPUs that are named must be there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from commands import run_command, run_python

from swift_stage2.errors import UserError
from swift_stage2.runtime.environment import check_gloo_address, end_with_torchrun, require_visible_devices

WHOLE = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        WHOLE,
        WHOLE | {"LOCAL_WORLD_SIZE": "1"},  # two torchruns on this machine
        WHOLE | {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"},
        WHOLE | {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.0.0.1", "GLOO_SOCKET_IFNAME": "eth7"},
    ],
)
def test_gloo_needs_an_interface_on_several_hosts_only(environment: dict[str, str]) -> None:
    """The rest is shown on hosts of their own: ``test_several_hosts``."""
    check_gloo_address(environment)


_DEADLINE_S = 90.0
_RANK = """
import os, pathlib, signal, sys, time
from swift_stage2.runtime import environment
folder, manner, rank = pathlib.Path(sys.argv[1]), sys.argv[2], os.environ["RANK"]
def save(*_):
    (folder / f"saved{rank}").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save if manner == "saves" else signal.SIG_IGN)
environment._GRACE_S = 300.0 if manner == "saves" else 0.5
environment.end_with_torchrun(os.environ)
(folder / f"{os.getpid()}.rank").touch()
while True:  # pause() would miss a signal that comes right before it
    time.sleep(0.1)
"""

_AT_FIRST_SLOW_IMPORT = """
import importlib.abc, os, pathlib, sys
class Look(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *_):
        if name == "swift_stage2.launch.rank":
            files = list(pathlib.Path("/proc/self/fdinfo").iterdir())
            print(*[line for file in files if file.exists() for line in file.read_text().splitlines()], sep="\\n")
            sys.stdout.flush()
            os._exit(0)
sys.meta_path.insert(0, Look())
from swift_stage2 import cli
cli.main(["train", "none.yaml"])
"""


@pytest.mark.parametrize(
    "manner",
    [
        pytest.param("saves", marks=[pytest.mark.slow, pytest.mark.ci]),
        pytest.param("ignores SIGTERM", marks=pytest.mark.slow),
    ],
)
def test_ranks_end_with_a_torchrun_that_was_killed(tmp_path: Path, manner: str) -> None:
    script = tmp_path / "rank.py"
    script.write_text(_RANK)
    command = ["-m", "swift_stage2.collectives", "--nproc-per-node=2", str(script)]
    torchrun = subprocess.Popen([sys.executable, *command, str(tmp_path), manner], start_new_session=True)
    end, pause = time.monotonic() + _DEADLINE_S, threading.Event()
    ranks: list[psutil.Process] = []
    try:
        while len(list(tmp_path.glob("*.rank"))) < 2:
            assert torchrun.poll() is None
            assert time.monotonic() < end
            pause.wait(0.1)
        ranks = [psutil.Process(int(path.stem)) for path in tmp_path.glob("*.rank")]
        torchrun.kill()
        torchrun.wait(timeout=_DEADLINE_S)
        _, left = psutil.wait_procs(ranks, timeout=_DEADLINE_S)
        assert left == []
        assert len(list(tmp_path.glob("saved*"))) == (2 if manner == "saves" else 0)
    finally:
        for process in (psutil.Process(torchrun.pid), *ranks) if torchrun.poll() is None else ranks:
            if process.is_running():
                process.send_signal(signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.ci
def test_a_torchrun_of_one_machine_listens_on_loopback_alone(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, psutil, torch.distributed as distributed\n"
        "distributed.init_process_group('gloo')\n"
        "if distributed.get_rank() == 0:\n"
        "    found = psutil.Process(os.getppid()).net_connections('tcp')\n"
        "    print(*[each.laddr.ip for each in found if each.status == 'LISTEN'])\n"
        "distributed.barrier()\n"
    )
    command = ["-m", "swift_stage2.collectives", "--nproc-per-node=2", str(script)]
    done = run_python(*command, timeout=_DEADLINE_S, check=True)
    assert done.stdout.split() == ["127.0.0.1"]


def test_a_rank_knows_its_agent_before_anything_slow_is_imported() -> None:
    done = run_python(
        "-c", _AT_FIRST_SLOW_IMPORT, variables={"TORCHELASTIC_RUN_ID": "none"}, timeout=_DEADLINE_S
    )
    assert f"Pid:\t{os.getpid()}" in done.stdout.splitlines()


def test_a_process_that_torchrun_did_not_start_is_not_watched() -> None:
    before = threading.active_count()
    end_with_torchrun({"RANK": "0", "MASTER_ADDR": "127.0.0.1"})
    assert threading.active_count() == before


# --- GPUs ---

STAGE1 = Path(__file__).parents[2] / "swift_stage2" / "demo" / "stage1"


@pytest.mark.parametrize(
    ("visible", "found"),
    [(None, 0), ("", 0), ("-1", 0), ("0", 1), ("0,1", 2), ("1,-1,3", 1), ("GPU-8932f937", 1)],
)
def test_what_is_there_is_taken(visible: str | None, found: int) -> None:
    require_visible_devices({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, found)


@pytest.mark.parametrize(("visible", "found"), [("7", 0), ("0,7", 1), ("GPU-8932f937", 0), ("0,1", 0)])
def test_fewer_than_named_are_refused(visible: str, found: int) -> None:
    with pytest.raises(UserError, match=f"CUDA_VISIBLE_DEVICES={visible} and {found} device"):
        require_visible_devices({"CUDA_VISIBLE_DEVICES": visible}, found)


_NPU = """
import torch

class Npu:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)

torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", Npu)
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "rollout"])
@pytest.mark.parametrize(
    ("variables", "told"),
    [
        (
            {"CUDA_VISIBLE_DEVICES": ""},
            "devices must be GPUs that torch knows as CUDA (NVIDIA, ROCm), or the CPU, got npu",
        ),
        ({"CUDA_VISIBLE_DEVICES": "901"}, "CUDA_VISIBLE_DEVICES=901 and 0 device(s)"),
    ],
    ids=["npu", "absent"],
)
def test_a_device_that_is_not_cuda_or_not_there_is_refused_and_the_cpu_does_not_take_its_place(
    tmp_path: Path, command: str, variables: dict[str, str], told: str
) -> None:
    """A machine whose torch has an NPU, as torch's own registration of one makes it; or a GPU that is not there."""
    if "npu" in told:
        (tmp_path / "sitecustomize.py").write_text(_NPU)
        variables = {**variables, "PYTHONPATH": str(tmp_path)}
    config = tmp_path / "run.yaml"
    config.write_text(
        f"swift: {{model: {STAGE1}, output_dir: {tmp_path / 'out'}}}\nstage2_ab: {{schedule: {{b_ratio: 0}}}}\n"
    )
    kind = ("--port", "0", "--model-type", "stage2_tiny_vl", "--template", "stage2_tiny_vl")
    plugin = ("--external-plugins", str(STAGE1.parent / "tiny_template.py"))
    words = [str(config)] if command == "train" else [str(STAGE1), *kind, *plugin]
    ended = run_command(command, *words, timeout=200, variables=variables)
    assert ended.returncode == 2, ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert last.startswith(f"swift-stage2 {command}: error: ")
    assert told in last
