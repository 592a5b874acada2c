"""Channel B's parts that know data set and template, made and checked when a run starts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from typing import Any

from swift_stage2.channel_b import detection as detection  # registers the task that is shipped
from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.preprocessing import Preprocessor, ProcessPreprocessor, ThreadPreprocessor
from swift_stage2.channel_b.sample_source import RowOrigins, SampleSource
from swift_stage2.channel_b.task import TASKS, Rows, Task
from swift_stage2.collectives import ControlGroup, together
from swift_stage2.config import Preprocessing, Stage2Config
from swift_stage2.config.registry import find
from swift_stage2.dataset.files import local_files
from swift_stage2.errors import DatasetError
from swift_stage2.preflight.packing_isolation import (
    IsolationBatches,
    PackedLoss,
    check_isolation,
    isolation_batches,
)
from swift_stage2.preflight.row_lengths import RowLengths, measure_lengths
from swift_stage2.preflight.samples import check_samples, usable_samples
from swift_stage2.records import Sample
from swift_stage2.telemetry.facade import Telemetry
from swift_stage2.telemetry.trace import Trace


def make_task(config: Stage2Config) -> Task:
    """The task that ``stage2_ab.task`` names.

    Raises:
        ConfigError: nobody has registered it, or it does not like its settings.
    """
    return find(TASKS, "stage2_ab.task", config.stage2_ab.task).from_config(config)


@dataclass(frozen=True, slots=True)
class CheckedParts:
    """What the data set and the template have become, and were checked as, on this rank."""

    encoder: Encoder
    task: Task
    preprocessor: Preprocessor
    source: SampleSource
    samples: list[Sample]
    isolation: IsolationBatches
    lengths: RowLengths


def check_parts(
    config: Stage2Config,
    task: Task,
    rows: Rows,
    usable: Sequence[int],
    template: Any,
    seed: int,
    control: ControlGroup,
    telemetry: Telemetry,
    on_failure: ExitStack,
) -> CheckedParts:
    """The checks that read files and may fail on one rank alone; the model is not run."""
    packing_length = config.stage2_ab.channel_b.packing.packing_length
    encoder = Encoder(template, packing_length=packing_length, span=telemetry.trace.span)
    task = task.with_span(telemetry.trace.span)
    # Also of the validation set: what a report or a log names is looked up in both.
    origins = RowOrigins([file for files in local_files(config.swift).values() for file in files])
    source = SampleSource(
        rows,
        task,
        rank=control.rank,
        world_size=control.world_size,
        seed=seed,
        events=telemetry.ledger,
        usable=usable,
        origins=origins,
    )
    samples = usable_samples(rows, seed, encoder, task, usable=usable, origins=origins)
    check_samples(config, encoder, task, samples, origins)
    task = task.learn(rows, samples[0], encoder)
    mine = range(control.rank, len(rows), control.world_size)
    lengths = measure_lengths(config, rows, mine, encoder, task, origins)
    isolation = isolation_batches(encoder, task, samples)
    # Before the checks that run the model, which give its process the time to load the template.
    preprocessor = _preprocessor(config, encoder, task, telemetry.trace)
    on_failure.callback(preprocessor.close)
    return CheckedParts(encoder, task, preprocessor, source, samples, isolation, lengths)


def tell_lengths(mine: RowLengths, control: ControlGroup, telemetry: Telemetry) -> None:
    """Every rank has measured its share of the rows; the first one tells what does not fit."""
    parts = [RowLengths.from_note(note) for note in control.gather(mine.to_note())]
    if control.rank == 0:
        for found, remedy in reduce(RowLengths.merged, parts).troubles:
            telemetry.record_warning(f"{found}; {remedy}")


def _preprocessor(config: Stage2Config, encoder: Encoder, task: Task, trace: Trace) -> Preprocessor:
    packing_length = config.stage2_ab.channel_b.packing.packing_length
    if config.stage2_ab.channel_b.preprocessing is Preprocessing.THREAD:
        return ThreadPreprocessor(encoder, task, packing_length=packing_length)
    return ProcessPreprocessor(encoder, task, packing_length=packing_length, trace=trace)


def check_packing(parts: CheckedParts, packed_loss: PackedLoss, control: ControlGroup) -> None:
    """Packed segments do not see each other: found by running the model on the same batches on every rank."""
    spellings = control.gather(str(parts.task.spelling))
    if len(set(spellings)) > 1:
        raise DatasetError(
            f"every rank must read answers written in one way, got answers={spellings} by rank; give all nodes "
            "the same files"
        )
    lengths = control.gather(str(parts.isolation.lengths))
    if len(set(lengths)) > 1:
        raise DatasetError(
            f"every rank must be able to read the same rows, got samples of lengths {lengths} by rank; give all "
            "nodes the same files"
        )
    together(control, lambda: check_isolation(parts.isolation, packed_loss))
