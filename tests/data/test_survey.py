"""Every row is looked at, and whatever ms-swift would train otherwise than meant is told with file and line."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps
from row_files import ANSWER, make_image, make_row, write_rows

from swift_stage2.channel_b.dialects import OBJECT_LIST, OBJECT_MAP
from swift_stage2.channel_b.sample_source import RowOrigins
from swift_stage2.data.files import Rule, local_files
from swift_stage2.data.picture import look_at
from swift_stage2.data.survey import MOST_KEPT, main, survey
from swift_stage2.errors import DatasetError

NUM_GOOD = 12
MAP_ANSWER = '{"object_1": {"desc": "<ref-object>", "bbox_2d": <bbox>}}'


@pytest.fixture
def image(tmp_path: Path) -> str:
    return make_image(tmp_path / "a.png")


@pytest.mark.parametrize(
    ("changes", "rule", "words"),
    [
        ({"answer": "There is a cat."}, Rule.ANSWER, "must list its objects as JSON, got 'There is a cat.'"),
        ({"answer": ANSWER + ANSWER}, Rule.ANSWER, "num_bbox=2 num_ref_object=2 num_objects=1"),
        ({"answer": "[]"}, Rule.ANSWER, "must list its objects as JSON, got '[]'"),
        ({"labels": ['say "cat"']}, Rule.ANSWER, "label='say \"cat\"'"),
        ({"labels": ["a\nb"]}, Rule.ANSWER, "label='a\\nb'"),
        ({"labels": ["a\\b"]}, Rule.ANSWER, "take quotes, backslashes"),
        (
            {"answer": '[{"bbox_2d": <bbox>, "label": "<ref-object>", "score": 1}]'},
            Rule.ANSWER,
            "must list its objects as JSON",
        ),
        ({"answer": ANSWER.replace("<ref-object>", "dog")}, Rule.ANSWER, "objects in their order"),
        ({"answer": f"```json\n{ANSWER}\n```"}, Rule.FORMAT, 'where 12 rows write \'[{"bbox_2d"'),
        ({"answer": '[{"label": "<ref-object>", "bbox_2d": <bbox>}]'}, Rule.FORMAT, "written alike"),
        (
            {"labels": ["<|im_end|>"]},
            Rule.OBJECTS,
            "got a special token in label='<|im_end|>'",
        ),
        ({"labels": ["cafe\u0301"]}, Rule.LABEL, "label='cafe\\u0301'"),
        ({"labels": ["c\u200bat"]}, Rule.LABEL, "label='c\\u200bat'"),
        ({"answer": MAP_ANSWER}, Rule.FORMAT, '\'{"object_1": {"desc": '),
        ({"prompt": "<image>Where is <ref-object>?"}, Rule.PROMPT, "must not hold <ref-object>"),
        ({"prompt": "<image><image>Detect."}, Rule.PROMPT, "num_tags=2 num_images=1"),
        ({"boxes": [[1, 2, 400, 20]]}, Rule.BOUNDS, "bbox=[1.0, 2.0, 400.0, 20.0] width=40 height=30"),
        ({"image_id": [1]}, Rule.OBJECTS, "first of a row's images, got image_id=[1]"),
        ({"boxes": [[1e400, 2, 3, 4]]}, Rule.OBJECTS, "0 <= x1 <= x2"),
        (
            {"boxes": [[0.1, 0.2, 0.5, 1]]},
            Rule.BOUNDS,
            "boxes must be in pixels, got bbox=[0.1, 0.2, 0.5, 1.0]",
        ),
        ({"bbox_type": "percent"}, Rule.OBJECTS, "must be real (pixels) or norm1"),
        ({"boxes": [[3, 3, 3, 10]]}, Rule.AREA, "a box should have an area, got bbox=[3.0, 3.0, 3.0, 10.0]"),
    ],
)
def test_one_bad_row_among_good_ones_is_told_wherever_it_stands(
    tmp_path: Path, image: str, changes: dict[str, Any], rule: Rule, words: str
) -> None:
    for place in (1, 7, NUM_GOOD + 1):
        rows = [make_row(image) for _ in range(NUM_GOOD)]
        rows.insert(place - 1, make_row(image, **changes))
        file = write_rows(tmp_path / "rows.jsonl", rows)
        found = survey([file])
        assert dict(found.counts) == {rule: 1}
        (fault,) = found.faults
        assert str(fault).startswith(f"{file}:{place}: ")
        assert words in str(fault)
        assert image in str(fault)
        assert found.num_rows == NUM_GOOD + 1
        assert found.num_bad_rows == (0 if rule.is_advice else 1)


def test_all_faults_of_all_files_are_listed_at_once(tmp_path: Path, image: str) -> None:
    first = write_rows(tmp_path / "a.jsonl", [make_row(image), "{", make_row("/nowhere.png")])
    second = write_rows(
        tmp_path / "b.jsonl", [make_row(image), make_row(image, answer="no", boxes=[[0, 0, 99, 9]])]
    )
    found = survey([first, second])
    assert [(fault.place.file, fault.place.line, fault.rule) for fault in found.faults] == [
        (first, 2, Rule.LINE),
        (second, 2, Rule.BOUNDS),
        (first, 3, Rule.IMAGE),
        (second, 2, Rule.ANSWER),
    ]
    assert found.num_bad_rows == 3


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda text: b"\xef\xbb\xbf" + text, "Unexpected UTF-8 BOM"),
        (lambda text: text.decode().encode("utf-16"), "a line must be UTF-8 text"),
        (lambda text: b"[" + text, "rows stand alone"),
        (lambda text: text.rstrip() + b",", "rows stand alone"),
        (lambda text: text.decode().encode("latin-1"), "a line must be UTF-8 text"),
    ],
)
def test_a_file_in_another_form_is_told_by_its_name(
    tmp_path: Path, image: str, spoil: Callable[[bytes], bytes], words: str
) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [make_row(image, labels=["café"])])
    row = json.loads(file.read_bytes())
    file.write_bytes(spoil(json.dumps(row, ensure_ascii=False).encode()))
    assert words in survey([file]).faults[0].reason


def test_videos_beside_objects_are_told(tmp_path: Path, image: str) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [make_row(image), {**make_row(image), "videos": ["a.mp4"]}])
    (fault,) = survey([file]).faults
    assert (fault.rule, fault.place.line) == (Rule.OBJECTS, 2)
    assert "about images alone, got videos=['a.mp4'] beside objects" in fault.reason
    assert survey([file], judge_answers=False).num_faults == 0


def test_a_path_with_a_number_sign_is_a_path(tmp_path: Path, image: str) -> None:
    file = write_rows(tmp_path / "rows#2.jsonl", [make_row(image)])
    assert local_files({"dataset": [str(file), f"{file}#1"]})["dataset"] == [file]
    with pytest.raises(DatasetError, match="must name files that exist"):
        local_files({"dataset": [str(tmp_path / "gone#2.jsonl")]})


def test_faults_are_counted_beyond_those_kept(tmp_path: Path, image: str) -> None:
    num = MOST_KEPT + 50
    found = survey([write_rows(tmp_path / "rows.jsonl", [make_row(image, answer="no")] * num)])
    assert found.counts[Rule.ANSWER] == num == found.num_bad_rows
    assert len(found.faults) == MOST_KEPT
    rows = [make_row(image)] * (2 * num) + [make_row(image, answer=MAP_ANSWER)] * num
    found = survey([write_rows(tmp_path / "rows.jsonl", rows)])
    assert found.counts[Rule.FORMAT] == num == found.num_bad_rows
    assert [fault.place.line for fault in found.faults] == list(range(2 * num + 1, 2 * num + 1 + MOST_KEPT))


def test_a_configured_dialect_decides_whatever_most_rows_write(tmp_path: Path, image: str) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [make_row(image, answer=MAP_ANSWER)] * 3)
    assert survey([file]).num_faults == 0
    assert survey([file], dialect=OBJECT_MAP).num_faults == 0
    found = survey([file], dialect=OBJECT_LIST)
    assert found.counts == {Rule.FORMAT: 3}
    assert "dialect=object_map, stage2_ab.channel_b.target.dialect=object_list" in found.faults[0].reason


def test_answers_may_be_anything_where_channel_a_trains_alone_but_for_their_placeholders(
    tmp_path: Path, image: str
) -> None:
    rows = [make_row(image, answer="A cat at <bbox>."), make_row(image, answer="A cat at <bbox> and <bbox>.")]
    found = survey([write_rows(tmp_path / "rows.jsonl", rows)], judge_answers=False)
    assert [(fault.place.line, fault.rule) for fault in found.faults] == [(2, Rule.ANSWER)]


def test_rows_without_objects_are_refused_unless_they_are_allowed(tmp_path: Path, image: str) -> None:
    bare = {name: value for name, value in make_row(image, answer="A cat.").items() if name != "objects"}
    file = write_rows(tmp_path / "rows.jsonl", [make_row(image), bare])
    assert survey([file]).counts == {Rule.OBJECTS: 1}
    assert survey([file], needs_objects=False).num_faults == 0
    spoilt = {**bare, "messages": make_row(image)["messages"]}
    file = write_rows(tmp_path / "rows.jsonl", [make_row(image), spoilt])
    assert survey([file], needs_objects=False).counts == {Rule.ANSWER: 1}


def test_written_out_boxes_are_left_to_the_template(tmp_path: Path, image: str) -> None:
    row = make_row(image, answer='[{"bbox_2d": [25, 66, 750, 666], "label": "cat"}]')
    assert survey([write_rows(tmp_path / "rows.jsonl", [row])]).num_faults == 0


def test_no_image_and_two_images_are_told(tmp_path: Path, image: str) -> None:
    other = make_image(tmp_path / "wide.png", (80, 30))
    rows = [
        make_row([], prompt="Detect."),
        make_row([image, other], prompt="<image><image>Detect.", boxes=[[50, 0, 70, 20]], image_id=[1]),
        make_row([image, other], prompt="<image><image>Detect.", boxes=[[50, 0, 70, 20]]),
    ]
    found = survey([write_rows(tmp_path / "rows.jsonl", rows)])
    assert [(fault.place.line, fault.rule) for fault in found.faults] == [
        (2, Rule.OBJECTS),
        (3, Rule.BOUNDS),
        (1, Rule.IMAGES),
        (2, Rule.IMAGES),
        (3, Rule.IMAGES),
    ]
    assert "num_images=0" in found.faults[2].reason
    assert "num_images=2" in found.faults[3].reason


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "bmp", "gif", "tif"])
@pytest.mark.parametrize("share", [0.3, 0.9, 1.0])
def test_a_picture_that_is_not_all_there_is_told(tmp_path: Path, suffix: str, share: float) -> None:
    whole = Path(make_image(tmp_path / f"whole.{suffix}", (200, 160))).read_bytes()
    cut = tmp_path / f"cut.{suffix}"
    cut.write_bytes(whole[: int(len(whole) * share)])
    found = survey([write_rows(tmp_path / "rows.jsonl", [make_row(str(cut))])])
    palette = {Rule.COLOURS: 1} if suffix == "gif" else {}
    assert found.counts == (palette if share == 1 else {Rule.IMAGE: 1})


def test_damage_in_the_middle_shows_once_everything_is_decoded(tmp_path: Path) -> None:
    content = bytearray(Path(make_image(tmp_path / "a.png", (200, 160))).read_bytes())
    content[len(content) // 2] ^= 0xFF
    (tmp_path / "a.png").write_bytes(content)
    file = write_rows(tmp_path / "rows.jsonl", [make_row(str(tmp_path / "a.png"))])
    assert survey([file]).num_faults == 0
    assert survey([file], decode=True).counts == {Rule.IMAGE: 1}


def test_a_rotated_picture_is_told_and_its_boxes_are_on_the_stored_one(tmp_path: Path) -> None:
    image = make_image(tmp_path / "a.jpg", orientation=6)
    file = write_rows(
        tmp_path / "rows.jsonl",
        [make_row(image, boxes=[[0, 0, 40, 30]]), make_row(image, boxes=[[0, 0, 30, 40]])],
    )
    found = survey([file])
    assert found.counts == {Rule.BOUNDS: 1, Rule.ROTATED: 2}
    bounds, first, _ = found.faults
    assert bounds.place.line == 2
    assert "it would on the picture turned by its EXIF orientation 6" in bounds.reason
    assert f"{file}:1: an image should carry no EXIF rotation, got orientation=6" in str(first)


def test_rows_whose_columns_show_late_are_told(tmp_path: Path, image: str) -> None:
    """`datasets` takes the columns' types from the first 10 MiB: pyarrow's own words are the reason, not ours."""
    empty = make_row(
        image, answer="[]", labels=[], boxes=[], prompt="<image>" + "Detect all objects. " * 1200
    )
    rows = [empty] * 450 + [make_row(image)] * 12
    (fault,) = survey([write_rows(tmp_path / "rows.jsonl", rows)]).faults
    assert (fault.rule, fault.place.line) == (Rule.COLUMNS, 451)
    assert survey([write_rows(tmp_path / "rows.jsonl", rows[::-1])]).counts == {}


POINT_ANSWER = '[{"point_2d": <bbox>, "label": "<ref-object>"}]'


@pytest.mark.parametrize(
    ("boxes", "rule", "reason"),
    [
        ([[40, 30]], None, ""),
        ([[0, 0]], None, ""),
        ([[0.4, 0.7]], Rule.BOUNDS, "points must be in pixels"),
        (
            [[41, 3]],
            Rule.BOUNDS,
            "a point must lie inside its image, got bbox=[41.0, 3.0] width=40 height=30",
        ),
        ([[4, 31]], Rule.BOUNDS, "a point must lie inside its image"),
        ([[-4, 3]], Rule.OBJECTS, "a point must have 0 <= x and 0 <= y"),
        ([[1, 2, 30, 20]], Rule.OBJECTS, "a point must be two numbers"),
        ([[9, 9], [8, 8]], Rule.OBJECTS, "one label and one box, got num_ref=1 num_bbox=2"),
    ],
)
def test_points_are_checked_as_points(
    tmp_path: Path, image: str, boxes: list[list[float]], rule: Rule | None, reason: str
) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [make_row(image, answer=POINT_ANSWER, boxes=boxes)])
    findings = survey([file], num_coordinates=2)
    assert list(findings.counts) == ([rule] if rule else [])
    assert reason in "".join(fault.reason for fault in findings.faults)


@pytest.mark.parametrize(
    ("rows", "objects", "status", "told"),
    [
        ([[], [[9, 9]]], {}, 0, "dialect point_list"),
        ([[], []], {}, 0, "no fault"),
        (
            [[[9, 9]], [[1, 2, 30, 20]]],
            {},
            1,
            ":2: a point must be two numbers x, y, got bbox=[1, 2, 30, 20]",
        ),
        ([[[9, 9], [1, 2, 30, 20]]], {}, 1, ":1: a point must be two numbers x, y, got bbox=[1, 2, 30, 20]"),
        ([[[1, 2, 30, 20]], [[9, 9]]], {}, 1, ":2: a box must be four numbers"),
        ([[[9, 9]]], {"region": ["[8, 8, 10, 10]"]}, 0, "no fault"),
        ([[[9, 9]]], {"region": ["[8, 8, 10, 8.9]"]}, 1, ":1: a point must lie in its objects.region"),
        ([[[9, 9]]], {"region": ["[[1, 2]]"]}, 1, ":1: a mask must be"),
        ([[[9, 9]]], {"region": []}, 1, ":1: objects.region must hold one text"),
        ([[[9, 9]]], {"region": ["[8, 8, 10, 10]"] * 2}, 1, ":1: objects.region must hold one text"),
    ],
)
def test_the_rows_tell_whether_they_are_points(
    tmp_path: Path, image: str, rows: list[Any], objects: Any, status: int, told: str, capsys: Any
) -> None:
    of_boxes = any(len(places[0]) == 4 for places in rows[:1] if places)
    one = (ANSWER if of_boxes else POINT_ANSWER)[1:-1]
    written = [
        make_row(
            image,
            answer=f"[{', '.join([one] * len(places))}]",
            labels=["a"] * len(places),
            boxes=places,
            **objects,
        )
        for places in rows
    ]
    assert main(["check", str(write_rows(tmp_path / "rows.jsonl", written))]) == status
    assert told in capsys.readouterr().out


def test_an_answer_of_boxes_is_none_of_points(tmp_path: Path, image: str) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [make_row(image, boxes=[[9, 9]])])
    (fault,) = survey([file], num_coordinates=2).faults
    assert fault.rule is Rule.ANSWER
    assert '[{"point_2d": <bbox>, "label": "<ref-object>"}, …]' in fault.reason


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_stored_size_is_told_with_the_upright_one(tmp_path: Path, orientation: int) -> None:
    for suffix in ("png", "jpg", "webp"):
        path = make_image(tmp_path / f"a.{suffix}", orientation=orientation)
        picture = look_at(path)
        assert (picture.width, picture.height, picture.orientation) == (40, 30, orientation)
        with Image.open(path) as stored:
            assert ImageOps.exif_transpose(stored).size == picture.upright_size


def test_a_tiff_is_turned_by_whoever_opens_it(tmp_path: Path) -> None:
    picture = look_at(make_image(tmp_path / "a.tif", orientation=6))
    assert (picture.width, picture.height, picture.orientation) == (30, 40, 1)


def test_a_damaged_tag_turns_nothing(tmp_path: Path) -> None:
    path = Path(make_image(tmp_path / "a.jpg", orientation=6))
    content = path.read_bytes()
    path.write_bytes(content.replace(b"Exif\0\0MM", b"Exif\0\0ZZ").replace(b"Exif\0\0II", b"Exif\0\0ZZ"))
    assert look_at(str(path)).orientation == 1


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | st.sampled_from(
        ["", "<bbox>", "<ref-object>", "[", "\ud800", "\u0000", "<|im_end|>", "cat", "\u2028", "norm1"]
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["path", "role"]), inner),
    max_leaves=4,
)


def _places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
    return [place for key in keys for place in ((*path, key), *_places(node[key], (*path, key)))]


@pytest.fixture(scope="module")
def row(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    image = make_image(tmp_path_factory.mktemp("images") / "a.jpg", orientation=6)
    return make_row(image, bbox_type="real", image_id=[0])


def test_a_row_of_brackets_is_a_fault(tmp_path: Path, row: dict[str, Any]) -> None:
    found = survey([write_rows(tmp_path / "rows.jsonl", ["[" * 100_000, row])])
    assert (found.num_rows, found.num_bad_rows, found.faults[0].place.line) == (2, 1, 1)


@given(data=st.data())
def test_no_row_ends_what_reads_it(
    tmp_path_factory: pytest.TempPathFactory, row: dict[str, Any], data: st.DataObject
) -> None:
    spoilt = copy.deepcopy(row)
    for _ in range(data.draw(st.integers(1, 3))):
        *path, key = data.draw(st.sampled_from(_places(spoilt)))
        node = spoilt
        for step in path:
            node = node[step]
        node[key] = data.draw(JSON)
        if not _places(spoilt):
            break
    directory = tmp_path_factory.mktemp("spoilt")
    try:
        file = write_rows(directory / "rows.jsonl", [row, spoilt, row])
        found = survey([file])
        assert found.num_rows == 3
        for fault in found.faults:
            assert str(fault).startswith(f"{file}:")
        assert [fault for fault in found.faults if fault.place.line != 2 and not fault.rule.is_advice] == []
        RowOrigins([file]).find(spoilt)
    finally:
        shutil.rmtree(directory)
