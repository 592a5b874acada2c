"""``init``: what it writes is accepted by the real doctor; what cannot run is refused and nothing is written."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from swift_stage2 import cli, starter_config
from swift_stage2.config import ServerEngine, Stage2Config, load_config
from swift_stage2.config.binding import bind
from swift_stage2.config.yaml_text import write_yaml
from swift_stage2.demo.demo_config import MODEL_TYPE, STAGE1, TEMPLATE_FILE
from swift_stage2.launch.plan import plan_launch
from swift_stage2.rollout_server.command_line import parse_command

TINY = [
    word
    for pair in (f"model_type={MODEL_TYPE}", f"template={MODEL_TYPE}", f"external_plugins={TEMPLATE_FILE}")
    for word in ("--swift", pair)
]


def answers(rows_file: Path, file: Path, **changes: str) -> list[str]:
    values = {
        "data": str(rows_file),
        "model": str(STAGE1),
        "learner-gpus": "none",
        "rollout-gpus": "none",
        "output": str(file),
        **{name.replace("_", "-"): value for name, value in changes.items()},
    }
    return [word for name, value in values.items() for word in (f"--{name}", value)]


def test_the_doctor_accepts_what_init_writes(
    rows_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", *answers(rows_file, tmp_path / "job.yaml"), *TINY]) == 0
    told = capsys.readouterr().out
    assert "servers run engine transformers, because the servers have no GPU" in told
    assert "swift-stage2 doctor" in told
    assert cli.main(["doctor", "job.yaml"]) == 0, capsys.readouterr().out


def test_what_init_writes_can_be_used_from_any_folder(
    rows_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    for name, target in {"rows.jsonl": rows_file, "model": STAGE1, "plugin.py": TEMPLATE_FILE}.items():
        (tmp_path / name).symlink_to(target)
    words = answers(Path("rows.jsonl"), Path("job.yaml"), model="model")
    plugin = ("--swift", "external_plugins=plugin.py")
    assert cli.main(["init", *words, *plugin]) == 0, capsys.readouterr().err
    other = answers(Path("rows.jsonl"), Path("other.yaml"), model="model")
    assert cli.main(["init", *other, *plugin, "--swift", "output_dir=new"]) == 0, capsys.readouterr().err
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_config("../other.yaml").swift["output_dir"] == f"{tmp_path}/new"
    config = load_config("../job.yaml")
    here = str(tmp_path)
    assert config.swift["model"] == f"{here}/model"
    assert config.swift["dataset"] == [f"{here}/rows.jsonl"]
    assert config.swift["external_plugins"] == f"{here}/plugin.py"
    assert config.launch.servers[0].args["external-plugins"] == f"{here}/plugin.py"
    assert config.swift["output_dir"] == f"{here}/runs/job"
    assert config.swift["add_version"] is False
    assert "read from the folder in which a command is started" in (tmp_path / "job.yaml").read_text()


def test_any_key_can_be_set_by_its_path(rows_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "job.yaml"
    words = ["--set", "rollout.decoding.max_new_tokens=128", "--set", "telemetry.record=true"]
    assert cli.main(["init", *answers(rows_file, output), *words]) == 0
    config = load_config(output)
    assert (config.rollout.decoding.max_new_tokens, config.telemetry.record) == (128, True)


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("rollout.decoding", "--set must be SECTION.KEY=VALUE"),
        ("rollout.servers.base_url=x", "--set must name a key of a section"),
        ("rollout.decodng.max_new_tokens=1", "unknown key 'decodng'"),
        ("stage2_ab.schedule.b_ratio=no", "stage2_ab.schedule.b_ratio"),
    ],
)
def test_a_key_that_cannot_be_set_is_told_and_nothing_is_written(
    rows_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str, told: str
) -> None:
    output = tmp_path / "job.yaml"
    assert cli.main(["init", *answers(rows_file, output), "--set", word]) == 2
    assert told in capsys.readouterr().err
    assert not output.exists()


def test_a_hub_id_and_a_number_of_rows_stay(
    rows_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(rows_file.parent)
    output = tmp_path / "job.yaml"
    assert (
        cli.main(["init", *answers(Path(f"{rows_file.name}#4"), output, model="Qwen/Qwen2.5-VL-3B-Instruct")])
        == 0
    )
    config = load_config(output)
    assert config.swift["model"] == "Qwen/Qwen2.5-VL-3B-Instruct"
    assert config.swift["dataset"] == [f"{rows_file}#4"]


@pytest.mark.parametrize(
    ("gpus", "has_vllm", "engine", "reason"),
    [
        ("1", True, ServerEngine.VLLM, "vLLM is installed"),
        ("1", False, ServerEngine.TRANSFORMERS, "vLLM is not installed"),
        ("none", True, ServerEngine.TRANSFORMERS, "the servers have no GPU"),
    ],
)
def test_servers_get_of_the_learners_arguments_what_decides_how_a_prompt_is_read(
    rows_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: str,
    has_vllm: bool,
    engine: ServerEngine,
    reason: str,
) -> None:
    monkeypatch.setattr(starter_config, "find_spec", lambda _: object() if has_vllm else None)
    plugins = [tmp_path / name for name in ("a.py", "b.py")]
    for plugin in plugins:
        plugin.touch()
    shared: dict[str, Any] = {
        "template": "qwen2_5_vl",
        "external_plugins": [str(plugin) for plugin in plugins],
        "max_pixels": 501760,
    }
    words = answers(rows_file, tmp_path / "job.yaml", rollout_gpus=gpus)
    options = starter_config._parse([*words, "--swift", "max_steps=8"])
    options.output = tmp_path / "job.yaml"
    options.swift += [f"{key}={json.dumps(value)}" for key, value in shared.items()]
    data = starter_config.starter_config(options)
    (server,) = data["launch"]["servers"]
    underscore = "_" if engine is ServerEngine.VLLM else "-"
    assert server["engine"] == engine
    assert server["args"] == {name.replace("_", underscore): value for name, value in shared.items()}
    assert "&id" not in write_yaml(data)  # a list that stands twice is written twice
    argv = plan_launch(bind(Stage2Config, data), options.output, {}).servers[0].command.argv
    parse_command(argv[argv.index("rollout") + 1 :])
    assert starter_config._engine(server["devices"])[1].startswith(reason)


def test_every_rollout_gpu_gets_a_server_with_ports_of_its_own(rows_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "gpus.yaml"
    words = answers(rows_file, output, learner_gpus="0,1", rollout_gpus="2, 3,4")
    assert cli.main(["init", *words, "--b-ratio", "0.5"]) == 0
    config = load_config(output)
    assert config.launch.learner.devices == (0, 1)
    assert config.launch.learner.nproc_per_node == 2
    assert [server.devices for server in config.launch.servers] == [(2,), (3,), (4,)]
    assert len({server.base_url for server in config.rollout.servers}) == 3
    assert "use_cpu" not in config.swift
    assert config.stage2_ab.schedule.b_ratio == 0.5


@pytest.mark.parametrize(
    ("rollout_gpus", "has_vllm", "shares"),
    [
        ("0", True, [0.5]),
        ("1,2", True, [0.5, None]),
        ("0,0", True, [0.33, 0.33]),
        ("0", False, [None]),
        ("2", True, [None]),
    ],
)
def test_gpus_of_both_sides_are_shared(
    rows_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rollout_gpus: str,
    has_vllm: bool,
    shares: list[float | None],
) -> None:
    monkeypatch.setattr(starter_config, "find_spec", lambda _: object() if has_vllm else None)
    output = tmp_path / "job.yaml"
    words = answers(rows_file, output, learner_gpus="0,1", rollout_gpus=rollout_gpus)
    assert cli.main(["init", *words]) == 0, capsys.readouterr().err
    launch = load_config(output).launch
    assert launch.share_devices is (rollout_gpus != "2")
    assert ("share GPU" in capsys.readouterr().out) is launch.share_devices
    assert [server.args.get("vllm_gpu_memory_utilization") for server in launch.servers] == shares


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"data": "/nowhere/rows.jsonl"}, "must name files that exist"),
        ({"data": ""}, "--data must name a JSONL file"),
        ({"model": "/nowhere/model"}, "--model must be a directory that exists"),
        ({"learner_gpus": "first"}, "GPUs must be numbers with commas between, got 'first'"),
        ({"learner_gpus": "0,0", "rollout_gpus": "0"}, "what was asked for cannot run: launch.learner"),
        ({"rollout_gpus": "1,1"}, "need devices of their own"),
        ({"output": "job.txt"}, "--output must be the name of a YAML file"),
    ],
)
def test_what_no_run_could_use_is_refused_and_nothing_is_written(
    rows_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", *answers(rows_file, Path("job.yaml"), **changes)]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("lerning_rate=1e-5", "unknown key 'lerning_rate' in section swift; did you mean 'learning_rate'?"),
        ("max_steps=many", "ms-swift refuses section swift: argument --max_steps"),
        ("external_plugins=b.py", "--swift must name a key once, got external_plugins again with"),
    ],
)
def test_arguments_that_ms_swift_does_not_take_are_refused(
    rows_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str, told: str
) -> None:
    output = tmp_path / "job.yaml"
    before = ["--swift", "external_plugins=a.py"] if "plugins" in word else []
    assert cli.main(["init", *answers(rows_file, output), *before, "--swift", word]) == 2
    assert told in capsys.readouterr().err
    assert not output.exists()


COUNTING = """
from swift_stage2 import Task, register_task
@register_task("init_counting")
class InitCounting(Task):
    pass
