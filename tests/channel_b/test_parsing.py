"""Parsing against a table of worked cases, ``json.loads`` as oracle, and texts made to hurt."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.channel_b.dialects import DIALECTS, OBJECT_MAP
from swift_stage2.channel_b.parsing import PredictedObject, parse_rollout
from swift_stage2.records import ObjectDropReason

A = PredictedObject("a", (1, 2, 3, 4))
B = PredictedObject("b", (5, 6, 7, 8))
TEXT_A = '{"bbox_2d": [1, 2, 3, 4], "label": "a"}'
TEXT_B = '{"bbox_2d": [5, 6, 7, 8], "label": "b"}'


def check(
    text: str,
    objects: tuple[PredictedObject, ...],
    dropped: dict[str, int],
    unclosed: bool,
    dialect: str = "object_list",
) -> None:
    parsed = parse_rollout(text, DIALECTS[dialect])
    assert parsed.objects == objects
    assert parsed.dropped == dropped
    assert parsed.is_whole is not (unclosed or not text.partition("<|im_end|>")[0])
    assert parsed.counted == (() if unclosed else objects)


@pytest.mark.parametrize(
    ("text", "objects", "dropped", "unclosed"),
    [
        (f"[{TEXT_A}, {TEXT_B}]", (A, B), {}, False),
        (f"```json\n[\n\t{TEXT_A},\n\t{TEXT_B}\n]\n```", (A, B), {}, False),
        (f'[{TEXT_A}, {{"bbox_2d": [5, 6, 7], "label": "b"}}]', (A,), {"wrong_arity": 1}, False),
        (f'[{TEXT_A}, {{"bbox_2d": [5, 6', (A,), {}, True),
        ("I see nothing.", (), {}, True),
        ("[]", (), {}, False),
        ("", (), {}, False),
        ("<|im_end|>", (), {}, False),
        ("[", (), {}, True),
        (f"[{TEXT_A}", (A,), {}, True),
        (f"[{TEXT_A},", (A,), {}, True),
        (f"Here they are: [{TEXT_A}] and that is all, {TEXT_B}]", (A,), {}, False),
        (f"[{TEXT_A}]<|im_end|>\n[{TEXT_B}]", (A,), {}, False),
        (f"[{TEXT_A}, <|im_end|>{TEXT_B}]", (A,), {}, True),
        (f"<|im_end|>[{TEXT_A}]", (), {}, False),
        # Separators spoil no object.
        (f"[{TEXT_A}, {TEXT_B},]", (A, B), {}, False),
        (f"[{TEXT_A},, {TEXT_B}]", (A, B), {}, False),
        (f"[{TEXT_A} {TEXT_B}]", (A, B), {}, False),
        (f"[,{TEXT_A}{TEXT_B}]", (A, B), {}, False),
        # Text beside an object is an element of its own.
        (f"[{TEXT_A} or so, {TEXT_B}]", (A, B), {"not_an_object": 1}, False),
        (f"[about {TEXT_A}, {TEXT_B}]", (B,), {"not_an_object": 1}, False),
        (f"[{TEXT_A}}}, {TEXT_B}]", (A, B), {"not_an_object": 1}, False),
        # Brackets of prose are passed over; with nothing else they are read.
        (f"I see [two], [[1, 2], 3]: [{TEXT_A}]", (A,), {}, False),
        (f"[see {TEXT_B}], [{TEXT_A}]", (A,), {}, False),
        (f"I see [two cars: [{TEXT_A}]", (), {}, True),
        (f"[[{TEXT_A}]]", (), {"not_an_object": 1}, False),
        # Thoughts are no answer, and one that does not end has none behind it.
        (f"<think>[{TEXT_B}] [x</think>\n[{TEXT_A}]", (A,), {}, False),
        (f"no [{TEXT_B}]</think>so</think>[{TEXT_A}]", (A,), {}, False),
        (f"<think>[{TEXT_B}]", (), {}, True),
        (f"[{TEXT_A}]<think>[{TEXT_B}]", (A,), {}, False),
    ],
)
def test_container(
    text: str, objects: tuple[PredictedObject, ...], dropped: dict[str, int], unclosed: bool
) -> None:
    check(text, objects, dropped, unclosed)


MAP_B = '{"object_1": {"desc": "b", "bbox_2d": [1, 2, 3, 4]}}'


@pytest.mark.parametrize(
    ("text", "num_objects", "num_outside", "is_whole"),
    [
        (f"[{TEXT_A}] or rather [{TEXT_B}]", 1, 1, True),
        (f"[{TEXT_A}] {TEXT_B}, {TEXT_B}]", 1, 2, True),
        (f"[{TEXT_A}]" * 30, 1, 29, True),
        (f"{TEXT_B}: [{TEXT_A}]", 1, 1, True),
        (f"[] [{TEXT_A}]", 0, 1, True),
        (f"[see {TEXT_B}], [{TEXT_A}]", 1, 1, True),
        (f'[{TEXT_A}] {{ "label" : "b', 1, 1, True),
        (TEXT_A, 0, 1, False),
        (f"{TEXT_A}, {TEXT_B}", 0, 2, False),
        (f"[7] {TEXT_A}", 0, 1, False),
        (f"<think>[{TEXT_B}]</think>[{TEXT_A}]", 1, 0, True),
        (f"[{TEXT_A}] {{'label': 'b'}} {{\"x\": 1}}", 1, 0, True),
        ('[{"label": "\\"}] {", "bbox_2d": [1, 2, 3, 4]}]', 1, 0, True),
        (f"{MAP_B} {MAP_B}", 1, 1, True),
        (f"{{one}} {MAP_B}", 1, 0, True),
        ('{"desc": "b", "bbox_2d": [1, 2, 3, 4]}', 0, 1, False),
    ],
)
def test_objects_outside_of_the_list_are_lost_and_counted(
    text: str, num_objects: int, num_outside: int, is_whole: bool
) -> None:
    parsed = parse_rollout(text, DIALECTS["object_map" if "desc" in text else "object_list"])
    assert (len(parsed.objects), parsed.num_outside, parsed.is_whole) == (num_objects, num_outside, is_whole)
    assert not parsed.dropped
    assert parsed.lost == ({"outside_list": num_outside} if num_outside else {})


@pytest.mark.parametrize("whole", [f"[{TEXT_A}]", "[]", f"\n```json\n[{TEXT_A}]\n```\n", "```\n[]\n``` "])
def test_white_space_and_one_code_fence_are_no_text(whole: str) -> None:
    assert not parse_rollout(whole + "<|im_end|>\nBut").has_text_beside
    for odd in ("Sure: {}", "{}.", '{}, "}}]', "<think></think>{}", "```{}", "{} []"):
        parsed = parse_rollout(odd.format(whole))
        assert parsed.has_text_beside
        assert (parsed.objects, parsed.is_whole) == (parse_rollout(whole).objects, True)


WORDS_ALONE = st.text(st.characters(exclude_characters='[]{}<"')).map(lambda text: text + ":")
PROSE = st.lists(st.one_of(WORDS_ALONE, WORDS_ALONE.map("[{}]".format)), min_size=1).map("".join)


@given(
    PROSE,
    st.lists(st.sampled_from([TEXT_A, TEXT_B, '{"label": "a"}', '{"a": "["}'])),
    st.sampled_from(["", TEXT_B]),
)
def test_prose_before_an_answer_changes_nothing_but_that_it_is_there(
    prose: str, elements: list[str], behind: str
) -> None:
    listed = f"[{', '.join(elements)}]"
    found = parse_rollout(prose + listed + behind)
    assert found == replace(parse_rollout(listed + behind), has_text_beside=True)
    assert [each.label for each in found.objects] == [x["label"] for x in json.loads(listed) if len(x) == 2]


@pytest.mark.parametrize(
    ("element", "reason"),
    [
        ("7", "not_an_object"),
        ("null", "not_an_object"),
        ('"a"', "not_an_object"),
        ("two words", "not_an_object"),
        ("[1, 2, 3, 4]", "not_an_object"),
        ("{", None),
        ("{]", None),
        ("{'bbox_2d': [1, 2, 3, 4], 'label': 'a'}", "not_an_object"),
        ('{"bbox_2d": [1, 2, 3, 4] "label": "a"}', "not_an_object"),
        ('{"bbox_2d": [1, 2, 3, 4], "label": "a",}', "not_an_object"),
        ('{"bbox_2d": [1 2 3 4], "label": "a"}', "not_an_object"),
        ('{"bbox_2d": [1, 2, 3, 4, "label": "a"}', "not_an_object"),
        ('{"bbox_2d": [1, 2, 3, 4]], "label": "a"}', "not_an_object"),
        ('{"bbox_2d": [1, 2, {3, 4], "label": "a"}', "not_an_object"),
        ('{"bbox_2d": [<|coord_1|><|coord_2|>], "label": "a"}', "not_an_object"),
        ('{"bbox_2d": [<|coord_x|>, 2, 3, 4], "label": "a"}', "not_an_object"),
        ('{"bbox_2d": [1, 2, 3, 4], "label": "a\nb"}', "not_an_object"),
        ('{"bbox_2d": [1, 2, 3, 4], "label": "a", "score": 1}', "unexpected_key"),
        ('{"bbox_2d": [1], "label": "a", "score": 1}', "unexpected_key"),
        ('{"desc": "a", "bbox_2d": [1, 2, 3, 4]}', "unexpected_key"),
        ('{"bbox_2d": [1, 2, 3, 4], "label": "a", "label": "a"}', "unexpected_key"),
        ('{"bbox_2d": [1, 2, 3, 4], "label": "a", "\\u006cabel": "a"}', "unexpected_key"),
        ('{"label": "a"}', "missing_box"),
        ("{}", "missing_box"),
        ('{"bbox_2d": null, "label": "a"}', "wrong_arity"),
        ('{"bbox_2d": "1, 2, 3, 4", "label": "a"}', "wrong_arity"),
        ('{"bbox_2d": [[1, 2, 3, 4]], "label": "a"}', "wrong_arity"),
        ('{"bbox_2d": [], "label": ""}', "wrong_arity"),
        ('{"bbox_2d": [1, 2, 3, 4]}', "missing_label"),
        ('{"bbox_2d": [1, 2, 3, 4], "label": " "}', "missing_label"),
        ('{"bbox_2d": [1, 2, 3, 4], "label": "\\t\\u00a0"}', "missing_label"),
        ('{"bbox_2d": [1, 2, 3, 4], "label": ["a"]}', "missing_label"),
        ('{"bbox_2d": [9, 2, 3, 4], "label": ""}', "invalid_box"),
    ],
)
def test_a_bad_element_is_dropped_alone_with_its_first_reason(element: str, reason: str | None) -> None:
    if reason is None:  # it never ends, and takes the rest of the text with it
        check(f"[{TEXT_A}, {element}, {TEXT_B}]", (A,), {}, True)
    else:
        check(f"[{TEXT_A}, {element}, {TEXT_B}]", (A, B), {reason: 1}, False)
        check(f"[{element}]", (), {reason: 1}, False)


@pytest.mark.parametrize(
    ("box", "expected"),
    [
        ("9, 2, 3, 4", None),
        ("1, 9, 3, 4", None),
        ("-1, 2, 3, 4", None),
        ("1.5, 2, 3, 4", None),
        ("true, 2, 3, 4", None),
        ("NaN, 2, 3, 4", None),
        ('"1", 2, 3, 4', None),
        ('"1", "2", "3", "4"', None),
        ("[1], 2, 3, 4", None),
        ("<|coord_1|>, 2, 3, 4", None),
        ('"<|coord_1|>", 2, 3, 4', None),
        ('"<|coord_1|> ", <|coord_2|>, <|coord_3|>, <|coord_4|>', None),
        ("<|coord_9|>, <|coord_2|>, <|coord_3|>, <|coord_4|>", None),
        ("1, 2, 3, " + "9" * 5000, None),
        ("1, 2, 1, 2", (1, 2, 1, 2)),
        ("0, 0, 0, 0", (0, 0, 0, 0)),
        ("-0, 0, 0, 0", (0, 0, 0, 0)),
        ("1,2\n,\t3 ,4", (1, 2, 3, 4)),
        ("1, 2, 3, " + "9" * 30, (1, 2, 3, 10**30 - 1)),
        ("<|coord_7|>, <|coord_0|>, <|coord_70|>, <|coord_999|>", (7, 0, 70, 999)),
        ('"<|coord_1|>", "<|coord_2|>", "<|coord_3|>", "<|coord_4|>"', (1, 2, 3, 4)),
        ('"<|coord_1|>", <|coord_2|>, "<|coord_3|>", <|coord_4|>', (1, 2, 3, 4)),
    ],
)
def test_coordinates(box: str, expected: tuple[int, int, int, int] | None) -> None:
    objects = () if expected is None else (PredictedObject("a", expected),)
    text = f'[{{"bbox_2d": [{box}], "label": "a"}}]'
    check(text, objects, {} if objects else {"invalid_box": 1}, False)
    for found in parse_rollout(text).objects:
        told = [text[start:end].removeprefix("<|coord_") for start, end in found.places[1:]]
        assert tuple(int(each.removesuffix("|>")) for each in told) == expected


@pytest.mark.parametrize(
    ("literal", "label"),
    [
        ('" a "', "a"),
        ('"a } ] , { ["', "a } ] , { ["),
        (r'"say \"a\" \\"', 'say "a" \\'),
        (r'"caf\u00e9 \ud83d\ude00"', "café 😀"),
        ('"café 😀"', "café 😀"),
        ('"<|coord_7|>"', "<|coord_7|>"),
        ("<|coord_7|>", "<|coord_7|>"),
        ('"at <|coord_7|>, \\" of it"', 'at <|coord_7|>, " of it'),
    ],
)
def test_labels_are_decoded_and_stripped(literal: str, label: str) -> None:
    text = f'[{{"label": {literal}, "bbox_2d": [1, 2, 3, 4]}}, {TEXT_B}]'
    check(text, (PredictedObject(label, (1, 2, 3, 4)), B), {}, False)
    (start, end), *_ = parse_rollout(text).objects[0].places
    assert text[start:end] == literal.strip('"')


def entry(name: str, label: str = "a", box: str = "1, 2, 3, 4") -> str:
    return f'"{name}": {{"desc": "{label}", "bbox_2d": [{box}]}}'


def listed(*entries: str) -> str:
    return "{" + ", ".join(entries) + "}"


@pytest.mark.parametrize(
    ("body", "labels", "dropped", "unclosed"),
    [
        ("{" + entry("object_10", "x") + ", " + entry("object_2", "y") + "}", "xy", {}, False),
        ("{" + entry("object_1", "x") + ", " + entry("object_2", "y"), "xy", {}, True),
        ("{" + entry("object_1", "x") + ', "object_2": {"desc": "y', "x", {}, True),
        ("{" + entry("object_1", "x") + ', "object_2"', "x", {}, True),
        ("{" + entry("object_1", "x") + ', "object_2": ', "x", {}, True),
        ("{" + entry("object_1", "x") + ', "object_2": 7', "x", {}, True),
        ("{}", "", {}, False),
        ("[]", "", {}, True),
        ("nothing", "", {}, True),
        ("", "", {}, False),
        ("Sure: ```\n{" + entry("object_1", "x") + "}\n``` {" + entry("object_2", "y") + "}", "x", {}, False),
        ("{" + entry("object_1", "x") + "}<|im_end|>{", "x", {}, False),
        (listed(entry("thing_1", "x"), entry("object_2", "y")), "y", {"unexpected_key": 1}, False),
        (listed(entry("object_", "x"), entry("object_1a", "y")), "", {"unexpected_key": 2}, False),
        (listed(entry("object_²", "x")), "", {"unexpected_key": 1}, False),
        (listed(entry("object_1", "x"), entry("object_1", "y")), "x", {"unexpected_key": 1}, False),
        (listed(entry("object_1", "x"), entry(r"object_\u0031", "y")), "x", {"unexpected_key": 1}, False),
        (
            listed('"object_1": 7', entry("object_1", "y")),
            "",
            {"not_an_object": 1, "unexpected_key": 1},
            False,
        ),
        ('{"thing": 7}', "", {"not_an_object": 1}, False),
        ('{"object_1": [1, 2], ' + entry("object_2", "y") + "}", "y", {"not_an_object": 1}, False),
        ('{"object_1": , ' + entry("object_2", "y") + "}", "y", {"not_an_object": 1}, False),
        ('{"object_1"; {"a": 1}, ' + entry("object_2", "y") + "}", "y", {"not_an_object": 1}, False),
        ('{object_1: {"desc": "}"}, ' + entry("object_2", "y") + "}", "y", {"not_an_object": 1}, False),
        ('{"object_1": {"desc": "a" "b"}, ' + entry("object_2", "y") + "}", "y", {"not_an_object": 1}, False),
        ('{"object_1": {"label": "a", "bbox_2d": [1, 2, 3, 4]}}', "", {"unexpected_key": 1}, False),
        ("{" + entry("object_1", "") + "}", "", {"missing_label": 1}, False),
        ("{" + entry("object_1", "x", "1, 2, 3") + "}", "", {"wrong_arity": 1}, False),
        ("{" + entry("object_1", "x", "<|coord_7|>, 2, 3, 4") + "}", "", {"invalid_box": 1}, False),
        ("{" + entry("object_1", "x") + "}, " + entry("object_2", "y") + "}", "x", {}, False),
    ],
)
def test_object_map(body: str, labels: str, dropped: dict[str, int], unclosed: bool) -> None:
    objects = tuple(PredictedObject(label, (1, 2, 3, 4)) for label in labels)
    check(body, objects, dropped, unclosed, "object_map")


def test_a_brace_in_a_description_closes_nothing() -> None:
    text = "{" + entry("object_1", "a } b") + ", " + entry("object_2", r"c \" } {") + "}"
    assert [found.label for found in parse_rollout(text, OBJECT_MAP).objects] == ["a } b", 'c " } {']


LABELS = st.text(min_size=1).filter(lambda label: bool(label.strip()) and "<|im_end|>" not in label)
BOXES = st.tuples(*[st.integers(0, 2000)] * 4).map(
    lambda c: [min(c[0], c[2]), min(c[1], c[3]), max(c[0], c[2]), max(c[1], c[3])]
)
OBJECTS = st.lists(st.tuples(LABELS, BOXES), max_size=5)


def well_formed(objects: list[tuple[str, list[int]]], dialect: str, **style: Any) -> str:
    if dialect != "object_map":
        key = DIALECTS[dialect].box_key
        return json.dumps([{key: box, "label": label} for label, box in objects], **style)
    members = {f"object_{n}": {"desc": label, "bbox_2d": box} for n, (label, box) in enumerate(objects, 1)}
    return json.dumps(members, **style)


@given(OBJECTS, st.sampled_from(list(DIALECTS)), st.booleans(), st.sampled_from([None, 2]), st.data())
def test_what_json_writes_is_read_back_and_every_cut_keeps_a_prefix(
    objects: list[tuple[str, list[int]]],
    dialect: str,
    ascii_only: bool,
    indent: int | None,
    data: st.DataObject,
) -> None:
    objects = [(label, box[: DIALECTS[dialect].num_coordinates]) for label, box in objects]
    text = well_formed(objects, dialect, ensure_ascii=ascii_only, indent=indent)
    expected = tuple(PredictedObject(label.strip(), tuple(box)) for label, box in objects)
    check(text, expected, {}, False, dialect)
    for each in parse_rollout(text, DIALECTS[dialect]).objects:
        label, *coordinates = (text[start:end] for start, end in each.places)
        assert (json.loads(f'"{label}"').strip(), tuple(map(int, coordinates))) == (each.label, each.box)
    cut = parse_rollout(text[: data.draw(st.integers(1, len(text) - 1))], DIALECTS[dialect])
    assert cut.objects == expected[: len(cut.objects)]
    assert not cut.dropped
    assert not cut.is_whole


@given(
    st.lists(
        st.sampled_from([TEXT_A, TEXT_B, "7", '{"label": "a"}', '{"x": [}', '"]"', "[[]]", "{:}"]),
        max_size=8,
    )
)
def test_elements_do_not_influence_each_other(elements: list[str]) -> None:
    whole = parse_rollout("[" + ",".join(elements) + "]")
    alone = [parse_rollout(f"[{element}]") for element in elements]
    assert whole.objects == tuple(found for one in alone for found in one.objects)
    assert sum(whole.dropped.values()) == sum(sum(one.dropped.values()) for one in alone)
    assert len(whole.objects) + sum(whole.dropped.values()) == len(elements)
    assert whole.is_whole


WORDS = '"bbox_2d": "label": "desc": "object_1": "a" [1,2,3,4] - 1e9 0 true NaN \\u \\ud800 é ```json'
WORDS += " <|coord_1|> <|im_end|>"
PIECES = st.sampled_from([*'[]{}",:\\ \n\x00', TEXT_A, *WORDS.split()])


@given(st.one_of(st.text(), st.lists(PIECES, max_size=40).map("".join)), st.sampled_from(list(DIALECTS)))
def test_no_text_raises(text: str, dialect: str) -> None:
    parsed = parse_rollout(text, DIALECTS[dialect])
    assert all(count > 0 and reason in ObjectDropReason for reason, count in parsed.dropped.items())
    for found in parsed.objects:
        assert found.label == found.label.strip() != ""
        assert 0 <= found.box[0] <= found.box[2]
        assert 0 <= found.box[1] <= found.box[3]


HOSTILE: dict[str, Callable[[int], str]] = {
    "openers": lambda n: "[" * n,
    "braces": lambda n: "[" + "{" * n,
    "quotes": lambda n: "[" + '"' * n,
    "objects that open": lambda n: '[{"a":' * (n // 6),
    "nested objects": lambda n: "[" + '{"a":' * (n // 5),
    "nested box": lambda n: '[{"bbox_2d":' + "[" * (n // 2) + "]" * (n // 2) + "}]",
    "malformed elements": lambda n: "[" + '{"a":1 1},' * (n // 10),
    "crossed brackets": lambda n: "[" + "{[}]" * (n // 4),
    "openers of one kind, closers of the other": lambda n: "[" + "[{" * (n // 4) + "]" * (n // 2),
    "tokens between quotes": lambda n: "[" + '{"<|coord_1|>" <|coord_1|>},' * (n // 28),
    "digits": lambda n: '[{"bbox_2d":[' + "9" * n + ',2,3,4],"label":"a"}]',
    "coordinate tokens": lambda n: '[{"bbox_2d":[' + "<|coord_" * (n // 8),
    "members": lambda n: "[{" + '"a":1,' * (n // 6) + '"a":1}]',
    "backslashes": lambda n: '[{"a":"' + "\\" * n,
    "space": lambda n: "[" + " " * n + '{"a"' + " " * n,
    "commas": lambda n: "[" + "," * n,
    "map keys": lambda n: "{" + '"object_1":' * (n // 11),
    "map entries": lambda n: "{" + '"object_1":{"desc":1},' * (n // 22),
    "lists of prose": lambda n: "[7]" * (n // 3),
    "lists of prose that open": lambda n: "[a " * (n // 3),
    "bare objects": lambda n: '{"label":' * (n // 9),
    "braces and space": lambda n: "{ " * (n // 2),
    "thoughts": lambda n: "<think>[]</think>" * (n // 17),
    "ends of turn": lambda n: "<|im_end|>" * (n // 10),
}


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE.keys())
def test_long_hostile_texts_neither_recurse_nor_hang(make: Callable[[int], str]) -> None:
    # Work inside the regular expressions is invisible to a line count; quadratic, it would not end here.
    for dialect in DIALECTS.values():
        assert parse_rollout(make(200_000), dialect).objects == ()
