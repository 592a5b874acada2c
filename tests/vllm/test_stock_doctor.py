"""The doctor against the unmodified ``swift rollout``: every check green, and the server fit for a run afterwards."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "doctor")]

from doctor_run import run_doctor, write_config  # noqa: E402
from stock_server import ServerProcess  # noqa: E402

from swift_stage2.demo.demo_config import STAGE1  # noqa: E402


@pytest.fixture
def config(stock: ServerProcess, tmp_path: Path, rows_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("SWIFT_ROLLOUT_API_KEY", raising=False)
    servers = [{"base_url": stock.base_url, "group_port": stock.group_port}]
    launched = [{"engine": "swift", "model": str(STAGE1), "args": {"vllm_max_model_len": 1024}}]
    changes = {"rollout__servers": servers, "launch__servers": launched}
    return write_config(tmp_path / "run.yaml", rows_file, tmp_path / "out", (), changes)


def test_a_stock_server_is_green_twice_in_a_row(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read: Callable[[], str] = lambda: capsys.readouterr().out  # noqa: E731
    for _ in range(2):  # the first must leave no communicator that the second would stumble over
        read()
        report = run_doctor(config, ["--live", "--step-seconds", "5"], read)
        assert report.status == 0, report.text
        assert [row["check"] for row in report.findings if row["verdict"] not in ("ok",)] == []
        texts = {
            "who answers": "stock swift rollout, 1 worker(s)",
            "parameters": "92 tensors fill all 66 of vLLM's",
            "model served": "serves stage1",
            "files": "the same directory",
            "prompts": "images as the model sees them: 140x112",
            "dry sync round": "proven by canary",
            "timed rollouts": "rollouts/s with all slots in use",
            "parsed and matched": "9 rollout(s): ",
        }
        for check, text in texts.items():
            assert text in report.row(check)["found"]
        assert "nothing is grossly wrong" in report.row("dry sync round")["found"]
