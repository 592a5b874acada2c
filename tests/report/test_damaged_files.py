"""Whatever becomes of a run's logs, a report is a page or one clear line, and says balanced where its status does."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from run_files import RunFiles

from swift_stage2.cli import main
from swift_stage2.records import ReturnReason
from swift_stage2.telemetry.event_log import event_path

GARBAGE = (b"", b"\0" * 20, b"[" * 20_000, b"{}", b"7", b"\xff\xfe", b'{"kind":[]}', b'{"kind":"step"}')


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with an event of every part of a report."""
    run = RunFiles(tmp_path_factory.mktemp("valid")).start().train(12).evaluate().train(12)
    late, bad = run.samples.draw(2)
    run.samples.match([late])
    run.samples.source.give_back([late], ReturnReason.STALE)
    run.samples.source.settle_quarantined(bad, "bad_sample", "no box")
    for number in range(3):
        run.match([number, 0, 4, 0], version=number, reward={"f1": 0.5, "total": number})
    run.save()
    run.end()
    return run.run_dir


def _drop(lines: list[bytes], at: int, pick: int) -> None:
    del lines[at % len(lines)]


def _insert(lines: list[bytes], at: int, pick: int) -> None:
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


Deed = tuple[Callable[[list[bytes], int, int], None], int, int]
NUMBERS = st.integers(0, 10_000)
DEEDS = st.lists(
    st.tuples(st.sampled_from([_drop, _insert, _tear, _cut, _double, _swap]), NUMBERS, NUMBERS), max_size=4
)


@settings(
    max_examples=12,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),  # an example takes a whole report, too much to shrink
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(deeds=DEEDS)
def test_no_damage_ends_in_a_traceback(
    valid: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
    deeds: list[Deed],
) -> None:
    run_dir = tmp_path_factory.mktemp("damaged") / "run"
    shutil.copytree(valid, run_dir)
    lines = event_path(run_dir, 0).read_bytes().splitlines(keepends=True)
    for deed, at, pick in deeds:
        if lines:
            deed(lines, at, pick)
    event_path(run_dir, 0).write_bytes(b"".join(lines))
    status = main(["report", str(run_dir)])
    told = capsys.readouterr()
    assert "Traceback" not in told.out + told.err
    assert status == 0 or deeds
    assert status in (0, 1)
    assert (run_dir / "report.html").is_file()
    assert ("balanced: every sample" in " ".join(told.out.split())) == (status == 0)
