"""The checks of a run that need no template: ``train`` and ``launch`` stop at the first error, ``doctor`` shows all.

A program runs those whose needs it has (``CheckStage``), when it has them. Checks that need the template, the model or
answering servers stand in the other files of this folder; a run's start and the doctor share them as well.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from swift_stage2.channel_b.dialects import DIALECTS, coordinates_of
from swift_stage2.checks.model import check_model, refuse_transposed_experts
from swift_stage2.checks.servers import (
    refuse_busy_ports,
    refuse_deaf_endpoint,
    refuse_lone_addresses,
    refuse_unservable,
    warn_of_open_servers,
)
from swift_stage2.config import RowsWithoutObjects, Stage2Config
from swift_stage2.config.stage2_ab import SHIPPED_TASKS
from swift_stage2.config.swift_arguments import is_on, named_places
from swift_stage2.data.files import Rule, local_files
from swift_stage2.data.survey import Findings, survey
from swift_stage2.errors import ConfigError, DatasetError
from swift_stage2.runtime.checkpoints import check_world_size
from swift_stage2.runtime.environment import (
    check_gloo_address,
    require_known_accelerator,
    require_visible_devices,
)
from swift_stage2.runtime.run_directory import refuse_earlier_run

if TYPE_CHECKING:
    from swift_stage2.collectives import ControlGroup  # torch

logger = logging.getLogger(__name__)

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckStage:
    """The things that a program has when it asks; a check whose need is not there is left out."""

    addresses: bool = False
    """Names of hosts may be resolved."""
    files: bool = False
    """Directories, and heads of the files in them, may be read."""
    rows: bool = False
    """Every row of the data sets may be read."""
    rank_environment: Mapping[str, str] | None = None
    """Of one of torchrun's ranks."""
    starts_learner: bool = False
    """torchrun is still to be started, by this launch."""
    run_directory: bool = False
    """Held, so that nobody else begins there."""
    num_ranks: int | None = None
    started_servers: Sequence[int] | None = None
    """Numbers in ``launch.servers`` of those that this machine is to start."""
    devices: tuple[str | None, int] | None = None
    """The accelerator that torch found, and how many CUDA devices."""
    num_validation_rows: int | None = None


