"""Rows as the real template sees them: a few usable ones to check settings on, and the length of every one in tokens.

What the template makes of each image size is asked of it once; rows with the same sizes share the answer. Exact are
answers, image tokens and the first row's prompt. A prompt of another text is tokenised alone, which may differ by a
token where it meets the template's own text.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from typing import Any

from PIL import Image
from pydantic import TypeAdapter

from swift_stage2.channel_b.answer_templates import fill_placeholders
from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.preprocessing import make_target
from swift_stage2.channel_b.sample_source import RowOrigins, SampleSource
from swift_stage2.channel_b.task import Rows, Task, name_of
from swift_stage2.checks.packing_isolation import empty_rollout
from swift_stage2.columns import stand_ins
from swift_stage2.config import Stage2Config
from swift_stage2.data.files import local_files
from swift_stage2.data.picture import UNREADABLE, look_at, path_of
from swift_stage2.errors import (
    ConfigError,
    DatasetError,
    MatchingError,
    SampleError,
    Stage2Error,
    TaskError,
)
from swift_stage2.records import Sample, SampleKey

MOST_LOOKED_AT = 64
_NUM_SAMPLES_WANTED = 3
_NONSENSE = "flibbertigibbet"
_PACKING_LENGTH = "stage2_ab.channel_b.packing.packing_length"
_MAX_NEW_TOKENS = "rollout.decoding.max_new_tokens"


def usable_samples(
    rows: Rows,
    seed: int,
    encoder: Encoder,
    task: Task,
    count: int,
    usable: Sequence[int],
    origins: RowOrigins | None = None,
) -> list[Sample]:
    """A few samples to check settings on, the same on every rank; a bad one is no reason not to start.

    Raises:
        DatasetError: none of the first rows can be used.
    """
    source = SampleSource(
        rows, task, rank=0, world_size=1, seed=seed, usable=usable, origins=origins or RowOrigins()
    )
    samples: list[Sample] = []
    problems: list[tuple[SampleKey, SampleError]] = []
    for key in source.draw(min(MOST_LOOKED_AT, len(usable))):
        try:
            sample = source.read(key)
            task.to_space(sample.truth, encoder.encode_prompt(sample).convert)
            samples.append(sample)
        except SampleError as error:
            problems.append((key, error))
        if len(samples) == count:
            break
    if not samples:
        raise DatasetError(
            "channel B needs rows that it can use",
            got=f"none among num_rows={len(problems)}, the first ({source.origin_of(problems[0][0])}) because: "
            f"{problems[0][1]}",
            remedy="mend the data set",
        ) from problems[0][1]
    return samples


def check_sample(
    config: Stage2Config, encoder: Encoder, task: Task, sample: Sample, origins: RowOrigins
) -> None:
    """Checks what only the real template and tokenizer can tell about the data and the settings.

    Raises:
        ConfigError: another dialect than channel A's, or a pack that cannot hold the first prompt and its answer.
        DatasetError: the template refuses the first row with its answer.
    """
    try:
        prompt = encoder.encode_prompt(sample)
        truth = task.to_space(sample.truth, prompt.convert)
        answer = encoder.answer_of(sample)
    except SampleError as error:
        raise DatasetError(
            "channel A must be able to train the data set's rows",
            got=f"{error} ({origins.find(sample.row)})",
            remedy="mend them",
        ) from error
    task.check_answer(answer, truth, encoder.normalise)
    packing_length, (most, told) = _limits(config)[0], _longest_answer(config)
    needed = len(prompt.token_ids) + most
    if packing_length < needed:
        raise ConfigError(
            f"{_PACKING_LENGTH} must hold a prompt and its answer",
            got=f"packing_length={packing_length} < prompt {len(prompt.token_ids)} + {told}",
            remedy=f"write packing_length: {needed} or more",
        )


Sizes = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class CheckedRows:
    """The rows of a data set, as the settings were checked on them."""

    encoder: Encoder
    samples: list[Sample]
    task: Task
    """It has learned how the answers are written."""
    origins: RowOrigins
    """Of the validation set, too: a row that a report or a log names is looked up in both."""
    lengths: RowLengths
    """Of the rows that were to be measured."""


def check_rows(
    config: Stage2Config,
    rows: Rows,
    usable: Sequence[int],
    encoder: Encoder,
    task: Task,
    seed: int,
    *,
    measured: Iterable[int],
    count: int = _NUM_SAMPLES_WANTED,
) -> CheckedRows:
    """Everything that the real template tells of the rows without the model, as a start and the doctor ask it.

    Raises:
        DatasetError, ConfigError: as ``usable_samples`` and ``check_sample`` do.
        TaskError: the task breaks on one of the rows, or on an answer to one of the samples.
    """
    origins = RowOrigins([file for files in local_files(config.swift).values() for file in files])
    with task_faults(task):
        samples = usable_samples(rows, seed, encoder, task, count, usable, origins)
        check_sample(config, encoder, task, samples[0], origins)
        task = task.learn(rows, samples[0], encoder)
        try_answers(encoder, task, samples)
        lengths = measure_lengths(config, rows, measured, encoder, task, origins)
    return CheckedRows(encoder, samples, task, origins, lengths)


def try_answers(encoder: Encoder, task: Task, samples: Sequence[Sample]) -> None:
    """Has the task correct, for each sample, silence, its true answer, half of that, and a word that answers nothing.

    While a run goes on only SampleError and MatchingError cost one sample; anything else ends channel B.
    """
    for sample in samples:
        try:
            silence, prompt = empty_rollout(sample, encoder), encoder.encode_prompt(sample)
            answer = encoder.answer_of(sample)
        except (SampleError, DatasetError):
            continue  # told elsewhere
        half = answer[: len(answer) // 2]
        for text in ("", answer, _NONSENSE, half):
            token_ids, _ = encoder.tokenise(text)
            said = {"text": text, "token_ids": token_ids, **stand_ins(len(token_ids))}
            with suppress(SampleError, MatchingError):
                make_target(replace(silence, **said, truncated=text == half), prompt, encoder, task)


@contextmanager
def task_faults(task: Task) -> Iterator[None]:
    """Tells an exception that came through the task's file as TaskError, with its last line there."""
    try:
        yield
    except Exception as error:  # raised again unless it is the task's
        file = getattr(sys.modules[type(task).__module__], "__file__", None)
        lines = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file
        ]
        if isinstance(error, Stage2Error) or not lines:
            raise
        raise TaskError(
            f"task {name_of(task)} must work on every row and answer (only SampleError and MatchingError cost one "
            "sample)",
            got=f"{type(error).__name__}: {error} ({file}:{lines[-1]})",
            remedy="mend the task",
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLengths:
    """Rows of a data set in tokens. A segment is a prompt with its true answer."""

    num_rows: int = 0
    num_unusable: int = 0
    """Further rows, which cannot be read or whose truth the task refuses."""
    num_tokens: int = 0
    """Of all segments together."""
    num_long_segments: int = 0
    """Longer than ``packing_length``."""
    num_long_answers: int = 0
    """Longer than ``max_new_tokens``."""
    longest_prompt: int = 0
    longest_segment: tuple[int, str] = (0, "")
    """Its tokens, and where its row stands."""
    longest_answer: tuple[int, str] = (0, "")
    an_unusable: str = ""
    """The place of one, and what is wrong with it."""

    @classmethod
    def merged(cls, notes: Sequence[str]) -> RowLengths:
        """Of all ranks' rows, from their notes."""
        parts = [_NOTES.validate_json(note) for note in notes]
        return cls(
            **{
                each.name: (sum if each.name.startswith("num_") else max)(
                    getattr(part, each.name) for part in parts
                )
                for each in fields(cls)
            }
        )

    def to_note(self) -> str:
        """JSON, for another rank."""
        return _NOTES.dump_json(self).decode()

    def samples_per_pack(self, capacity: int) -> float:
        """Rows that a full pack holds in the mean, one at least; of none measured, one."""
        return max(1.0, capacity * self.num_rows / self.num_tokens) if self.num_tokens else 1.0

    def troubles(self, config: Stage2Config) -> list[tuple[str, str]]:
        """Rows that do not fit, each kind with what to write."""
        packing_length, max_new_tokens = _limits(config)
        (most, told), found = _longest_answer(config), []
        needed = self.longest_prompt + most
        if self.num_unusable:
            found.append(
                (
                    f"{self.num_unusable:,} of {self.num_rows + self.num_unusable:,} rows cannot be used by channel B "
                    f"and will be quarantined, one of them {self.an_unusable}",
                    "mend them",
                )
            )
        if not self.num_long_segments and packing_length < needed:
            found.append(
                (
                    f"the longest prompt of {self.longest_prompt} tokens and {told} are more "
                    f"than packing_length {packing_length}: such samples may be quarantined",
                    f"write {_PACKING_LENGTH}: {needed} or more",
                )
            )
        never, unsaid = "can never be trained on channel B: prompt and", "have a"
        for number, (longest, place), told, limit, key in (
            (self.num_long_segments, self.longest_segment, never, packing_length, _PACKING_LENGTH),
            (self.num_long_answers, self.longest_answer, unsaid, max_new_tokens, _MAX_NEW_TOKENS),
        ):
            if number:
                limited = (
                    f"longer than {key.rpartition('.')[2]} {limit}, the longest {longest} tokens ({place})"
                )
                rows = f"{number:,} of {self.num_rows:,} rows {told} true answer {limited}"
                found.append((rows, f"write {key}: {longest} or more"))
        return found


_NOTES = TypeAdapter(RowLengths)


def _limits(config: Stage2Config) -> tuple[int, int]:
    return config.stage2_ab.channel_b.packing.packing_length, config.rollout.decoding.max_new_tokens


def _longest_answer(config: Stage2Config) -> tuple[int, str]:
    """Tokens that the model says at most, and how that is told."""
    most, turns = config.rollout.decoding.max_new_tokens, config.rollout.max_turns
    return most * turns, f"max_new_tokens {most}" + (f" * max_turns {turns}" if turns > 1 else "")


def measure_lengths(
    config: Stage2Config,
    rows: Rows,
    numbers: Iterable[int],
    encoder: Encoder,
    task: Task,
    origins: RowOrigins,
) -> RowLengths:
    """Of the rows with these ``numbers``. Those that cannot be used are counted apart."""
    ruler = _Ruler(encoder, task)
    prompts, segments, answers = list[int](), list[tuple[int, int]](), list[tuple[int, int]]()
    num_unusable, an_unusable = 0, ""
    for number in numbers:
        try:
            prompt, answer = ruler.measure(rows[number])
        except SampleError as error:
            num_unusable += 1
            an_unusable = an_unusable or f"({origins.find(rows[number])}): {error.found}"
            continue
        prompts.append(prompt)
        segments.append((prompt + answer, number))
        answers.append((answer, number))
    if not prompts:
        return RowLengths(num_unusable=num_unusable, an_unusable=an_unusable)

    def longest(lengths: Sequence[tuple[int, int]]) -> tuple[int, str]:
        length, number = max(lengths)
        return length, str(origins.find(rows[number]))

    packing_length, max_new_tokens = _limits(config)
    return RowLengths(
        num_rows=len(prompts),
        num_unusable=num_unusable,
        num_tokens=sum(length for length, _ in segments),
        num_long_segments=sum(length > packing_length for length, _ in segments),
        num_long_answers=sum(length > max_new_tokens for length, _ in answers),
        longest_prompt=max(prompts),
        longest_segment=longest(segments),
        longest_answer=longest(answers),
        an_unusable=an_unusable,
    )


class _Ruler:
    """Counts tokens; remembers what each image size costs, told by the first row with as many images."""

    def __init__(self, encoder: Encoder, task: Task) -> None:
        self._encoder = encoder
        self._task = task
        self._of_sizes: dict[Sizes, tuple[int, tuple[int, int] | None]] = {}
        self._first: dict[int, tuple[Mapping[str, Any], int]] = {}  # by number of images; tokens of its text

    def measure(self, row: Mapping[str, Any]) -> tuple[int, int]:
        """Tokens of the prompt, and of the true answer with the end of its turn.

        Raises:
            SampleError: the row cannot be used.
        """
        messages = row.get("messages")
        if (
            not isinstance(messages, list)
            or len(messages) < 2
            or not all(isinstance(turn, Mapping) for turn in messages)
        ):
            raise SampleError("a row needs messages=[{'role': ..., 'content': ...}, ...]")
        sizes = _sizes(row)
        prompt_text = "\n".join(str(turn.get("content")) for turn in messages[:-1])
        first_row, first_text = self._first.setdefault(len(sizes), (row, self._tokens(prompt_text)))
        if sizes not in self._of_sizes:
            blank = {**first_row, "images": [Image.new("RGB", size) for size in sizes], "objects": None}
            prompt = self._encoder.encode_prompt(Sample(SampleKey(0, 0, 0), blank))
            self._of_sizes[sizes] = len(prompt.token_ids), prompt.space
        num_tokens, space = self._of_sizes[sizes]
        self._task.read_truth(row)
        objects = row.get("objects") or {}
        labels = [label.strip() for label in objects.get("ref") or []]
        scaled = [_scaled(box, objects, sizes, space) for box in objects.get("bbox") or []]
        text = fill_placeholders(str(messages[-1].get("content")), list(zip(labels, scaled, strict=False)))
        answer = self._tokens(text) + len(self._encoder.closing_token_ids)
        return num_tokens + self._tokens(prompt_text) - first_text, answer

    def _tokens(self, text: str) -> int:
        return len(self._encoder.tokenise(text)[0])


def _sizes(row: Mapping[str, Any]) -> Sizes:
    images = row.get("images") or []
    return tuple(_size(image) for image in (images if isinstance(images, Sequence) else [images]))


def _size(image: Any) -> tuple[int, int]:
    try:
        if isinstance(image, Image.Image):
            return image.size
        content = image.get("bytes") if isinstance(image, Mapping) else None
        picture = look_at(content or str(path_of(image)))
    except UNREADABLE as error:
        raise SampleError(f"an image must be a readable picture: {error}") from error
    return picture.width, picture.height


def _scaled(
    box: Sequence[float], objects: Mapping[str, Any], sizes: Sizes, space: tuple[int, int] | None
) -> list[int]:
    """In the template's space, to a rounding: only the number of digits counts here."""
    if space is None or not sizes:
        width = height = wide = high = 1
    else:
        (width, height), (wide, high) = sizes[0], space
        if objects.get("bbox_type") == "norm1":
            width = height = 1
    scales = (wide / width, high / height)
    return [round(value * scales[index % 2]) for index, value in enumerate(box)]