"""


def test_another_tasks_rows_need_no_objects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, output, plugin = tmp_path / "rows.jsonl", tmp_path / "job.yaml", tmp_path / "counting.py"
    turns = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "3"}]
    rows.write_text(json.dumps({"messages": turns}) + "\n")
    plugin.write_text(COUNTING)
    words = answers(rows, output)
    assert cli.main(["init", *words]) == 2
    assert "objects" in capsys.readouterr().err
    more = ["--task", "init_counting", "--swift", f"external_plugins={plugin}"]
    assert cli.main(["init", *words, *more]) == 0, capsys.readouterr().err
    assert "task init_counting is not looked at here; doctor does" in capsys.readouterr().out
    assert load_config(output).stage2_ab.task == "init_counting"


def test_what_init_is_at_is_told_while_it_takes_long(
    rows_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(starter_config, "going_on", lambda _, what: told.append(what) or nullcontext())
    assert cli.main(["init", *answers(rows_file, tmp_path / "job.yaml"), *TINY]) == 0
    assert told == ["checking the data set", "loading ms-swift, which checks its arguments"]


def test_a_file_that_exists_is_never_overwritten(
    rows_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "mine.yaml"
    output.write_text("mine")
    assert cli.main(["init", *answers(rows_file, output)]) == 2
    assert "must be a new file" in capsys.readouterr().err
    assert output.read_text() == "mine"


def test_an_option_that_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["init", "--data", "x.jsonl"])
    assert "required: --model, --learner-gpus, --rollout-gpus, --output" in capsys.readouterr().err
