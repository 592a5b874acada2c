"""``init --from``: what it reads of a script is what bash hands to the program; what channel B refuses is left out."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from swift_stage2 import cli
from swift_stage2.config import Stage2Config, load_config
from swift_stage2.config.swift_arguments import UNSUPPORTED, as_argv
from swift_stage2.config.train_script import TrainScript, read_train_script
from swift_stage2.demo.demo_config import MODEL_TYPE, STAGE1, TEMPLATE_FILE
from swift_stage2.launch.plan import plan_launch

SCRIPTS = {file.stem: file for file in (Path(__file__).parent / "train_scripts").glob("*.sh")}
PROGRAM = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["TOLD"], "a") as file:
    file.write(json.dumps([sys.argv, dict(os.environ)]) + "\\n")
"""


def run_by_bash(script: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """What bash hands to the program that trains: its options, and what the script set in its environment."""
    told, programs = folder / "told", folder / "programs"
    programs.mkdir()
    for name in ("swift", "torchrun", "python"):
        (programs / name).write_text(PROGRAM)
        (programs / name).chmod(0o755)
    outer = {"PATH": f"{programs}:/usr/bin:/bin", "TOLD": str(told), "LC_ALL": "C.UTF-8", "HOME": str(folder)}
    subprocess.run(["bash", "-c", f"{script}\nwait"], cwd=folder, env=outer, check=True, timeout=60)
    runs = [json.loads(line) for line in told.read_text().splitlines()]
    ends = [
        number for argv, _ in runs for number, word in enumerate(argv) if re.search(r"\bsft(\.py)?$", word)
    ]
    ((argv, variables),) = [run for run in runs if "export" not in run[0] and "infer" not in run[0]]
    given = {
        name: value
        for name, value in variables.items()
        if name not in {*outer, "PWD", "SHLVL", "_", "OLDPWD"}
    }
    return argv[ends[0] + 1 :], given


def divided(argv: Sequence[str]) -> dict[str, list[str]]:
    """Values by option, as argparse divides them, on which ms-swift's own parser is built; exponents as Python's."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in {word.partition("=")[0] for word in argv if word.startswith("--")}:
        parser.add_argument(name, dest=name[2:].replace("-", "_"), nargs="*")
    values = vars(parser.parse_args(argv))
    exponent = re.compile(r"-?\d[\d.]*e-?\d+")
    return {
        name: [str(float(word)) if exponent.fullmatch(word) else word for word in words or ["true"]]
        for name, words in values.items()
    }


def readable(script: TrainScript) -> dict[str, str]:
    return {name: value for name, value in script.environment.items() if isinstance(value, str)}


def init(source: object, output: Path, *more: str) -> Stage2Config:
    assert cli.main(["init", "--from", str(source), "--output", str(output), *more]) == 0
    return load_config(output)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cached" / "train").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("A", "B", "DATA", "MODEL", "EMPTY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_read_as_bash_reads_it(name: str, tmp_path: Path) -> None:
    argv, variables = run_by_bash(SCRIPTS[name].read_text(), tmp_path)
    script = read_train_script(str(SCRIPTS[name]))
    assert divided(as_argv(script.arguments)) == divided(argv)
    of_shell = script.environment.keys() - readable(script).keys()
    assert of_shell == ({"WANDB_NAME"} if name == "variables" else set())
    of_launcher = {"NPROC_PER_NODE": "2"} if name == "torchrun" else {}
    assert (
        readable(script)
        == {key: value for key, value in variables.items() if key not in of_shell} | of_launcher
    )


@pytest.mark.parametrize(
    "text",
    [
        'swift sft --a "x  y" --b \'p"q$A\' --c a\\ b\\$c --d "\\$\\`\\"\\\\\\n" --e ""x\'\' --f --g=',
        'A="x  y"; B=$A\nswift sft --a $A --b "$A" --c "${A}z" --d pre$A"$B"post --e ${B} --f="$A"',
        "A='' B=b; swift sft --a ${A:-d} --b ${A-d} --c ${C:-$B/x} --d \"${C:-q r}\" --e ${C:-'q r'} ${C:-s t} $A",
        'A=\'a"b\\c#d;e|f\'; swift sft --a $A --b "$A" --c \'$A\' --d "$A"',
        "A=1 swift sft --a one two --b=1 --a three;echo done",
        'A=$((2 * 3*4)) B=$A swift sft --a $((5*6)) \\\n  --b "$((7))" 2>/dev/null </dev/null >>log --c 2 &>log &',
        "swift sft --a on\\\ne \\\n --b 2 # --c 3 \\\n\n(echo swift) | cat && echo 'sft' # it's \"over\"",
        "export A=1; export B; B=2; A=3\nA=4 true; swift sft --a $A; A=5",
        "time env A=1 swift sft --a x#1 '#' # y",
    ],
)
def test_quotes_and_variables_are_read_as_bash_reads_them(text: str, tmp_path: Path) -> None:
    argv, variables = run_by_bash(text, tmp_path)
    script = read_train_script(text)
    assert divided(as_argv(script.arguments)) == divided(argv)
    assert readable(script) == variables


def test_an_exported_variable_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA", "rows.jsonl")
    assert read_train_script("swift sft --val-dataset $DATA#5").arguments == {"val_dataset": "rows.jsonl#5"}


# GPUs of learner and servers, what channel B cannot live with, and what else is written in another way.
JOBS: dict[str, tuple[list[int], list[int], set[str], set[str]]] = {
    "one_gpu": ([0], [0], set(), {"train_type"}),
    "packed": (
        [0, 1],
        [2, 3],
        {"packing", "padding_free", "use_liger_kernel"},
        {"output_dir", "add_version"},
    ),
    "variables": ([2], [3], set(), {"output_dir"}),
    "torchrun": ([0], [1], set(), {"model_kwargs"}),
    "several_commands": ([0, 1], [2], {"cached_dataset"}, set()),
    "spread": ([4, 5], [6, 7], {"streaming", "task_type", "truncation_strategy"}, set()),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_channel_b_can_live_with_is_kept_and_all_else_told(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learner, servers, left_out, changed = JOBS[name]
    left_out = {key for key in left_out if any(rule.key == key for rule in UNSUPPORTED)}
    config = init(SCRIPTS[name], tmp_path / "job.yaml")
    assert (list(config.launch.learner.devices), config.launch.learner.nproc_per_node) == (
        learner,
        len(learner),
    )
    assert [gpu for server in config.launch.servers for gpu in server.devices] == servers
    given = divided(as_argv(read_train_script(str(SCRIPTS[name])).arguments))
    written = divided([word.replace(f"{tmp_path}/cached", "./cached") for word in as_argv(config.swift)])
    kept = given.keys() - left_out - changed
    assert {key: written.get(key) for key in kept} == {key: given[key] for key in kept}
    assert not written.keys() & left_out
    told = capsys.readouterr().out
    assert {key for key in left_out if f"--{key} " not in told} == set()
    assert set(re.findall("^--(.*?) .*: becomes", told, re.MULTILINE)) == changed - {"model_kwargs"}


def test_variables_reach_whoever_reads_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.yaml"
    plan = plan_launch(init(SCRIPTS["several_commands"], file), file, {})
    assert plan.learner is not None
    learner, server = plan.learner.environment, plan.servers[0].command.environment
    assert (server["MAX_PIXELS"], server["FPS_MAX_FRAMES"]) == ("501760", "12")
    assert learner["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in server
    kwargs = {"max_pixels": "501760", "video_max_pixels": "50176", "fps_max_frames": "12"}
    assert load_config(file).swift["model_kwargs"] == kwargs
    assert "NNODES: left out; export it before" in capsys.readouterr().out


def test_options_win_over_the_script(
    tmp_path: Path, rows_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data", str(rows_file), "--model", "stage1", "--learner-gpus", "1", "--b-ratio", "0"]
    (tmp_path / "more.sh").write_text(f"{SCRIPTS['packed'].read_text().strip()} --cached_dataset rows")
    config = init("more.sh", tmp_path / "job.yaml", *words, "--swift", "torch_dtype=float16")
    assert (config.swift["model"], config.swift["dataset"]) == ("stage1", [str(rows_file)])
    assert (config.launch.learner.devices, len(config.launch.servers)) == ((1,), 3)
    assert config.swift["packing"] is True  # which plain training can live with
    told = capsys.readouterr().out
    assert "--cached_dataset rows: becomes nothing, as the options say" in told
    assert "--torch_dtype bfloat16: becomes --torch_dtype float16, as the options say" in told
    assert "4 would keep the rows of a step (ranks: 1, in the script 4)" in told


SFT = "swift sft --model m --dataset d"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("swift infer --model m", "must hold one command that trains with swift sft, got none"),
        (f"{SFT}\n\nswift pt --model n", "got swift sft in line 1 and swift pt in line 3"),
        (
            "megatron sft --model m",
            "must train with swift sft, on which stage 2 builds, got megatron sft in line 1",
        ),
        ("A=1 \\\nswift rlhf --model m", "got swift rlhf in line 1"),
        ("python -m swift.cli._megatron.sft --x 1", "must train with swift sft"),
        (f"{SFT} --output_dir $(date)", "--from runs nothing, got $(date); write what it stands for"),
        (f'{SFT} "${{WORDS[@]}}"', "--from runs nothing"),
        (f"A=`date`; {SFT} --output_dir $A", "$A: --from runs nothing, got `date`"),
        (
            f"\n{SFT} --output_dir $A",
            "swift sft in line 2: $A: --from reads what the script sets, or this shell has exported",
        ),
        (f"if true; then A=1; fi\n{SFT} --seed $A", "$A: --from reads no condition, loop or function"),
        (f"[ -n x ] && A=1; {SFT} --seed $A", "$A: --from reads no condition"),
        (f"for A in 1 2; do\n {SFT} --seed $A; done", "$A: --from reads what the script sets"),
        (f"{SFT} --system 'open", 'must close every quotation, got "\'open"'),
        (f"export FPS=$(cat fps) NPROC_PER_NODE=1; {SFT}", "$FPS: --from runs nothing"),
        (f"if true; then export FPS=2; fi; NPROC_PER_NODE=1 {SFT}", "$FPS: --from reads no condition"),
        (SFT, "--learner-gpus and --rollout-gpus must be given, or a --from that names GPUs"),
        (
            "NPROC_PER_NODE=2 swift sft --model m",
            "--data must be given, or a --from that names what it stands for",
        ),
        ("nowhere.sh", "must be a script, or a command in quotes, got nowhere.sh: No such file"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.sh").write_text(text)
    source = "train.sh" if "\n" in text else text
    assert cli.main(["init", "--from", source, "--output", "job.yaml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
    assert not (tmp_path / "job.yaml").exists()


def test_a_number_of_ranks_that_only_a_shell_knows_is_not_needed_beside_given_gpus(tmp_path: Path) -> None:
    source = f"CUDA_VISIBLE_DEVICES=$(free) NPROC_PER_NODE=$(free | wc -l) MASTER_PORT=$((RANDOM + 1)) {SFT}"
    config = init(source, tmp_path / "job.yaml", "--learner-gpus", "0", "--rollout-gpus", "1,2")
    assert config.launch.learner.devices == (0,)


def test_the_doctor_accepts_what_a_script_gives(
    tmp_path: Path, rows_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And ms-swift's own parser sets the variables that the script set."""
    monkeypatch.setenv("MAX_PIXELS", "none")  # of this process, in which ms-swift will set it
    tiny = f"--model {STAGE1} --model_type {MODEL_TYPE} --template {MODEL_TYPE} --external_plugins {TEMPLATE_FILE}"
    source = (
        f"CUDA_VISIBLE_DEVICES= MAX_PIXELS=501760 swift sft {tiny} --dataset {rows_file} --train_type full"
    )
    config = init(source, tmp_path / "job.yaml")
    assert config.swift["use_cpu"] is True
    assert cli.main(["doctor", "job.yaml"]) == 0, capsys.readouterr().out
    assert os.environ["MAX_PIXELS"] == "501760"
