"""Checks settings on real samples when a run starts: dialect, lengths, usable rows. Used by the doctor, too."""

from __future__ import annotations

from collections.abc import Sequence

from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.sample_source import RowOrigins, SampleSource
from swift_stage2.channel_b.task import Rows, Task
from swift_stage2.config import Stage2Config
from swift_stage2.errors import ConfigError, DatasetError, SampleError
from swift_stage2.records import Sample, SampleKey

_NUM_SAMPLES_LOOKED_AT = 64
_NUM_SAMPLES_WANTED = 3


def usable_samples(
    rows: Rows,
    seed: int,
    encoder: Encoder,
    task: Task,
    count: int = _NUM_SAMPLES_WANTED,
    usable: Sequence[int] | None = None,
    origins: RowOrigins | None = None,
) -> list[Sample]:
    """A few samples to check settings on, the same on every rank; a bad one is no reason not to start.

    ``usable``: as ``SampleSource`` takes it.

    Raises:
        DatasetError: none of the first rows can be used.
    """
    source = SampleSource(rows, task, rank=0, world_size=1, seed=seed, usable=usable, origins=origins)
    samples: list[Sample] = []
    problems: list[tuple[SampleKey, SampleError]] = []
    for drawn in source.draw(min(_NUM_SAMPLES_LOOKED_AT, len(rows if usable is None else usable))):
        try:
            if drawn.sample is None:
                raise drawn.error or SampleError("the row cannot be read")
            task.to_space(drawn.sample.truth, encoder.encode_prompt(drawn.sample).convert)
            samples.append(drawn.sample)
        except SampleError as error:
            problems.append((drawn.key, error))
        if len(samples) == count:
            break
    if not samples:
        raise DatasetError(
            f"channel B needs rows that it can use, got none among num_rows={len(problems)}, the first "
            f"({source.origin_of(problems[0][0])}) because: {problems[0][1]}; mend the data set"
        ) from problems[0][1]
    return samples


def check_samples(
    config: Stage2Config,
    encoder: Encoder,
    task: Task,
    samples: list[Sample],
    origins: RowOrigins | None = None,
) -> None:
    """What only the real template and tokenizer can tell about the data and the settings.

    Raises:
        ConfigError: another dialect than channel A's, or a pack that cannot hold the first prompt and its answer.
        DatasetError: the template refuses the first row with its answer.
    """
    try:
        prompt = encoder.encode_prompt(samples[0])
        truth = task.to_space(samples[0].truth, prompt.convert)
        answer = encoder.answer_of(samples[0])
    except SampleError as error:
        raise DatasetError(
            f"channel A must be able to train the data set's rows, got {error} "
            f"({(origins or RowOrigins()).find(samples[0].row)}); mend them"
        ) from error
    task.check_answer(answer, truth, encoder.normalise)
    needed = len(prompt.token_ids) + config.rollout.decoding.max_new_tokens
    packing_length = config.stage2_ab.channel_b.packing.packing_length
    if packing_length < needed:
        raise ConfigError(
            "stage2_ab.channel_b.packing.packing_length must hold a prompt and its answer, got "
            f"packing_length={packing_length} < prompt {len(prompt.token_ids)} + "
            f"max_new_tokens {config.rollout.decoding.max_new_tokens}; write packing_length: {needed} or more"
        )
