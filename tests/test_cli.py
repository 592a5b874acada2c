"""The command line: what it lists, exit statuses, one line for a user's mistake."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import run_command
from ledger_run import LedgerRun

from swift_stage2 import __version__, cli
from swift_stage2.config import Stage2Config
from swift_stage2.errors import DatasetError, Stage2Error, StorageFull
from swift_stage2.launch.plan import EXIT_STATUS_FILE
from swift_stage2.launch.rank import end_left_in, take_room


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_command(*arguments, variables=environment)


@pytest.fixture
def valid(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    file = tmp_path / "run.yaml"
    file.write_text(
        f"swift: {{output_dir: out, model: {tmp_path / 'model'}}}\nstage2_ab: {{schedule: {{b_ratio: 0}}}}\n"
    )
    return file


Train = Callable[[int | BaseException], int]


@pytest.fixture
def train(valid: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """The command with a trainer that needs no model, and ends as it is told."""

    def train(end: int | BaseException) -> int:
        def ended(config: object, **_: object) -> int:
            if isinstance(end, BaseException):
                raise end
            return end

        monkeypatch.setitem(sys.modules, "swift_stage2.training.sft", types.SimpleNamespace(train=ended))
        return cli.main(["train", str(valid)])

    return train


def test_pages_are_made_without_torch() -> None:
    """Its import costs more than a report."""
    makers = (
        "swift_stage2.report.command, swift_stage2.evaluate.command, swift_stage2.report.rollouts_command"
    )
    code = f"import sys, {makers}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("bench", "learning", "--steps", "0"), "bench: error: --steps must be at least 1, got 0"),
        (("gpu-check", "--python", "3.11"), "gpu-check: error: this goes only with --collect, got --python"),
    ],
    ids=("bench", "gpu-check"),
)
def test_a_command_of_a_checkout_takes_this_ones_place_with_its_status_and_its_words(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    (tmp_path / "benchmarks.py").write_text("raise SystemExit(9)")  # another program's, where the user is
    command = [sys.executable, "-m", "swift_stage2", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"swift-stage2 {said}")
    assert done.stderr.count("\n") == 1


def test_version() -> None:
    assert run("--version").stdout.strip() == f"swift-stage2 {__version__}"


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("trian",),
        ("train",),
        *(("launch", "x.yaml", f"--nproc-per-node={n}") for n in ("0", "two", "1.5")),
    ],
)
def test_a_wrong_command_line_exits_with_2(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert result.stderr.startswith("swift-stage2")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["train", "launch"])
def test_a_refused_configuration_is_one_line_and_writes_nothing(tmp_path: Path, command: str) -> None:
    (tmp_path / "bad.yaml").write_text("stage2_ab: {schedule: {b_ratoi: 0.5}}\n")
    result = run(command, str(tmp_path / "bad.yaml"))
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"swift-stage2 {command}: error: ")
    assert "did you mean 'b_ratio'" in result.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["bad.yaml"]


@pytest.mark.parametrize(
    ("arguments", "mistake"),
    [
        (("doctor", "absent.yaml"), "must exist"),
        (("rollout", "absent"), "checkpoint directory"),
        (("merge", "--upstream", "localhost"), "--upstream: base_url must"),
    ],
    ids=lambda it: it[0] if isinstance(it, tuple) else "",
)
def test_every_command_words_a_mistake_as_argparse_does(
    arguments: tuple[str, ...], mistake: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"swift-stage2 {arguments[0]}: error: ")
    assert mistake in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("end", "before", "status", "left", "told"),
    [
        (0, None, 0, None, ""),
        (7, None, 7, "7", ""),
        (1, "2", 1, "2", ""),  # the first rank that fails has the say
        (
            DatasetError("every line must be JSON,\n  got line=7; mend it"),
            None,
            2,
            "2\nevery line must be JSON, got line=7; mend it",
            "swift-stage2 train: error: every line must be JSON, got line=7; mend it",
        ),
        (
            Stage2Error("a fault\n  of ours"),
            None,
            1,
            "1\nStage2Error: a fault of ours",
            "swift-stage2 train: error: Stage2Error: a fault of ours",
        ),
        (KeyboardInterrupt(), None, 130, "1", ""),
    ],
    ids=repr,
)
def test_a_rank_leaves_its_end_for_the_launcher_and_tells_it_in_one_line(
    tmp_path: Path,
    train: Train,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    end: int | BaseException,
    before: str | None,
    status: int,
    left: str | None,
    told: str,
) -> None:
    """What is not the user's keeps its traceback above that line."""
    file = tmp_path / "status"
    if before:
        file.write_text(before)
    monkeypatch.setenv(EXIT_STATUS_FILE, str(file))
    assert train(end) == status
    assert (file.read_text() if file.exists() else None) == left
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1:] == ([told] if told else [])
    assert ("Traceback" in "".join(lines)) is told.endswith("a fault of ours")


