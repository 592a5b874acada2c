"""The folder of wheels: only what is missing is installed, into a private directory, with the real pip."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu_check.wheels import PINNED, install_missing
from swift_stage2.errors import UserError


def _wheel(folder: Path, name: str) -> None:
    """A wheel of one module, made by hand."""
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", "VALUE = 1\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


def test_only_what_is_missing_is_installed(tmp_path: Path) -> None:
    for name in ("stage2_no_such_package", "torch"):
        _wheel(tmp_path, name)
    private = tmp_path / "private"
    assert install_missing(tmp_path, private) == ["stage2_no_such_package"]
    assert (private / "stage2_no_such_package.py").exists()
    assert not (private / "torch.py").exists()


def test_a_folder_without_wheels_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="make it with --collect"):
        install_missing(tmp_path, tmp_path / "private")


def test_a_broken_wheel_is_told_in_pips_words(tmp_path: Path) -> None:
    (tmp_path / "broken-1.0-py3-none-any.whl").write_text("no zip")
    with pytest.raises(UserError, match="wheels cannot be installed"):
        install_missing(tmp_path, tmp_path / "private")


def test_every_package_is_pinned_once() -> None:
    names = [pin.partition("==")[0] for pin in PINNED]
    assert all("==" in pin for pin in PINNED)
    assert len(set(names)) == len(names)
