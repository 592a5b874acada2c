"""Data sets that are wrong: lines, boxes, labels, answers, images. One bad row among good ones, never the first."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from PIL import Image

from benchmarks.wrong_inputs.case import DATA, DOCTOR, LAUNCH, Case, Setup, Spoil, holding, placed
from swift_stage2.demo.grounding_dataset import ROWS_FILE

_BAD = 3
_ORIENTATION = 0x0112
_WHERE = f"{ROWS_FILE}:{_BAD + 1}"
_CLAIM = "every line and picture is readable"

_OBJECT = '{"bbox_2d": <bbox>, "label": "<ref-object>"}'

Row = dict[str, Any]


def _lines(change: Callable[[list[str]], None]) -> Spoil:
    def spoil(scene: Setup) -> None:
        lines = [json.dumps(row) for row in scene.rows]
        change(lines)
        scene.files[ROWS_FILE] = "\n".join(lines) + "\n"

    return spoil


def _line(content: str) -> Spoil:
    return _lines(lambda lines: lines.__setitem__(_BAD, content))


def _row(change: Callable[[Row], object]) -> Spoil:
    return lambda scene: change(scene.rows[_BAD])


def _set(key: str, value: Any) -> Spoil:
    return _row(lambda row: row.__setitem__(key, value))


def _answer(text: str) -> Spoil:
    return _row(lambda row: row["messages"][-1].__setitem__("content", text))


def _changed(change: Callable[[str], str]) -> Spoil:
    return _row(lambda row: row["messages"][-1].update(content=change(row["messages"][-1]["content"])))


def _box(*box: Any) -> Spoil:
    return _row(lambda row: row["objects"]["bbox"].__setitem__(0, list(box)))


def _label(label: Any) -> Spoil:
    return _row(lambda row: row["objects"]["ref"].__setitem__(0, label))


def _bytes(change: Callable[[bytes], bytes]) -> Spoil:
    def spoil(scene: Setup) -> None:
        image = scene.image(_BAD)
        image.write_bytes(change(image.read_bytes()))

    return spoil


def _damaged(content: bytes, place: int) -> bytes:
    return content[:place] + b"\xff" * 64 + content[place + 64 :]


def _saved(form: str, **options: Any) -> Spoil:
    """The same picture, written in another way under the same name."""

    def change(content: bytes) -> bytes:
        told = io.BytesIO()
        picture = Image.open(io.BytesIO(content)).convert("RGB")
        picture.save(told, form, **options)
        return told.getvalue()

    return _bytes(change)


def _turned(number: int) -> Spoil:
    exif = Image.Exif()
    exif[_ORIENTATION] = number
    return _saved("JPEG", exif=exif)


# What is wrong, how, and whether it stands in one line that must be named.
_LINES: tuple[tuple[str, Spoil], ...] = (
    ("a line that is no JSON", _line("{nothing")),
    ("a line cut in half", _line('{"messages": [{"role": "us')),
    ("a line with two objects", _line('{"a": 1} {"b": 2}')),
    ("a list as line", _line("[1, 2]")),
    ("a number as line", _line("7")),
    ("null as line", _line("null")),
    ("JSON 3,000 deep", _line("[" * 3000 + "]" * 3000)),
    ("a number of 5,000 digits", _line('{"messages": ' + "1" * 5000 + "}")),
    ("NaN as a coordinate", _box(float("nan"), 1, 2, 3)),
    ("an empty object", _line("{}")),
    ("no messages", _row(lambda row: row.pop("messages"))),
    ("messages are text", _set("messages", "hello")),
    ("messages are empty", _set("messages", [])),
    ("a message is text", _set("messages", ["hello"])),
    ("a message without role", _row(lambda row: row["messages"][0].pop("role"))),
    ("a message of a role that nobody knows", _row(lambda row: row["messages"][0].update(role="boss"))),
    ("no answer", _row(lambda row: row["messages"].pop())),
    ("two answers, one after the other", _row(lambda row: row["messages"].append(row["messages"][-1]))),
    ("an answer that is null", _row(lambda row: row["messages"][-1].update(content=None))),
    ("an answer that is a number", _row(lambda row: row["messages"][-1].update(content=5))),
    ("objects are a list", _set("objects", [1])),
    ("objects are text", _set("objects", "cat")),
    ("no boxes in objects", _row(lambda row: row["objects"].pop("bbox"))),
    ("no labels in objects", _row(lambda row: row["objects"].pop("ref"))),
    ("one label too few", _row(lambda row: row["objects"]["ref"].pop())),
    ("one label too many", _row(lambda row: row["objects"]["ref"].append("x"))),
    ("boxes are text", _row(lambda row: row["objects"].update(bbox="1,2,3,4"))),
    ("an unknown bbox_type", _row(lambda row: row["objects"].update(bbox_type="percent"))),
    ("a box of three numbers", _box(1, 2, 3)),
    ("a box of five numbers", _box(1, 2, 3, 4, 5)),
    ("a box of texts", _box("1", "2", "3", "4")),
    ("a box with null", _box(None, 2, 3, 4)),
    ("a box with true", _box(True, 2, 30, 40)),
    ("a box from right to left", _box(40, 10, 10, 30)),
    ("a box from bottom to top", _box(10, 40, 30, 10)),
    ("a box with a negative corner", _box(-5, 10, 30, 30)),
    ("a box outside its image", _box(10, 10, 5000, 30)),
    ("an endless coordinate", _box(1, 2, float("inf"), 4)),
    ("a label that is a number", _label(5)),
    ("a label that is null", _label(None)),
    ("an empty label", _label("")),
    ("a label of blanks", _label("   ")),
    ("a label with a quote", _label('a "big" cat')),
    ("a label with a line break", _label("a\ncat")),
    ("an answer in prose", _answer("I can see a cat at <bbox>.")),
    ("an answer without placeholders", _answer("[]")),
    ("one placeholder too many", _changed(lambda text: text.replace("]", f", {_OBJECT}]"))),
    ("one placeholder too few", _changed(lambda text: text.replace("<bbox>", "[1, 2, 3, 4]", 1))),
    ("an answer that is no closed JSON", _changed(lambda text: text[:-1])),
    ("no image", _row(lambda row: row.pop("images"))),
    ("an empty list of images", _set("images", [])),
    ("an image that is a number", _set("images", [5])),
    ("an image that is null", _set("images", [None])),
    ("an image that is not there", _set("images", ["images/absent.png"])),
    ("an image that is a folder", _set("images", ["images"])),
    ("an image without a name", _set("images", [""])),
    ("an image file of no bytes", _bytes(lambda content: b"")),
    ("an image that is text", _bytes(lambda content: b"this is no picture")),
    ("an image cut in its header", _bytes(lambda content: content[:20])),
    ("an image that is an HTML page", _bytes(lambda content: b"<html>404</html>")),
    ("an image whose first bytes are wrong", _bytes(lambda content: b"XXXX" + content[4:])),
    ("a path with a NUL", _set("images", ["images/a\x00b.png"])),
    ("a path of 5,000 characters", _set("images", ["x" * 5000 + ".png"])),
)

_PIXELS: tuple[tuple[str, Spoil], ...] = (
    ("an image cut in half", _bytes(lambda content: content[: len(content) // 2])),
    ("an image whose pixels are damaged", _bytes(lambda content: _damaged(content, len(content) // 2))),
)

# Such rows train, so that they are told without an exit status of their own.
_ADVICE: tuple[tuple[str, Spoil, str], ...] = (
    ("a box without area", _box(10, 10, 10, 10), _WHERE),
    ("two images", _row(lambda row: row["images"].append(row["images"][0])), _WHERE),
    ("an image without its last bytes, all pixels there", _bytes(lambda content: content[:-20]), "no fault"),
)

_FILES: tuple[tuple[str, Spoil, str], ...] = (
    ("an empty file", holding(**{ROWS_FILE: ""}), "rows"),
    ("only blank lines", holding(**{ROWS_FILE: "\n\n  \n"}), "rows"),
    ("Latin-1 text", lambda scene: _encode(scene, "latin-1"), "UTF-8"),
    ("UTF-16 text", lambda scene: _encode(scene, "utf-16"), "UTF-8"),
    ("a picture as data set", holding(**{ROWS_FILE: b"\x89PNG\r\n\x1a\n"}), "UTF-8"),
    (
        "one JSON list over many lines",
        lambda scene: _write(scene, json.dumps(scene.rows, indent=1)),
        ROWS_FILE,
    ),
    ("a CSV under the name of a JSONL", holding(**{ROWS_FILE: "image,label\na.png,cat\n"}), f"{ROWS_FILE}:1"),
)
# What launch leaves to the check of every row: it needs the data set's own answer format.
_ONLY_DATA_CHECK = ("a message of a role that nobody knows",)


def data_cases() -> Iterator[Case]:
    """Every one by ``data check``; those that a look at the lines finds by ``launch`` as well, before it starts."""
    case, by_launch = partial(Case, "data"), partial(Case, "data, met by launch")
    decode = f"{DATA} --decode"
    for wrong, spoil in _LINES:
        yield case(wrong, _WHERE, DATA, spoil, (1,))
    for wrong, spoil in _PIXELS:
        yield case(f"{wrong} (--decode)", _WHERE, decode, spoil, (1,))
    for wrong, spoil, told in _ADVICE:
        yield case(wrong, told, decode, spoil, (0,))
    for wrong, spoil, told in _FILES:
        yield case(wrong, told, DATA, spoil, (1, 2))
        yield by_launch(wrong, told, LAUNCH, spoil)
    for wrong, spoil in _LINES[:15] + _LINES[20:32] + _LINES[-12:]:
        if wrong not in _ONLY_DATA_CHECK:
            yield by_launch(wrong, _WHERE, LAUNCH, spoil)
    for number in (3, 6, 8):
        wrong = f"a photograph turned by EXIF, orientation {number}"
        yield case(wrong, "EXIF", DATA, _turned(number), (0, 1))
    yield from _named()


def _write(scene: Setup, content: str | bytes) -> None:
    scene.files[ROWS_FILE] = content


def _encode(scene: Setup, code: str) -> None:
    scene.rows[0]["objects"]["ref"][0] = "café"
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in scene.rows)
    _write(scene, text.encode(code))


def _named() -> Iterator[Case]:
    case = partial(Case, "naming data")
    for wrong, value, told in (
        ("a data set that is not there", ["absent.jsonl"], "must name files that exist"),
        ("a folder as data set", ["./images"], "a folder"),
        ("a CSV that is not there", ["absent.csv"], "must name files that exist"),
        ("nothing among names", ["rows.jsonl", ""], "must be a path or a list of paths"),
    ):
        yield case(wrong, told, spoil=placed("swift.dataset", value))
    validation = placed("swift.val_dataset", ["absent.jsonl"])
    yield case("a validation set that is not there", "val_dataset", spoil=validation)
    for wrong, command, told in (
        ("data check of a file that is not there", "data check absent.jsonl", "absent.jsonl"),
        ("data check of a folder", "data check images", "images"),
        ("data check of nothing", "data check", "required"),
        ("data check with an unknown option", f"{DATA} --fix", "--fix"),
        ("--apply-exif without --output", f"{DATA} --apply-exif upright", "--output"),
        ("--apply-exif onto its own input", f"{DATA} --apply-exif upright --output {ROWS_FILE}", ROWS_FILE),
        ("data with a word that it does not know", f"data chcek_it {ROWS_FILE}", "chcek_it"),
        ("--dialect of nothing known", f"{DATA} --dialect xml", "xml"),
    ):
        yield case(wrong, told, command, statuses=(1, 2))
    for wrong, spoil, told in (
        ("a bad row, met by the doctor", _line("{nothing"), _WHERE),
        ("an answer in prose, met by the doctor", _answer("I can see a cat at <bbox>."), ""),
        ("a box outside its image, met by the doctor", _box(10, 10, 5000, 30), _WHERE),
    ):
        yield case(wrong, told, DOCTOR, spoil, (1,), _CLAIM)
