"""Wheel and source distribution hold what they must, and the wheel runs where there is no checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from data.drawn_sources import SIZE, annotation, draw, write_coco

from swift_stage2 import __version__

PROJECT = Path(__file__).parents[1]
BUILD_S = 100.0
PATIENCE_S = 500.0
_BUILD = "import sys, setuptools.build_meta as backend; print(getattr(backend, sys.argv[1])(sys.argv[2]))"


def run(
    words: Iterable[str | Path], folder: Path, *, status: int | None = 0, timeout_s: float = BUILD_S
) -> subprocess.CompletedProcess[str]:
    """A process that finds no module by ``PYTHONPATH``; it ends with ``status``, if one is told."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = (
        "0"  # cpu_support's, which an environment with vLLM has from the checkout
    )
    words = list(map(str, words))
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s
    )
    assert status in (done.returncode, None), f"{words}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


def build(source: Path, kind: str, target: Path) -> Path:
    """What the build backend makes of ``source``: ``kind`` is wheel or sdist."""
    told = run([sys.executable, "-c", _BUILD, f"build_{kind}", target], source).stdout
    return target / told.splitlines()[-1]


def files_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return Parser().parsestr(archive.read(f"{_dist_info(__version__)}/METADATA").decode())


def _dist_info(version: str) -> str:
    return f"swift_stage2-{version}.dist-info"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout without what git ignores: an older build's files would come into the wheel."""
    ignored = [line.strip("/") for line in (PROJECT / ".gitignore").read_text().split()]
    copy = tmp_path_factory.mktemp("source") / "checkout"
    return Path(shutil.copytree(PROJECT, copy, ignore=shutil.ignore_patterns(".git", *ignored)))


@dataclass(frozen=True)
class Built:
    """``files``: those of the checkout before anything was built in it."""

    files: set[str]
    sdist: Path
    wheel: Path


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    files, target = files_below(source), tmp_path_factory.mktemp("dist")
    return Built(files, build(source, "sdist", target), build(source, "wheel", target))


def test_the_wheel_is_the_package_with_all_its_files_and_nothing_else(built: Built) -> None:
    info = _dist_info(__version__)
    about = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}
    package = {name for name in built.files if name.startswith("swift_stage2/")}
    assert {"swift_stage2/py.typed", "swift_stage2/demo/stage1/model.safetensors"} <= package
    assert files_of(built.wheel) == package | {f"{info}/{name}" for name in about}
    assert built.wheel.name == f"swift_stage2-{__version__}-py3-none-any.whl"


def test_the_source_distribution_is_the_checkout_and_gives_the_same_wheel(
    built: Built, tmp_path: Path
) -> None:
    with tarfile.open(built.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / f"swift_stage2-{__version__}"
    made = {name for name in files_below(unpacked) if name.startswith("swift_stage2.egg-info/")}
    assert files_below(unpacked) - made == built.files | {"PKG-INFO"}
    again = build(unpacked, "wheel", tmp_path)
    assert (again.name, files_of(again)) == (built.wheel.name, files_of(built.wheel))
    assert metadata_of(again).items() == metadata_of(built.wheel).items()


@dataclass(frozen=True)
class Installation:
    """An environment that has the wheel and sees the tests' other packages; an empty folder outside the checkout."""

    python: Path
    folder: Path

    def tells(self, *words: str | Path, status: int | None = 0) -> str:
        """Both outputs of ``swift-stage2 WORDS``, run in the folder."""
        program = self.python.with_name("swift-stage2")
        done = run([program, *words], self.folder, status=status, timeout_s=PATIENCE_S)
        return done.stdout + done.stderr

    def evaluates(self, code: str) -> str:
        return run([self.python, "-c", code], self.folder).stdout.strip()


@pytest.fixture(scope="module")
def installation(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    environment, folder = tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("empty")
    run([sys.executable, "-m", "venv", "--without-pip", environment], folder)
    python = environment / "bin" / "python"
    found = Installation(python, folder)
    own = Path(found.evaluates("import sysconfig; print(sysconfig.get_path('purelib'))"))
    # A path alone: the .pth files in that folder, which lead to the checkout, are not read.
    (own / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps"]
    run([*pip, "--ignore-installed", built.wheel], folder)
    assert Path(found.evaluates("import swift_stage2; print(swift_stage2.__file__)")).is_relative_to(own)
    return found


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.ci
def test_commands_run_from_the_wheel_alone(installation: Installation) -> None:
    tells, folder = installation.tells, installation.folder
    assert tells("--version") == f"swift-stage2 {__version__}\n"
    assert "launch" in tells("--help")
    assert "benches are in benchmarks/ of a checkout" in tells("bench", "sync", status=2)
    assert "-F _shtab_swift_stage2 swift-stage2" in tells("completion", "bash")
    names = [f"{number}.png" for number in range(20)]
    for name in names:
        draw(folder / "images" / name)
    coco = write_coco(
        folder,
        (annotation(number, number) for number in range(20)),
        ({"id": number, "file_name": name} for number, name in enumerate(names)),
    )
    tells("import", "coco", coco.name, "--images", "images", "--output", "train.jsonl")
    tells("data", "check", "train.jsonl")
    demo = Path(installation.evaluates("import swift_stage2.demo as demo; print(*demo.__path__)"))
    tiny = ("model_type=stage2_tiny_vl", f"external_plugins={demo / 'tiny_template.py'}")
    swift = [word for each in (*tiny, "template=stage2_tiny_vl") for word in ("--swift", each)]
    begun = ("init", "--data", "train.jsonl", "--model", demo / "stage1", "--output", "run.yaml")
    tells(*begun, "--learner-gpus", "none", "--rollout-gpus", "none", *swift)
    assert "data sets" in tells("doctor", "run.yaml")
    predictions = folder / "predictions.jsonl"
    rows = map(json.loads, (folder / "train.jsonl").read_text().splitlines())
    lines = [
        {
            "image": row["images"][0],
            "width": SIZE[0],
            "height": SIZE[1],
            "objects": {"ref": ["cat"], "bbox": [[1, 2, 11, 22]]},
        }
        for row in rows
    ]
    predictions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tells("evaluate", "--data", "train.jsonl", "--predictions", predictions, "--output", "scores")
    metrics = json.loads((folder / "scores" / "evaluation.json").read_text())["metrics"]
    assert metrics["eval/f1"]["value"] == 1
    tells("export", "coco", predictions, "--images", "images", "--output", "back.json")
    assert len(json.loads((folder / "back.json").read_text())["annotations"]) == 20


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_S)
def test_the_demo_and_its_report_run_from_the_wheel_alone(installation: Installation) -> None:
    told = installation.tells("demo", "--steps", "8", "--output", "demo", status=None)
    # Too short a run to ask for a share of B; everything else must be as it should.
    problems = [line for line in told.splitlines() if line.startswith("!")]
    assert all(line.startswith("! channel B must run") for line in problems), told
    assert "are left: " not in told
    run_dir = installation.folder / "demo" / "run"
    records = map(json.loads, (run_dir / "events" / "rank0.jsonl").read_text().splitlines())
    rounds = [each for each in records if each["kind"] == "round"]
    assert any(server["proven"] for each in rounds for server in each["servers"].values())
    installation.tells("report", run_dir)
    page = (run_dir / "report.html").read_text()
    assert (PROJECT / "swift_stage2" / "report" / "page_files" / "page.css").read_text()[:200] in page
