"""Reads every row of a run's JSONL files before anything heavy starts, and refuses with file, line, problem, remedy.

Looks where ms-swift would only trip later, or train something else than is meant: see ``dataset.row_check``. A bad
sample that slips through (a remote data set, a broken pixel stream) is quarantined while training.
"""

from __future__ import annotations

from swift_stage2.channel_b.dialects import DIALECTS, coordinates_of
from swift_stage2.config import RowsWithoutObjects, Stage2Config
from swift_stage2.config.stage2_ab import DEFAULT_TASK, SHIPPED_TASKS
from swift_stage2.config.swift_arguments import named_places
from swift_stage2.data.fault import Rule
from swift_stage2.data.files import local_files
from swift_stage2.data.survey import Findings, survey
from swift_stage2.errors import DatasetError


def check_data(config: Stage2Config) -> tuple[str, list[str]]:
    """Checks every row of every local JSONL of a run. Returns what was found, and advice, which refuses nothing.

    Without channel B answers may be anything.

    Raises:
        DatasetError: a file is missing, a folder, cannot be read or holds no rows, or rows have faults; names key,
            file, line, problem and remedy.
        ConfigError: an argument is neither a path nor a list of paths.
    """
    task, written = config.stage2_ab.task, config.stage2_ab.dialect
    # The dialect of all answers; None of a user's, which is loaded later, and judged then.
    dialect, num_coordinates = DIALECTS.get(written or ""), coordinates_of(task, written)
    needs_objects = config.stage2_ab.channel_b.rows_without_objects is RowsWithoutObjects.REFUSE
    # With which ``data check`` judges these rows as a run with channel B does.
    options = "" if task == DEFAULT_TASK else f" --task {task}"
    if task not in SHIPPED_TASKS and dialect is not None:
        options += f" --dialect {dialect}"
    options += "" if needs_objects else " --rows-without-objects"
    num_rows, advice = 0, list[str]()
    for argument, files in local_files(config.swift).items():
        if not files:
            continue
        try:
            findings = survey(
                files,
                dialect=dialect if config.b_enabled else None,
                judge_answers=config.b_enabled and dialect is not None,
                needs_objects=needs_objects,
                num_coordinates=num_coordinates,
            )
        except DatasetError as error:
            raise error.at(f"swift.{argument}") from error
        _refuse_faults(argument, findings, options)
        num_rows += findings.num_rows
        advice += [
            f"swift.{argument}: {rule}: {findings.counts[rule]:,} of {findings.num_rows:,} rows, the first: "
            f"{findings.of(rule)[0]}"
            for rule in Rule
            if rule.is_advice and findings.counts.get(rule)
        ]
    names = ", ".join(named_places(config.swift, "dataset"))
    if validation := named_places(config.swift, "val_dataset"):
        names += f"; for validation {', '.join(validation)}"
    if not num_rows:
        return f"{names}: no local JSONL, so that no row was checked", []
    parts = "form and pictures"
    if num_coordinates is not None:
        parts = f"picture, {'points' if num_coordinates == 2 else 'boxes'} and answer"
    return f"{names}: all {num_rows:,} rows checked, each with its {parts}", advice


def _refuse_faults(argument: str, findings: Findings, options: str) -> None:
    """Raises DatasetError with the first fault, the number of rows that have any, and the command that lists all."""
    faults = [fault for fault in findings.faults if not fault.rule.is_advice]
    if not faults:
        return
    first = min(faults, key=lambda fault: (findings.files.index(fault.place.file), fault.place.line))
    if findings.num_bad_rows == 1:
        raise DatasetError(str(first), key=f"swift.{argument}")
    raise DatasetError(
        f"{findings.num_bad_rows:,} of {findings.num_rows:,} rows have faults, the first: {first}",
        remedy=f"list all: swift-stage2 data check {' '.join(map(str, findings.files))}{options}",
        key=f"swift.{argument}",
    )
