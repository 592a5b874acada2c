from __future__ import annotations

from pathlib import Path

import pytest

from swift_stage2.errors import UserError
from swift_stage2.run_directory.output import claim_directory


def test_a_new_directory_is_made_with_its_parents(tmp_path: Path) -> None:
    assert claim_directory(tmp_path / "a" / "b", keep=False).is_dir()


def test_an_earlier_claim_is_replaced(tmp_path: Path) -> None:
    first = claim_directory(tmp_path / "demo", keep=False)
    (first / "old").mkdir()
    assert claim_directory(tmp_path / "demo", keep=False) == first
    assert not (first / "old").exists()


def test_keep_takes_the_next_free_name(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        directory = claim_directory(tmp_path / "demo", keep=True)
        (directory / "result").touch()
        names.append(directory.name)
    assert names == ["demo", "demo-2", "demo-3"]
    assert (tmp_path / "demo" / "result").exists()


def test_what_somebody_else_wrote_is_never_removed(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("ten years of work")
    with pytest.raises(UserError, match="with other files"):
        claim_directory(tmp_path, keep=False)
    assert (tmp_path / "thesis.tex").read_text() == "ten years of work"


def test_an_empty_directory_of_the_user_is_taken(tmp_path: Path) -> None:
    assert claim_directory(tmp_path, keep=False) == tmp_path


@pytest.mark.parametrize("keep", [False, True])
def test_a_file_is_no_directory(tmp_path: Path, keep: bool) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError, match=r"^--output must be a directory, got .*/file, a file; name another one$"
    ):
        claim_directory(tmp_path / "file", keep=keep)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_nothing_can_be_made_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--output must be a directory that can be written"):
        claim_directory(tmp_path / "file" / "below", keep=False)


def test_another_commands_claim_is_never_cleared(tmp_path: Path) -> None:
    (claim_directory(tmp_path / "bench", keep=False) / "result").touch()
    with pytest.raises(UserError, match="with other files"):
        claim_directory(tmp_path / "bench", keep=False, marker=".other")
    assert (tmp_path / "bench" / "result").exists()


def test_a_relative_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert claim_directory(Path("out"), keep=False) == tmp_path / "out"
