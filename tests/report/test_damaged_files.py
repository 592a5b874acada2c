"""Whatever becomes of a run's files, a report is a page or one clear line, and balanced only if the ledger is whole.

Examples start from a whole run's files and damage them as disks, copies and hands do.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from run_files import RunFiles, balanced_ledger

from swift_stage2.cli import main
from swift_stage2.report.report import report_of
from swift_stage2.report.run_data import read_run
from swift_stage2.telemetry.audit import audit_path
from swift_stage2.telemetry.ledger import ReturnReason, UnusedReason

FOLDERS = ("audit", "ledger", "matches")
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 10**400, 1.5, -2.5, float("nan"), float("inf"), "", "x", "\ud800", [], [[]], [None] * 4, {},
    {"a": 1}, [1, 2, 3, -4], 2**40,
)  # fmt: skip
GARBAGE = (
    b"", b"\0" * 20, b"[" * 20_000, b"{}", b"[]", b"7", b"\xff\xfe", b"9" * 5000, b'{"kind":[]}', b'{"kind":"gap"}',
    b'{"kind":"step"}', b'{"kind":"match"}', b'{"kind":"trained"}', b'{"kind":"round","servers":3}',
)  # fmt: skip


def whole_run(run_dir: Path) -> None:
    """Everything that a run leaves, with a sample of every fate; it ended in order."""
    ledger = balanced_ledger(run_dir, num_samples=12, num_generations=2)
    late, bad, unused = ledger.draw(3)
    ledger.match([late])
    ledger.source.give_back([late], ReturnReason.STALE)
    ledger.source.settle_quarantined(bad, "bad_sample", "no box")
    ledger.match([unused])
    ledger.source.settle_unused([unused], UnusedReason.TOO_SMALL)
    saved = json.loads(ledger.save("s1"))
    checkpoint = run_dir / "checkpoint-24"
    checkpoint.mkdir()
    state = {"save_id": "s1", "learner": {"source": saved["source"]}}
    (checkpoint / "stage2_rank0.json").write_text(json.dumps({"step": ledger.step, "state": state}))
    ledger.draw(1)
    ledger.ledger.close()
    run = RunFiles(run_dir)
    run.start().train(12).evaluate().train(12)
    for number in range(3):
        run.match([number, 0, 4, 0], version=number, reward={"f1": 0.5, "total": number})
    run.end()


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("valid")
    whole_run(run_dir)
    return run_dir


def _drop_line(lines: list[bytes], at: int, pick: int) -> None:
    del lines[at % len(lines)]


def _insert_garbage(lines: list[bytes], at: int, pick: int) -> None:
    lines.insert(at % (len(lines) + 1), GARBAGE[pick % len(GARBAGE)] + b"\n")


def _tear(lines: list[bytes], at: int, pick: int) -> None:
    index = at % len(lines)
    lines[index] = lines[index][: pick % len(lines[index])] + b"\n"


def _cut(lines: list[bytes], at: int, pick: int) -> None:
    whole = b"".join(lines)
    lines[:] = whole[: (at * 7919 + pick) % len(whole)].splitlines(keepends=True)


def _double(lines: list[bytes], at: int, pick: int) -> None:
    lines.insert(at % len(lines), lines[at % len(lines)])


def _swap(lines: list[bytes], at: int, pick: int) -> None:
    one, other = at % len(lines), pick % len(lines)
    lines[one], lines[other] = lines[other], lines[one]


def _places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside a record."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    return [place for key in keys for place in ((value, key), *_places(value[key]))]


def _change(lines: list[bytes], at: int, pick: int) -> None:
    """One field, however deep, gets another type, or goes."""
    index = at % len(lines)
    try:
        record = json.loads(lines[index])
    except (ValueError, RecursionError):
        return
    places = _places(record)
    container, key = places[pick % len(places)] if places else ({}, None)
    choice = (at + pick) % (len(ODD) + 1)
    if choice < len(ODD):
        container[key] = ODD[choice]
    elif places:
        del container[key]
    lines[index] = json.dumps(record).encode() + b"\n"


DAMAGES: tuple[Callable[[list[bytes], int, int], None], ...] = (
    _drop_line, _insert_garbage, _tear, _cut, _double, _swap, _change, _change, _change
)  # fmt: skip


def damage(run_dir: Path, folder: str, deeds: list[tuple[int, int, int]]) -> None:
    path = run_dir / folder / "rank0.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for deed, at, pick in deeds:
        if lines:
            DAMAGES[deed](lines, at, pick)
    path.write_bytes(b"".join(lines))


def status_of(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> int:
    """Of a report, which must end in a page or in one line."""
    page = run_dir / "report.html"
    page.unlink(missing_ok=True)
    status = main(["report", str(run_dir)])
    told = capsys.readouterr()
    assert "Traceback" not in told.out + told.err
    if status == 2:
        (line,) = told.err.splitlines()
        assert line.startswith("swift-stage2 report: error: ")
    else:
        assert status in (0, 1)
        assert page.is_file()
        assert ("balanced: every sample" in " ".join(told.out.split())) == (status == 0)
    return status


def test_the_whole_run_is_balanced(valid: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(valid, capsys) == 0


@pytest.mark.parametrize(
    "odd",
    [
        {"kind": "quarantine", "rank": 0},
        {"kind": "start", "rank": 0, "time": 1.0, "step": 0, "world_size": None, "settings": {}},
        {
            "kind": "metrics",
            "rank": 0,
            "time": 1.0,
            "step": None,
            "epoch": None,
            "numbers": {},
            "activity_ns": {},
        }
        | {"wall_ns": 0, "pipeline_ns": {}, "pipeline_wall_ns": None},
    ],
    ids=lambda odd: odd["kind"],
)
def test_a_record_without_a_value_that_a_resume_or_a_sum_reads_ends_in_no_traceback(
    tmp_path: Path, odd: dict[str, Any]
) -> None:
    run = RunFiles(tmp_path).start().train(12)
    audit = audit_path(tmp_path, 0)
    with audit.open("ab") as file:
        file.write(json.dumps(odd).encode() + b"\n")
    run.start(4).train(12).end()
    with audit.open("ab") as file:
        file.write(json.dumps(odd).encode() + b"\n")
    assert main(["report", str(tmp_path)]) in (0, 1)


NUMBERS = st.integers(0, 10_000)
DEEDS = st.lists(st.tuples(st.integers(0, len(DAMAGES) - 1), NUMBERS, NUMBERS), min_size=1, max_size=4)


@pytest.mark.slow
@settings(
    max_examples=60,
    phases=(Phase.explicit, Phase.generate),  # an example takes a whole report, too much to shrink
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(harm=st.dictionaries(st.sampled_from(FOLDERS), DEEDS, min_size=1, max_size=3))
@example(harm={"audit": [(1, 5, 2)], "matches": [(1, 0, 8)], "ledger": [(1, 3, 9)]})
def test_no_damage_ends_in_a_traceback(
    valid: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
    harm: dict[str, list[tuple[int, int, int]]],
) -> None:
    run_dir = tmp_path_factory.mktemp("damaged") / "run"
    shutil.copytree(valid, run_dir)
    for folder, deeds in harm.items():
        damage(run_dir, folder, deeds)
    status_of(run_dir, capsys)
    shutil.rmtree(run_dir)


def test_no_record_of_the_ledger_can_be_missing_unseen(valid: Path, tmp_path: Path) -> None:
    """Each of them: left out, cut off with all that follow, torn, and as a record of another form."""
    shutil.copytree(valid, tmp_path / "run")
    path = tmp_path / "run" / "ledger" / "rank0.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    records = [number for number, line in enumerate(lines) if b'"kind":"gap"' not in line]
    assert len(records) > 60
    for number in records:
        kind = json.loads(lines[number])["kind"]
        for rest in (
            [*lines[:number], *lines[number + 1 :]],
            lines[:number],
            [*lines[:number], lines[number][: len(lines[number]) // 2]],
            [*lines[:number], b'{"kind":"%s","sequence":"x"}\n' % kind.encode(), *lines[number + 1 :]],
        ):
            path.write_bytes(b"".join(rest))
            report = read_run([tmp_path / "run"])
            assert not report_of(report, 0).is_balanced, (number, kind, len(rest))
