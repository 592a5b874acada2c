"""The command under test, in a folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from drawn_sources import Importer


@pytest.fixture
def run_import(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Importer:
    return Importer(tmp_path, capsys, monkeypatch)
