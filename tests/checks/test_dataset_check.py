"""Every way in which a data set can be unusable gives one line: file, line, problem, remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders import config_of
from data.row_files import make_image, make_row, write_rows
from golden import Golden, name_of

from swift_stage2.checks.checks import check_data
from swift_stage2.data.survey import survey
from swift_stage2.errors import DatasetError


@pytest.fixture
def row(tmp_path: Path) -> dict[str, Any]:
    return make_row(make_image(tmp_path / "a.png"), boxes=[[1, 2, 40, 30]])


def _write(directory: Path, *lines: Any) -> Path:
    return write_rows(directory / "rows.jsonl", lines)


def check_datasets(swift: dict[str, Any], **channel_b: Any) -> None:
    """As a run with channel B checks them; a configuration without a data set is refused before."""
    rows = {f"stage2_ab.channel_b.{key}": value for key, value in channel_b.items()}
    check_data(config_of({"swift": swift}, rows))


def check_jsonl(path: Path) -> None:
    check_datasets({"dataset": str(path)})


def _refusal(path: Path) -> str:
    with pytest.raises(DatasetError) as caught:
        check_jsonl(path)
    message = str(caught.value).removeprefix("swift.dataset: ")
    assert "\n" not in message
    assert message.count(str(path)) >= 1
    return message.replace(f"{path.parent}/", "")


def objects(refs: list[str], boxes: list[Any]) -> dict[str, Any]:
    return {"objects": {"ref": refs, "bbox": boxes}}


BAD_LINES = [
    '{"messages": [',
    "not json",
    '{"messages": []}',
    '{"messages": [{"role": "user", "content": "Detect."}]}',
    '{"messages": ["hello"]}',
]
BAD_ROWS = [
    {"objects": None},
    objects(["cat", "dog"], [[1, 2, 3, 4]]),
    objects(["cat"], [[1, 2, 3]]),
    objects(["cat"], [[5, 2, 3, 4]]),
    objects([""], [[1, 2, 3, 4]]),
    objects(["cat"], []),
    objects([], []),
    objects(["cat"], [[0, 0, 40.5, 30]]),
    {"images": ["/nowhere/b.png"]},
    {"images": [7]},
    {"images": [{"bytes": "x"}]},
]
CASES: dict[str, list[Any]] = {line: [{}, line] for line in BAD_LINES}
CASES |= {name_of(changes): [{}, changes] for changes in BAD_ROWS}
CASES |= {"nothing": [""], "blank lines": ["\n\n  \n"]}
MESSAGES = Golden(__file__, CASES)


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_used_is_told_with_its_line(tmp_path: Path, row: dict[str, Any], case: str) -> None:
    lines = [line if isinstance(line, str) else row | line for line in CASES[case]]
    MESSAGES.check(case, _refusal(_write(tmp_path, *lines)))


def test_a_good_file_passes_blank_lines_included_and_the_configuration_says_which_rows_may_lack_objects(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    check_jsonl(_write(tmp_path, row, "", row))
    prose = [row["messages"][0], {"role": "assistant", "content": "A room."}]
    path = _write(tmp_path, row, {"messages": prose, "images": row["images"]})
    assert "write empty lists for an image without objects" in _refusal(path)
    check_datasets({"dataset": str(path)}, rows_without_objects="channel_a_only")


def test_images_may_be_one_path_or_records_and_relative(
    tmp_path: Path, row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    monkeypatch.setenv("ROOT_IMAGE_DIR", str(tmp_path))
    path = _write(tmp_path, row | {"images": row["images"][0]}, row | {"images": [{"path": "a.png"}]})
    check_jsonl(path)
    monkeypatch.delenv("ROOT_IMAGE_DIR")
    assert _refusal(path).startswith("rows.jsonl:2: ")


def test_a_file_that_cannot_be_read_and_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    for name, why in (("missing.jsonl", "No such file"), ("folder.jsonl", "not a regular file")):
        (tmp_path / "folder.jsonl").mkdir(exist_ok=True)
        with pytest.raises(DatasetError, match=f"a data set must be a readable UTF-8 file, got .*{why}"):
            survey([tmp_path / name])
    (tmp_path / "latin.jsonl").write_bytes(b'{"messages": "\xff"}')
    assert ":1: a line must be UTF-8 text" in _refusal(tmp_path / "latin.jsonl")


def test_every_local_file_of_the_arguments_is_checked_and_nothing_else(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    good = _write(tmp_path, row)
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{")
    check_datasets({})
    check_datasets({"dataset": [str(good), f"{good}#100", "org/hub-data"], "val_dataset": None})
    for arguments in (
        {"dataset": [str(good), str(bad)]},
        {"dataset": f"{bad}#5"},
        {"dataset": str(good), "val_dataset": [str(bad)]},
    ):
        with pytest.raises(DatasetError, match=r"bad\.jsonl:1"):
            check_datasets(arguments)


@pytest.mark.parametrize("key", ["dataset", "val_dataset"])
@pytest.mark.parametrize("name", ["absent.jsonl#7", "/nowhere/rows"])
def test_a_missing_file_is_told_with_its_key_and_path(key: str, name: str) -> None:
    with pytest.raises(DatasetError) as refused:
        check_datasets({key: [name]})
    assert str(refused.value).startswith(f"swift.{key} must name files that exist, got {key}={name!r}; ")


def test_a_folder_is_refused_however_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "rows").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in (str(tmp_path), "./org", "org/rows", "org/rows#5"):
        with pytest.raises(DatasetError) as refused:
            check_datasets({"val_dataset": [name]})
        assert str(refused.value) == (
            f"swift.val_dataset must name files, got val_dataset={name!r}, a folder; name the files in it"
        )
