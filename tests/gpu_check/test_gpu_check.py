"""The whole check, rehearsed on the CPU with real processes, and stages that end in every bad way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from swift_stage2.errors import CheckFailed, UserError
from swift_stage2.gpu_check import run, stage_process
from swift_stage2.gpu_check.processes import StageProcesses
from swift_stage2.gpu_check.stage import STAGES, FigureLog, Stage, Status
from swift_stage2.run_directory.claim import claim_directory

ROOT = Path(__file__).parents[2]
# Each trains for a minute or more; the first three are seconds each and share one check.
LONG = ("learner-lora", "learner-full", "two-ranks")
NOT_HERE = {"zero3": "deepspeed", "nccl-rollout": "vllm"}

pytestmark = pytest.mark.timeout(1000)


def _check(directory: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    """Status, report and what was printed."""
    done = subprocess.run(
        [
            ROOT / "scripts" / "gpu-check",
            "--rehearse",
            "--deadline-s",
            "3600",
            "--output",
            directory,
            *options,
        ],
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | {"PYTHON": sys.executable},
        check=False,
    )
    return done.returncode, json.loads((directory / run.JSON_FILE).read_text()), done.stdout + done.stderr


def _end(report: dict[str, Any], name: str) -> tuple[str, str]:
    (stage,) = [stage for stage in report["stages"] if stage["name"] == name]
    return stage["status"], stage["why"]


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any], str, Path]:
    """All stages that train no learner."""
    directory = tmp_path_factory.mktemp("check") / "short"
    names = [stage.name for stage in STAGES if stage.name not in LONG]
    return *_check(directory, "--stages", *names), directory


@pytest.mark.parametrize("name", [s.name for s in STAGES if s.name not in (*LONG, *NOT_HERE)])
def test_a_short_stage_passes_in_the_rehearsal(
    short: tuple[int, dict[str, Any], str, Path], name: str
) -> None:
    assert _end(short[1], name) == ("passed", "")


@pytest.mark.parametrize(("name", "package"), NOT_HERE.items())
def test_a_stage_whose_package_is_missing_says_so(
    short: tuple[int, dict[str, Any], str, Path], name: str, package: str
) -> None:
    pytest.importorskip("swift")
    status, why = _end(short[1], name)
    assert (status, why) == ("skipped", f"needs {package}, not installed here")


def test_skipped_stages_fail_no_check_and_the_page_says_it_is_a_rehearsal(
    short: tuple[int, dict[str, Any], str, Path],
) -> None:
    status, report, _, directory = short
    assert status == 0
    assert report["finished"]
    text = (directory / run.PAGE_FILE).read_text()
    assert "No figure on this page says anything about a GPU" in text
    assert "H100" not in text


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_a_stage_with_a_learner_passes_in_the_rehearsal(tmp_path: Path, name: str) -> None:
    status, report, told = _check(tmp_path / "check", "--stages", name)
    assert _end(report, name) == ("passed", ""), told
    assert status == 0
    (stage,) = [stage for stage in report["stages"] if stage["name"] == name]
    assert stage["figures"]["num_rounds_proven"] >= 2
    assert stage["figures"]["num_b_steps"] >= 1
    assert not [
        p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])
    ]


# --- stages that end badly ------------------------------------------------------------------------

BAD_STAGES = """
import ctypes, os, subprocess, sys, threading
def hang(context):
    context.figures.note("before_s", 1.0)
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
    context.figures.note("child", child.pid)
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
        "from swift_stage2.gpu_check import stage_process\n"
        "from swift_stage2.gpu_check.stage import Stage\n"
        f"stage = Stage(name='bad', proves='', work='bad_stage:run', weight=1, arguments={{'how': {how!r}}})\n"
        "stage_process.STAGES = (stage,)\n"
        "sys.exit(stage_process.main(sys.argv[1:]))\n"
    )
    (tmp_path / "bad_process.py").write_text(starter)
    monkeypatch.setattr(stage_process, "PROGRAM", "bad_process")
    results = tmp_path / "results"
    results.mkdir()
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    return stage_process.run_child(
        Stage(name="bad", proves="", work="", weight=1),
        results,
        tmp_path,
        os.environ | {"PYTHONPATH": path},
        deadline_s=deadline_s,
        rehearsal=True,
    )


def test_a_stage_that_hangs_is_ended_with_all_below_it_and_keeps_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, why = _bad(tmp_path, monkeypatch, "hang", 60.0)
    assert (status, why) == (Status.FAILED, "it did not end within 60 s")
    figures = FigureLog.read(tmp_path / "results" / "figures.json")
    assert figures["before_s"] == 1.0
    assert not psutil.pid_exists(int(figures["child"]))


def test_a_stage_that_crashes_is_told_by_its_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, why = _bad(tmp_path, monkeypatch, "crash", 200.0)
    assert status is Status.FAILED
    assert why.startswith(f"its process ended with signal {signal.SIGSEGV.value}: ")
    assert "\n" not in why


def test_a_stage_that_gets_no_memory_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, why = _bad(tmp_path, monkeypatch, "out_of_memory", 200.0)
    assert status is Status.FAILED
    assert why.startswith("RuntimeError: ")
    assert "memory" in why
    assert "\n" not in why


# --- time and signals -----------------------------------------------------------------------------


