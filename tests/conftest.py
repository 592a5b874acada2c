"""Every test has this: no network, one thread per process, reproducible examples, one real data set.

``pythonpath`` in setup.cfg makes ``tests/`` importable, so that test files share the stand-ins beside them.
Fixtures import their modules on first use: tests of the pure parts load no torch.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# A shell starts what it runs in the background with SIGINT ignored, and so would every process of a test begin.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Hundreds of processes import the package here: they share its bytecode, also where the environment keeps none.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# No deadline per example: the machine is shared with other ranks. In CI the same examples come every time.
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("local"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """A search for garbage among the million objects that imports leave is slow and finds none: they are left out."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


# How many tests a run leaves out, by the line that says so at its end.
_left_out: defaultdict[str, int] = defaultdict(int)
_WITHOUT_DISK = "tests that mount a small disk: that needs root"
_SLOW = "slow tests: scripts/test --all runs everything"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what needs a filesystem of its own where none may be mounted."""
    needing = [item for item in items if "small_disk" in getattr(item, "fixturenames", ())]
    if not needing:
        return
    from small_disk import may_mount

    if not may_mount():
        _left_out[_WITHOUT_DISK] += len(needing)
        items[:] = [item for item in items if item not in needing]
        config.hook.pytest_deselected(items=needing)


def pytest_deselected(items: list[pytest.Item]) -> None:
    _left_out[_SLOW] += len([item for item in items if item.get_closest_marker("slow")])


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where tests are spread over workers, each of them collects and counts all, and only their parent can write."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(_left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    # A worker that crashed tells nothing
    _left_out.update(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for line, number in _left_out.items():
        if number:
            terminalreporter.write_line(f"left out: {number} {line}")


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """pytest's own, which also hears ms-swift and us after a command in this process has quietened them."""
    for logger in map(logging.getLogger, ("swift", "swift_stage2")):
        monkeypatch.setattr(logger, "propagate", True)
        if logger.level > logging.WARNING:
            caplog.set_level(logging.NOTSET, logger=logger.name)
    return caplog


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Stays as the test found it: a command in this process also quietens the libraries of processes started later."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session", autouse=True)
def _torchruns_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where a torchrun that is started without --log-dir leaves one; pytest removes it with its other folders."""
    os.environ["PET_LOG_DIR"] = str(tmp_path_factory.getbasetemp() / "torchrun")


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """The gate that a held answer waits for; opened at the end in any case."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def forever(gate: threading.Event) -> threading.Event:
    """An event that never comes while the test runs, and lets go of every handler afterwards."""
    return gate


@pytest.fixture
def server() -> Iterator[Any]:
    """A ``FakeRolloutServer`` that echoes and knows no /stage2/ path, as a stock server."""
    from fake_rollout_server import FakeRolloutServer

    with FakeRolloutServer() as server:
        yield server


@pytest.fixture
def busy_port() -> Iterator[int]:
    """Somebody listens there."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A real filesystem of one mebibyte, or of the size that a test's parameter names."""
    from small_disk import SmallDisk

    disk = SmallDisk(tmp_path / "small_disk", getattr(request, "param", "1m"))
    yield disk
    disk.unmount()


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve shape scenes of 150 x 100 pixels, which the tiny model's template resizes to multiples of 28."""
    from swift_stage2.demo.scenes import SceneKind, Split, write_dataset

    directory = tmp_path_factory.mktemp("data") / "shapes"
    return write_dataset(directory, SceneKind.SHAPES, 12, Split.TRAIN, 1, image_size=(150, 100))


@pytest.fixture(scope="session")
def rows(rows_file: Path) -> list[dict[str, Any]]:
    """The rows of ``rows_file``; no test may change them."""
    from real_model import read_rows

    return read_rows(rows_file)


@pytest.fixture
def template() -> Any:
    """The tiny model's own template in mode ``train``, as channel A holds it."""
    from real_model import make_template

    return make_template()
