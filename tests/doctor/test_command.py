"""The command without a server: rows with numbers, exit statuses, fixes, and that nothing secret is printed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from detection_task import make_task
from doctor_run import Report
from live_server import MODEL, free_port
from real_model import make_encoder, rollout_of, sample_of

from swift_stage2.channel_b.task import TASKS
from swift_stage2.config import load_config
from swift_stage2.demo.demo_config import TEMPLATE_FILE
from swift_stage2.doctor import command, data, rollouts
from swift_stage2.errors import ConfigError
from swift_stage2.scheduling.evaluation_schedule import EvaluationSchedule
from swift_stage2.weights.disk_manifest import mark_proven

Configure = Callable[..., Path]
Doctor = Callable[..., Report]
DEAD = "http://127.0.0.1:9"
PREFETCH = "stage2_ab__channel_b__prefetch"


def cli(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "swift_stage2", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env=dict(os.environ) | environment,
    )


INTERRUPTED = """
import pathlib, signal, sys, time
from swift_stage2.doctor import command

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # where the tests themselves run under nohup

def examine(exam, path, options, scratch):
    print(scratch, flush=True)
    for _ in range(600):  # a signal right before a long sleep begins would not end it
        time.sleep(0.1)

command.examine = examine
command.main([sys.argv[1]])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_no_folder(configure: Configure, number: signal.Signals) -> None:
    command_line = [sys.executable, "-c", INTERRUPTED, str(configure(DEAD))]
    with subprocess.Popen(command_line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as doctor:
        assert doctor.stdout is not None
        scratch = Path(doctor.stdout.readline().strip())
        assert scratch.is_dir()
        doctor.send_signal(number)
        doctor.communicate(timeout=60)
    assert not scratch.exists()
    assert number is signal.SIGINT or doctor.returncode == 128 + number


# --- exit statuses -----------------------------------------------------------------------------------


def test_a_missing_file_and_text_that_is_no_yaml_are_the_users_mistake(tmp_path: Path) -> None:
    missing = cli(str(tmp_path / "absent.yaml"))
    assert missing.returncode == 2
    assert "a configuration file must exist" in missing.stderr
    assert missing.stdout == ""
    broken = tmp_path / "broken.yaml"
    broken.write_text("stage2_ab: {schedule: ")
    with pytest.raises(ConfigError, match="valid YAML"):
        command.main([str(broken)])


def test_a_step_time_must_be_a_number_of_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(["run.yaml", "--step-seconds", "-1"])
    assert caught.value.code == 2
    assert "a number of seconds above 0, got '-1'" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", ["0", "-2", "1.5", "two"])
def test_a_number_of_ranks_must_be_one(ranks: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(["run.yaml", "--nproc-per-node", ranks])
    assert caught.value.code == 2
    assert f"a whole number, at least 1, got '{ranks}'" in capsys.readouterr().err


def test_a_refused_configuration_is_a_failed_check_and_the_rest_names_it(
    configure: Configure, doctor: Doctor
) -> None:
    report = doctor(configure(DEAD, **{f"{PREFETCH}__queue_limit": 3}))
    assert report.status == 1
    assert report.failed == ["configuration loads"]
    row = report.row("configuration loads")
    assert "prefetch_target_packs=4 queue_limit=3" in row["found"]
    assert row["fix"] == "write queue_limit: 4 or more"
    rest = [row for row in report.findings if row["check"] != "configuration loads"]
    assert len(rest) >= 3
    assert {row["verdict"] for row in rest} == {"not checked"}
    assert all(row["counts_as_failed"] for row in rest)


def test_the_table_goes_to_a_terminal_and_the_status_to_the_script(configure: Configure) -> None:
    result = cli(str(configure(DEAD, swift__model="/nowhere/model")), COLUMNS="80")
    assert result.returncode == 1
    assert "swift.model must be a directory that exists" in " ".join(result.stdout.split())
    assert "fix: check the path" in result.stdout
    assert "not checked: because of: model directory" in " ".join(result.stdout.split())
    assert all(len(line) <= 80 for line in result.stdout.splitlines())


# --- rows --------------------------------------------------------------------------------------------


def test_every_inequality_is_shown_with_its_numbers(configure: Configure, doctor: Doctor) -> None:
    port, group_port = free_port(), free_port()
    servers = [{"base_url": f"http://127.0.0.1:{port}", "group_port": group_port}]
    launch = {"launch__servers": [{"engine": "transformers"}], "rollout__servers": servers}
    report = doctor(configure(**launch))
    assert report.status == 0, report.text
    numbers = {
        "target within limit": "prefetch_target_packs <= queue_limit: 4 <= 6",
        "version window": "version_window 2, sync_every_steps 4",
        "control timeout": "1800 >= 3 * (30 + 10)",
        "target holds a step": "prefetch_target_packs >= gradient_accumulation_steps: 4 >= 2",
        "limit holds a step": "queue_limit >= gradient_accumulation_steps: 6 >= 2",
        "useful limit": "6 <= 2 * max(1, ceil((2 + 1) * 0.25 * 4)) = 6",
        "starvation grace": "200 * 0.25 = 50",
        "round time": "30 >= 10 + 512 / 100 = 16",
        "request time": "30 >= 1 + 100 / 400 = 2",
        "devices": "learner: CPU only; server 0: CPU only",
        "ports": f"ports {port} and {group_port} are free",
    }
    for check, text in numbers.items():
        assert report.verdict(check) == "ok", report.row(check)
        assert text in report.row(check)["found"]
    packing = report.row("packing_length")
    assert packing["verdict"] == "ok"
    assert "packing_length >= prompt + max_new_tokens: 256 >= " in packing["found"]
    assert "12 of 12 rows encoded as the model gets them" in report.row("samples")["found"]
    budget = report.row("run-ahead")
    assert budget["verdict"] == "ok"
    assert re.fullmatch(
        r"a rank holds at most (\d+) rollouts begun under one version \(a pack holds at most (\d+) of them: "
        r"packing_length 256 / (\d+)\); a B step needs 2 \* [\d.]+ = \d+ of a usual length",
        budget["found"],
    ), budget
    assert "no such" not in report.text


def test_what_wastes_something_is_a_warning_with_the_value_and_exit_0(
    configure: Configure, doctor: Doctor
) -> None:
    config = configure(
        DEAD,
        **{
            f"{PREFETCH}__queue_limit": 9,
            "stage2_ab__starvation": {"grace_steps": 10},
            "swift__model": "/nowhere/m",
        },
    )
    report = doctor(config)
    assert report.row("useful limit")["verdict"] == "warning"
    assert report.row("useful limit")["fix"] == "write stage2_ab.channel_b.prefetch.queue_limit: 6"
    assert report.row("starvation grace")["fix"] == "write stage2_ab.starvation.grace_steps: 16 or more"


def test_devices_that_this_machine_lacks_fail(configure: Configure, doctor: Doctor) -> None:
    report = doctor(
        configure(
            DEAD,
            launch={"servers": [{"engine": "swift", "devices": [901]}], "learner": {"devices": [900]}},
            swift__model="/nowhere/m",
        )
    )
    row = report.row("devices")
    assert row["verdict"] == "failed"
    assert "learner: 900; server 0: 901" in row["found"]
    assert "run the doctor on the machine that trains" in row["fix"]


def test_devices_of_servers_on_other_hosts_are_not_looked_for_here(
    configure: Configure, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    learner = {"devices": [0, 1], "nnodes": 2, "rdzv_endpoint": "127.0.0.1:29400"}
    launch = {"servers": [{"engine": "swift", "devices": [7]}, {"engine": "vllm"}], "learner": learner}
    elsewhere = {
        "rollout__servers": [{"base_url": f"http://{host}:8000"} for host in ("192.0.2.1", "203.0.113.1")]
    }
    report = doctor(configure(DEAD, launch=launch, swift__model="/nowhere/m", **elsewhere))
    assert report.verdict("devices") == "ok", report.row("devices")
    assert "learner: 0,1; server 0: 7; server 1: CPU only" in report.row("devices")["found"]
    assert report.verdict("launch plan") == "ok", report.row("launch plan")


@pytest.mark.parametrize("output", ["/proc/nowhere/run", "rows.jsonl/run", 7])
def test_a_run_directory_that_cannot_be_written_fails(
    configure: Configure, doctor: Doctor, tmp_path: Path, output: str | int
) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    place = str(tmp_path / output) if isinstance(output, str) and output.startswith("rows") else output
    row = doctor(configure(DEAD, swift__output_dir=place, swift__model="/nowhere/m")).row("run directory")
    assert row["verdict"] == "failed"
    assert row["fix"] == "write a swift.output_dir that this user can write"


def test_a_run_directory_is_tried_and_left_as_it_was(
    configure: Configure, doctor: Doctor, tmp_path: Path
) -> None:
    config = configure(DEAD, swift__output_dir=str(tmp_path / "new" / "run"), swift__model="/nowhere/m")
    before = sorted(tmp_path.iterdir())
    row = doctor(config).row("run directory")
    assert row["verdict"] == "ok"
    assert "can be written" in row["found"]
    assert sorted(tmp_path.iterdir()) == before


def test_a_disk_too_full_for_one_checkpoint_is_told(
    configure: Configure, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda place: real(place)._replace(free=1000))
    row = doctor(configure(DEAD, swift__lerning_rate=1)).row("run directory")
    assert row["verdict"] == "warning"
    assert "the weights alone of one checkpoint take" in row["found"]


@pytest.mark.slow
def test_the_room_for_the_versions_that_stay_is_told(
    configure: Configure, doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark_proven(make(tmp_path / "weights" / "run-1"), 1)
    sync = {"transport": "disk", "disk_directory": str(tmp_path / "weights"), "disk_keep": 3}
    config, real = configure(DEAD, rollout__sync=sync), shutil.disk_usage
    row = doctor(config).row("disk room")
    assert row["verdict"] == "ok"
    assert (
        f"GiB free in {tmp_path / 'weights'}, weights take 4 x 0.0 GiB; 1 versions of earlier runs"
        in row["found"]
    )
    num_bytes = (MODEL / "model.safetensors").stat().st_size
    monkeypatch.setattr(shutil, "disk_usage", lambda place: real(place)._replace(free=4 * num_bytes - 1))
    row = doctor(config).row("disk room")
    assert row["verdict"] == "warning"
    assert "lower sync.disk_keep" in row["fix"]
    shutil.rmtree(tmp_path / "weights")
    rows = [row for row in doctor(config).findings if "disk" in row["check"]]
    assert [(row["check"], row["verdict"]) for row in rows] == [("disk directory", "failed")]


def make(directory: Path) -> Path:
    directory.mkdir(parents=True)
    return directory


def test_servers_without_channel_b_are_told(configure: Configure, doctor: Doctor) -> None:
    changes = {"stage2_ab__schedule__b_ratio": 0, "launch__servers": [{"engine": "transformers"}]}
    row = doctor(configure(DEAD, swift__model="/nowhere/m", **changes)).row("channel B is off")
    assert row["verdict"] == "warning"
    assert "are not started" in row["found"]
    assert row["fix"] == "remove them"


@pytest.mark.parametrize(
    ("engine", "use_cpu", "fix"),
    [
        ("transformers", False, "write numbers of GPUs at launch.learner.devices, launch.servers[0].devices"),
        ("vllm", True, "write numbers of GPUs at launch.servers[0].devices"),
        ("transformers", True, None),
    ],
)
def test_who_would_leave_the_gpus_here_unused_is_told(
    configure: Configure,
    doctor: Doctor,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    use_cpu: bool,
    fix: str | None,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    report = doctor(
        configure(
            DEAD,
            launch={"servers": [{"engine": engine}]},
            swift__model="/nowhere/m",
            swift__use_cpu=use_cpu,
        )
    )
    row = report.row("devices")
    assert row["verdict"] == ("ok" if fix is None else "warning")
    assert row["fix"] == (fix or "")


@pytest.mark.parametrize(
    ("changes", "check", "verdict", "fix"),
    [
        ({"stage2_ab__channel_b__target": {"dialect": "object_map"}}, "data sets", "failed", "object_map"),
        (
            {"stage2_ab__channel_b__packing": {"packing_length": 110}},
            "samples",
            "failed",
            "write packing_length: ",
        ),
        ({"swift__lerning_rate": 1e-4}, "template", "failed", "did you mean 'learning_rate'?"),
        ({"swift__torch_dtype": "float99"}, "template", "failed", "invalid choice: 'float99'"),
        ({"swift__dataset": ["/nowhere/rows.jsonl"]}, "data sets", "failed", ""),
        (
            {"swift__split_dataset_ratio": 1.5},
            "data sets",
            "failed",
            "must be at least 0 and below 1, got split_dataset_ratio=1.5",
        ),
    ],
)
def test_what_the_real_template_and_parser_refuse_is_a_row_with_its_fix(
    configure: Configure, doctor: Doctor, changes: dict[str, Any], check: str, verdict: str, fix: str
) -> None:
    report = doctor(configure(DEAD, **changes))
    row = report.row(check)
    assert row["verdict"] == verdict
    assert fix in row["fix"] or fix in row["found"]
    assert report.status == 1
    assert report.row("packing_length")["verdict"] == "not checked"


@pytest.mark.parametrize(
    ("changes", "verdict", "found"),
    [
        ({}, "ok", "Qwen2_5_VLForConditionalGeneration, attention sdpa, float32 on cpu"),
        (
            {"swift__attn_impl": "flash_attention_2"},
            "failed",
            "the package for FlashAttention2 doesn't seem to",
        ),
    ],
)
def test_what_transformers_will_load_is_a_row(
    configure: Configure, doctor: Doctor, changes: dict[str, Any], verdict: str, found: str
) -> None:
    report = doctor(configure(DEAD, **changes))
    assert report.verdict("model load") == verdict
    assert found in report.row("model load")["found"]
    assert report.status == (verdict == "failed")


@pytest.mark.parametrize(("text", "verdict"), [("I see nothing.", "warning"), ("[]", "ok")])
def test_only_a_list_counts_as_read_on_an_image_without_objects(
    configure: Configure, rows_file: Path, text: str, verdict: str
) -> None:
    row = {**json.loads(rows_file.read_text().splitlines()[0]), "objects": {"ref": [], "bbox": []}}
    encoder, sample = make_encoder(), sample_of(row)
    answered = rollout_of(sample, text, encoder.encode_prompt(sample).token_ids)
    calls = [rollouts.TimedCall(1, 1.0, (answered,))]
    assert (
        rollouts.check_matching(calls, encoder, make_task(), load_config(configure(DEAD))).verdict == verdict
    )


def test_a_b_step_of_many_a_steps_is_a_warning_with_a_length_that_the_doctor_takes(
    configure: Configure, doctor: Doctor
) -> None:
    changes = {"stage2_ab__channel_b__packing": {"packing_length": 4096}}
    told = doctor(configure(DEAD, **changes)).row("step sizes")
    assert told["verdict"] == "warning"
    assert "(2 packs of 4096 tokens, " in told["found"]
    found = re.search(r"packing_length: (\d+)(?:.*max_new_tokens: (\d+))?", told["fix"])
    assert found is not None
    changes = {"stage2_ab__channel_b__packing": {"packing_length": int(found[1])}}
    if found[2]:
        changes["rollout__decoding"] = {"max_new_tokens": int(found[2])}
    report = doctor(configure(DEAD, **changes))
    assert report.verdict("packing_length") == "ok"
    assert report.verdict("step sizes") == "ok"


@pytest.mark.parametrize(("budget", "verdict"), [(2, "failed"), (8, "warning"), (None, "ok")])
def test_a_budget_that_fills_no_b_step_fails_with_the_number_that_does(
    configure: Configure, doctor: Doctor, budget: int | None, verdict: str
) -> None:
    row = doctor(configure(DEAD, stage2_ab__channel_b__prefetch={"max_rollouts_per_version": budget})).row(
        "run-ahead"
    )
    assert row["verdict"] == verdict, row
    if verdict == "warning":  # two packs of four samples of the usual length, or of more that are shorter
        assert row["found"].startswith(
            "a rank holds at most 8 rollouts begun under one version; a B step needs 2 * "
        )
        assert row["found"].endswith("of the shortest: then B waits for a round")
    if verdict == "failed":
        assert "B could never run: a step trains gradient_accumulation_steps=2 packs of" in row["found"]
        assert "got max_rollouts_per_version=2" in row["found"]
        assert "write stage2_ab.channel_b.prefetch.max_rollouts_per_version: " in row["fix"]


BREAKING = """
from swift_stage2 import register_task
from swift_stage2.channel_b.detection import DetectionTask

@register_task("breaking")
class BreakingTask(DetectionTask):
    def correct(self, rollout, truth, tokenise):
        rollout.text and int(rollout.text)
        return super().correct(rollout, truth, tokenise)
"""


def test_a_task_that_breaks_on_an_answer_is_told_with_its_line(
    configure: Configure, doctor: Doctor, tmp_path: Path
) -> None:
    plugin = tmp_path / "breaking.py"
    plugin.write_text(BREAKING, encoding="utf-8")
    config = configure(
        DEAD, stage2_ab__task="breaking", swift__external_plugins=[str(TEMPLATE_FILE), str(plugin)]
    )
    try:
        row = doctor(config).row("samples")
    finally:
        TASKS.pop("breaking", None)
    assert row["verdict"] == "failed"
    assert row["found"].startswith("task breaking must work on every row and answer")
    assert "ValueError: invalid literal for int()" in row["found"]
    assert row["found"].endswith(f"({plugin}:8)")
    assert row["fix"] == "mend the task"


def test_accumulation_that_is_not_written_is_told_with_swifts_value(
    configure: Configure, doctor: Doctor
) -> None:
    report = doctor(
        configure(DEAD, swift__gradient_accumulation_steps=None, swift__per_device_train_batch_size=8)
    )
    row = report.row("gradient_accumulation_steps")
    assert row["verdict"] == "warning"
    assert row["fix"].startswith("write swift.gradient_accumulation_steps: 2")
    assert report.row("limit holds a step")["found"].endswith("6 >= 2")


@pytest.mark.parametrize(
    ("num_samples", "every_steps", "verdicts", "found"),
    [
        (4, 10, ("ok", "ok"), ("the first 4 of its 12 rows", "at most 5, and one after training")),
        (
            64,
            59,
            ("warning", "warning"),
            ("12 rows, stage2_ab.evaluation.num_samples is 64", "none will run beside training"),
        ),
    ],
)
def test_the_rows_and_steps_of_evaluations_are_told(
    configure: Configure,
    doctor: Doctor,
    rows_file: Path,
    num_samples: int,
    every_steps: int,
    verdicts: tuple[str, str],
    found: tuple[str, str],
) -> None:
    evaluation = {"every_steps": every_steps, "num_samples": num_samples}
    report = doctor(
        configure(
            DEAD, swift__val_dataset=[str(rows_file)], swift__max_steps=60, stage2_ab__evaluation=evaluation
        )
    )
    rows = [report.row("validation set"), report.row("evaluations")]
    assert tuple(row["verdict"] for row in rows) == verdicts, report.text
    for row, words in zip(rows, found, strict=True):
        assert words in row["found"]
        assert bool(row["fix"]) == (row["verdict"] == "warning")
    assert report.row("data sets")["found"].startswith(
        f"{rows_file}; for validation {rows_file}: all 24 rows"
    )


@pytest.mark.parametrize("engine", ["swift", "vllm"])
def test_a_servers_context_must_hold_the_longest_prompt_and_its_answer(
    configure: Configure, doctor: Doctor, engine: str
) -> None:
    launch = {"servers": [{"engine": engine, "args": {"vllm_max_model_len": 64}}]}
    row = doctor(configure(DEAD, launch=launch)).row("packing_length")
    assert row["verdict"] == "warning", row
    assert "launch.servers[0].args.vllm_max_model_len 64 < prompt " in row["found"]


@pytest.mark.parametrize(("max_steps", "times"), [(12, 1), (11, 0), (22, 2), (21, 1), (1, 0), (-1, None)])
def test_evaluations_are_counted_as_the_schedule_begins_them(
    configure: Configure, rows_file: Path, max_steps: int, times: int | None
) -> None:
    config = load_config(
        configure(DEAD, swift__val_dataset=[str(rows_file)], stage2_ab__evaluation={"every_steps": 10})
    )
    outcome = data.check_evaluation_steps(config, max_steps)
    schedule = EvaluationSchedule(every_steps=10, max_round_delay_steps=4, last_step=max_steps - 1)
    begun = 0
    for step in range(max_steps):
        if schedule.begin_if_due(step, 0, may_begin=True):
            begun += 1
            schedule.end()
    if times is None:
        assert "decided by the epochs" in outcome.found
    else:
        assert begun == times
        assert ("none will run beside training" if times == 0 else f"at most {times}") in outcome.found


def test_without_evaluations_nothing_is_said_of_them(configure: Configure, doctor: Doctor) -> None:
    report = doctor(configure(DEAD, swift__model="/nowhere/m"))
    assert not {"validation set", "evaluations"} & {row["check"] for row in report.findings}


@pytest.mark.parametrize(
    ("options", "check", "verdict"),
    [((), "server 0: port open", "warning"), (("--live",), "server 0: answers", "failed")],
)
def test_a_server_that_is_started_elsewhere_must_answer_when_it_is_asked(
    configure: Configure, doctor: Doctor, options: tuple[str, ...], check: str, verdict: str
) -> None:
    report = doctor(configure(f"http://127.0.0.1:{free_port()}", swift__model="/nowhere/m"), *options)
    row = report.row(check)
    assert row["verdict"] == verdict
    assert "start the server there" in row["fix"]


def test_without_channel_b_no_server_is_looked_at(configure: Configure, doctor: Doctor) -> None:
    report = doctor(configure(DEAD, stage2_ab={"schedule": {"b_ratio": 0}}), "--live")
    assert report.status == 0, report.text
    assert report.row("channel B")["found"] == "off (b_ratio 0): no server is needed"
    assert not [row for row in report.findings if "server 0" in row["check"]]


def test_no_secret_is_printed(configure: Configure, doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWIFT_ROLLOUT_API_KEY", "k3y-of-the-server")
    monkeypatch.setenv("http_proxy", "http://me:pa55word@proxy:1")
    config = configure(DEAD, swift__hub_token="t0ken-of-the-hub", swift__model="/nowhere/k3y-of-the-server")
    report = doctor(config)
    for secret in ("k3y-of-the-server", "pa55word", "t0ken-of-the-hub"):
        assert secret not in report.text
    assert "http_proxy would catch it and is ignored" in report.text
    assert json.loads(report.text)["live"] is False


def test_nothing_is_left_in_the_run_directory(configure: Configure, doctor: Doctor, tmp_path: Path) -> None:
    doctor(configure(f"http://127.0.0.1:{free_port()}"))
    assert not (tmp_path / "out").exists()
