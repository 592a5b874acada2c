"""``bench all``: every bench is planned, one that fails costs its own section, and nothing is written over unasked."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import swift_stage2
from benchmarks import all_benches
from benchmarks.all_benches import (
    PAGE,
    PLAN,
    BenchRun,
    found_in,
    kept_runs,
    machine,
    options_of,
    page,
    state,
    write_page,
)
from benchmarks.benches import BENCHES
from benchmarks.child_runs import ChildRuns
from benchmarks.command import main, parse
from swift_stage2.errors import ChildFailed, UserError


def test_every_bench_has_a_plan() -> None:
    assert {*PLAN, "all"} == set(BENCHES)
    assert all(planned.minutes and planned.quick_minutes for planned in PLAN.values())
    assert all(planned.quick_minutes <= planned.minutes for planned in PLAN.values())


@pytest.mark.parametrize("name", PLAN)
@pytest.mark.parametrize("kind", ["full", "quick", "without_vllm"])
def test_every_plan_asks_what_its_bench_understands(name: str, kind: str) -> None:
    options = parse(BENCHES[name], (getattr(PLAN[name], kind) or PLAN[name].full).split())
    module = importlib.import_module(BENCHES[name].path)
    if hasattr(module, "check") and not PLAN[name].needs_vllm:
        module.check(options)


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
    assert "peer: left out" in capsys.readouterr().out
    _main(monkeypatch, "--only", "peer", "--output", str(tmp_path / "one"))
    assert [bench["name"] for bench in _benches(tmp_path / "one")] == ["peer"]


def _benches(directory: Path) -> list[dict[str, Any]]:
    benches: list[dict[str, Any]] = json.loads((directory / PAGE).with_suffix(".json").read_text())["benches"]
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
    return main(["all", *argv])


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
    assert [bench["failure"] is None for bench in _benches(out)] == [False, True, True]


def test_the_page_goes_elsewhere_only_where_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    also = tmp_path / "page.md"
    argv = ("--only", "preprocess", "--output", str(tmp_path / "out"))
    assert _main(monkeypatch, *argv) == 0
    assert not also.exists()
    assert _main(monkeypatch, *argv, "--write", str(also)) == 0
    assert also.read_text() == (tmp_path / "out" / PAGE).read_text()


def _bench_run(name: str = "plan", **changes: Any) -> BenchRun:
    run = BenchRun(
        name=name, command=f"swift-stage2 bench {name}", started="2026-11-22T00:00:00+00:00", seconds=12.4,
        failure=None, found="| x |\n", state="1.0 (abc)", machine=machine(),
    )  # fmt: skip
    return replace(run, **changes)


def test_the_page_names_machine_versions_command_date_and_state() -> None:
    facts = machine()
    text = page([_bench_run()])
    assert "torch 2." in facts["versions"]
    for part in (
        *facts.values(),
        "## `swift-stage2 bench plan`",
        "2026-11-22T00:00:00+00:00, 12 s, state 1.0 (abc).\n",
        "| x |",
    ):
        assert part in text
    assert "Failed" not in text


def test_a_section_from_another_machine_says_what_differs() -> None:
    older = _bench_run(started="2026-10-01T00:00:00+00:00", machine=machine() | {"cores": "1 of 1"})
    text = page([older, _bench_run("merge")])
    assert f"| cores | {machine()['cores']} |" in text
    assert "state 1.0 (abc). Elsewhere: cores 1 of 1." in text
    assert text.count("Elsewhere") == 1


def test_a_bench_that_runs_again_replaces_its_own_section_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    also = tmp_path / "page.md"
    write_page(also, [_bench_run("plan", found="old plan"), _bench_run("soak", found="old soak")])
    argv = ("--only", "preprocess,plan", "--output", str(tmp_path / "out"), "--write", str(also))
    assert _main(monkeypatch, *argv) == 1
    assert [run.name for run in kept_runs(also.with_suffix(".json"))] == ["plan", "preprocess", "soak"]
    text = also.read_text()
    assert "old plan" not in text
    assert "old soak" in text
    assert "old soak" not in (tmp_path / "out" / PAGE).read_text()


def test_a_page_whose_json_is_not_ours_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "page.json").write_text('{"benches": [{"name": "plan"}]}')
    with pytest.raises(UserError, match=r"must be what bench all wrote, got path=.*page\.json"):
        main(["all", "--output", str(tmp_path / "out"), "--write", str(tmp_path / "page.md")])
    assert not (tmp_path / "out").exists()


def test_the_state_is_the_version_and_in_a_checkout_the_commit() -> None:
    assert state().startswith(swift_stage2.__version__)


def test_a_bench_that_wrote_and_printed_nothing_has_an_empty_section(tmp_path: Path) -> None:
    assert found_in(tmp_path, tmp_path / "no.log") == ""
