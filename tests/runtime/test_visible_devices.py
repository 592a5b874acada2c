"""Named GPUs that are not there are refused, no name and no GPU is fine."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import run_command

from swift_stage2.errors import UserError
from swift_stage2.runtime.visible_devices import (
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
@pytest.mark.parametrize("command", ["train", "rollout"])
@pytest.mark.parametrize(
    ("variables", "told"),
    [
        (
            {"CUDA_VISIBLE_DEVICES": ""},
            "devices must be GPUs that torch knows as CUDA (NVIDIA, ROCm), or the CPU, got npu",
        ),
        ({"CUDA_VISIBLE_DEVICES": "901"}, "CUDA_VISIBLE_DEVICES=901 and 0 device(s)"),
    ],
    ids=["npu", "absent"],
)
def test_a_device_that_is_not_cuda_or_not_there_is_refused_and_the_cpu_does_not_take_its_place(
    tmp_path: Path, command: str, variables: dict[str, str], told: str
) -> None:
    """A machine whose torch has an NPU, as torch's own registration of one makes it; or a GPU that is not there."""
    if "npu" in told:
        (tmp_path / "sitecustomize.py").write_text(_NPU)
        variables = {**variables, "PYTHONPATH": str(tmp_path)}
    config = tmp_path / "run.yaml"
    config.write_text(
        f"swift: {{model: {STAGE1}, output_dir: {tmp_path / 'out'}}}\nstage2_ab: {{schedule: {{b_ratio: 0}}}}\n"
    )
    kind = ("--port", "0", "--model-type", "stage2_tiny_vl", "--template", "stage2_tiny_vl")
    plugin = ("--external-plugins", str(STAGE1.parent / "tiny_template.py"))
    words = [str(config)] if command == "train" else [str(STAGE1), *kind, *plugin]
    ended = run_command(command, *words, timeout=200, variables=variables)
    assert ended.returncode == 2, ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert last.startswith(f"swift-stage2 {command}: error: ")
    assert told in last
