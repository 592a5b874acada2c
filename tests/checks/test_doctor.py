"""The command without a server: rows with numbers, exit statuses, fixes, and that nothing secret is printed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from detection_task import make_task
from doctor_run import Report
from live_server import free_port
from real_model import make_encoder, rollout_of, sample_of

from swift_stage2.checks import doctor as doctor_command
from swift_stage2.checks import rollouts
from swift_stage2.checks.learner import RankMemory, phase_peaks, rank_memory
from swift_stage2.config import Stage2Config, load_config
from swift_stage2.config.binding import bind
from swift_stage2.errors import UserError

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


# --- exit statuses -----------------------------------------------------------------------------------


def test_a_refused_configuration_is_a_failed_check_and_the_rest_names_it(
    configure: Configure, doctor: Doctor
) -> None:
    report = doctor(configure(DEAD, **{f"{PREFETCH}__queue_limit": 3}))
    assert report.status == 1
    assert report.failed == ["configuration loads"]
    row = report.row("configuration loads")
    assert "prefetch_target_packs <= queue_limit must hold, got 4 <= 3" in row["found"]
    assert row["fix"] == "write queue_limit: 4 or more"
    rest = [row for row in report.findings if row["check"] != "configuration loads"]
    assert len(rest) == 2
    assert {row["verdict"] for row in rest} == {"not checked"}
    assert all(row["counts_as_failed"] for row in rest)


def test_the_table_goes_to_a_terminal_and_the_status_to_the_script(configure: Configure) -> None:
    result = cli(str(configure(DEAD, swift__model="/nowhere/model")), COLUMNS="80")
    assert result.returncode == 1
    assert "swift.model must be a directory that exists" in " ".join(result.stdout.split())
    assert "fix: check the path" in result.stdout
    assert "not checked: since model directory failed" in " ".join(result.stdout.split())
    assert all(len(line) <= 80 for line in result.stdout.splitlines())


# --- rows --------------------------------------------------------------------------------------------


def test_a_good_configuration_is_green_with_every_rule_and_its_numbers(
    configure: Configure, doctor: Doctor, tmp_path: Path, rows_file: Path
) -> None:
    ports = free_port(), free_port()
    servers = [{"base_url": f"http://127.0.0.1:{ports[0]}", "group_port": ports[1]}]
    launch = {"launch__servers": [{"engine": "transformers"}], "rollout__servers": servers}
    evaluation = {
        "swift__val_dataset": [str(rows_file)],
        "stage2_ab__evaluation": {"every_steps": 9, "num_samples": 4},
    }
    report = doctor(configure(**launch, **evaluation, swift__output_dir=str(tmp_path / "new" / "run")))
    assert report.status == 0, report.text
    for check, told in {
        "devices": "launch.learner: CPU only; launch.servers[0]: CPU only",
        "packing_length": "packing_length 256 holds the longest prompt",
        "samples": "12 of 12 rows encoded as the model gets them",
        "memory": "a rank needs",
        "data sets": "all 24 rows",
    }.items():
        assert report.verdict(check) == "ok", report.row(check)
        assert told in report.row(check)["found"]
    assert not (tmp_path / "new").exists(), "what was tried is gone"


PREFETCH_RULES = {f"{PREFETCH}__queue_limit": 9}
ELSEWHERE = {
    "rollout__servers": [{"base_url": f"http://{host}:8000"} for host in ("192.0.2.1", "203.0.113.1")],
    "launch": {
        "servers": [{"engine": "swift", "devices": [7]}, {"engine": "vllm"}],
        "learner": {"devices": [0, 1], "nnodes": 2, "rdzv_endpoint": "127.0.0.1:29400"},
    },
}


@pytest.mark.parametrize(
    ("changes", "num_gpus", "check", "verdict", "told"),
    [
        (
            PREFETCH_RULES,
            0,
            "configuration loads",
            "warning",
            "write stage2_ab.channel_b.prefetch.queue_limit: 6",
        ),
        (ELSEWHERE, 2, "devices", "ok", "(launch.learner: 0,1)"),
        (
            {"launch": {"servers": [{"engine": "transformers"}]}, "swift__use_cpu": False},
            2,
            "devices",
            "warning",
            "write numbers of GPUs at launch.learner.devices, launch.servers[0].devices",
        ),
        (
            {"launch": {"servers": [{"engine": "vllm"}]}},
            2,
            "devices",
            "warning",
            "write numbers of GPUs at launch.servers[0].devices",
        ),
        ({"launch": {"servers": [{"engine": "transformers"}]}}, 2, "devices", "ok", "CPU only"),
    ],
)
def test_what_needs_no_model_is_told(
    configure: Configure,
    doctor: Doctor,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    num_gpus: int,
    check: str,
    verdict: str,
    told: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    row = doctor(
        configure(f"http://127.0.0.1:{free_port()}", **{"swift__model": "/nowhere/m", **changes})
    ).row(check)
    assert row["verdict"] == verdict, row
    assert told in row["found"] + row["fix"]


def not_checked(report: Report) -> dict[str, str]:
    return {row["check"]: row["found"] for row in report.findings if row["verdict"] == "not checked"}


def test_each_side_is_judged_without_what_only_the_other_can_know(
    configure: Configure, doctor: Doctor, busy_port: int
) -> None:
    server = {"engine": "transformers", "model": "/nowhere/served"}
    sides = {"launch": {"servers": [server]}, "swift__model": "/nowhere/m"}
    config = configure(f"http://127.0.0.1:{busy_port}", **sides)
    report = doctor(config, "--role", "server")
    assert report.failed == ["engine and model", "ports"]
    assert (
        "launch.servers[0].model must be a directory that exists" in report.row("engine and model")["found"]
    )
    assert not_checked(report) == {"model and data": "the learner's, by --role server"}
    report = doctor(config, "--role", "learner")
    assert report.failed == ["model directory"]
    assert report.row("devices")["found"] == "disjoint (launch.learner: CPU only)"
    assert not_checked(report)["launch.servers"] == "the servers' own, by --role learner"
    assert doctor(config).failed == ["model directory", "engine and model", "ports"]


def test_a_host_that_serves_alone_has_nothing_to_mend(configure: Configure, doctor: Doctor) -> None:
    launch = {"servers": [{"engine": "transformers"}], "learner": {"devices": [0, 1]}}
    config = configure(f"http://127.0.0.1:{free_port()}", launch=launch, swift__use_cpu=False)
    report = doctor(config, "--role", "server")
    assert report.status == 0, report.text
    assert report.row("devices")["found"] == "disjoint (launch.servers[0]: CPU only)"


LOGIN_NODE = {
    "launch": {
        "servers": [{"engine": "vllm", "devices": [0]}, {"engine": "vllm", "devices": [1]}],
        "learner": {"devices": [0, 1], "nnodes": 2, "rdzv_endpoint": "LEARNER_0:29400"},
        "share_devices": False,
    },
    "rollout__servers": [{"base_url": f"http://SERVER_{index}:8000"} for index in (0, 1)],
    "swift__use_cpu": False,
    "swift__torch_dtype": "bfloat16",  # which transformers refuses without a GPU
}


@pytest.mark.parametrize(
    ("role", "changes"), [("all", {}), ("learner", {}), ("server", {}), ("all", {"launch": {}})]
)
def test_a_login_node_is_asked_for_no_device_no_port_and_no_name(
    configure: Configure, doctor: Doctor, monkeypatch: pytest.MonkeyPatch, role: str, changes: dict[str, Any]
) -> None:
    monkeypatch.setattr("swift_stage2.checks.doctor.has_gpu_driver", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as some sites set it there
    report = doctor(configure(**LOGIN_NODE | changes), "--role", role)
    assert report.status == 0, report.text
    assert "devices" in not_checked(report)
    if role != "server":
        assert not_checked(report)["devices"].startswith(
            "this host has no GPU: devices, ports and rendezvous are"
        )
        assert not_checked(report)["memory"].endswith("GB of a GPU, and more for activations; none is here")
        assert report.verdict("samples") == "ok"


def test_a_login_node_is_told_both_phases_of_shared_devices(
    configure: Configure, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swift_stage2.checks.doctor.has_gpu_driver", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    server = {"engine": "vllm", "devices": [0], "args": {"vllm_gpu_memory_utilization": 0.6}}
    changes = {
        "launch": {"servers": [server], "learner": {"devices": [0]}, "share_devices": True},
        "stage2_ab__mode": "inline",
        "rollout__servers": [{"base_url": "http://127.0.0.1:8000"}],
    }
    report = doctor(configure(**LOGIN_NODE | changes))
    assert report.status == 0, report.text
    found = re.fullmatch(
        r"in turns learner and servers need (\S+) GB while it trains, and more for activations, and (\S+) GB while "
        r"servers are awake, of a GPU's 80 GB; rank 0 keeps a copy of (\S+) GB .*; no GPU is here to compare with",
        not_checked(report)["memory"],
    )
    assert found, not_checked(report)
    train, awake, model = map(float, found.groups())
    assert train == pytest.approx(1.5 + 4 * model, abs=0.01)
    assert awake == pytest.approx(0.6 * 80 + 3 * model, abs=0.1)


def test_a_host_whose_driver_shows_no_gpu_is_no_login_node(
    configure: Configure, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swift_stage2.checks.doctor.has_gpu_driver", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    report = doctor(configure(**LOGIN_NODE | {"swift__model": "/nowhere/m"}))
    assert set(report.failed) == {"learner's devices", "model directory", "rendezvous"}


def test_servers_alone_are_not_compared_with_the_learner(configure: Configure) -> None:
    with pytest.raises(UserError, match=r"got --role server; leave it out, or write --role learner"):
        doctor_command.main([str(configure(DEAD)), "--role", "server", "--live"])


def test_servers_that_do_not_answer_are_told_one_by_one(configure: Configure, doctor: Doctor) -> None:
    urls = (f"http://127.0.0.1:{free_port()}", "http://no-such-host.invalid:8000")
    report = doctor(configure(*urls, swift__model="/nowhere/m"), "--live")
    for index, told in enumerate(("start the server there", "name or address that this machine knows")):
        row = report.row(f"server {index}")
        assert row["verdict"] == "failed"
        assert told in row["found"]


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
        ({"swift__dataset": ["/nowhere/rows.jsonl"]}, "data sets", "failed", ""),
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


@pytest.mark.parametrize(("text", "verdict"), [("I see nothing.", "warning"), ("[]", "ok")])
def test_only_a_list_counts_as_read_on_an_image_without_objects(
    configure: Configure, rows_file: Path, text: str, verdict: str
) -> None:
    row = {**json.loads(rows_file.read_text().splitlines()[0]), "objects": {"ref": [], "bbox": []}}
    encoder, sample = make_encoder(), sample_of(row)
    answered = rollout_of(sample, text, encoder.encode_prompt(sample).token_ids)
    assert (
        rollouts.check_matching([answered], encoder, make_task(), load_config(configure(DEAD))).verdict
        == verdict
    )


def test_average_precision_is_told_with_scores_and_without(configure: Configure, rows_file: Path) -> None:
    """A false object stands first, and the model was unsure of it."""
    encoder, sample = make_encoder(), sample_of(json.loads(rows_file.read_text().splitlines()[0]))
    right = encoder.answer_of(sample)
    text = f'[{{"bbox_2d": [0, 0, 3, 3], "label": "{sample.truth.labels[0]}"}}, {right[1:]}'
    ids, offsets = encoder.tokenise(text)
    unsure = tuple(-1.0 if start < len(text) - len(right) else 0.0 for start, _ in offsets)
    answered = rollout_of(sample, text, encoder.encode_prompt(sample).token_ids)
    told = [
        rollouts.check_matching([each], encoder, make_task(), load_config(configure(DEAD))).found
        for each in (answered, replace(answered, token_ids=ids, log_probs=unsure))
    ]
    (plain,) = re.findall(r", AP (0\.\d+)$", told[0])
    ((best, same),) = re.findall(r", AP ([01]\.\d+) with scores and (0\.\d+) without$", told[1])
    assert (same, float(best) > float(same)) == (plain, True)


def test_what_the_learners_ranks_find_by_their_own_environment_the_doctor_finds(
    configure: Configure, doctor: Doctor, rows_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    row = json.loads(rows_file.read_text().splitlines()[0])
    (image,) = row["images"]
    relative = tmp_path / "relative.jsonl"
    relative.write_text(json.dumps(row | {"images": [Path(image).name]}))
    learner = {"env": {"ROOT_IMAGE_DIR": str(Path(image).parent)}}
    report = doctor(configure(DEAD, swift__dataset=[str(relative)], launch__learner=learner))
    assert report.row("samples")["verdict"] != "failed", report.text
    assert report.row("data sets")["verdict"] == "ok", report.text


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
    assert json.loads(report.text)["live"] is False


@pytest.mark.parametrize(
    ("swift", "itemsize", "num_ranks", "per_parameter"),
    [
        ({"tuner_type": "full"}, 2, 1, 8),  # itself, gradient and two moments, all of its own dtype
        ({"tuner_type": "full", "deepspeed": "zero2"}, 2, 2, 2 + 14 / 2),
        ({"tuner_type": "full", "deepspeed": "zero3"}, 2, 2, 16 / 2),
        ({"tuner_type": "full", "fsdp": "fsdp2"}, 4, 4, 16 / 4),
        ({"deepspeed": "zero3"}, 2, 2, 1),
        ({}, 2, 2, 2),
    ],
)
def test_the_learner_is_estimated_by_one_formula(
    swift: dict[str, str], itemsize: int, num_ranks: int, per_parameter: float
) -> None:
    assert rank_memory(swift, itemsize * 1000, itemsize, num_ranks).total == per_parameter * 1000


@pytest.mark.parametrize(
    ("num_devices", "utilization", "offloads", "peaks"),
    [
        # 3.75 billion parameters in 16 bits: weights, gradients, and moments of as many bytes twice; a server's rest.
        (1, 0.6, False, (30.0 + 1.5, 7.5 + 15.0 + 0.6 * 80)),
        (1, 0.6, True, (30.0 + 1.5, 7.5 + 0.6 * 80)),
        (2, 0.5, True, (30.0 + 1.5, 7.5 + 7.5 + 0.5 * 80)),  # the buckets of DDP stay
        (0, None, False, (2 * 30.0, 2 * (7.5 + 7.5 + 15.0) + 7.5)),  # two ranks in main memory
    ],
)
def test_both_phases_of_a_shared_device_are_estimated(
    num_devices: int, utilization: float | None, offloads: bool, peaks: tuple[float, float]
) -> None:
    devices = list(range(num_devices))
    args = {"vllm_gpu_memory_utilization": utilization} if utilization else {}
    server = {"engine": "vllm" if utilization else "transformers", "devices": devices, "args": args}
    config = bind(
        Stage2Config,
        {
            "swift": {"tuner_type": "full"},
            "stage2_ab": {"schedule": {"b_ratio": 0.25}, "mode": "inline"},
            "rollout": {"servers": [{"base_url": "http://127.0.0.1:8000"}]},
            "launch": {
                "servers": [server],
                "share_devices": True,
                "offload_optimizer": offloads,
                "learner": {"devices": devices, "nproc_per_node": num_devices or 2},
            },
        },
    )
    num_ranks = num_devices or 2
    rank = rank_memory(config.swift, 7_500_000_000, 2, num_ranks)
    assert rank == RankMemory(7.5e9, 7.5e9, 15e9)
    found = phase_peaks(config, rank, 7_500_000_000, 80e9, num_ranks)
    assert [each / 1e9 for each in found] == pytest.approx(peaks)
