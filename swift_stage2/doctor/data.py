"""Model directory, data sets, and what the real template makes of a few samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.packing import select_pack
from swift_stage2.channel_b.records import Sample
from swift_stage2.channel_b.row_origins import RowOrigins
from swift_stage2.channel_b.sample_source import usable_rows
from swift_stage2.channel_b.task import Task
from swift_stage2.config import ServerEngine, Stage2Config
from swift_stage2.config.swift_arguments import named_places
from swift_stage2.dataset.files import local_files
from swift_stage2.doctor.finding import Outcome, failed, ok, warning
from swift_stage2.preflight.channel_b_parts import make_task
from swift_stage2.preflight.dataset import advice_of, list_command, survey_data
from swift_stage2.preflight.model import check_model
from swift_stage2.preflight.model_family import check_family
from swift_stage2.preflight.packing_isolation import ground_truth_segments
from swift_stage2.preflight.row_lengths import RowLengths, measure_lengths
from swift_stage2.preflight.samples import check_samples, usable_samples

_NUM_SAMPLES = 16
_MOST_FAULTS_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of the data set as channel B would draw them, with what encodes them."""

    encoder: Encoder
    task: Task
    samples: tuple[Sample, ...]
    longest_prompt_tokens: int
    longest_prompt_place: str
    lengths: RowLengths
    """Of all rows."""
    segment_lengths: tuple[int, ...]
    """Tokens of prompt and ground truth, of the samples that fit a pack."""


def check_checkpoint(config: Stage2Config) -> Outcome[None]:
    """Raises ConfigError as ``check_model`` and ``check_family`` do."""
    check_model(config.swift)
    check_family(config)
    named = [
        f"{name} {config.swift[name]}"
        for name in ("model", "adapters", "resume_from_checkpoint")
        if config.swift.get(name)
    ]
    return ok(", ".join(named))


def check_rows(config: Stage2Config) -> Outcome[None]:
    """Every row of every local file. Raises DatasetError and ConfigError as ``survey_data`` does."""
    bad: list[str] = []
    advice: list[str] = []
    num_rows, commands = 0, []
    for argument, findings in survey_data(config).items():
        num_rows += findings.num_rows
        faults = [fault for fault in findings.faults if not fault.rule.is_advice]
        if faults:
            shown = " | ".join(map(str, faults[:_MOST_FAULTS_SHOWN]))
            more = findings.num_faults - _MOST_FAULTS_SHOWN
            bad.append(
                f"swift.{argument}: {findings.num_bad_rows:,} of {findings.num_rows:,} rows have faults: {shown}"
                + (f" | and {more:,} more" if more > 0 else "")
            )
            commands.append(list_command(findings))
        advice += [f"swift.{argument}: {line}" for line in advice_of(findings)]
    if bad:
        return failed(" ".join(bad), f"mend or remove these rows; list all: {' and '.join(commands)}")
    names = [", ".join(named_places(config.swift, "dataset"))]
    if validation := named_places(config.swift, "val_dataset"):
        names.append(f"for validation {', '.join(validation)}")
    if num_rows == 0:
        return ok(f"{'; '.join(names)}: no local JSONL, so that no row was checked")
    found = f"{'; '.join(names)}: all {num_rows:,} rows checked, each with its picture, boxes and answer"
    if advice:
        return warning(f"{found}; {' | '.join(advice)}", "look at these rows; such rows train as they are")
    return ok(found)


def check_validation_rows(config: Stage2Config, num_rows: int) -> Outcome[None]:
    """How many of the rows that an evaluation asks for there are. Raises ConfigError when there are none."""
    config.check_validation_set(num_rows)
    wanted = config.stage2_ab.evaluation.num_samples
    if num_rows < wanted:
        return warning(
            f"it has {num_rows} rows, stage2_ab.evaluation.num_samples is {wanted}: each asks all of them",
            f"write stage2_ab.evaluation.num_samples: {num_rows}, or name a larger swift.val_dataset",
        )
    return ok(f"every evaluation asks the first {wanted} of its {num_rows} rows")


