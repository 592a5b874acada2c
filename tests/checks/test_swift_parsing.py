"""Refusals of ms-swift are told in one line that names the argument."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from real_model import STAGE1
from swift.arguments import RolloutArguments

from swift_stage2.checks import swift_parsing
from swift_stage2.checks.swift_parsing import refuse_unreadable
from swift_stage2.config import ServerEngine, load_config
from swift_stage2.config.swift_arguments import as_argv
from swift_stage2.demo import tiny_template
from swift_stage2.errors import ConfigError

PLUGIN = Path(tiny_template.__file__)


def refusal(capfd: pytest.CaptureFixture[str], output_dir: Path, *arguments: str) -> str:
    given = f"--model {STAGE1} --model_type stage2_tiny_vl --template stage2_tiny_vl --use_cpu true".split()
    with pytest.raises(ConfigError) as refused:
        swift_parsing.parse_swift_arguments([*given, "--output_dir", str(output_dir), *arguments])
    assert "usage:" not in capfd.readouterr().err
    message = str(refused.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_kind_that_only_a_plugin_knows_is_told_with_the_remedy(tmp_path: Path, is_recorded: bool) -> None:
    """As written, and as a run's args.json names it, which ms-swift looks up without asking whether it is there."""
    checkpoint = tmp_path / "checkpoint-1"
    shutil.copytree(STAGE1, checkpoint)
    given = ["--model", str(checkpoint), "--load_args", "true", "--output_dir", str(tmp_path / "out")]
    if is_recorded:
        (checkpoint / "args.json").write_text('{"model_type": "of_a_plugin", "swift_version": "4.6.0"}')
    else:
        given += ["--model_type", "of_a_plugin"]
    with pytest.raises(
        ConfigError, match=r"ms-swift must know the model's kind, got .*of_a_plugin"
    ) as refused:
        swift_parsing.parse_swift_arguments(given)
    assert "external_plugins" in str(refused.value)
    assert len(str(refused.value)) < 400


def test_a_refusal_names_the_option_that_the_user_has(tmp_path: Path) -> None:
    given = ["--model", str(STAGE1), "--output_dir", str(tmp_path), "--learning_rate", "much"]
    with pytest.raises(ConfigError, match=r"^ms-swift refuses --swift: .*is --swift NAME=VALUE\)$"):
        swift_parsing.parse_swift_arguments(given, where=swift_parsing.OPTION)


def test_what_ms_swift_checks_after_parsing_is_told_in_its_words(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "Please input the training dataset" in refusal(capfd, tmp_path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("\nraise LookupError('no luck')\n", "got LookupError: no luck from {}:2; mend that file"),
        (
            "import nothing_of_this_name\n",
            "got ModuleNotFoundError: No module named 'nothing_of_this_name' from {}:1;",
        ),
        ("x = (\n", "got SyntaxError: '(' was never closed"),
    ],
)
def test_a_plugin_that_raises_is_named_with_its_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text(text)
    message = refusal(capfd, tmp_path, "--external_plugins", str(plugin))
    assert message.startswith("a plugin must be importable, ")
    assert told.format(plugin) in message
    assert f"from {plugin}:" in message


def test_every_example_writes_only_what_ms_swift_can_read() -> None:
    for file in (Path(__file__).parents[2] / "configs").glob("*.yaml"):
        config = load_config(file)
        refuse_unreadable(config.swift_arguments())
        for server in config.launch.servers:
            if server.engine is not ServerEngine.TRANSFORMERS:  # whose options are ours
                refuse_unreadable(as_argv(server.args), RolloutArguments)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (
            ["--learnin_rate", "1"],
            "argument of section swift, got 'learnin_rate'; did you mean 'learning_rate'?",
        ),
        (
            ["--learning", "1"],
            "got 'learning'; did you mean",
        ),  # argparse would take it for one that begins so
        (
            ["--learning_rate", "much"],
            "section swift: argument --learning_rate/--learning-rate: invalid float",
        ),
    ],
)
def test_arguments_are_checked_without_a_model(argv: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_unreadable(argv)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
