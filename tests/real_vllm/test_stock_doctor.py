"""The doctor against the unmodified ``swift rollout``: every check green, and the server fit for a run afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
from doctor_run import check_live_twice, write_config
from stock_server import ServerProcess

from swift_stage2.demo.demo_config import STAGE1


@pytest.fixture
def config(stock: ServerProcess, tmp_path: Path, rows_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("SWIFT_ROLLOUT_API_KEY", raising=False)
    servers = [{"base_url": stock.base_url, "group_port": stock.group_port}]
    launched = [{"engine": "swift", "model": str(STAGE1), "args": {"vllm_max_model_len": 1024}}]
    changes = {"rollout__servers": servers, "launch__servers": launched}
    return write_config(tmp_path / "run.yaml", rows_file, tmp_path / "out", (), changes)


def test_a_stock_server_is_green_twice_in_a_row(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {
        "server 0": "stock swift rollout",
        "prompts": "images as the model sees them: 140x112",
    }
    check_live_twice(config, capsys, texts)
