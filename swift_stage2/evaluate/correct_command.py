"""``swift-stage2 correct``: rows whose objects stand in the order of channel B's target for a model's answer.

The model answers every row once; what it found comes first, in its order, then what it missed. Channel A alone, without
a server, can train the new rows, as many and in the same order. Exit status: 0 every row was corrected, 1 some stay as
they were, 2 the user's mistake.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift_stage2.channel_b.detection import DetectionTask
from swift_stage2.channel_b.targets import TokenGroup
from swift_stage2.config import MatchingConfig, MissedOrder
from swift_stage2.data.files import require_boxes
from swift_stage2.data.prediction import TrueRow, answer_dialect, read_rows
from swift_stage2.data.row_check import BOX_MARK, LABEL_MARK
from swift_stage2.errors import DatasetError, MatchingError, SampleError, UserError
from swift_stage2.evaluate.command import EXIT_INCOMPLETE, add_asking_options, ask
from swift_stage2.records import SampleKey
from swift_stage2.runtime.output import check_new_file, say
from swift_stage2.runtime.parser import CommandParser, real_number
from swift_stage2.whole_file import whole_file

if TYPE_CHECKING:
    from swift_stage2.channel_b.encoding import PromptEncoding

_ORDERS = [str(order) for order in MissedOrder if order is not MissedOrder.ANY]  # which is none


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    Raises:
        UserError: a file cannot be used or written, or the server does not answer.
    """
    options = _parse(argv)
    check_new_file(options.output, force=options.force, sources=[options.data])
    require_boxes(options.data, "correct")
    rows = read_rows(options.data)
    _require_marks(rows)
    task = DetectionTask(
        dialect=answer_dialect(rows),
        matching=MatchingConfig(),
        weights=dict.fromkeys(TokenGroup, 1.0),
        missed_order=MissedOrder(options.missed_order),
    )
    orders: dict[int, tuple[int, ...]] = {}
    refusals: list[str] = []

    def note_order(row: TrueRow, prompt: PromptEncoding, answer: str) -> None:
        key = SampleKey(0, row.number, row.number)
        try:
            orders[row.number] = task.order_of(answer, task.to_space(row.truth, prompt.convert), key)
        except (SampleError, MatchingError) as error:
            refusals.append(f"row {row.number} ({row.image}) cannot be corrected: {error}")

    ask(rows, options, options.output.parent, temperature=options.temperature, on_answer=note_order)
    try:
        with whole_file(options.output) as file:
            for row in rows:
                file.write(json.dumps(reordered(row.row, orders.get(row.number, ()))) + "\n")
    except OSError as error:
        raise UserError(
            "--output must be a file that can be written", got=str(error), remedy="name another"
        ) from error
    num_changed = sum(list(order) != sorted(order) for order in orders.values())
    say(f"{options.output}: {len(rows):,} rows, the objects of {num_changed:,} in another order")
    if num_left := len(rows) - len(orders):
        say(*refusals[:1], f"{num_left:,} rows were not corrected and stay as they were", is_error=True)
    return EXIT_INCOMPLETE if num_left else 0


def reordered(row: Mapping[str, Any], order: Sequence[int]) -> dict[str, Any]:
    """The row with its objects in this order; placeholders in its answer follow them."""
    lists = {name: [row["objects"][name][number] for number in order] for name in ("ref", "bbox") if order}
    return {**row, "objects": {**row["objects"], **lists}}


def _require_marks(rows: Sequence[TrueRow]) -> None:
    for row in rows:
        answer, count = str(row.row["messages"][-1].get("content")), len(row.truth)
        if count > 1 and {answer.count(LABEL_MARK), answer.count(BOX_MARK)} != {count}:
            raise DatasetError(
                f"an answer must name every label as {LABEL_MARK} and every box as {BOX_MARK} to change their order",
                got=f"{answer[:80]!r} in row {row.number} of {count} objects",
                remedy="write these placeholders",
            )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="swift-stage2 correct",
        description="Lists each row's objects as a model finds them, then what it misses, for channel A to train.",
        exit_statuses="0 every row was corrected; 1 some stay as they were",
    )
    add = parser.add_argument
    add("--data", required=True, type=Path, metavar="FILE.jsonl", help="rows with their true objects")
    add("--model", required=True, metavar="DIR", help="the checkpoint to ask; a server of our own serves it")
    add("--server", metavar="URL", help="a running rollout server of --model, asked instead")
    add("--output", required=True, type=Path, metavar="OUT.jsonl", help="the rows to write")
    add("--force", action="store_true", help="replace OUT.jsonl if it exists")
    order_help = "of the objects that the model missed, as stage2_ab.channel_b.target has it (default given)"
    add("--missed-order", choices=_ORDERS, default=str(MissedOrder.GIVEN), help=order_help)
    temperature = real_number("a temperature above 0")
    add("--temperature", type=temperature, default=0.0, metavar="T", help="of sampling (default: greedy)")
    add_asking_options(parser)
    options = parser.parse_args(argv)
    if options.engine and options.server:
        parser.error("--engine is of the server that --model alone starts; leave it out")
    return options
