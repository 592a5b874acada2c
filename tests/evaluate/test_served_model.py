"""A server of our own for one evaluation: started as the user wrote, ended with the command, missed in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
from detection_sets import write_rows
from real_model import STAGE1

from swift_stage2.checks.swift_parsing import parse_swift_arguments
from swift_stage2.cli import main
from swift_stage2.config import ServerEngine
from swift_stage2.config.swift_arguments import as_argv
from swift_stage2.demo.demo_config import MODEL_TYPE, TEMPLATE_FILE
from swift_stage2.errors import ServerUnavailable, UserError
from swift_stage2.evaluate.served_model import own_server, server_command

TRANSFORMERS = ServerEngine.TRANSFORMERS
OF_THE_TINY_MODEL = {
    "model_type": MODEL_TYPE,
    "template": MODEL_TYPE,
    "external_plugins": TEMPLATE_FILE,
    "torch_dtype": "float32",
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "val.jsonl", [("c.png", [])])


def without_model(folder: Path) -> str:
    """A directory of which our server says at once that it is no checkpoint."""
    (folder / "empty").mkdir()
    return str(folder / "empty")


def test_a_server_that_ends_is_told_with_its_last_error_and_its_log(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerUnavailable) as told,
        own_server(without_model(tmp_path), TRANSFORMERS, {}, tmp_path / "out"),
    ):
        pass
    log = str(tmp_path / "out" / "server.log")
    for part in ("exit status=2", "rollout: error: the model must be a checkpoint", log):
        assert part in str(told.value)
    assert "\n" not in str(told.value)


def test_an_answer_that_is_lost_is_told_by_the_servers_own_end(tmp_path: Path) -> None:
    def lose_an_answer() -> None:
        with own_server(str(STAGE1), TRANSFORMERS, OF_THE_TINY_MODEL, tmp_path):
            (supervisor,) = set(psutil.Process().children()) - before
            supervisor.children()[0].kill()
            raise ServerUnavailable("the connection was lost")

    before = set(psutil.Process().children())
    with pytest.raises(ServerUnavailable, match="exit status=137"):
        lose_an_answer()


def test_nothing_of_a_server_is_left_when_the_command_is_given_up(tmp_path: Path) -> None:
    began: list[psutil.Process] = []

    def give_up() -> None:
        with own_server(str(STAGE1), TRANSFORMERS, OF_THE_TINY_MODEL, tmp_path):
            began.extend(psutil.Process().children(recursive=True))
            raise KeyboardInterrupt

    before = psutil.Process().children()
    with pytest.raises(KeyboardInterrupt):
        give_up()
    assert psutil.Process().children() == before
    assert not any(each.is_running() for each in began if each not in before)


def test_our_engine_gets_its_own_options_and_vllm_those_of_ms_swift(monkeypatch: pytest.MonkeyPatch) -> None:
    swift: dict[str, Any] = {"max_pixels": 9, "external_plugins": ["a.py", "b.py"], "norm_bbox": "none"}
    ours = " ".join(server_command("m", TRANSFORMERS, swift, 1))
    place = "rollout --engine transformers m --host 127.0.0.1 --port 1"
    assert ours.endswith(f"-m swift_stage2 {place} --max-pixels 9 --external-plugins a.py b.py")
    monkeypatch.setattr("swift_stage2.evaluate.served_model.require_vllm", lambda who: None)
    swift["vllm_max_model_len"] = 64
    vllm = server_command("m", ServerEngine.VLLM, swift, 1)
    assert " ".join(vllm).endswith("--max_pixels 9 --external_plugins a.py b.py --vllm_max_model_len 64")
    with pytest.raises(UserError, match="--swift vllm_max_model_len is vLLM's; add --engine vllm"):
        server_command("m", TRANSFORMERS, swift, 1)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--server", "http://127.0.0.1:9\n"], "base_url must hold scheme, host and a port"),
        (["--model", "nowhere"], "--model must be a directory that exists"),
        (["--model", "LORA"], "swift export --adapters"),
        (["--model", "PLUGIN"], "write --swift external_plugins=FILE"),
        (["--model", str(STAGE1), "--swift", "vllm_seed=1"], "is vLLM's; add --engine vllm"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    data: Path, options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lora, plugin = data.parent / "lora", data.parent / "plugin"
    lora.mkdir()
    (lora / "adapter_config.json").write_text("{}")
    plugin.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (plugin / name).write_text("{}")
    (plugin / "args.json").write_text(json.dumps({"external_plugins": ["gone.py"]}))
    places = {"LORA": str(lora), "PLUGIN": str(plugin)}
    words = [places.get(word, word) for word in options]
    if "--server" in words:
        words += ["--model", str(STAGE1)]
    output = str(data.parent / "out")
    assert main(["evaluate", "--data", str(data), *words, "--output", output]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert told in error


@pytest.mark.slow
def test_a_runs_checkpoint_needs_no_further_option(rows_file: Path, tmp_path: Path) -> None:
    """Its args.json names plugin, kind and template, to our server and to the template here."""
    checkpoint = tmp_path / "checkpoint-3"
    shutil.copytree(STAGE1, checkpoint)
    given = {"model": STAGE1, "dataset": rows_file, "use_cpu": True, "output_dir": tmp_path / "run"}
    parse_swift_arguments(as_argv(OF_THE_TINY_MODEL | given | {"add_version": False})).save_args(checkpoint)
    output = tmp_path / "out"
    words = [
        "--model",
        str(checkpoint),
        "--swift",
        "use_cpu=true",
        "--output",
        str(output),
    ]
    before = psutil.Process().children()  # of other tests' fixtures
    assert main(["evaluate", "--data", str(rows_file), *words, "--max-new-tokens", "64"]) == 0
    facts = json.loads((output / "evaluation.json").read_text(encoding="utf-8"))
    assert facts["metrics"]["eval/recall"]["value"] > 0.1
    assert facts["source"] == str(checkpoint)
    assert psutil.Process().children() == before
    assert f"serving {checkpoint}" in (output / "server.log").read_text(encoding="utf-8")
