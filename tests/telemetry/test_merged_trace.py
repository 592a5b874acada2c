from __future__ import annotations

import json
from pathlib import Path

import pytest

from swift_stage2.errors import UserError
from swift_stage2.telemetry.audit import StorageWarning
from swift_stage2.telemetry.trace import Trace, merge_traces, trace_files, write_trace


def save(run_dir: Path, rank: int, name: str) -> None:
    trace = Trace(True)
    with trace.span(name):
        pass
    trace.save(run_dir / "trace" / f"rank{rank}.json", rank, StorageWarning())


def test_ranks_stand_side_by_side_in_their_order(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        save(tmp_path, rank, f"span of {rank}")
    merged = merge_traces(trace_files(tmp_path))
    spans = [(event["pid"], event["name"]) for event in merged["traceEvents"] if event["ph"] == "X"]
    assert spans == [(rank, f"span of {rank}") for rank in (0, 2, 10)]
    assert list(merged["otherData"]) == ["rank0", "rank2", "rank10"]
    write_trace(tmp_path / "trace.json", merged)
    assert json.loads((tmp_path / "trace.json").read_text()) == merged
    assert not list(tmp_path.glob("*.partial"))


def test_a_run_without_traces_has_none(tmp_path: Path) -> None:
    assert trace_files(tmp_path) == []


@pytest.mark.parametrize("text", ["{", "[]", '{"traceEvents": []}', '{"otherData": {}}', "3"])
def test_a_damaged_trace_is_named(tmp_path: Path, text: str) -> None:
    save(tmp_path, 0, "a")
    path = tmp_path / "trace" / "rank1.json"
    path.write_text(text)
    with pytest.raises(UserError, match=str(path)):
        merge_traces(trace_files(tmp_path))