def test_a_rank_leaves_its_end_though_the_disk_is_full(
    small_disk: Any, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = small_disk.path / "status"
    take_room(file)
    small_disk.fill()
    monkeypatch.setenv(EXIT_STATUS_FILE, str(file))
    assert train(StorageFull("no room")) == 2
    assert end_left_in(file) == (2, "no room")


def test_a_hung_push_ends_the_process_though_a_thread_never_returns(tmp_path: Path, valid: Path) -> None:
    code = (
        "import sys, threading, types\n"
        "from swift_stage2 import cli\n"
        "module = types.ModuleType('swift_stage2.training.sft')\n"
        "module.train = lambda config, **_: threading.Thread(target=threading.Event().wait).start() or 70\n"
        "sys.modules[module.__name__] = module\n"
        f"sys.exit(cli.main(['train', {str(valid)!r}]))\n"
    )
    status_file = tmp_path / "status"
    environment = dict(os.environ) | {"SWIFT_STAGE2_EXIT_STATUS_FILE": str(status_file)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=60).returncode == 70
    assert status_file.read_text() == "70"


def test_a_warning_is_told_once_by_rank_0_unless_the_launcher_has_told_it(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Stage2Config, "warnings", ("too much",))
    told = []
    for name in ("LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for variables in (
        {"RANK": "0"},
        {"RANK": "1"},
        {"RANK": "0", EXIT_STATUS_FILE: str(tmp_path / "status")},
    ):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert train(0) == 0
        told.append(capsys.readouterr().err)
    assert told == ["swift-stage2 train: warning: too much\n", "", ""]


def every_command_line() -> list[tuple[str, ...]]:
    return [
        ("train",),
        ("launch",),
        ("completion",),
        *((name,) for name in cli._OWN_PARSER),
        ("rollout", "--engine", "vllm"),
    ]


@pytest.mark.parametrize("words", every_command_line(), ids=" ".join)
def test_every_help_ends_with_the_exit_statuses(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([*words, "--help"])
    assert end.value.code == 0
    last = " ".join(capsys.readouterr().out.split("\n\n")[-1].split())
    assert last.startswith("exit status: 0 ")
    assert "2 the user's mistake, told in one line" in last


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (("trian", "x.yaml"), "train"),
        (("doctor", "x.yaml", "--jsn"), "--json"),
        (("launch", "run.yaml", "--resum"), "--resume"),  # an abbreviation was taken for the option
        (("launch", "x.yaml", "--nproc_per_node", "2"), "--nproc-per-node"),
        (("rollout", "m", "--engine", "transformer"), "transformers"),
    ],
    ids=lambda it: " ".join(it) if isinstance(it, tuple) else "",
)
def test_a_misspelt_word_names_the_nearest(
    words: tuple[str, ...], near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"; did you mean {near}?")


@pytest.mark.parametrize("command", ["rollout", "merge"])
def test_a_key_on_the_command_line_is_not_echoed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = {"rollout": ["absent"], "merge": ["--upstream", "http://127.0.0.1:9"]}[command]
    assert cli.main([command, *words, "--api-key-env", "sk-abcdef0123456789abcdef"]) == 2
    error = capsys.readouterr().err
    assert "--api-key-env must be the name of an environment variable" in error
    assert "abcdef" not in error


def test_credentials_of_an_upstream_are_not_echoed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["merge", "--upstream", "http://me:hush@127.0.0.1:9"]) == 2
    error = capsys.readouterr().err
    assert "***@" in error
    assert "hush" not in error


# --- completion, and output that nobody reads ---------------------------------------------------------


@pytest.fixture
def script(capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["completion", "bash"]) == 0
    return capsys.readouterr().out


def complete(script: str, *words: str) -> list[str]:
    bash = shutil.which("bash")
    assert bash is not None
    typed = f'COMP_WORDS=({" ".join(words[:-1])} "{words[-1]}"); COMP_CWORD={len(words) - 1}'
    ask = f'{typed}; $(complete -p swift-stage2 | grep -o "_shtab[a-z0-9_]*"); echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(
        [bash, "-c", f"{script}\n{ask}"], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.split()


def test_commands_and_options_are_completed(script: str) -> None:
    assert complete(script, "swift-stage2", "la") == ["launch"]
    assert complete(script, "swift-stage2", "be") == ["bench"]
    assert complete(script, "swift-stage2", "launch", "--re") == ["--resume"]


_SHOW = """
import sys
from swift_stage2 import cli
sys.exit(cli.ended("launch", lambda: [cli._show("a line") for _ in range(3)] and 7))
"""


@pytest.mark.parametrize("is_run", [False, True])
def test_what_only_prints_is_cut_quietly_and_a_run_goes_on(tmp_path: Path, is_run: bool) -> None:
    LedgerRun(tmp_path).train_drawn(2)
    reading, writing = os.pipe()
    os.close(reading)
    words = ["-c", _SHOW] if is_run else ["-m", "swift_stage2", "report", str(tmp_path), "--json"]
    try:
        ended = subprocess.run(
            [sys.executable, *words], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=100
        )
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (7 if is_run else 1, "")
