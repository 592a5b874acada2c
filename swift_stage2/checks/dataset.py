"""Reads every row of a run's JSONL files before anything heavy starts, and refuses with file, line, problem, remedy.

Looks where ms-swift would only trip later, or train something else than is meant: see ``dataset.row_check``. A bad
sample that slips through (a remote data set, a broken pixel stream) is quarantined while training.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from swift_stage2.channel_b.dialects import DIALECTS, Dialect, coordinates_of
from swift_stage2.config import RowsWithoutObjects, Stage2Config
from swift_stage2.config.stage2_ab import DEFAULT_TASK, SHIPPED_TASKS
from swift_stage2.config.swift_arguments import named_places
from swift_stage2.dataset.fault import Rule
from swift_stage2.dataset.files import local_files
from swift_stage2.dataset.survey import Findings, OnProgress, survey
from swift_stage2.errors import ConfigError, DatasetError

logger = logging.getLogger(__name__)

_PROGRESS_EVERY_S = 10.0


def check_data(config: Stage2Config) -> tuple[str, list[str]]:
    """Checks every row of every local JSONL of a run. Returns what was found, and advice, which refuses nothing.

    Raises:
        DatasetError: names key, file, line, problem and remedy, and how many rows have faults.
        ConfigError: as ``survey_data`` does.
    """
    surveyed = survey_data(config)
    for argument, findings in surveyed.items():
        refuse_faults(argument, findings, _options_of(config))
    names = ", ".join(named_places(config.swift, "dataset"))
    if validation := named_places(config.swift, "val_dataset"):
        names += f"; for validation {', '.join(validation)}"
    if not (num_rows := sum(findings.num_rows for findings in surveyed.values())):
        return f"{names}: no local JSONL, so that no row was checked", []
    parts = "form and pictures"
    if (num_coordinates := _num_coordinates(config)) is not None:
        parts = f"picture, {'points' if num_coordinates == 2 else 'boxes'} and answer"
    found = f"{names}: all {num_rows:,} rows checked, each with its {parts}"
    return found, [
        f"swift.{name}: {line}" for name, findings in surveyed.items() for line in _advice(findings)
    ]


def survey_data(config: Stage2Config) -> dict[str, Findings]:
    """Looks through the local JSONL files of ms-swift's ``dataset`` and of its ``val_dataset`` argument.

    Says now and then how far it is. Without channel B answers may be anything.

    Raises:
        DatasetError: a file is missing, a folder, cannot be read or holds no rows; names the key.
        ConfigError: an argument is neither a path nor a list of paths, or ``split_dataset_ratio`` is out of range.
    """
    _check_split(config.swift.get("split_dataset_ratio"))
    channel_b = config.stage2_ab.channel_b
    dialect = _dialect(config)
    found: dict[str, Findings] = {}
    for argument, files in local_files(config.swift).items():
        if not files:
            continue
        try:
            found[argument] = survey(
                files,
                dialect=dialect if config.b_enabled else None,
                judge_answers=config.b_enabled and dialect is not None,
                needs_objects=channel_b.rows_without_objects is RowsWithoutObjects.REFUSE,
                num_coordinates=_num_coordinates(config),
                on_progress=_progress(),
            )
        except DatasetError as error:
            raise DatasetError(f"swift.{argument}: {error}") from error
    return found


def _dialect(config: Stage2Config) -> Dialect | None:
    """The dialect of all answers; None of a user's, which is loaded later, and judged then."""
    return DIALECTS.get(config.stage2_ab.dialect or "")


def _num_coordinates(config: Stage2Config) -> int | None:
    return coordinates_of(config.stage2_ab.task, config.stage2_ab.dialect)


def _options_of(config: Stage2Config) -> str:
    """Options with which ``data check`` judges these rows as a run with channel B does."""
    channel_b, task, dialect = config.stage2_ab.channel_b, config.stage2_ab.task, _dialect(config)
    options = "" if task == DEFAULT_TASK else f" --task {task}"
    if task not in SHIPPED_TASKS and dialect is not None:
        options += f" --dialect {dialect}"
    allows_none = channel_b.rows_without_objects is not RowsWithoutObjects.REFUSE
    return options + (" --rows-without-objects" if allows_none else "")


def _progress() -> OnProgress:
    """A line now and then, from the first rank."""
    last_s = time.monotonic()

    def tell(num_rows: int, num_bytes: int) -> None:
        nonlocal last_s
        if time.monotonic() - last_s > _PROGRESS_EVERY_S and os.environ.get("RANK", "0") == "0":
            last_s = time.monotonic()
            logger.warning("checking the data set: %s rows so far", f"{num_rows:,}")

    return tell


def _check_split(ratio: Any) -> None:
    """YAML reads some numbers (``1e-2``) as text; ms-swift reads them as numbers."""
    try:
        holds = ratio is None or 0 <= float(ratio) < 1
    except (TypeError, ValueError):
        holds = False
    if not holds:
        raise ConfigError(
            "swift.split_dataset_ratio must be at least 0 and below 1",
            got=f"split_dataset_ratio={ratio!r}",
            remedy="write split_dataset_ratio: 0.01",
        )


def refuse_faults(argument: str, findings: Findings, options: str = "") -> None:
    """Raises DatasetError with the first fault, the number of rows that have any, and the command that lists all.

    ``options``: with which ``data check`` judges as this check has done.
    """
    faults = [fault for fault in findings.faults if not fault.rule.is_advice]
    if not faults:
        return
    first = min(faults, key=lambda fault: (findings.files.index(fault.place.file), fault.place.line))
    if findings.num_bad_rows == 1:
        raise DatasetError(f"swift.{argument}: {first}")
    raise DatasetError(
        f"swift.{argument}: {findings.num_bad_rows:,} of {findings.num_rows:,} rows have faults, the first: "
        f"{first}",
        remedy=f"list all: swift-stage2 data check {' '.join(map(str, findings.files))}{options}",
    )


def _advice(findings: Findings) -> list[str]:
    """One line per rule whose breach trains, with its count and its first place."""
    return [
        f"{rule}: {findings.counts[rule]:,} of {findings.num_rows:,} rows, the first: {findings.of(rule)[0]}"
        for rule in Rule
        if rule.is_advice and findings.counts.get(rule)
    ]
