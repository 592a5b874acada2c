"""Named GPUs that are not there are refused, no name and no GPU is fine; cores are halved and given."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import run_command

from swift_stage2.errors import UserError
from swift_stage2.process.visible_devices import (
    require_known_accelerator,
    require_visible_devices,
)

STAGE1 = Path(__file__).parents[2] / "swift_stage2" / "demo" / "stage1"


@pytest.mark.parametrize(
    ("visible", "found"),
    [(None, 0), ("", 0), ("-1", 0), ("0", 1), ("0,1", 2), ("1,-1,3", 1), ("GPU-8932f937", 1)],
)
def test_what_is_there_is_taken(visible: str | None, found: int) -> None:
    require_visible_devices({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, found)


@pytest.mark.parametrize(("visible", "found"), [("7", 0), ("0,7", 1), ("GPU-8932f937", 0), ("0,1", 0)])
def test_fewer_than_named_are_refused(visible: str, found: int) -> None:
    with pytest.raises(UserError, match=f"CUDA_VISIBLE_DEVICES={visible} and {found} device"):
        require_visible_devices({"CUDA_VISIBLE_DEVICES": visible}, found)


@pytest.mark.parametrize("kind", [None, "cuda"])
def test_gpus_and_none_are_known(kind: str | None) -> None:
    require_known_accelerator(kind)


_NPU = """
import torch

class Npu:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)

torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", Npu)
"""


@pytest.mark.slow
@pytest.mark.parametrize("words", [pytest.param(["train"], marks=pytest.mark.slow), ["rollout"]])
def test_an_accelerator_that_is_not_cuda_is_refused(tmp_path: Path, words: list[str]) -> None:
    """A machine whose torch has an NPU, as torch's own registration of one makes it."""
    (tmp_path / "sitecustomize.py").write_text(_NPU)
    config = tmp_path / "run.yaml"
    config.write_text(
        f"swift: {{model: {STAGE1}, output_dir: {tmp_path / 'out'}}}\nstage2_ab: {{schedule: {{b_ratio: 0}}}}\n"
    )
    rollout = [str(STAGE1), "--port", "0", "--model-type", "stage2_tiny_vl", "--template", "stage2_tiny_vl"]
    ended = run_command(
        *words,
        *([str(config)] if words == ["train"] else rollout),
        timeout=200,
        variables={"PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert ended.returncode == 2, ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert last.startswith(f"swift-stage2 {words[0]}: error: ")
    assert "devices must be GPUs that torch knows as CUDA (NVIDIA, ROCm), or the CPU, got npu" in last


@pytest.mark.slow
def test_a_server_on_a_gpu_that_is_not_there_does_not_serve_from_the_cpu() -> None:
    options = ["--port", "0", "--model-type", "stage2_tiny_vl", "--template", "stage2_tiny_vl"]
    plugin = ["--external-plugins", str(STAGE1.parent / "tiny_template.py")]
    ended = run_command(
        "rollout",
        str(STAGE1),
        *options,
        *plugin,
        timeout=200,
        variables={"CUDA_VISIBLE_DEVICES": "901"},
    )
    assert ended.returncode == 2, ended.stderr
    assert "CUDA_VISIBLE_DEVICES=901 and 0 device(s)" in ended.stderr


@pytest.mark.slow
def test_a_learner_on_a_gpu_that_is_not_there_does_not_train_on_the_cpu(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        f"swift: {{model: {STAGE1}, output_dir: {tmp_path / 'out'}}}\nstage2_ab: {{schedule: {{b_ratio: 0}}}}\n"
    )
    ended = run_command("train", str(config), timeout=200, variables={"CUDA_VISIBLE_DEVICES": "901"})
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.splitlines()[-1].startswith(
        "swift-stage2 train: error: every device that is named must exist"
    )