class Verdict(StrEnum):
    """The outcome of one check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True)
class CheckResult(Generic[ValueT]):
    """The row of one check. ``fix`` is one line, and there whenever the verdict is a warning or failed."""

    verdict: Verdict
    found: str
    fix: str = ""
    value: ValueT | None = None
    """For the checks that build on it."""
    section: str = ""
    check: str = ""
    counts_as_failed: bool = False
    """Failed, or not checked because of something that failed."""

    @property
    def passed(self) -> bool:
        """True if the verdict is ok or a warning, so that a check that needs this one can run."""
        return self.verdict in (Verdict.OK, Verdict.WARNING)

    @property
    def result(self) -> ValueT:
        """The value for later checks. Raises ValueError when the check did not pass."""
        if self.value is None:
            raise ValueError(f"{self.check} handed nothing on; name it in needs")
        return self.value


def ok(found: str, value: ValueT | None = None) -> CheckResult[ValueT]:
    """Nothing to do."""
    return CheckResult(Verdict.OK, found, value=value)


def warning(found: str, fix: str, value: ValueT | None = None) -> CheckResult[ValueT]:
    """It works, but wastes or risks something."""
    return CheckResult(Verdict.WARNING, found, fix, value)


def failed(found: str, fix: str) -> CheckResult[Any]:
    """Training would not start, or not do what was asked."""
    return CheckResult(Verdict.FAILED, found, fix)


def left_out(why: str) -> CheckResult[Any]:
    """Nothing failed, but there is no way or no wish to look."""
    return CheckResult(Verdict.NOT_CHECKED, why)


@dataclass(frozen=True, slots=True)
class Check:
    """One entry: its name in the doctor's table, the field of ``CheckStage`` that it needs, and the work.

    ``find`` raises UserError, and returns what is worth a row; None where all is well, or does not apply.
    """

    name: str
    needs: str
    find: Callable[[Stage2Config, CheckStage], CheckResult[None] | None]


def run_checks(
    config: Stage2Config, known: CheckStage, tell: Callable[[str], object] = logger.warning
) -> None:
    """Runs what applies, in order. The first rank tells warnings.

    Raises:
        UserError: of the first check that refuses.
    """
    tells = os.environ.get("RANK", "0") == "0"
    for check in due_checks(known):
        found = check.find(config, known)
        if found is not None and found.verdict is Verdict.WARNING and tells:
            tell(f"{found.found}; {found.fix}")


def due_checks(known: CheckStage) -> Iterator[Check]:
    """Entries whose needs are there."""
    for check in CHECKS:
        need = getattr(known, check.needs)
        if need is not None and need is not False:
            yield check


def _devices(config: Stage2Config, known: CheckStage) -> None:
    if config.swift.get("use_cpu") is not True:
        kind, num_devices = known.devices or (None, 0)
        require_known_accelerator(kind)
        require_visible_devices(os.environ, num_devices)


def _api_key(config: Stage2Config, known: CheckStage) -> CheckResult[None] | None:
    """Whether there is a key; never what it is."""
    if not config.b_enabled:
        return None
    name, key = config.rollout.api_key_env, config.rollout.api_key()
    if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(
            f"{name} is set to something that cannot be a bearer token",
            remedy=f"set {name} to printable ASCII without spaces",
        )
    if key is not None:
        return ok(f"{name} is set; it is sent to every server")
    if advice := warn_of_open_servers(config):
        return warning(
            f"{name} is not set; {' | '.join(advice)}", f"start the servers with a key and set {name} to it"
        )
    return ok(f"{name} is not set: right for servers without a key")


def _model(config: Stage2Config, known: CheckStage) -> None:
    check_model(config.swift)
    refuse_transposed_experts(config)


def _packages(config: Stage2Config, known: CheckStage) -> None:
    # Else the ranks would learn it once the model is loaded. A kernel of the hub may stand in for flash-attn.
    flash = ("flash_attn", "flash_attention_2")
    for key, needs, packages, remedy in (
        ("deepspeed", is_on, ["deepspeed"], "install the extra swift-stage2[deepspeed], or remove the key"),
        ("attn_impl", flash.__contains__, ["flash_attn", "kernels"], "install flash-attn, or write sdpa"),
    ):
        if needs(value := config.swift.get(key)) and not any(map(importlib.util.find_spec, packages)):
            raise ConfigError(
                f"swift.{key} needs {packages[0]} in the learner's environment",
                got=f"{key}={value!r:.200} and no such package",
                remedy=remedy,
            )


def _resume(config: Stage2Config, known: CheckStage) -> CheckResult[None] | None:
    """As ``refuse_unsupported`` refuses it, when it would be too late."""
    swift = config.swift
    is_sharded_adapter = swift.get("fsdp") and swift.get("tuner_type", "lora") != "full"
    if not is_sharded_adapter or swift.get("save_strategy") == "no":
        return None
    return warning(
        "checkpoints of LoRA under FSDP2 cannot be resumed: a run that ends early must begin anew",
        "train with DDP or ZeRO, or write swift.tuner_type: full",
    )


def _plugins(config: Stage2Config, known: CheckStage) -> None:
    for place in named_places(config.swift, "external_plugins"):
        if not (plugin := Path(place).expanduser()).is_file():
            raise ConfigError(
                "swift.external_plugins must name Python files",
                got=f"{str(plugin)!r}, which is none",
                remedy="correct the path",
            )


def _disk_directory(config: Stage2Config, known: CheckStage) -> None:
    directory = config.rollout.sync.disk_directory
    if not config.b_enabled or directory is None or os.environ.get("RANK", "0") != "0":
        return
    if not os.path.isdir(directory) or not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(
            "rollout.sync.disk_directory must be a directory that the learner's user can write",
            got=f"disk_directory={directory!r}",
            remedy="make it, or mount it, and let learner and servers see it",
        )


def _data_sets(config: Stage2Config, known: CheckStage) -> CheckResult[None]:
    text, advice = check_data(config)
    fix = "look at these rows; such rows train as they are"
    return warning(f"{text}; {' | '.join(advice)}", fix) if advice else ok(text)


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
    options = f" --task {task}"
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
    train, validation = (
        [place for name in (own, f"cached_{own}") for place in named_places(config.swift, name)]
        for own in ("dataset", "val_dataset")
    )
    names = ", ".join(train)
    if validation:
        names += f"; for validation {', '.join(validation)}"
    if not num_rows:
        return f"{names}: no local JSONL, so that no row was checked", []
    parts = "form and pictures"
    unread = [
        place
        for name in ("cached_dataset", "cached_val_dataset")
        for place in named_places(config.swift, name)
    ]
    told = f"; none of {', '.join(unread)}" if unread else ""
    if num_coordinates is not None:
        parts = f"picture, {'points' if num_coordinates == 2 else 'boxes'} and answer"
    return f"{names}: all {num_rows:,} rows checked, each with its {parts}{told}", advice


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


def _checkpoint_ranks(config: Stage2Config, known: CheckStage) -> None:
    for checkpoint in named_places(config.swift, "resume_from_checkpoint") if config.b_enabled else []:
        check_world_size(os.path.expanduser(checkpoint), known.num_ranks or 1)


CHECKS = (
    Check(
        "rank environment",
        "rank_environment",
        lambda config, known: check_gloo_address(known.rank_environment or {}),
    ),
    Check("learner's devices", "devices", _devices),
    Check("API key", "addresses", _api_key),
    Check("addresses of hosts", "addresses", lambda config, known: refuse_lone_addresses(config)),
    Check("rendezvous", "starts_learner", lambda config, known: refuse_deaf_endpoint(config)),
    Check("model directory", "files", _model),
    Check("packages", "files", _packages),
    Check("resume", "files", _resume),
    Check("plugins", "files", _plugins),
    Check("disk directory", "files", _disk_directory),
    Check("data sets", "rows", _data_sets),
    Check("earlier run", "run_directory", lambda config, known: refuse_earlier_run(config.swift)),
    Check("ranks", "num_ranks", _checkpoint_ranks),
    Check(
        "engine and model",
        "started_servers",
        lambda config, known: refuse_unservable(config, known.started_servers or ()),
    ),
    Check(
        "ports",
        "started_servers",
        lambda config, known: refuse_busy_ports(config, known.started_servers or ()),
    ),
    Check(
        "validation set",
        "num_validation_rows",
        lambda config, known: config.check_validation_set(known.num_validation_rows or 0),
    ),
)


def refuse_differing_settings(settings: Mapping[str, Any], control: ControlGroup) -> None:
    """Every rank has read a file of its own. Section ``launch`` is left out: a host may number its devices as it does.

    Raises:
        ConfigError: a setting is not every rank's; on every rank.
    """
    mine = {place: value for place, value in _leaves(settings) if not place.startswith("launch.")}
    told = [json.loads(each) for each in control.gather(json.dumps(mine))]
    places = sorted({place for each in told for place in each})
    differing = [place for place in places if any(each.get(place) != told[0].get(place) for each in told)]
    if differing:
        place = differing[0]
        values = [each.get(place) for each in told]
        rank = next(rank for rank, value in enumerate(values) if value != values[0])
        raise ConfigError(
            "every rank must have the same settings",
            got=f"{place}={values[0]} on rank 0 and {values[rank]} on rank {rank}",
            remedy="give every host the same file",
        )


def _leaves(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", str(value)
