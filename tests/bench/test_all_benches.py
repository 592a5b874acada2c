"""``bench all``: every bench is planned, one that fails costs its own section, and nothing is written over unasked."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from swift_stage2.bench import all_benches
from swift_stage2.bench.all_benches import PAGE, PLAN, options_of
from swift_stage2.bench.benchmark_page import BenchRun, found_in, machine, page
from swift_stage2.bench.run import BENCHES
from swift_stage2.demo.child_runs import ChildRuns
from swift_stage2.errors import ChildFailed, UserError


def test_every_bench_has_a_plan() -> None:
    assert {*PLAN, "all"} == set(BENCHES)
    assert all(planned.quick_minutes <= planned.minutes for planned in PLAN.values())


@pytest.mark.parametrize("name", PLAN)
@pytest.mark.parametrize("kind", ["full", "quick", "without_vllm"])
def test_every_plan_asks_what_its_bench_understands(name: str, kind: str) -> None:
    parse = importlib.import_module(BENCHES[name][0])._parse
    parse(getattr(PLAN[name], kind).split())


def test_without_vllm_nothing_is_asked_that_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_benches, "_has_vllm", lambda: False)
    asked = [word for planned in PLAN.values() for word in options_of(planned, quick=False)]
    assert "transformers" in asked
    assert not {"vllm", "stock"} & set(asked)


def test_without_vllm_what_cannot_run_is_left_out_and_told_unless_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(all_benches, "_has_vllm", lambda: False)
    _main(monkeypatch, "--quick", "--output", str(tmp_path / "all"))
    ran = [bench["name"] for bench in _benches(tmp_path / "all")]
    assert ran == [name for name in PLAN if name != "peer"]
    assert "peer: left out, vLLM is not installed" in capsys.readouterr().out
    _main(monkeypatch, "--only", "peer", "--output", str(tmp_path / "one"))
    assert [bench["name"] for bench in _benches(tmp_path / "one")] == ["peer"]


def _benches(directory: Path) -> list[dict[str, Any]]:
    benches: list[dict[str, Any]] = json.loads((directory / "all.json").read_text())["benches"]
    return benches


class _Children(ChildRuns):
    """Runs nothing: writes what a bench would have written, or fails as one would."""

    def run(self, name: str, argv: tuple[str, ...], *, log_dir: Path, **_: Any) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        (log_dir / f"{name}.log").write_text(f"┃ what {name} printed ┃\n")
        if name == "plan":
            raise ChildFailed("plan must end within 300 s, it did not; see a log")
        if name == "preprocess":
            own = Path(argv[argv.index("--output") + 1])
            own.mkdir()
            (own / "preprocess.md").write_text("| a | b |\n")


def _main(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    monkeypatch.setattr(all_benches, "ChildRuns", _Children)
    return all_benches.main(argv)


def test_a_bench_that_fails_costs_its_own_section_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    argv = ("--only", "plan,preprocess,overhead", "--quick", "--output", str(out))
    assert _main(monkeypatch, *argv) == 1
    text = (out / PAGE).read_text()
    plan, preprocess, overhead = text.split("\n## ")[1:]
    assert plan.startswith("`swift-stage2 bench plan --ranks 2 4")
    assert "**Failed**: plan must end within 300 s" in plan
    assert "| a | b |" in preprocess
    assert "what preprocess printed" not in preprocess
    assert "```text\n┃ what overhead printed ┃\n```" in overhead
    assert "plan: at most 5 minutes" in capsys.readouterr().out
    benches = json.loads((out / "all.json").read_text())["benches"]
    assert [bench["failure"] is None for bench in benches] == [False, True, True]


def test_the_page_goes_elsewhere_only_where_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    also = tmp_path / "page.md"
    argv = ("--only", "preprocess", "--output", str(tmp_path / "out"))
    assert _main(monkeypatch, *argv) == 0
    assert not also.exists()
    assert _main(monkeypatch, *argv, "--write", str(also)) == 0
    assert also.read_text() == (tmp_path / "out" / PAGE).read_text()


def test_the_page_names_machine_versions_command_and_date() -> None:
    run = BenchRun(
        name="plan", command="swift-stage2 bench plan", started="2026-11-22T00:00:00+00:00", seconds=12.4,
        failure=None, found="| x |\n",
    )  # fmt: skip
    facts = machine()
    text = page([run], facts)
    assert "torch 2." in facts["versions"]
    for part in (
        *facts.values(),
        "## `swift-stage2 bench plan`",
        "2026-11-22T00:00:00+00:00, 12 s.",
        "| x |",
    ):
        assert part in text
    assert "Failed" not in text


def test_a_bench_that_wrote_and_printed_nothing_has_an_empty_section(tmp_path: Path) -> None:
    assert found_in(tmp_path, tmp_path / "no.log") == ""


@pytest.mark.parametrize(
    ("argv", "named"),
    [(["--only", "plan", "--skip", "plan"], "--skip"), (["--write", "/no/such/place/page.md"], "--write")],
)
def test_options_that_cannot_be_are_refused_before_anything_is_written(
    argv: Sequence[str], named: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=named):
        all_benches.main([*argv, "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_an_unknown_name_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        all_benches.main(["--only", "speed"])
    assert "must be of plan, preprocess" in capsys.readouterr().err