def check_evaluation_steps(config: Stage2Config, max_steps: int) -> Outcome[None]:
    """How often an evaluation falls due; ``max_steps`` is not above 0 where the epochs decide."""
    every = config.stage2_ab.evaluation.every_steps
    if max_steps <= 0:
        return ok(f"one every {every} steps; how many steps there are is decided by the epochs")
    times = max(0, max_steps - 2) // every  # steps are counted from 0, and none begins at the last one
    if times == 0:
        return warning(
            f"none will ever run: the first falls due at step {every}, and the last of max_steps {max_steps} is "
            f"step {max_steps - 1}, where none begins",
            "write a smaller stage2_ab.evaluation.every_steps, or a larger swift.max_steps",
        )
    return ok(f"one every {every} of {max_steps} steps: at most {times}")


def check_usable(config: Stage2Config, encoder: Encoder, rows: Any, seed: int) -> Outcome[Samples]:
    """Measures all rows; draws and encodes a few samples, the first of which is checked as at a run's start.

    Raises:
        DatasetError, ConfigError: as ``usable_samples`` and ``check_samples`` do.
    """
    task = make_task(config)
    usable = usable_rows(rows, task, config.stage2_ab.channel_b.rows_without_objects)
    count = min(len(usable), _NUM_SAMPLES)
    origins = RowOrigins([file for files in local_files(config.swift).values() for file in files])
    samples = usable_samples(rows, seed, encoder, task, count, usable, origins)
    check_samples(config, encoder, task, samples, origins)
    task = task.learn(rows, samples[0], encoder)
    prompts = [len(encoder.encode_prompt(sample).token_ids) for sample in samples]
    longest = max(range(len(samples)), key=prompts.__getitem__)
    segments = ground_truth_segments(encoder, task, samples)
    lengths = measure_lengths(config, rows, range(len(rows)), encoder, task, origins)
    looked_at = Samples(
        encoder,
        task,
        tuple(samples),
        prompts[longest],
        str(origins.find(samples[longest].row)),
        lengths,
        tuple(segment.num_tokens for segment in segments),
    )
    found = (
        f"{len(samples)} of {len(rows)} rows encoded as the model gets them, the first in the dialect "
        f"{config.stage2_ab.channel_b.target.dialect} as the template writes it; prompts of {min(prompts)} to "
        f"{max(prompts)} tokens"
    )
    if len(samples) < count:
        return warning(
            found, f"mend the rows that cannot be used; only {len(samples)} of the first 64 can", looked_at
        )
    return ok(found, looked_at)


def check_packing_length(config: Stage2Config, samples: Samples) -> Outcome[None]:
    """Whether a pack, and a server's context, hold the longest prompt and its answer."""
    prompt, new = samples.longest_prompt_tokens, config.rollout.decoding.max_new_tokens
    length = config.stage2_ab.channel_b.packing.packing_length
    needed = prompt + new
    if troubles := samples.lengths.troubles:
        return warning(
            " | ".join(found for found, _ in troubles), "; ".join(remedy for _, remedy in troubles)
        )
    if length < needed:
        return warning(
            f"packing_length {length} < longest prompt {prompt} ({samples.longest_prompt_place}) + max_new_tokens "
            f"{new}: such samples may be quarantined",
            f"write stage2_ab.channel_b.packing.packing_length: {needed} or more",
        )
    for index, server in enumerate(config.launch.servers):
        context = server.args.get("vllm_max_model_len")
        if server.engine is ServerEngine.SWIFT and isinstance(context, int) and context < needed:
            return warning(
                f"launch.servers[{index}].args.vllm_max_model_len {context} < prompt {prompt} + max_new_tokens {new}",
                f"write launch.servers[{index}].args.vllm_max_model_len: {needed} or more",
            )
    longest = samples.lengths.segments
    return ok(
        f"packing_length >= prompt + max_new_tokens: {length} >= {prompt} + {new} = {needed}; of all "
        f"{samples.lengths.num_rows:,} rows the longest with its true answer has {longest.longest} tokens "
        f"({longest.place})"
    )


def samples_per_pack(lengths: Sequence[int], capacity: int) -> float:
    """How many samples a pack holds when packs are filled as the pipeline fills them, oldest first."""
    left = list(lengths) * max(1, -(-2 * capacity // sum(lengths)))  # enough for two packs at least
    num_packs = num_packed = 0
    while sum(left) >= capacity or not num_packs:
        chosen = select_pack(left, capacity)
        num_packs, num_packed = num_packs + 1, num_packed + len(chosen)
        left = [length for index, length in enumerate(left) if index not in set(chosen)]
    return num_packed / num_packs
