"""``swift-stage2 export coco PREDICTIONS.jsonl --output OUT.json``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from swift_stage2.convert.coco_export import CocoExport
from swift_stage2.errors import UserError
from swift_stage2.runtime.output import check_new_file, say
from swift_stage2.runtime.parser import CommandParser
from swift_stage2.runtime.progress import progress_bar
from swift_stage2.whole_file import whole_file


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Raises UserError: what is there cannot be exported or written; then nothing is."""
    parser = CommandParser(
        prog="swift-stage2 export",
        exit_statuses="0 done",
        description="Turns rows or predictions into another format.",
    )
    formats = parser.add_subparsers(dest="format", required=True, metavar="FORMAT")
    coco = formats.add_parser(
        "coco",
        help="COCO's JSON: a data set, or results for one",
        description="Writes images, categories and annotations; with --truth, a list of results instead.",
        exit_statuses="0 done",
    )
    coco.add_argument(
        "rows", type=Path, metavar="PREDICTIONS.jsonl", help="predictions, or rows of training data"
    )
    coco.add_argument("--output", type=Path, required=True, metavar="OUT.json", help="the file to write")
    coco.add_argument(
        "--images",
        type=Path,
        metavar="DIR",
        help="the folder that images' names start from, as import had it",
    )
    coco.add_argument(
        "--truth",
        type=Path,
        metavar="COCO.json",
        help="write results that have this COCO file's ids of images and classes",
    )
    coco.add_argument("--force", action="store_true", help="replace OUT.json if it exists")
    options = parser.parse_args(argv)
    sources = [options.rows, *([options.truth] if options.truth else [])]
    check_new_file(options.output, force=options.force, sources=sources)
    export = CocoExport(options.rows, options.images, options.truth)
    size = os.path.getsize(options.rows) if os.path.isfile(options.rows) else None
    try:
        with whole_file(options.output) as file, progress_bar(size, "rows") as move_to:
            export.write(file, move_to)
    except OSError as error:
        raise UserError(f"--output must be a file that can be written, got {error}; name another") from error
    say(f"{options.output}: {export.num_objects:,} objects of {export.num_images:,} images")
    if export.num_unknown:
        say(
            f"{export.num_unknown:,} objects have a label that {options.truth} does not know, and were left out"
        )
    return 0