@pytest.mark.parametrize("total_s", [90.0, 300.0, 600.0])
@pytest.mark.parametrize("overrun_s", [0.0, 55.0])
def test_a_check_whose_stages_all_have_to_be_killed_ends_by_its_deadline(
    total_s: float, overrun_s: float
) -> None:
    elapsed_s = 0.0
    given = []
    for index, stage in enumerate(STAGES):
        deadline_s = run.time_for(stage, STAGES[index:], total_s - 60.0 - elapsed_s)
        given.append(deadline_s)
        elapsed_s += 0.0 if deadline_s is None else deadline_s + overrun_s
    assert elapsed_s <= total_s
    assert given[0] is not None
    assert all(each is None or each >= 30.0 for each in given)


def test_a_stage_that_has_no_time_left_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "time_for", lambda *_: None)
    assert run.main(["--rehearse", "--stages", "machine", "--output", str(tmp_path / "check")]) == 0
    report = json.loads((tmp_path / "check" / run.JSON_FILE).read_text())
    assert _end(report, "machine") == ("skipped", "too little of --deadline-s 600 is left")


def _program(patch: str, options: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command after ``patch`` in a process of its own."""
    code = (
        f"import os, signal, sys\n{patch}\n"
        "from swift_stage2 import cli\nsys.exit(cli.main(['gpu-check', *sys.argv[1:]]))"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *options],
        capture_output=True, text=True, timeout=300, env=os.environ | environment, check=False,
    )  # fmt: skip


def test_a_signal_between_stages_leaves_the_page_and_nothing_else(tmp_path: Path) -> None:
    patch = """
from swift_stage2.gpu_check import run
add = run.Report.add
def add_and_signal(self, record, *, finished):
    add(self, record, finished=finished)
    os.kill(os.getpid(), signal.SIGTERM)
run.Report.add = add_and_signal
"""
    (tmp_path / "scratch").mkdir()
    words = ["--rehearse", "--stages", "arithmetic", "--output", str(tmp_path / "check")]
    done = _program(patch, words, TMPDIR=str(tmp_path / "scratch"))
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert not list((tmp_path / "scratch").glob("swift-stage2-*"))
    assert "| machine | passed |" in (tmp_path / "check" / run.PAGE_FILE).read_text()
    assert "The check was interrupted" in (tmp_path / "check" / run.PAGE_FILE).read_text()


def test_a_signal_ends_the_wait_for_a_learner_and_the_learner(tmp_path: Path) -> None:
    child = "import signal; signal.pause()"
    asked: list[None] = []

    def signal_once() -> None:
        if not asked:
            asked.append(os.kill(os.getpid(), signal.SIGTERM))

    with StageProcesses(tmp_path) as processes:
        tree = processes.start("learner", (sys.executable, "-c", child), {})
        with pytest.raises(KeyboardInterrupt):
            processes.await_end(tree, time.monotonic() + 60.0, signal_once)
    assert tree.poll() is not None


def test_a_learner_that_is_late_or_ends_badly_fails_the_stage(tmp_path: Path) -> None:
    with StageProcesses(tmp_path) as processes:
        late = processes.start("late", (sys.executable, "-c", "import signal; signal.pause()"), {})
        with pytest.raises(CheckFailed, match="late must end within the stage's time"):
            processes.await_end(late, time.monotonic())
        bad = processes.start("bad", (sys.executable, "-c", "raise SystemExit('no luck')"), {})
        with pytest.raises(CheckFailed, match="bad ended with status 1: no luck"):
            processes.await_end(bad, time.monotonic() + 60.0)


# --- the user's mistakes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--deadline-s", "1"], "--deadline-s must be in the range 90..3600, got deadline_s=1"),
        (
            ["--collect", "w", "--rehearse", "--deadline-s", "90"],
            "only --python goes with --collect, got --rehearse, --deadline-s; leave it out",
        ),
        (["--python", "3.11"], "--python goes with --collect only, got --python; leave it out"),
        (["--wheels", "nowhere"], "--wheels must be a folder, got nowhere"),
    ],
)
def test_a_wrong_option_is_the_users_mistake(options: list[str], told: str) -> None:
    with pytest.raises(UserError, match=told):
        run.main(options)


def test_a_machine_without_a_gpu_is_told_in_one_line_and_an_earlier_page_stays(tmp_path: Path) -> None:
    earlier = tmp_path / "check" / run.PAGE_FILE
    claim_directory(earlier.parent, keep=False)
    earlier.write_text("of yesterday")
    done = subprocess.run(
        [sys.executable, "-m", "swift_stage2", "gpu-check", "--output", tmp_path / "check"],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("swift-stage2 gpu-check: error: a GPU check needs a GPU: ")
    assert done.stderr.count("\n") == 1
    assert earlier.read_text() == "of yesterday"


@pytest.mark.parametrize("package", ["psutil", "yaml"])
def test_a_machine_without_a_package_of_the_check_is_told_the_remedy(package: str, tmp_path: Path) -> None:
    done = _program(f"sys.modules[{package!r}] = None", ["--rehearse", "--output", str(tmp_path / "check")])
    assert done.returncode == 2
    assert done.stderr == (
        f"swift-stage2 gpu-check: error: gpu-check needs {package}, not installed here; bring what is missing with "
        "--wheels DIR, a folder that --collect DIR makes where a package registry is\n"
    )
