"""The whole check, rehearsed on the CPU with real processes, and stages that end in every bad way."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from commands import run_python

from benchmarks.gpu_check import command, stage_process
from benchmarks.gpu_check.stage import STAGES, Status
from swift_stage2.runtime.run_directory import make_directory

ROOT = Path(__file__).parents[2]
NEEDS = {"zero3": "deepspeed", "nccl-rollout": "vllm", "one-gpu-vllm": "vllm"}
NOT_HERE = {stage: package for stage, package in NEEDS.items() if find_spec(package) is None}
# One learner after another takes a minute each: learner-lora is rehearsed by a long test, and learner-full is it with
# the tuner of two-ranks.
REHEARSED = [stage.name for stage in STAGES if stage.name not in ("learner-lora", "learner-full")]

pytestmark = pytest.mark.timeout(1900)


class Check(NamedTuple):
    """One whole check: its exit status, report, page and what was printed."""

    status: int
    report: dict[str, Any]
    page: str
    told: str
    left: list[str]

    def stage(self, name: str) -> dict[str, Any]:
        (stage,) = [stage for stage in self.report["stages"] if stage["name"] == name]
        return stage


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Check:
    """All stages that every change must pass."""
    return rehearse(tmp_path_factory.mktemp("check"), REHEARSED)


def rehearse(directory: Path, stages: Sequence[str]) -> Check:
    """As a user would start it."""
    options = ["--rehearse", "--deadline-s", "3600", "--output", directory / "check", "--stages", *stages]
    done = subprocess.run(
        [ROOT / "scripts" / "gpu-check", *options],
        capture_output=True, text=True, timeout=1800, env=os.environ | {"PYTHON": sys.executable}, check=False,
    )  # fmt: skip
    commands = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    return Check(
        done.returncode,
        json.loads((directory / "check" / command.JSON_FILE).read_text()),
        (directory / "check" / command.PAGE_FILE).read_text(),
        done.stdout + done.stderr,
        [each for each in commands if str(directory) in each],
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in REHEARSED if name not in NOT_HERE])
def test_a_stage_passes_in_the_rehearsal(check: Check, name: str) -> None:
    stage = check.stage(name)
    assert (stage["status"], stage["why"]) == ("passed", ""), check.told


@pytest.mark.slow
def test_ranks_train_both_channels_beside_a_server_that_is_proven(check: Check) -> None:
    assert_trained(check.stage("two-ranks")["figures"])


def assert_trained(figures: Mapping[str, float]) -> None:
    assert figures["num_rounds_proven"] >= 2
    assert figures["num_b_steps"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "package"), NOT_HERE.items())
def test_a_stage_whose_package_is_missing_says_so(check: Check, name: str, package: str) -> None:
    stage = check.stage(name)
    assert (stage["status"], stage["why"]) == ("skipped", f"needs {package}, not installed here")


@pytest.mark.slow
def test_skipped_stages_fail_no_check_and_the_page_says_it_is_a_rehearsal(check: Check) -> None:
    assert check.status == 0, check.told
    assert check.report["finished"]
    assert "No figure on this page says anything about a GPU" in check.page
    assert check.left == []


# --- stages that end badly ------------------------------------------------------------------------

BAD_STAGES = """
import os, subprocess, sys, threading
def hang(context):
    context.note("before_s", 1.0)
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
    context.note("child", child.pid)
    context.at("halfway")
    print("it stands still", flush=True)
    threading.Event().wait()
def crash(context):
    os.kill(os.getpid(), 11)
def out_of_memory(context):
    import torch
    torch.empty(1 << 60, dtype=torch.uint8)
def run(context, how):
    globals()[how](context)
