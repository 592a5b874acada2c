"""``init``: what it writes is accepted by the real doctor; what cannot run is refused and nothing is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swift_stage2 import cli, starter_config
from swift_stage2.config import ServerEngine, load_config
from swift_stage2.demo.demo_config import MODEL_TYPE, STAGE1, TEMPLATE_FILE
from swift_stage2.launch.plan import plan_launch
from swift_stage2.rollout_server.command_line import parse_command

TINY = [
    word
    for pair in (f"model_type={MODEL_TYPE}", f"template={MODEL_TYPE}", f"external_plugins={TEMPLATE_FILE}")
    for word in ("--swift", pair)
]


Init = Callable[..., int]


@pytest.fixture
def init(rows_file: Path, tmp_path: Path) -> Init:
    """``init`` with all its answers, some of them others, and more words; by default it writes ``job.yaml``."""

    def init(*words: str, **changes: str) -> int:
        values = {
            "data": str(rows_file),
            "model": str(STAGE1),
            "learner-gpus": "none",
            "rollout-gpus": "none",
            "output": str(tmp_path / "job.yaml"),
            **{name.replace("_", "-"): value for name, value in changes.items()},
        }
        return cli.main(["init", *(word for name in values for word in (f"--{name}", values[name])), *words])

    return init


def test_the_doctor_accepts_what_init_writes(
    init: Init, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert init(*TINY) == 0
    told = capsys.readouterr().out
    assert "servers run engine transformers, because the servers have no GPU" in told
    assert "swift-stage2 doctor" in told
    written = (tmp_path / "job.yaml").read_text()
    assert all(f"  # {comment}\n" in written for comment in starter_config._COMMENTS.values())
    assert cli.main(["doctor", "job.yaml"]) == 0, capsys.readouterr().out


def test_what_init_writes_can_be_used_from_any_folder(
    rows_file: Path,
    init: Init,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A hub's id and a number of rows stay."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    for name, target in {"rows.jsonl": rows_file, "model": STAGE1, "plugin.py": TEMPLATE_FILE}.items():
        (tmp_path / name).symlink_to(target)
    plugin = ("--swift", "external_plugins=plugin.py")
    first = {"data": "rows.jsonl#4", "output": "job.yaml", "model": "model"}
    assert init(*plugin, **first) == 0, capsys.readouterr().err
    other = {"data": "rows.jsonl", "output": "other.yaml", "model": "Qwen/Qwen2.5-VL-3B-Instruct"}
    assert init(*plugin, "--swift", "output_dir=new", **other) == 0, capsys.readouterr().err
    monkeypatch.chdir(tmp_path / "elsewhere")
    second = load_config("../other.yaml").swift
    assert (second["output_dir"], second["model"]) == (f"{tmp_path}/new", "Qwen/Qwen2.5-VL-3B-Instruct")
    config = load_config("../job.yaml")
    here = str(tmp_path)
    expected = {
        "model": f"{here}/model",
        "dataset": [f"{here}/rows.jsonl#4"],
        "external_plugins": f"{here}/plugin.py",
        "output_dir": f"{here}/runs/job",
        "add_version": False,
    }
    assert {name: config.swift[name] for name in expected} == expected
    assert config.launch.servers[0].args["external-plugins"] == f"{here}/plugin.py"


def test_any_key_can_be_set_by_its_path(init: Init, tmp_path: Path) -> None:
    words = ["--set", "rollout.decoding.max_new_tokens=128", "--set", "telemetry.record=true"]
    assert init(*words, "--task", "point") == 0
    config = load_config(tmp_path / "job.yaml")
    assert (config.rollout.decoding.max_new_tokens, config.telemetry.record) == (128, True)
    assert config.stage2_ab.task == "point"


@pytest.mark.parametrize(
    ("gpus", "has_vllm", "engine", "reason"),
    [
        ("1", True, ServerEngine.VLLM, "vLLM is installed"),
        ("1", False, ServerEngine.TRANSFORMERS, "vLLM is not installed"),
        ("none", True, ServerEngine.TRANSFORMERS, "the servers have no GPU"),
    ],
)
def test_servers_get_of_the_learners_arguments_what_decides_how_a_prompt_is_read(
    init: Init,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gpus: str,
    has_vllm: bool,
    engine: ServerEngine,
    reason: str,
) -> None:
    monkeypatch.setattr(starter_config, "find_spec", lambda _: object() if has_vllm else None)
    plugins = [str(tmp_path / name) for name in ("a.py", "b.py")]
    for plugin in plugins:
        Path(plugin).touch()
    shared: dict[str, Any] = {"template": "qwen2_5_vl", "external_plugins": plugins, "max_pixels": 501760}
    output = tmp_path / "job.yaml"
    given = [word for key, value in shared.items() for word in ("--swift", f"{key}={json.dumps(value)}")]
    assert init(*given, rollout_gpus=gpus) == 0
    assert f"because {reason}" in capsys.readouterr().out
    config = load_config(output)
    (server,) = config.launch.servers
    underscore = "_" if engine is ServerEngine.VLLM else "-"
    assert server.engine is engine
    assert dict(server.args) == {name.replace("_", underscore): value for name, value in shared.items()}
    assert "&id" not in output.read_text()  # a list that stands twice is written twice
    argv = plan_launch(config, output, {}).servers[0].command.argv
    parse_command(argv[argv.index("rollout") + 1 :])


def test_every_rollout_gpu_gets_a_server_with_ports_of_its_own(init: Init, tmp_path: Path) -> None:
    assert init("--b-ratio", "0.5", learner_gpus="0,1", rollout_gpus="2, 3,4") == 0
    config = load_config(tmp_path / "job.yaml")
    assert (config.launch.learner.devices, config.launch.learner.nproc_per_node) == ((0, 1), 2)
    assert [server.devices for server in config.launch.servers] == [(2,), (3,), (4,)]
    assert len({server.base_url for server in config.rollout.servers}) == 3
    assert "use_cpu" not in config.swift
    assert config.stage2_ab.schedule.b_ratio == 0.5


@pytest.mark.parametrize(
    ("rollout_gpus", "has_vllm", "shares"),
    [
        ("0", True, [0.5]),
        ("1,2", True, [0.5, None]),
        ("0", False, [None]),
        ("2", True, [None]),
    ],
)
def test_gpus_of_both_sides_are_shared(
    init: Init,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rollout_gpus: str,
    has_vllm: bool,
    shares: list[float | None],
) -> None:
    monkeypatch.setattr(starter_config, "find_spec", lambda _: object() if has_vllm else None)
    assert init(learner_gpus="0,1", rollout_gpus=rollout_gpus) == 0, capsys.readouterr().err
    launch = load_config(tmp_path / "job.yaml").launch
    assert launch.share_devices is (rollout_gpus != "2")
    assert ("share GPU" in capsys.readouterr().out) is launch.share_devices
    assert [server.args.get("vllm_gpu_memory_utilization") for server in launch.servers] == shares


@pytest.mark.parametrize(
    ("changes", "more", "told"),
    [
        ({"data": "/nowhere/rows.jsonl"}, "", "must name files that exist"),
        ({"learner_gpus": "first"}, "", "GPUs must be numbers with commas between, got 'first'"),
        ({"learner_gpus": "0,0", "rollout_gpus": "0"}, "", "what was asked for cannot run: "),
        ({}, "--set rollout.decoding", "--set must be KEY=VALUE"),
        ({}, "--set stage2_ab.schedule.b_ratio=no", "stage2_ab.schedule.b_ratio"),
    ],
)
def test_what_no_run_could_use_is_refused_and_nothing_is_written(
    init: Init,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, str],
    more: str,
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert init(*more.split(), **{"output": "job.yaml"} | changes) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
    assert not list(tmp_path.iterdir())


def test_a_file_that_exists_is_never_overwritten(
    init: Init, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "job.yaml"
    output.write_text("mine")
    assert init() == 2
    assert "must be a new file" in capsys.readouterr().err
    assert output.read_text() == "mine"
