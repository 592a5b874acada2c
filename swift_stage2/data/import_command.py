"""``swift-stage2 import coco|yolo|voc SOURCE``: writes rows, or nothing, and says how each issue was handled."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from swift_stage2.channel_b.answer_templates import standard_template
from swift_stage2.channel_b.dialects import DIALECTS, POINT_LIST, Dialect
from swift_stage2.data.coco_file import read_coco
from swift_stage2.data.picture import TURN, UNREADABLE, StoredPicture, look_at
from swift_stage2.data.regions import mask_of, point_in
from swift_stage2.data.row_check import BOX_MARK, LABEL_MARK
from swift_stage2.data.sources import (
    AnnotatedImage,
    AnnotatedObject,
    AnnotatedSet,
    ImageFolder,
    ImportIssue,
    ImportReport,
    short,
)
from swift_stage2.data.voc_folder import read_voc
from swift_stage2.data.yolo_folder import read_yolo
from swift_stage2.errors import DatasetError, SampleError, UserError
from swift_stage2.records import Box
from swift_stage2.runtime.output import SafeConsole, check_new_file, going_on, progress_bar, say
from swift_stage2.runtime.parser import CommandParser, real_number
from swift_stage2.servers.image_opening import UPRIGHT
from swift_stage2.whole_file import whole_file

_PROMPT, _POINT_PROMPT = "Detect all objects.", "Point at all objects."
_SOURCES = {
    "coco": "COCO's JSON, as CVAT, Label Studio and Roboflow write it, too",
    "yolo": "a folder of YOLO's label files, in the folders in which --images has the pictures",
    "voc": "a folder of Pascal VOC's XML files",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Raises UserError: what is there cannot be imported or written; then nothing is."""
    options = _parse(argv)
    outputs = [options.output]
    if options.split:
        outputs.append(options.output.with_name(f"{options.output.stem}.val{options.output.suffix}"))
    for output in outputs:
        check_new_file(output, force=options.force, sources=[options.source])
    if not os.path.isdir(options.images):  # Path.is_dir raises for names that are too long
        raise UserError(
            "--images must be a folder", got=f"{options.images}, which is none", remedy="correct the path"
        )
    has_points = DIALECTS[options.dialect].num_coordinates == 2
    options.prompt = options.prompt or (_POINT_PROMPT if has_points else _PROMPT)
    check_prompt(options.prompt)
    report = ImportReport()
    # Absolute, so that rows are right wherever they are read from.
    folder = ImageFolder(options.images.absolute())
    with going_on("import", f"reading {options.source}"):
        source = _read(options, report, folder)
    try:
        written = _write(source, report, folder.folder, options, outputs)
    except OSError as error:
        raise UserError(
            "--output must be a file that can be written", got=str(error), remedy="name another"
        ) from error
    SafeConsole(soft_wrap=True).print(report.table())
    if source.class_file is not None:
        say(f"classes of {source.class_file}: {', '.join(source.labels)}")
    say(*written)
    say(f"check it with: swift-stage2 data check {' '.join(map(str, outputs))}")
    return 0


def _read(options: argparse.Namespace, report: ImportReport, folder: ImageFolder) -> AnnotatedSet:
    of_all = options.source, report, folder
    if options.format == "voc":
        return read_voc(*of_all, first_pixel=options.first_pixel, skip_difficult=options.skip_difficult)
    if options.format == "yolo":
        return read_yolo(*of_all, classes=options.classes)
    return read_coco(*of_all, with_masks=DIALECTS[options.dialect].num_coordinates == 2)


def _write(
    source: AnnotatedSet,
    report: ImportReport,
    folder: Path,
    options: argparse.Namespace,
    outputs: Sequence[Path],
) -> list[str]:
    """A line for each file: how much it holds. Raises OSError or UserError; then there is none."""
    prompt, dialect = options.prompt.replace(LABELS, ", ".join(source.labels)), DIALECTS[options.dialect]
    num_images, num_objects = Counter[Path](), Counter[Path]()
    with ExitStack() as stack:
        files = {path: stack.enter_context(whole_file(path)) for path in outputs}
        move_to = stack.enter_context(progress_bar(len(source.images), "images"))
        for number, image in enumerate(source.images):
            move_to(number)
            if (placed := place_objects(image, folder, report, dialect)) is None:
                continue
            path = outputs[-1] if _is_held_out(image.name, options) else outputs[0]
            files[path].write(row_of(os.path.join(folder, image.name), placed, prompt, dialect))
            num_images[path] += 1
            num_objects[path] += len(placed)
        found = "; ".join(report.words()) or "nothing odd"
        if not num_images.total():
            raise DatasetError("SOURCE must give rows", got=f"none: {found}", remedy="mend what is named")
        if report.num_annotations and not num_objects.total():
            raise DatasetError(
                "SOURCE must give objects",
                got=f"none of {report.num_annotations:,}: {found}",
                remedy="mend what is named",
            )
        if report.counts[ImportIssue.ROTATED] and options.boxes_on is None:
            raise UserError(
                "pictures with an EXIF rotation need --boxes-on",
                got=f"none and {report.counts[ImportIssue.ROTATED]} of them (first "
                f"{report.first[ImportIssue.ROTATED]})",
                remedy="write --boxes-on stored if boxes were drawn on the pixels as they lie in the file; else, as "
                f"most programs show pictures, turn the pictures themselves, and import them then: {TURN}",
            )
    return [f"{path}: {num_images[path]:,} rows with {num_objects[path]:,} objects" for path in outputs]


