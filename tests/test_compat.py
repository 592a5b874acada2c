"""ms-swift and its companions are prepared: real interpreters for torchvision; DeepSpeed runs in tests/real_vllm."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import run_python
from real_model import tiny_model
from transformers.integrations import deepspeed as integration

from swift_stage2.compat import keep_buffers_exact


def _run(script: str, *, first_on_path: Path | None = None) -> str:
    path = [str(first_on_path)] if first_on_path else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])}
    done = run_python("-c", script, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.ci
def test_torchvision_and_what_needs_it_import_and_transform() -> None:
    script = """
from swift_stage2.compat import declare_operators
declare_operators()
declare_operators()
import torch, torchvision, qwen_vl_utils
declare_operators()
print(tuple(torchvision.transforms.functional.resize(torch.zeros(3, 4, 6), [2, 3]).shape))
"""
    assert _run(script) == "(3, 2, 3)"


def test_a_process_ends_whose_packing_fails_behind_what_nobody_reads() -> None:
    script = """
import multiprocessing
from swift_stage2.compat import pack_here
def pack(queue):
    queue.put(b"x" * (1 << 22))  # more than a pipe holds
    raise ValueError("a length that is none")
try:
    pack_here(None, target=pack, jobs=[(multiprocessing.get_context("spawn").Queue(),)])
except ValueError as error:
    print(error)
"""
    assert _run(script) == "a length that is none"


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("fits", [True, False])
def test_declares_only_where_the_own_library_does_not_load(tmp_path: Path, fits: bool) -> None:
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").touch()
    if fits:  # any shared library that loads in this interpreter stands for a build that fits
        loadable = importlib.util.find_spec("markupsafe._speedups")
        assert loadable is not None
        assert loadable.origin is not None
        shutil.copy(loadable.origin, package / "_C.so")
    else:
        (package / "_C.so").write_bytes(b"not a library for this torch")
    script = """
from swift_stage2.compat import declare_operators
declare_operators()
import torch, torchvision
print(torchvision.__file__)
print(hasattr(torch.ops.torchvision, "nms"))
"""
    file, declared = _run(script, first_on_path=tmp_path).splitlines()
    assert file == str(package / "__init__.py")
    assert declared == str(not fits)


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
