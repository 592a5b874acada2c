"""Model directory, data sets, and what the real template makes of a few samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.packing import select_pack
from swift_stage2.channel_b.sample_source import usable_rows
from swift_stage2.channel_b.task import Task
from swift_stage2.config import Stage2Config
from swift_stage2.config.stage2_ab import SHIPPED_TASKS
from swift_stage2.doctor.configuration import check_accumulation, check_disk_room
from swift_stage2.doctor.examination import Checked, Examination, Outcome, failed, left_out, ok, warning
from swift_stage2.preflight.channel_b_parts import make_task, run_ahead_budget, step_sizes
from swift_stage2.preflight.checks import Known
from swift_stage2.preflight.packing_isolation import ground_truth_segments
from swift_stage2.preflight.samples import MOST_LOOKED_AT, RowLengths, check_rows
from swift_stage2.records import Sample
from swift_stage2.scheduling.run_ahead import most_samples

if TYPE_CHECKING:
    from swift_stage2.doctor.preparation import LearnerPreparation

_NUM_SAMPLES = 16


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


def examine_learner(
    exam: Examination, config: Stage2Config, scratch: Path, num_ranks: int
) -> tuple[Checked[LearnerPreparation], Checked[Samples]]:
    """The rows of model and data; hands on what the trainer would start from, and samples of its data."""
    exam.begin_section("Model and data")
    found = torch.accelerator.current_accelerator(check_available=True)
    devices = (found.type if found else None, torch.cuda.device_count())
    rows = exam.show(config, Known(devices=devices, files=True, rows=True))
    checkpoint, rows_checked = rows["model directory"], rows["data sets"]
    directory = config.rollout.sync.disk_directory
    if directory is not None and "disk directory" in rows and rows["disk directory"].passed:
        exam.check("disk room", lambda: check_disk_room(config, directory))
    prepared = exam.check(
        "template",
        lambda: _prepare(config, scratch),
        needs=[checkpoint],
        fix="mend section swift: ms-swift's own words are beside",
    )
    exam.check("model load", lambda: _check_load(prepared.result), needs=[prepared])
    if not config.b_enabled:
        return prepared, exam.check("channel B", lambda: ok("off (b_ratio 0): no server is needed"))
    samples = exam.check(
        "samples",
        lambda: _check_samples(config, prepared.result),
        needs=[prepared, rows_checked],
        fix="mend the data set, or section swift",
    )
    exam.check("packing_length", lambda: check_packing_length(config, samples.result), needs=[samples])
    exam.check(
        "step sizes",
        lambda: check_step_sizes(
            config, samples.result, prepared.result.gradient_accumulation_steps * num_ranks
        ),
        needs=[prepared, samples],
    )
    exam.check(
        "run-ahead",
        lambda: check_run_ahead(config, samples.result, prepared.result.gradient_accumulation_steps),
        needs=[prepared, samples],
    )
    if config.stage2_ab.evaluation.every_steps:
        num_rows = len(prepared.result.row_sets[1]) if prepared.passed and rows_checked.passed else 0
        exam.show(config, Known(num_validation_rows=num_rows), needs=[prepared, rows_checked])
        exam.check(
            "evaluations",
            lambda: check_evaluation_steps(config, prepared.result.max_steps),
            needs=[prepared],
        )
    if prepared.passed and config.gradient_accumulation_steps is None:
        check_accumulation(exam, config, prepared.result.gradient_accumulation_steps)
    return prepared, samples


def _prepare(config: Stage2Config, scratch: Path) -> Outcome[LearnerPreparation]:
    from swift_stage2.doctor.preparation import prepare_learner  # loads ms-swift

    prepared = prepare_learner(config.swift, scratch, with_weights=False)
    return ok(
        f"ms-swift takes section swift; template {prepared.args.template}, {len(prepared.template.tokenizer)} tokens, "
        f"dtype {str(prepared.args.torch_dtype).removeprefix('torch.')}",
        prepared,
    )


def _check_load(prepared: LearnerPreparation) -> Outcome[None]:
    from swift_stage2.preflight.swift_parsing import check_load  # loads ms-swift

    return ok(check_load(prepared.args))


def check_evaluation_steps(config: Stage2Config, max_steps: int) -> Outcome[None]:
    """How often an evaluation falls due; ``max_steps`` is not above 0 where the epochs decide."""
    every = config.stage2_ab.evaluation.every_steps
    if max_steps <= 0:
        return ok(f"one every {every} steps; how many steps there are is decided by the epochs")
    times = max(0, max_steps - 2) // every  # steps are counted from 0, and none begins at the last one
    if times == 0:
        return warning(
            f"none will run beside training: the first falls due at step {every}, and the last of max_steps "
            f"{max_steps} is step {max_steps - 1}, where none begins",
            "write a smaller stage2_ab.evaluation.every_steps, or a larger swift.max_steps",
        )
    final = ", and one after training" if config.stage2_ab.evaluation.final_timeout_s else ""
    return ok(f"one every {every} of {max_steps} steps: at most {times}{final}")


def _check_samples(config: Stage2Config, prepared: LearnerPreparation) -> Outcome[Samples]:
    """Measures all rows; draws and encodes a few samples, the first of which is checked as at a run's start.

    Raises:
        DatasetError, ConfigError, TaskError: as ``check_rows`` does.
    """
    encoder = Encoder(prepared.template, packing_length=config.stage2_ab.channel_b.packing.packing_length)
    rows, _ = prepared.row_sets
    task = make_task(config)
    usable = usable_rows(rows, task, config.stage2_ab.channel_b.rows_without_objects)
    count = min(len(usable), _NUM_SAMPLES)
    checked = check_rows(
        config, rows, usable, encoder, task, int(prepared.args.seed), measured=usable, count=count
    )
    samples = checked.samples
    prompts = [len(encoder.encode_prompt(sample).token_ids) for sample in samples]
    longest = max(range(len(samples)), key=prompts.__getitem__)
    segments = ground_truth_segments(encoder, checked.task, samples)
    looked_at = Samples(
        encoder,
        checked.task,
        tuple(samples),
        prompts[longest],
        str(checked.origins.find(samples[longest].row)),
        checked.lengths,
        tuple(segment.num_tokens for segment in segments),
    )
    written = (
        f"in the dialect {config.stage2_ab.dialect}"
        if config.stage2_ab.task in SHIPPED_TASKS
        else f"as task {config.stage2_ab.task} checks it"
    )
    found = (
        f"{len(samples)} of {len(rows)} rows encoded as the model gets them, the first {written} as the template "
        f"writes it; prompts of {min(prompts)} to {max(prompts)} tokens"
    )
    if len(samples) < count:
        return warning(
            found,
            "mend the rows that cannot be used; only "
            f"{len(samples)} of the {min(MOST_LOOKED_AT, len(usable))} looked at can",
            looked_at,
        )
    return ok(found, looked_at)


def check_packing_length(config: Stage2Config, samples: Samples) -> Outcome[None]:
    """Whether a pack, and a server's context, hold the longest prompt and its answer."""
    prompt, new = samples.longest_prompt_tokens, config.rollout.decoding.max_new_tokens
    length = config.stage2_ab.channel_b.packing.packing_length
    needed, beside, told = prompt + new, 0, ""
    if config.stage2_ab.trains_targets_beside:
        beside = samples.lengths.segments.longest
        told = f" + {beside} of a corrected answer beside it"
    if troubles := samples.lengths.troubles:
        return warning(
            " | ".join(found for found, _ in troubles), "; ".join(remedy for _, remedy in troubles)
        )
    if length < needed + beside:
        lost = "samples may be quarantined" if length < needed else "corrected answers may be left out"
        return warning(
            f"packing_length {length} < longest prompt {prompt} ({samples.longest_prompt_place}) + max_new_tokens "
            f"{new}{told}: such {lost}",
            f"write stage2_ab.channel_b.packing.packing_length: {needed + beside} or more",
        )
    for index, server in enumerate(config.launch.servers):
        context = server.args.get("vllm_max_model_len")
        if isinstance(context, int) and context < needed:
            return warning(
                f"launch.servers[{index}].args.vllm_max_model_len {context} < prompt {prompt} + max_new_tokens {new}",
                f"write launch.servers[{index}].args.vllm_max_model_len: {needed} or more",
            )
    longest = samples.lengths.segments
    return ok(
        f"packing_length >= prompt + max_new_tokens: {length} >= {prompt} + {new}{told} = {needed + beside}; of all "
        f"{samples.lengths.num_rows:,} rows the longest with its true answer has {longest.longest} tokens "
        f"({longest.place})"
    )