def _is_held_out(name: str, options: argparse.Namespace) -> bool:
    """By a hash of the name: an image stays on its side whatever else is imported with it."""
    if not options.split:
        return False
    digest = hashlib.blake2b(f"{options.seed}:{name}".encode("utf-8", "surrogateescape"), digest_size=8)
    return bool(int.from_bytes(digest.digest()) < options.split * 2.0**64)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="swift-stage2 import", exit_statuses="0 done", description="Turns a labelled data set into rows."
    )
    formats = parser.add_subparsers(dest="format", required=True, metavar="FORMAT")
    of_format = {name: _add_format(formats, name, meaning) for name, meaning in _SOURCES.items()}
    classes_help = "data.yaml or classes.txt, if it is not near SOURCE"
    of_format["yolo"]("--classes", type=Path, metavar="FILE", help=classes_help)
    first_help = "where edges count from (default 1)"
    of_format["voc"]("--first-pixel", type=int, choices=(0, 1), default=1, help=first_help)
    of_format["voc"]("--skip-difficult", action="store_true", help="drop objects marked as difficult")
    return parser.parse_args(argv)


def _add_format(formats: Any, name: str, meaning: str) -> Callable[..., Any]:
    """The options of all formats; returns what adds those of one."""
    parser = formats.add_parser(
        name, help=meaning, description=f"SOURCE is {meaning}.", exit_statuses="0 done"
    )
    add: Callable[..., Any] = parser.add_argument
    add("source", type=Path, metavar="SOURCE")
    add("--images", type=Path, required=True, metavar="DIR", help="the folder that images' names start from")
    add("--output", type=Path, required=True, metavar="TRAIN.jsonl", help="the file to write")
    prompt_help = f"the question; {LABELS} stands for all classes (default: {_PROMPT} or {_POINT_PROMPT})"
    add("--prompt", help=prompt_help)
    of_boxes = [name for name, dialect in DIALECTS.items() if dialect.num_coordinates == 4]
    written = parser.add_mutually_exclusive_group()
    written.add_argument("--dialect", choices=of_boxes, default=of_boxes[0], help="default: %(default)s")
    if name == "coco":
        points_help = "write a point for each object, in its mask if it has one, else its box's centre"
        constant = {"action": "store_const", "const": POINT_LIST.name}
        written.add_argument("--points", dest="dialect", help=points_help, **constant)
    add(
        "--split",
        type=real_number("a share between 0 and 1", below=1.0),
        metavar="SHARE",
        help="write this share of the images to TRAIN.val.jsonl",
    )
    add("--seed", type=int, default=0, metavar="N", help="of --split (default 0)")
    boxes_on_help = (
        "where a picture carries an EXIF rotation: boxes were drawn on its pixels as they are stored"
    )
    add("--boxes-on", choices=("stored",), help=boxes_on_help)
    add("--force", action="store_true", help="replace TRAIN.jsonl if it exists")
    return add


_IMAGE_MARK = "<image>"
LABELS = "{labels}"
_PLACEHOLDER = re.compile(r"\{\s*labels?\s*\}", re.IGNORECASE)


class PlacedObject(NamedTuple):
    """A label, a box or point in pixels, and of a point the region where another is right, as rows have it."""

    label: str
    place: tuple[float, ...]
    region: str = ""


