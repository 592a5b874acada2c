"""Estimates of memory: the numbers of known models, and the rows of a real doctor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import config_of, on_vllm, sharing
from doctor_run import Report
from live_server import MODEL, free_port
from safetensors.torch import load_file

from swift_stage2.config import Stage2Config
from swift_stage2.doctor.examination import Verdict
from swift_stage2.doctor.memory import (
    ModelMemory,
    check_device_memory,
    check_main_memory,
    estimate_memory,
)

GB = 10**9
SHAPES = [(1000, 1000), (500, 2000), (500_000,)]  # 2.5 million parameters, 4500 rows and columns
FULL = {"tuner_type": "full"}


@pytest.mark.parametrize(
    ("swift", "itemsize", "num_ranks", "weights_mb", "training_mb"),
    [
        (FULL, 2, 1, 5, 5 + 10),  # Adam's moments in the weights' own dtype
        (FULL, 4, 2, 10, 10 + 20),
        (FULL | {"deepspeed": "zero0"}, 2, 2, 5, 5 + 30),
        (FULL | {"deepspeed": "zero1"}, 2, 2, 5, 5 + 15),
        (FULL | {"deepspeed": "zero2"}, 2, 2, 5, 2.5 + 15),
        (FULL | {"deepspeed": "zero3"}, 2, 2, 2.5, 2.5 + 15),
        (FULL | {"deepspeed": "zero3"}, 4, 2, 5, 5 + 10),
        (FULL | {"fsdp": "fsdp2"}, 2, 2, 2.5, 2.5 + 15),
        (FULL | {"deepspeed": {"zero_optimization": {"stage": 2}}}, 2, 2, 5, 2.5 + 15),
        ({}, 2, 1, 5, 16 * 8 * 4500 / 1e6),
        ({"tuner_type": "lora", "lora_rank": 64, "deepspeed": "zero3"}, 2, 2, 2.5, 16 * 64 * 4500 / 1e6),
    ],
)
def test_the_learner_is_estimated_by_tuner_dtype_and_zero(
    swift: dict[str, Any], itemsize: int, num_ranks: int, weights_mb: float, training_mb: float
) -> None:
    memory = estimate_memory(swift, SHAPES, itemsize, num_ranks)
    assert memory.weights == itemsize * 2_500_000
    assert memory.on_rank / 1e6 == pytest.approx(weights_mb)
    assert memory.training / 1e6 == pytest.approx(training_mb)


def test_the_stage_is_read_from_a_file_of_settings(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"zero_optimization": {"stage": 3}}')
    assert estimate_memory({"deepspeed": str(file)}, SHAPES, 2, 5).on_rank == 1_000_000


def shared(
    *servers: dict[str, Any], transport: str = "auto", devices: tuple[int, ...] = (0,)
) -> Stage2Config:
    """The learner on some devices, and servers beside it."""
    directory = {"rollout.sync.disk_directory": "/weights"} if transport == "disk" else {}
    change = sharing(*servers, learner={"devices": list(devices)})
    return config_of(change, {"rollout.sync.transport": transport}, directory)


ON_TRANSFORMERS = {"engine": "transformers", "devices": [0]}


@pytest.mark.parametrize(
    ("servers", "training_gb", "verdict", "left"),
    [
        ([on_vllm(0.4, devices=[0])], 20, Verdict.OK, "48 GB of 80 GB"),
        ([on_vllm(0.4, devices=[0])], 50, Verdict.WARNING, "48 GB of 80 GB"),
        ([on_vllm(0.4, devices=[0]), on_vllm(0.4, devices=[0])], 5, Verdict.OK, "16 GB of 80 GB"),
        ([on_vllm(0.4, devices=[0]), on_vllm(0.55, devices=[0])], 5, Verdict.FAILED, "4 GB of 80 GB"),
        ([on_vllm(0.4, devices=[0]), on_vllm(0.9, devices=[1])], 20, Verdict.OK, "48 GB of 80 GB"),
        ([on_vllm(0.4, devices=[0]), ON_TRANSFORMERS], 20, Verdict.OK, "42 GB of 80 GB"),
    ],
)
def test_what_servers_leave_of_a_device_is_held_against_the_learners_need(
    servers: list[dict[str, Any]], training_gb: int, verdict: Verdict, left: str
) -> None:
    model = ModelMemory(weights=6 * GB, on_rank=6.0 * GB, training=training_gb * GB)
    outcome = check_device_memory(shared(*servers), model, 80 * GB)
    assert outcome.verdict is verdict, outcome.found
    assert (
        f"servers leave {left} on device 0; the learner needs an estimated {6 + training_gb} GB"
        in outcome.found
    )


def test_the_fullest_of_the_learners_devices_counts() -> None:
    model = ModelMemory(weights=GB, on_rank=GB, training=GB)
    outcome = check_device_memory(
        shared(on_vllm(0.4, devices=[0]), on_vllm(0.6, devices=[1]), devices=(0, 1)), model, 80 * GB
    )
    assert "32 GB of 80 GB on device 1" in outcome.found


@pytest.mark.parametrize(
    ("transport", "available_gb", "verdict", "told"),
    [
        ("auto", 11, Verdict.OK, "an estimated 10.2 GB of 11 GB"),
        ("shared_memory", 11, Verdict.OK, "2 server(s) 1.4 GB"),
        ("tcp", 23, Verdict.OK, "weights sent to them 12 GB"),
        ("disk", 23, Verdict.OK, "weights sent to them 12 GB"),
        ("tcp", 22, Verdict.WARNING, "22.2 GB of 22 GB"),
        ("auto", 10, Verdict.WARNING, "10.2 GB of 10 GB"),
    ],
)
def test_shared_memory_costs_servers_none_of_their_own(
    transport: str, available_gb: int, verdict: Verdict, told: str
) -> None:
    """Two ranks of 1.3 GB, the copy of 6, a courier of 0.25, two servers of 0.7; weights and training on the device."""
    model = ModelMemory(weights=6 * GB, on_rank=6.0 * GB, training=1.0 * GB)
    config = shared(on_vllm(0.4, devices=[0]), ON_TRANSFORMERS, transport=transport)
    outcome = check_main_memory(config, model, 2, available_gb * GB)
    assert (outcome.verdict, told in outcome.found) == (verdict, True), outcome.found
    assert ("write rollout.sync.transport: auto" in outcome.fix) == (
        transport == "tcp" and verdict is not Verdict.OK
    )


def test_on_a_cpu_the_models_lie_in_main_memory(
    configure: Callable[..., Path], doctor: Callable[..., Report]
) -> None:
    servers = [{"base_url": f"http://127.0.0.1:{free_port()}", "group_port": free_port()}]
    launch = {"share_devices": True, "servers": [{"engine": "transformers"}]}
    report = doctor(configure(rollout__servers=servers, launch=launch))
    assert report.status == 0, report.text
    assert "may be shared (learner: CPU only; server 0: CPU only)" in report.row("devices")["found"]
    num_bytes = 4 * sum(tensor.numel() for tensor in load_file(MODEL / "model.safetensors").values())
    assert f"{num_bytes / 4:.3g} parameters" in report.row("model's size")["found"]
    assert "the learner has no device" in report.row("device memory")["found"]
    found = report.row("main memory")["found"]
    # Full tuning in float32: weights, gradients and two moments.
    assert f"1 rank(s) {(1.3e9 + 4 * num_bytes) / 1e9:.3g} GB" in found
    assert f"1 server(s) {(0.7e9 + num_bytes) / 1e9:.3g} GB" in found


def test_without_the_key_a_device_has_no_row_and_servers_elsewhere_none_of_its_memory(
    configure: Callable[..., Path], doctor: Callable[..., Report]
) -> None:
    report = doctor(configure("http://127.0.0.1:1"))
    rows = {row["check"]: row["found"] for row in report.findings if row["section"] == "Memory"}
    assert rows.keys() == {"model's size", "main memory"}
    assert "server(s)" not in rows["main memory"]


def test_a_gpu_is_shown_with_its_own_size(
    configure: Callable[..., Path], doctor: Callable[..., Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Properties:
        total_memory = 80 * GB

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("swift_stage2.doctor.memory.torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    servers = [{"base_url": f"http://127.0.0.1:{free_port()}", "group_port": free_port()}]
    launch = {"share_devices": True, "learner": {"devices": [0]}, "servers": [on_vllm(0.4, devices=[0])]}
    row = doctor(configure(rollout__servers=servers, launch=launch)).row("device memory")
    assert "servers leave 48 GB of 80 GB on device 0" in row["found"]
