"""A file is there whole or not at all, on real disks that are full, read-only or gone."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
from small_disk import SmallDisk

import swift_stage2
from swift_stage2.data.prediction import write_file, write_predictions
from swift_stage2.launch.plan import Command
from swift_stage2.runtime.supervisor import ProcessTree
from swift_stage2.whole_file import write_whole


def test_a_file_is_replaced_and_its_directory_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    real_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    path = tmp_path / "a.json"
    path.write_text("old")
    write_whole(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]
    assert [Path(name).parent == tmp_path for name in flushed] == [
        True,
        False,
    ]  # the file, then its directory
    assert flushed[1] == str(tmp_path)


def test_a_full_disk_leaves_the_old_file_and_nothing_beside_it(small_disk: SmallDisk) -> None:
    path = small_disk.path / "a.json"
    path.write_text("old")
    small_disk.fill()
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "x" * 100_000)
    assert path.read_text() == "old"
    assert sorted(each.name for each in small_disk.path.iterdir()) == ["a.json", small_disk.filler.name]


def test_nothing_else_in_the_package_replaces_a_file() -> None:
    package = Path(swift_stage2.__file__).parent
    found = [
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.replace", "os.rename", "shutil.move")
    ]
    # Weights are directories.
    assert sorted(set(found)) == ["weights/disk_versions.py", "whole_file.py"]


def test_no_pipe_or_device_is_replaced_and_a_link_is_followed(tmp_path: Path) -> None:
    """``report --output /dev/null`` as root would leave the machine without one."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="never replaced"):
        write_whole(tmp_path / "pipe", "new")
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"


def test_what_holds_rows_or_answers_is_as_private_as_the_audit(tmp_path: Path) -> None:
    log = tmp_path / "learner.log"
    before = os.umask(0o022)
    try:
        write_file(tmp_path / "report.html", "")
        write_predictions(tmp_path / "predictions.jsonl", [])
        tree = ProcessTree(Command("a", ("true",), os.environ, 1.0), log)
        write_whole(tmp_path / "open.json", "")
    finally:
        os.umask(before)
    tree.ask_to_end()
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes.pop("open.json") == 0o644
    assert set(modes.values()) == {0o600}
    assert len(modes) == 3
