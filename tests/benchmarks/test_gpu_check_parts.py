"""The GPU check's page of a report, the shapes that it calls real, and its folder of wheels."""

from __future__ import annotations

import time
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu_check.real_shapes import QWEN25_VL_3B, QWEN25_VL_7B, ModelShape, made_on
from benchmarks.gpu_check.stage import Context, last_part
from benchmarks.gpu_check.training import attention_options
from benchmarks.gpu_check.wheels import install_missing, write_pieces
from benchmarks.tiny_model import build_model
from swift_stage2.errors import UserError


def test_a_part_is_a_figure_once_and_the_last_one_is_where_a_stage_stood(tmp_path: Path) -> None:
    context = Context(rehearsal=True, scratch=tmp_path, logs=tmp_path, deadline_s=60.0, began=time.time() - 5)
    assert last_part(context.figures) == ""
    context.at("imports")
    context.at("first_step")
    context.note("loss", 1.0)
    context.figures["until_imports_s"] = 1.0
    context.at("imports")
    assert context.figures["until_imports_s"] == 1.0
    assert last_part(context.figures) == f"first_step after {context.figures['until_first_step_s']:.0f} s"
    assert 5 <= float(context.figures["until_first_step_s"]) < 60


@pytest.mark.parametrize(
    ("kernels", "told"),
    [
        (("2", "3"), {}),
        (("3",), {"mm_encoder_attn_backend": "TORCH_SDPA"}),
        ((), {"mm_encoder_attn_backend": "TORCH_SDPA", "attention_backend": "TRITON_ATTN"}),
    ],
)
def test_a_vllm_without_its_flash_attention_is_told_what_to_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: tuple[str, ...], told: dict[str, str]
) -> None:
    (tmp_path / "vllm" / "vllm_flash_attn").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").touch()
    for version in kernels:
        (tmp_path / "vllm" / "vllm_flash_attn" / f"_vllm_fa{version}_C.abi3.so").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert attention_options() == told


def _num_parameters(shape: ModelShape) -> int:
    assert shape.vocab_size is not None
    with made_on("meta", "bfloat16"):
        model = build_model(0, vocab_size=shape.vocab_size, text=shape.text, vision=shape.vision)
    assert {parameter.element_size() for parameter in model.parameters()} == {2}
    return sum(parameter.numel() for parameter in model.parameters())


# ``total_size`` of each checkpoint's model.safetensors.index.json, in bytes of bfloat16.
@pytest.mark.parametrize(
    ("shape", "num_bytes"), [(QWEN25_VL_3B, 7_509_245_952), (QWEN25_VL_7B, 16_584_333_312)], ids=lambda it: ""
)
def test_a_real_shape_has_the_published_number_of_parameters(shape: ModelShape, num_bytes: int) -> None:
    assert 2 * _num_parameters(shape) == num_bytes


def _wheel(folder: Path, name: str) -> None:
    """A wheel of one module, made by hand."""
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", "VALUE = 1\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


def test_only_what_is_missing_is_installed(tmp_path: Path) -> None:
    earlier, later = tmp_path / "earlier", tmp_path / "later"  # two transfers
    for folder, name in ((earlier, "stage2_no_such_package"), (later, "torch")):
        folder.mkdir()
        _wheel(folder, name)
    private = tmp_path / "private"
    assert install_missing([earlier, later], private) == ["stage2_no_such_package"]
    assert (private / "stage2_no_such_package.py").exists()
    assert not (private / "torch.py").exists()


def test_vllms_wheel_comes_back_from_its_pieces_without_what_is_left_out(tmp_path: Path) -> None:
    wheel = tmp_path / "stage2_big-1.0-cp38-abi3-any.whl"
    needed, left_out = "big/vllm_flash_attn/_vllm_fa3_C.abi3.so", "big/vllm_flash_attn/_vllm_fa2_C.abi3.so"
    with zipfile.ZipFile(wheel, "w") as file:
        for name in (needed, left_out, "big/__init__.py"):
            file.writestr(name, name * 100)
    pieces = write_pieces(wheel, [tmp_path / "part2", tmp_path / "part3"])
    assert [piece.stat().st_size > 0 for piece in pieces] == [True, True]
    with pytest.raises(UserError, match="needs 2 pieces"):
        install_missing([tmp_path / "part3"], tmp_path / "private")
    assert install_missing([tmp_path / "part3", tmp_path / "part2"], tmp_path / "private") == ["stage2_big"]
    assert (tmp_path / "private" / needed).read_text() == needed * 100
    assert not (tmp_path / "private" / left_out).exists()
    assert left_out in (tmp_path / "private" / f"{wheel.stem}.left_out.txt").read_text()
