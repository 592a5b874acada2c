"""The bench of metrics on a few images: its peers, one of which may be absent, come to the same numbers."""

from __future__ import annotations

import importlib.util
import json
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import evaluate

OPTIONS = Namespace(images=30, classes=3, repeats=2)


@pytest.mark.slow
def test_without_globox_pycocotools_is_measured_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "globox" else find(name))
    assert evaluate.run(OPTIONS, tmp_path) == 0
    assert "globox is not installed" in capsys.readouterr().out
    facts = json.loads((tmp_path / "evaluate.json").read_text())
    assert facts["differences"] == {"pycocotools": pytest.approx(0, abs=1e-9)}
    assert {len(seconds) for seconds in facts["seconds"].values()} == {2}
    assert not any("globox" in name for name in facts["seconds"])


@pytest.mark.slow
def test_globox_reads_the_same_files(tmp_path: Path) -> None:
    pytest.importorskip("globox", reason="a peer of the bench alone")
    evaluate.run(OPTIONS, tmp_path)
    facts = json.loads((tmp_path / "evaluate.json").read_text())
    assert facts["differences"]["globox"] == pytest.approx(0, abs=1e-9)
    assert {"globox: COCO's file", "globox: COCO's metrics"} < facts["seconds"].keys()
