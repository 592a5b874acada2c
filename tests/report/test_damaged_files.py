"""Whatever becomes of a run's logs, a report is a page or one clear line, and says balanced where its status does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from run_files import RunFiles

from swift_stage2.cli import main
from swift_stage2.records import ReturnReason
from swift_stage2.telemetry.event_log import event_path

GARBAGE = (
    b"",
    b"\n",
    b"\0" * 20,
    b"[" * 20_000,
    b"\n{}\n",
    b"7",
    b"\xff\xfe",
    b'\n{"kind":[]}\n',
    b'{"kind":"step"}',
)


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


NUMBERS = st.integers(0, 10_000)
DEEDS = st.lists(st.tuples(NUMBERS, st.integers(0, 400), st.sampled_from(GARBAGE)), max_size=4)


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
    deeds: list[tuple[int, int, bytes]],
) -> None:
    """Each deed puts other bytes, or lines, in the place of some."""
    run_dir = tmp_path_factory.mktemp("damaged") / "run"
    shutil.copytree(valid, run_dir)
    content = event_path(run_dir, 0).read_bytes()
    for at, count, garbage in deeds:
        place = at * 7919 % (len(content) + 1)
        content = content[:place] + garbage + content[place + count :]
    event_path(run_dir, 0).write_bytes(content)
    status = main(["report", str(run_dir)])
    told = capsys.readouterr()
    assert "Traceback" not in told.out + told.err
    assert status in ((0, 1) if deeds else (0,))
    assert (run_dir / "report.html").is_file()
    # A line that lost a whole member may tell of a run without channel B, which has no account.
    assert status == 0 or "balanced: every sample" not in " ".join(told.out.split())
