"""One real server on port 0 for this directory's tests, and the doctor run in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_TESTS / folder) for folder in ("rollout_server", "checks")]

from doctor_run import Report, run_doctor, write_config  # noqa: E402
from live_server import MODEL, LearnerRound, RunningServer, load_generator, load_learner, serve  # noqa: E402

from swift_stage2.rollout_server.transformers_engine import TransformersRolloutEngine  # noqa: E402

START_TIMEOUT_S = 240.0
KEY_VARIABLE = "SWIFT_ROLLOUT_API_KEY"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No key or proxy of this machine counts."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


@pytest.fixture(scope="session")
def doctor_engine() -> Iterator[TransformersRolloutEngine]:
    engine = TransformersRolloutEngine(load_generator, model=str(MODEL), max_batch_size=16)
    assert engine.wait_loaded(START_TIMEOUT_S)
    yield engine
    engine.close(timeout_s=10.0)


@pytest.fixture
def server(doctor_engine: TransformersRolloutEngine) -> Iterator[RunningServer]:
    """The real server; weights that a test left unproven are cleared up."""
    with serve(doctor_engine) as running:
        yield running
        if running.state() != "serving":
            LearnerRound(running, load_learner()).run()


@pytest.fixture
def configure(tmp_path: Path, rows_file: Path) -> Callable[..., Path]:
    """Writes a configuration for servers at the given URLs; keywords are dotted keys with ``__`` for the dot."""

    def write(*base_urls: str, **changes: Any) -> Path:
        return write_config(tmp_path / "run.yaml", rows_file, tmp_path / "out", base_urls, changes)

    return write


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Callable[..., Report]:
    """Runs the command and reads its JSON."""

    def run(config: Path, *options: str) -> Report:
        capsys.readouterr()
        return run_doctor(config, options, lambda: capsys.readouterr().out)

    return run
