"""What is set for DeepSpeed, and for whom; DeepSpeed itself runs in tests/vllm/test_zero.py."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from real_model import tiny_model
from transformers.integrations import deepspeed as integration

from swift_stage2.compat.deepspeed import keep_buffers_exact, start_communication


class DeepSpeedConfig:
    """As Hugging Face's own, of which it asks no more than this."""

    def __init__(self, stage: int, **config: Any) -> None:
        self.config: dict[str, Any] = {"zero_optimization": {"stage": stage}, **config}

    def is_zero3(self) -> bool:
        return bool(self.config["zero_optimization"]["stage"] == 3)


@pytest.fixture(autouse=True)
def no_config_left() -> Iterator[None]:
    yield
    integration.unset_hf_deepspeed_config()


def kept(config: DeepSpeedConfig) -> Any:
    integration.set_hf_deepspeed_config(config)
    keep_buffers_exact()
    return config.config.get("data_types", {}).get("keep_in_fp32_modules")


def test_zero3_keeps_the_rotary_frequencies_in_float32() -> None:
    (pattern, _) = kept(DeepSpeedConfig(3))
    names = [name for name, _ in tiny_model()[0].named_buffers() if pattern in name]
    assert {name.partition(".rotary")[0] for name in names} == {"model.visual", "model.language_model"}


def test_what_the_user_keeps_stays() -> None:
    assert kept(DeepSpeedConfig(3, data_types={"keep_in_fp32_modules": ["bias"]})) == ["bias"]


def test_without_zero3_nothing_is_set() -> None:
    assert kept(DeepSpeedConfig(2)) is None
    integration.unset_hf_deepspeed_config()
    keep_buffers_exact()


@pytest.mark.parametrize(
    ("swift", "rank", "started"),
    [
        ({"deepspeed": "zero3", "use_cpu": True}, "0", True),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}, "use_cpu": True, "ddp_timeout": 60}, "1", True),
        ({"deepspeed": "zero3"}, "0", False),  # on a GPU Accelerate does it
        ({"deepspeed": None, "use_cpu": True}, "0", False),
        ({"deepspeed": "zero2", "use_cpu": True}, None, False),  # not started by torchrun
    ],
)
def test_communication_is_started_on_cpu_ranks_only(
    monkeypatch: pytest.MonkeyPatch, swift: Mapping[str, Any], rank: str | None, started: bool
) -> None:
    calls: list[dict[str, Any]] = []
    module: Any = types.ModuleType("deepspeed")
    module.init_distributed = lambda **settings: calls.append(settings)
    monkeypatch.setitem(sys.modules, "deepspeed", module)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    start_communication(swift)
    assert bool(calls) == started
    if started:
        assert calls[0]["dist_backend"] == "gloo"
        assert calls[0]["timeout"].total_seconds() == swift.get("ddp_timeout", 1800)