def check_step_sizes(config: Stage2Config, samples: Samples, num_packs: int) -> Outcome[None]:
    """The rows that a step of each channel trains."""
    sizes = step_sizes(config, samples.lengths, num_packs)
    if sizes is None:
        return left_out("no row could be measured")
    return ok(sizes.numbers) if sizes.holds else warning(sizes.refusal, sizes.remedy)


def check_run_ahead(config: Stage2Config, samples: Samples, packs_per_b_step: int) -> Outcome[None]:
    """Whether the rollouts that may be begun under one version fill a B step."""
    channel = config.stage2_ab.channel_b
    capacity, shortest = channel.packing.packing_length, samples.lengths.shortest_prompt
    rule = channel.prefetch.budget_inequality(
        packs_per_b_step, samples_per_pack(samples.segment_lengths or (capacity,), capacity)
    )
    if not rule.holds:
        return failed(f"{rule.refusal} ({rule.numbers})", rule.remedy)
    budget = run_ahead_budget(config, samples.lengths, packs_per_b_step)
    most = most_samples(capacity, shortest)
    found = f"a rank holds at most {budget} rollouts begun under one version"
    need = f"a B step needs {rule.numbers.partition(' >= ')[2]} of a usual length"
    if budget < packs_per_b_step * most:
        return warning(
            f"{found}; {need}, but up to {packs_per_b_step} * {most} of the shortest: then B waits for a round",
            f"write stage2_ab.channel_b.prefetch.max_rollouts_per_version: {packs_per_b_step * most} or more",
        )
    return ok(
        f"{found} (a pack holds at most {most} of them: packing_length {capacity} / {shortest}); {need}"
    )


def samples_per_pack(lengths: Sequence[int], capacity: int) -> float:
    """How many samples a pack holds in the long run: what the pipeline's packing fills of it, over the mean length.

    Counting the samples of the first packs would not tell: the best fill takes the longest samples first.
    """
    left = list(lengths) * max(1, -(-2 * capacity // sum(lengths)))  # enough for two packs at least
    num_packs = num_tokens = 0
    while sum(left) >= capacity or not num_packs:
        chosen = frozenset(select_pack(left, capacity))
        num_packs, num_tokens = num_packs + 1, num_tokens + sum(left[index] for index in chosen)
        left = [length for index, length in enumerate(left) if index not in chosen]
    return num_tokens / num_packs / (sum(lengths) / len(lengths))