def place_objects(
    image: AnnotatedImage, folder: Path, report: ImportReport, dialect: Dialect
) -> list[PlacedObject] | None:
    """Boxes, or points if the dialect has them, on the stored pixels of a picture in ``folder``.

    None if no row can be made of it. The report tells all.
    """
    path = os.path.join(folder, image.name)
    if (picture := _look_at(path, report)) is None:
        return None
    size, objects = (picture.width, picture.height), image.objects
    if not image.is_share and objects and all(max(each.box) <= 1 for each in objects):
        report.add(ImportIssue.SHARES, f"{objects[0].where}: {path}")
        return None
    if image.size not in (None, size):
        written, real = ("x".join(map(str, each)) for each in (image.size or (), size))
        report.add(ImportIssue.SIZE, f"{image.name}: {written}, the picture has {real}")
    scale = size if image.is_share else (1, 1)
    placed: list[PlacedObject] = []
    for each in _once(objects, report):
        x1, y1, x2, y2 = each.box
        box = x1 * scale[0], y1 * scale[1], x2 * scale[0], y2 * scale[1]
        if (inside := _inside(box, size, each.where, report)) is None:
            continue
        if dialect.num_coordinates == 2:
            placed.append(_as_point(each, inside, size, report))
        else:
            placed.append(PlacedObject(each.label, inside))
    if not placed:
        report.add(ImportIssue.EMPTY, path)
    return placed


def _as_point(found: AnnotatedObject, box: Box, size: tuple[int, int], report: ImportReport) -> PlacedObject:
    if found.segmentation:
        try:
            point = point_in(mask_of(found.segmentation, size))
            return PlacedObject(found.label, point, json.dumps(found.segmentation))
        except SampleError:
            report.add(ImportIssue.BAD_MASK, found.where)
    x1, y1, x2, y2 = box
    return PlacedObject(found.label, (round((x1 + x2) / 2, 6), round((y1 + y2) / 2, 6)), json.dumps(box))


def _once(objects: Sequence[AnnotatedObject], report: ImportReport) -> Iterator[AnnotatedObject]:
    first: dict[tuple[str, Box], AnnotatedObject] = {}
    for each in objects:
        if (other := first.setdefault((each.label, each.box), each)) is each:
            yield each
        else:
            report.add(ImportIssue.REPEATED, f"{each.where} as {other.where}")


def _look_at(path: str, report: ImportReport) -> StoredPicture | None:
    try:
        path.encode()  # JSON takes no other name
        picture = look_at(path)
    except FileNotFoundError:
        report.add(ImportIssue.NO_PICTURE, path)
    except UNREADABLE as error:
        report.add(ImportIssue.UNREADABLE, f"{path}: {error}")
    else:
        if picture.orientation != UPRIGHT:
            report.add(ImportIssue.ROTATED, path)
        return picture
    return None


def _inside(box: Box, size: tuple[int, int], where: str, report: ImportReport) -> Box | None:
    """The part of a box that lies on the picture, as whole numbers where it has them; None if it has no area."""
    x1, y1, x2, y2 = box = tuple(map(short, box))  # type: ignore[assignment]
    inside = max(x1, 0), max(y1, 0), min(x2, size[0]), min(y2, size[1])
    if x1 >= x2 or y1 >= y2:
        report.add(ImportIssue.FLAT, where)
    elif inside[0] >= inside[2] or inside[1] >= inside[3]:
        report.add(ImportIssue.OUTSIDE, where)
    else:
        if inside != box:
            report.add(ImportIssue.CLIPPED, where)
        return inside
    return None


def check_prompt(prompt: str) -> None:
    """Raises UserError: no row can have such a ``--prompt``, which may hold ``{labels}`` for all labels."""
    if LABEL_MARK in prompt or BOX_MARK in prompt or prompt.count(_IMAGE_MARK) > 1:
        raise UserError(
            f"--prompt may hold {_IMAGE_MARK} once, and neither {LABEL_MARK} nor {BOX_MARK}",
            got=f"prompt={prompt!r}",
            remedy="take them out",
        )
    if near := set(_PLACEHOLDER.findall(prompt)) - {LABELS}:
        raise UserError(f"--prompt knows {LABELS}", got=min(near), remedy="correct it")


def row_of(path: str, objects: Sequence[PlacedObject], prompt: str, dialect: Dialect) -> str:
    """The line of the picture at ``path``, with its line break."""
    messages = [
        {"role": "user", "content": prompt if _IMAGE_MARK in prompt else _IMAGE_MARK + prompt},
        {"role": "assistant", "content": _answer(dialect, len(objects))},
    ]
    lists = {"ref": [each.label for each in objects], "bbox": [each.place for each in objects]}
    if dialect.num_coordinates == 2:
        lists["region"] = [each.region for each in objects]
    row = {"messages": messages, "images": [path], "objects": lists}
    return json.dumps(row, ensure_ascii=False) + "\n"


@lru_cache(1024)
def _answer(dialect: Dialect, num_objects: int) -> str:
    """With a mark for each label and box, which ms-swift fills."""
    zeros = (0,) * dialect.num_coordinates
    answer = standard_template(dialect).write([(LABEL_MARK, zeros)] * num_objects)
    return answer.replace(str(list(zeros)), BOX_MARK)
