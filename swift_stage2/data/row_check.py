"""Checks one line of a JSONL against every rule and tells every fault, not the first. Knows no other row.

The answer is judged by ``answer_templates``, which the run's targets are written by; which dialect it is in, and
whether other rows write theirs alike, is for ``survey`` to say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from swift_stage2.channel_b.answer_templates import PossibleTemplates, fill_placeholders, possible_templates
from swift_stage2.channel_b.dialects import DIALECTS, Dialect
from swift_stage2.channel_b.parsing import lists_objects, parse_rollout, read_ground_truth
from swift_stage2.data.files import Fault, Place, Rule
from swift_stage2.data.picture import PLAIN_MODES, TURN, UNREADABLE, StoredPicture, images_of, path_of
from swift_stage2.data.sources import has_special_token, spell_label
from swift_stage2.errors import SampleError
from swift_stage2.records import Coordinates

_PLAIN_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9 ,._/-]*[A-Za-z0-9])?")
LABEL_MARK, BOX_MARK = "<ref-object>", "<bbox>"
_SHOWN = 80
_SHOWN_PATH = 200
_IMAGE_TAG = "<image>"
_PIXELS, _SHARES = "real", "norm1"  # ms-swift's names, and the only ones that it tells apart
_ROLES = ("system", "user", "assistant", "tool", "tool_call", "tool_response")


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """One line and its faults. ``templates``: those that write its answer; None of a row whose answer has a fault."""

    faults: tuple[Fault, ...]
    templates: PossibleTemplates | None = None
    image: str | None = None
    """The first, as the row names it."""
    columns: frozenset[str] = frozenset()
    """The columns whose types the row shows."""


def check_line(
    line: bytes,
    place: Place,
    look: Callable[[str], StoredPicture],
    *,
    judge_answer: bool = True,
    needs_objects: bool = True,
    num_coordinates: int | None = 4,
) -> CheckedRow:
    """``look`` reads an image as ``picture.look_at`` does.

    Without ``judge_answer`` an answer need not list objects; without ``needs_objects`` a row need not have any list
    of them, and its answer may be anything then. ``num_coordinates`` of each object: 4 of boxes, 2 of points; None is
    where nobody looks at either.
    """
    row = _read(line)
    if isinstance(row, str):
        return CheckedRow((Fault(place, Rule.LINE, row),))
    checked = _RowCheck(row, place, look, judge_answer, needs_objects, num_coordinates).run()
    return replace(checked, columns=frozenset(_columns(row)))


def _columns(row: Mapping[str, Any]) -> Iterator[str]:
    objects = row.get("objects")
    objects = objects if isinstance(objects, Mapping) else {}
    for name, value in (*row.items(), *((f"objects.{key}", value) for key, value in objects.items())):
        if value is not None:
            yield name
        if isinstance(value, list) and value:
            yield f"entry in {name}"
    boxes = objects.get("bbox")
    for box in boxes if isinstance(boxes, list) else ():
        if isinstance(box, list) and any(isinstance(edge, float) for edge in box):
            yield "decimal in objects.bbox"


def _read(line: bytes) -> Mapping[str, Any] | str:
    """The row, or what is wrong with its line."""
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return f"a line must be UTF-8 text, got a byte that is none: {error}; write the file as UTF-8"
    except (ValueError, RecursionError) as error:
        # Not its own words: they count lines within this one.
        cause = (
            f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else error
        )
        is_list = line.rstrip().endswith((b",", b"[")) or line.startswith(
            b"["
        )  # a JSON file that is one list
        hint = (
            "rows stand alone, without commas or brackets around them"
            if is_list
            else "mend or remove the line"
        )
        return f"every line must be one JSON object: {cause}; {hint}"
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        return "a row is an object with messages=[{'role': ..., 'content': ...}, ...]; write it so"
    last = messages[-1]
    if not isinstance(last, dict) or last.get("role") != "assistant":
        return "the last of a row's messages must be the assistant's, the answer; add it"
    if not isinstance(last.get("content"), str):
        return f"an answer must be text, got content={_cut(last.get('content'))}; write it as one text"
    if any(not isinstance(message, dict) or "content" not in message for message in messages):
        return "every message must be {'role': ..., 'content': ...}; write it so"
    if unknown := [message.get("role") for message in messages if message.get("role") not in _ROLES]:
        return f"a message's role must be one of {', '.join(_ROLES)}, got role={_cut(unknown[0])}; correct it"
    return dict(row)


@dataclass(slots=True)
class _RowCheck:
    """One row while it is checked."""

    row: Mapping[str, Any]
    place: Place
    look: Callable[[str], StoredPicture]
    judge_answer: bool
    needs_objects: bool
    num_coordinates: int | None
    faults: list[Fault] = field(default_factory=list)
    shown_image: str | None = None

    def run(self) -> CheckedRow:
        images = images_of(self.row)
        pictures = self._read_images(images)
        self._check_prompt(len(images))
        answer, num_coordinates = self.row["messages"][-1]["content"], self.num_coordinates
        has_objects = self.needs_objects or lists_objects(self.row)
        if num_coordinates and not has_objects and (LABEL_MARK in answer or BOX_MARK in answer):
            self._tell(
                Rule.ANSWER, f"an answer without objects must not hold {LABEL_MARK} or {BOX_MARK}; mend it"
            )
        if num_coordinates is None or not has_objects:
            return CheckedRow(tuple(self.faults))
        try:
            truth = read_ground_truth(self.row, num_coordinates)
        except (SampleError, OverflowError) as error:
            remedy = "" if "; " in str(error) else "; mend or remove the row"
            self._tell(Rule.OBJECTS, f"{error}{remedy}")
            return CheckedRow(tuple(self.faults))
        self._check_boxes(truth.boxes, pictures)
        has_regions = num_coordinates == 2 and self.row["objects"].get("region") is not None
        if has_regions and pictures and pictures[0]:
            from swift_stage2.data.regions import require_inside  # numpy, which other rows do without

            try:
                require_inside(self.row, (pictures[0].width, pictures[0].height))
            except SampleError as error:
                self._tell(Rule.OBJECTS, f"{error}; mend or remove the row")
        if not self._check_labels(truth.labels):
            return CheckedRow(tuple(self.faults))
        for key in ("videos", "audios"):
            if self.judge_answer and self.row.get(key):
                self._tell(
                    Rule.OBJECTS,
                    f"channel B asks about images alone, got {key}={_cut(self.row[key])} beside objects; take objects "
                    "out, and write rows_without_objects: channel_a_only",
                )
        shown = self._read_answer(answer, truth.labels, num_coordinates)
        return CheckedRow(tuple(self.faults), shown, self.shown_image)

    def _read_images(self, images: Sequence[Any]) -> list[StoredPicture | None]:
        if len(images) != 1:
            self._tell(
                Rule.IMAGES,
                f"a row should have one image, got num_images={len(images)}; "
                + ("name it in images" if not images else "make it one row per image"),
            )
        return [self._read_image(image) for image in images]

    def _read_image(self, image: Any) -> StoredPicture | None:
        path = path_of(image)
        if not isinstance(path, str) or not path:
            self._tell(
                Rule.IMAGE,
                f"an image must be the path of a file, got {_cut(image)}; write images=['…/a.png']",
            )
            return None
        self.shown_image = self.shown_image or path
        try:
            picture = self.look(path)
        except UNREADABLE as error:
            self._tell(
                Rule.IMAGE,
                f"an image must be a readable picture, got {path[:_SHOWN_PATH]}: "
                f"{getattr(error, 'strerror', None) or error}; mend the path "
                "(relative ones are read from the working directory or ROOT_IMAGE_DIR) or the file",
                path[:_SHOWN_PATH],
            )
            return None
        if picture.orientation != 1:
            self._tell(
                Rule.ROTATED,
                f"an image should carry no EXIF rotation, got orientation={picture.orientation}: boxes are taken on "
                f"the stored picture of {picture.width} x {picture.height}, not as viewers turn it; where boxes "
                f"were drawn as viewers show it, write upright images ({TURN})",
                path,
            )
        if picture.mode not in PLAIN_MODES:
            self._tell(
                Rule.COLOURS,
                f"an image should be RGB or grey of 8 bits, got {picture.mode}: it is read as RGB, without what is "
                "transparent; save it as RGB if that is not as you see it",
                path,
            )
        return picture

    def _check_prompt(self, num_images: int) -> None:
        contents = [message["content"] for message in self.row["messages"][:-1]]
        prompt = [content for content in contents if isinstance(content, str)]
        if any(mark in text for text in prompt for mark in (LABEL_MARK, BOX_MARK)):
            self._tell(
                Rule.PROMPT,
                f"a prompt must not hold {LABEL_MARK} or {BOX_MARK}; write labels and boxes out",
            )
        num_tags = sum(text.count(_IMAGE_TAG) for text in prompt)
        if num_tags > num_images:
            self._tell(
                Rule.PROMPT,
                f"a prompt must not hold more {_IMAGE_TAG} than there are images, got num_tags={num_tags} "
                f"num_images={num_images}; remove a tag or name the image",
            )

    def _check_labels(self, labels: Sequence[str]) -> bool:
        """False if a parser of answers would take one for something else than text."""
        for label in dict.fromkeys(labels):
            if has_special_token(label):
                self._tell(
                    Rule.OBJECTS,
                    f"a label must be text alone, got a special token in label={label!r}; write {spell_label(label)!r}",
                )
            elif spell_label(label) != label and json.dumps(label, ensure_ascii=False)[1:-1] == label:
                self._tell(
                    Rule.LABEL,
                    f"a label should be spelt with visible, composed (NFC) characters, got label={label!a}; write "
                    f"{spell_label(label)!a}",
                )
        return not any(map(has_special_token, labels))

    def _check_boxes(
        self, boxes: Sequence[tuple[float, ...]], pictures: Sequence[StoredPicture | None]
    ) -> None:
        noun, plural = ("a box", "boxes") if self.num_coordinates == 4 else ("a point", "points")
        flat = [box for box in boxes if len(box) == 4 and (box[0] == box[2] or box[1] == box[3])]
        if flat:
            self._tell(
                Rule.AREA,
                f"a box should have an area, got bbox={_numbers(flat[0])}"
                + (f" and {len(flat) - 1} more" if len(flat) > 1 else "")
                + "; no prediction can match it: mend the annotation",
            )
        kind = self.row["objects"].get("bbox_type") or _PIXELS
        if kind not in (_PIXELS, _SHARES):
            self._tell(
                Rule.OBJECTS,
                f"objects.bbox_type must be {_PIXELS} (pixels) or {_SHARES} (shares of width and height), got "
                f"bbox_type={_cut(kind)}: ms-swift would read it as {_PIXELS}; correct it",
            )
        if kind != _PIXELS or not pictures:
            return
        # A point may be the corner of its image; a box of whole numbers that ends there has no area, or is a pixel.
        may_be_shares = self.num_coordinates == 4 or any(value % 1 for box in boxes for value in box)
        if boxes and not flat and may_be_shares and all(max(box) <= 1 for box in boxes):
            self._tell(
                Rule.BOUNDS,
                f"{plural} must be in pixels, got bbox={_numbers(boxes[0])} of at most one pixel like all of the "
                f"row's: multiply by width and height, or write objects.bbox_type={_SHARES}",
            )
            return
        picture = pictures[0]
        for box in boxes:
            if picture is not None and not _is_inside(box, picture.width, picture.height):
                remedy = "; mend the annotation"
                if picture.orientation != 1 and _is_inside(box, *picture.upright_size):
                    remedy = (
                        f" (it would on the picture turned by its EXIF orientation {picture.orientation}); write "
                        f"upright images: {TURN}"
                    )
                self._tell(
                    Rule.BOUNDS,
                    f"{noun} must lie inside its image, got bbox={_numbers(box)} width={picture.width} "
                    f"height={picture.height}{remedy}",
                )

    def _read_answer(
        self, answer: str, labels: Sequence[str], num_coordinates: int
    ) -> PossibleTemplates | None:
        num_labels, num_boxes, count = answer.count(LABEL_MARK), answer.count(BOX_MARK), len(labels)
        if num_labels not in (0, count) or num_boxes not in (0, count):  # either may be written out instead
            self._tell(
                Rule.ANSWER,
                f"an answer must have one {BOX_MARK} and one {LABEL_MARK} per object, or none, got num_bbox="
                f"{num_boxes} num_ref_object={num_labels} num_objects={count}; ms-swift would train the others "
                "as they stand: mend the answer",
            )
            return None
        if not self.judge_answer:
            return None
        as_written = [str(label) for label in self.row["objects"].get("ref") or []]
        # Any ordered numbers do: the template's coordinates are not known here, and each box is told apart.
        stand_ins = _stand_ins(count, num_coordinates)
        if num_labels and num_boxes and all(map(_PLAIN_LABEL.fullmatch, as_written)):
            shown = _templates_of_marks(answer, count, num_coordinates)
            if shown is not None:
                return shown
        text = fill_placeholders(answer, list(zip(as_written, stand_ins, strict=True)))
        truth = list(zip(labels, stand_ins if num_boxes else [None] * count, strict=True))
        shown = _templates_of(text, truth, num_coordinates)
        if shown is None:
            self._tell(Rule.ANSWER, _why_no_list(text, labels, num_coordinates))
        return shown

    def _tell(self, rule: Rule, reason: str, image: str | None = None) -> None:
        self.faults.append(Fault(self.place, rule, reason, image or self.shown_image))


@lru_cache(4096)
def _templates_of_marks(answer: str, num_objects: int, num_coordinates: int) -> PossibleTemplates | None:
    """The same of an answer that is all placeholders: any plain labels give the same. Most rows share a few."""
    places = _stand_ins(num_objects, num_coordinates)
    objects = [(f"a{number}", place) for number, place in enumerate(places)]
    return _templates_of(fill_placeholders(answer, objects), objects, num_coordinates)


def _stand_ins(num_objects: int, num_coordinates: int) -> list[Coordinates]:
    return [(number, number, number + 1, number + 1)[:num_coordinates] for number in range(num_objects)]


def _dialects(num_coordinates: int) -> list[Dialect]:
    return [dialect for dialect in DIALECTS.values() if dialect.num_coordinates == num_coordinates]


def _templates_of(
    text: str, truth: Sequence[tuple[str, Coordinates | None]], num_coordinates: int
) -> PossibleTemplates | None:
    """How the answer is written, if it lists ``truth`` and nothing else. No text can be read in both dialects.

    A box that the answer writes out itself is None: whether it is right shows with the template only.
    """
    for dialect in _dialects(num_coordinates):
        if not (shown := possible_templates(text, dialect)):
            continue
        found = parse_rollout(text, dialect)
        same = len(found.objects) == len(truth) and all(
            one.label == label and box in (None, one.box)
            for one, (label, box) in zip(found.objects, truth, strict=True)
        )
        return shown if same and not found.dropped else None
    return None


def _why_no_list(text: str, labels: Sequence[str], num_coordinates: int) -> str:
    odd = next((label for label in labels if json.dumps(label, ensure_ascii=False)[1:-1] != label), None)
    if odd is not None:
        return (
            "a label must need no escape in JSON, because ms-swift writes it as it stands, got "
            f"label={odd!r}; take quotes, backslashes and line breaks out of it"
        )
    dialects = _dialects(num_coordinates)
    found = max((parse_rollout(text, dialect).objects for dialect in dialects), key=len)
    if not found and labels:
        return (
            f"an answer must list its objects as JSON, got {_cut(text)}; write "
            f'[{{"{dialects[0].box_key}": <bbox>, "{dialects[0].label_key}": "<ref-object>"}}, …]'
        )
    if [one.label for one in found] != list(labels):
        return (
            f"an answer must list the row's objects in their order, got {len(found)} in the answer and "
            f"{len(labels)} in objects, answer {_cut(text)}; mend the answer or objects"
        )
    return (
        f"an answer must list every object in one way, with nothing but white space and commas between them, got "
        f"{_cut(text)}; mend the answer"
    )


def _is_inside(box: Sequence[float], width: int, height: int) -> bool:
    return box[-2] <= width and box[-1] <= height


def _numbers(box: Sequence[float]) -> list[float]:
    return [round(value, 1) for value in box]


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
