"""A pipe or a device without an end in the place of a file from outside: each command goes on or says so."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from data.row_files import make_image, make_row, write_rows
from rich.text import Text

from swift_stage2.cli import main
from swift_stage2.runtime.output import SafeConsole
from swift_stage2.whole_file import MOST_BYTES, open_regular, read_regular, regular_lines

pytestmark = pytest.mark.timeout(60)


def row_of(image: Path) -> dict[str, Any]:
    return make_row(str(image), answer="[]", labels=(), boxes=(), prompt="<image>Find.")


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def endless(path: Path) -> Path:
    path.symlink_to("/dev/zero")
    return path


def sparse(path: Path) -> Path:
    path.touch()
    os.truncate(path, MOST_BYTES + 1)
    return path


IMPORT = "--images {folder} --output {folder}/o.jsonl"
PLACES = {
    "a.png": "data check {folder}/rows.jsonl",
    "b.jsonl": "data check {folder}/b.jsonl",
    "voc/a.xml": f"import voc {{folder}}/voc {IMPORT}",
    "labels/a.txt": f"import yolo {{folder}}/labels {IMPORT}",
    "p.jsonl": "evaluate --predictions {folder}/p.jsonl --data {folder}/rows.jsonl",
    "events/rank0.jsonl": "report {folder}",
    "c.yaml": "launch {folder}/c.yaml",
}
"""Commands that read a file of this name."""


def prepared(folder: Path) -> Path:
    for name in ("voc", "labels", "events"):
        (folder / name).mkdir()
    (folder / "labels" / "classes.txt").write_text("cat\n")
    make_image(folder / "a.png", (8, 8))
    return write_rows(folder / "rows.jsonl", [row_of(folder / "a.png")])


@pytest.mark.parametrize("spoil", [pipe, endless])
@pytest.mark.parametrize("name", PLACES)
def test_every_command_tells_of_what_is_no_regular_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, spoil: Callable[[Path], Path]
) -> None:
    prepared(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    spoil(tmp_path / name)
    assert main(PLACES[name].format(folder=tmp_path).split()) in (0, 1, 2)
    assert "not a regular file" in "".join(capsys.readouterr())


@pytest.mark.parametrize("spoil", [pipe, endless, sparse])
def test_what_is_no_file_or_too_large_is_an_os_error(tmp_path: Path, spoil: Callable[[Path], Path]) -> None:
    path = spoil(tmp_path / "a")
    with pytest.raises(OSError, match=str(path)):
        read_regular(path)
    with pytest.raises(OSError, match=str(path)):
        list(regular_lines(path))
    with pytest.raises(OSError, match="regular"):
        open_regular(tmp_path)


OBEYED = "\x1b[2J\x9b5m\u202e\x07"


def test_no_command_has_a_terminal_obey_a_path_or_a_label(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of them comes in table, line and error."""
    folder = tmp_path / f"a{OBEYED}b"
    folder.mkdir()
    rows = prepared(folder)
    labels = [word.format(folder=folder) for word in PLACES["labels/a.txt"].split()]
    (folder / "labels" / "a.txt").write_text("7 0.5 0.5 0.1 0.1")
    (folder / f"b{OBEYED}.png").write_bytes(b"no picture")
    (folder / "labels" / f"b{OBEYED}.txt").write_text("0 0.5 0.5 0.1 0.1")
    broken = write_rows(folder / "broken.jsonl", [row_of(folder / f"none{OBEYED}.png")])
    answers = folder / "p.jsonl"
    answers.write_text(f'{{"{json.dumps(OBEYED)[1:-1]}": 1}}\n')
    for command in (
        ["data", "check", str(rows), str(broken)],
        labels,
        ["evaluate", "--predictions", str(answers), "--data", str(rows)],
        ["report", str(folder)],
        ["rollouts", str(folder)],
        ["rollouts", str(folder), f"--x{OBEYED}"],
    ):
        with suppress(SystemExit):
            main(command)
        said = capsys.readouterr()
        assert "\ufffd" in said.out + said.err or r"\x1b" in said.err, (command, said)
        assert not set(OBEYED[:1] + OBEYED[4] + OBEYED[-2:]) & set(said.out + said.err), command


def test_a_table_keeps_its_own_colours_only(capsys: pytest.CaptureFixture[str]) -> None:
    SafeConsole(force_terminal=True, color_system="standard").print(Text(f"a{OBEYED}b", style="red"))
    assert capsys.readouterr().out == "\x1b[31ma\ufffd[2J\ufffd5m\ufffdb\x1b[0m\n"
