"""Reads every row of a run's JSONL files before anything heavy starts, and refuses with file, line, problem, remedy.

Looks where ms-swift would only trip later, or train something else than is meant: see ``dataset.row_check``. A bad
sample that slips through (a remote data set, a broken pixel stream) is quarantined while training.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from swift_stage2.channel_b.dialects import DIALECTS
from swift_stage2.config import RowsWithoutObjects, Stage2Config
from swift_stage2.config.stage2_ab import SHIPPED_TASKS
from swift_stage2.dataset.fault import Rule
from swift_stage2.dataset.files import local_files
from swift_stage2.dataset.survey import Findings, survey
from swift_stage2.errors import ConfigError, DatasetError

logger = logging.getLogger(__name__)

_MOST_LOGGED = 20
_PROGRESS_EVERY_S = 10.0


def check_data(config: Stage2Config) -> None:
    """Checks every row of every local JSONL of a run.

    Every fault is logged, up to a number, before the first is raised; so is advice, which refuses nothing.

    Raises:
        DatasetError: names key, file, line, problem and remedy, and how many rows have faults.
        ConfigError: as ``survey_data`` does.
    """
    for argument, findings in survey_data(config).items():
        _log(argument, findings)
        refuse_faults(argument, findings)


def survey_data(config: Stage2Config) -> dict[str, Findings]:
    """What is found in the local JSONL files of ms-swift's ``dataset`` and of its ``val_dataset`` argument.

    Says now and then how far it is. Without channel B answers may be anything.

    Raises:
        DatasetError: a file is missing, a folder, cannot be read or holds no rows; names the key.
        ConfigError: an argument is neither a path nor a list of paths, or ``split_dataset_ratio`` is out of range.
    """
    _check_split(config.swift.get("split_dataset_ratio"))
    channel_b = config.stage2_ab.channel_b
    dialect = DIALECTS.get(channel_b.target.dialect)  # a user's is loaded later, and judged then
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
                judge_objects=config.stage2_ab.task in SHIPPED_TASKS,
                on_progress=_Progress().tell,
            )
        except DatasetError as error:
            raise DatasetError(f"swift.{argument}: {error}") from error
    return found


class _Progress:
    """A line now and then, from one rank."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()

    def tell(self, num_rows: int, num_bytes: int) -> None:
        if (now_s := time.monotonic()) - self._last_s > _PROGRESS_EVERY_S:
            self._last_s = now_s
            if _is_first_rank():
                logger.warning("checking the data set: %s rows so far", f"{num_rows:,}")


def _check_split(ratio: Any) -> None:
    """YAML reads some numbers (``1e-2``) as text; ms-swift reads them as numbers."""
    try:
        holds = ratio is None or 0 <= float(ratio) < 1
    except (TypeError, ValueError):
        holds = False
    if not holds:
        raise ConfigError(
            "swift.split_dataset_ratio must be at least 0 and below 1, got "
            f"split_dataset_ratio={ratio!r}; write split_dataset_ratio: 0.01"
        )


def refuse_faults(argument: str, findings: Findings) -> None:
    """Raises DatasetError with the first fault and the number of rows that have any."""
    faults = [fault for fault in findings.faults if not fault.rule.is_advice]
    if not faults:
        return
    first = min(faults, key=lambda fault: (findings.files.index(fault.place.file), fault.place.line))
    if findings.num_bad_rows == 1:
        raise DatasetError(f"swift.{argument}: {first}")
    raise DatasetError(
        f"swift.{argument}: {findings.num_bad_rows:,} of {findings.num_rows:,} rows have faults, the first: {first}; "
        f"list all: {list_command(findings)}"
    )


def list_command(findings: Findings) -> str:
    """What shows every fault of these files."""
    return f"swift-stage2 data check {' '.join(map(str, findings.files))}"


def advice_of(findings: Findings) -> list[str]:
    """One line per rule whose breach trains, with its count and its first place."""
    return [
        f"{rule}: {findings.counts[rule]:,} of {findings.num_rows:,} rows, the first: {findings.of(rule)[0]}"
        for rule in Rule
        if rule.is_advice and findings.counts.get(rule)
    ]


def _log(argument: str, findings: Findings) -> None:
    if not _is_first_rank():
        return
    if findings.num_bad_rows > 1:
        for rule in Rule:
            faults = [] if rule.is_advice else findings.of(rule)
            for fault in faults[:_MOST_LOGGED]:
                logger.error("swift.%s: %s", argument, fault)
            if (more := findings.counts.get(rule, 0) - _MOST_LOGGED) > 0 and faults:
                logger.error("swift.%s: %s: and %s more", argument, rule, f"{more:,}")
    for advice in advice_of(findings):
        logger.warning("swift.%s: %s", argument, advice)


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"