"""


def _bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, deadline_s: float) -> tuple[Status, str]:
    """Runs a stage that is registered only for this process and its child."""
    (tmp_path / "bad_stage.py").write_text(BAD_STAGES)
    starter = (
        "import sys\n"
        "from benchmarks.gpu_check import stage_process\n"
        "from benchmarks.gpu_check.stage import Stage\n"
        f"stage = Stage(name='bad', proves='', work='bad_stage:run', seconds=1, arguments={{'how': {how!r}}})\n"
        "stage_process.STAGES = (stage,)\n"
        "sys.exit(stage_process.main(sys.argv[1:]))\n"
    )
    (tmp_path / "bad_process.py").write_text(starter)
    monkeypatch.setattr(stage_process, "PROGRAM", "bad_process")
    results = tmp_path / "results"
    results.mkdir()
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    return stage_process.run_child(
        "bad", results, tmp_path, os.environ | {"PYTHONPATH": path}, deadline_s=deadline_s, rehearsal=True
    )


@pytest.mark.slow
def test_a_stage_that_hangs_is_ended_with_all_below_it_and_keeps_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, why = _bad(tmp_path, monkeypatch, "hang", 20.0)
    assert status is Status.FAILED
    where = r"halfway after \d+ s, then stage\.log: it stands still"
    assert re.fullmatch(rf"it did not end within 20 s; {where}", why)
    figures = json.loads((tmp_path / "results" / "figures.json").read_text())
    assert figures["before_s"] == 1.0
    assert not psutil.pid_exists(int(figures["child"]))


def test_a_stage_that_crashes_is_told_by_its_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, why = _bad(tmp_path, monkeypatch, "crash", 200.0)
    assert status is Status.FAILED
    assert why.startswith(f"its process ended with signal {signal.SIGSEGV.value}: ")
    assert "\n" not in why


# --- time and signals -----------------------------------------------------------------------------


@pytest.mark.parametrize("total_s", [90.0, 300.0, 600.0])
@pytest.mark.parametrize("overrun_s", [0.0, 55.0])
def test_a_check_whose_stages_all_have_to_be_killed_ends_by_its_deadline(
    total_s: float, overrun_s: float
) -> None:
    elapsed_s = 0.0
    given = []
    for stage in STAGES:
        deadline_s = command.time_for(stage, total_s - 60.0 - elapsed_s)
        given.append(deadline_s)
        elapsed_s += 0.0 if deadline_s is None else deadline_s + overrun_s
    assert elapsed_s <= total_s
    assert given[0] is not None
    assert all(each is None or each >= 30.0 for each in given)


def _program(patch: str, options: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command after ``patch`` in a process of its own."""
    code = (
        f"import os, signal, sys\n{patch}\n"
        "from swift_stage2.cli import ended\nfrom benchmarks.gpu_check.command import main\n"
        "sys.exit(ended('gpu-check', lambda: main(sys.argv[1:])))"
    )
    return run_python("-c", code, *options, timeout=300, variables={"PYTHONPATH": str(ROOT)} | environment)


def test_a_signal_between_stages_leaves_the_page_and_nothing_else(tmp_path: Path) -> None:
    patch = """
from benchmarks.gpu_check import command
write = command.write_report
def write_and_signal(*arguments, **more):
    write(*arguments, **more)
    os.kill(os.getpid(), signal.SIGTERM)
command.write_report = write_and_signal
"""
    (tmp_path / "scratch").mkdir()
    words = ["--rehearse", "--stages", "arithmetic", "--output", str(tmp_path / "check")]
    done = _program(patch, words, TMPDIR=str(tmp_path / "scratch"))
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert not list((tmp_path / "scratch").glob("swift-stage2-*"))
    assert "| machine | passed |" in (tmp_path / "check" / command.PAGE_FILE).read_text()
    assert "The check was interrupted" in (tmp_path / "check" / command.PAGE_FILE).read_text()


# --- the user's mistakes --------------------------------------------------------------------------


def test_a_machine_without_a_gpu_is_told_in_one_line_and_an_earlier_page_stays(tmp_path: Path) -> None:
    earlier = tmp_path / "check" / command.PAGE_FILE
    make_directory(earlier.parent, keep=False)
    earlier.write_text("of yesterday")
    done = subprocess.run(
        [ROOT / "scripts" / "gpu-check", "--output", tmp_path / "check"],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable},
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("swift-stage2 gpu-check: error: a GPU check needs a GPU: ")
    assert done.stderr.count("\n") == 1
    assert earlier.read_text() == "of yesterday"
