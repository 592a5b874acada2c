"""Rows as the real template sees them: a few usable ones to check settings on, and the length of every one in tokens.

What the template makes of text and of each image size is asked of it once; rows with the same sizes share the answer.
Exact: answers, image tokens, the prompt that most rows share. A prompt of another text is tokenised alone, which may
differ by a token where it meets the template's own text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from PIL import Image

from swift_stage2.channel_b.answer_templates import fill_placeholders
from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.sample_source import RowOrigins, SampleSource
from swift_stage2.channel_b.task import Rows, Task
from swift_stage2.checks.task_trial import task_faults, try_answers
from swift_stage2.config import Stage2Config
from swift_stage2.data.files import local_files
from swift_stage2.data.picture import UNREADABLE, look_at, path_of
from swift_stage2.errors import ConfigError, DatasetError, SampleError
from swift_stage2.records import Sample, SampleKey

MOST_LOOKED_AT = 64
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
    for key in source.draw(min(MOST_LOOKED_AT, len(rows if usable is None else usable))):
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


def check_samples(
    config: Stage2Config,
    encoder: Encoder,
    task: Task,
    samples: list[Sample],
    origins: RowOrigins | None = None,
) -> None:
    """Checks what only the real template and tokenizer can tell about the data and the settings.

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
            "channel A must be able to train the data set's rows",
            got=f"{error} ({(origins or RowOrigins()).find(samples[0].row)})",
            remedy="mend them",
        ) from error
    task.check_answer(answer, truth, encoder.normalise)
    needed = len(prompt.token_ids) + config.rollout.decoding.max_new_tokens
    packing_length = config.stage2_ab.channel_b.packing.packing_length
    if packing_length < needed:
        raise ConfigError(
            "stage2_ab.channel_b.packing.packing_length must hold a prompt and its answer",
            got=f"packing_length={packing_length} < prompt {len(prompt.token_ids)} + max_new_tokens "
            f"{config.rollout.decoding.max_new_tokens}",
            remedy=f"write packing_length: {needed} or more",
        )


_NUM_PROMPTS = 256  # distinct ones that are encoded by the template itself

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
        DatasetError, ConfigError: as ``usable_samples`` and ``check_samples`` do.
        TaskError: the task breaks on one of the rows, or on an answer to one of the samples.
    """
    origins = RowOrigins([file for files in local_files(config.swift).values() for file in files])
    with task_faults(task):
        samples = usable_samples(rows, seed, encoder, task, count, usable, origins)
        check_samples(config, encoder, task, samples, origins)
        task = task.learn(rows, samples[0], encoder)
        try_answers(encoder, task, samples)
        lengths = measure_lengths(config, rows, measured, encoder, task, origins)
    return CheckedRows(encoder, samples, task, origins, lengths)


@dataclass(frozen=True, slots=True)
class Excess:
    """Rows that are longer than a limit. ``longest`` of all rows measured, and where it stands."""

    limit: int
    num_rows: int
    longest: int
    place: str

    def merged(self, other: Excess) -> Excess:
        larger = max((self, other), key=lambda part: part.longest)
        return Excess(self.limit, self.num_rows + other.num_rows, larger.longest, larger.place)


@dataclass(frozen=True, slots=True)
class RowLengths:
    """``segments``: prompt and true answer against packing_length; ``answers``: the latter against max_new_tokens."""

    num_rows: int
    segments: Excess
    answers: Excess
    num_unusable: int = 0
    """Further rows, which cannot be read or whose truth the task refuses."""
    first_unusable: str = ""
    shortest_prompt: int = 0
    """Tokens; 0 of no rows."""
    longest_prompt: int = 0
    num_tokens: int = 0
    """Of all prompts and true answers together."""

    def merged(self, other: RowLengths) -> RowLengths:
        return RowLengths(
            self.num_rows + other.num_rows,
            self.segments.merged(other.segments),
            self.answers.merged(other.answers),
            self.num_unusable + other.num_unusable,
            self.first_unusable or other.first_unusable,
            min(filter(None, (self.shortest_prompt, other.shortest_prompt)), default=0),
            max(self.longest_prompt, other.longest_prompt),
            self.num_tokens + other.num_tokens,
        )

    def samples_per_pack(self, capacity: int) -> float:
        """Rows that a full pack holds in the mean, one at least; of none measured, one."""
        return max(1.0, capacity * self.num_rows / self.num_tokens) if self.num_tokens else 1.0

    @property
    def troubles(self) -> list[tuple[str, str]]:
        """Rows that do not fit, each kind with what to write."""
        segments, answers, found = self.segments, self.answers, []
        if self.num_unusable:
            found.append(
                (
                    f"{self.num_unusable:,} of {self.num_rows + self.num_unusable:,} rows cannot be used by channel B "
                    f"and will be quarantined, one of them {self.first_unusable}",
                    "mend them",
                )
            )
        if not segments.num_rows and segments.limit < (needed := self.longest_prompt + answers.limit):
            found.append(
                (
                    f"the longest prompt of {self.longest_prompt} tokens and max_new_tokens {answers.limit} are more "
                    f"than packing_length {segments.limit}: such samples may be quarantined",
                    f"write stage2_ab.channel_b.packing.packing_length: {needed} or more",
                )
            )
        for excess, told, key in (
            (
                segments,
                "can never be trained on channel B: prompt and true answer are longer than packing_length",
                "stage2_ab.channel_b.packing.packing_length",
            ),
            (
                answers,
                "have a true answer that no rollout can say, longer than max_new_tokens",
                "rollout.decoding.max_new_tokens",
            ),
        ):
            if excess.num_rows:
                rows = f"{excess.num_rows:,} of {self.num_rows:,} rows"
                longest = f"the longest {excess.longest} tokens ({excess.place})"
                found.append(
                    (f"{rows} {told} {excess.limit}, {longest}", f"write {key}: {excess.longest} or more")
                )
        return found

    def to_note(self) -> str:
        """JSON, for another rank."""
        return json.dumps(asdict(self))

    @classmethod
    def from_note(cls, note: str) -> RowLengths:
        data = json.loads(note)
        return cls(**data | {name: Excess(**data[name]) for name in ("segments", "answers")})


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
    limits = config.stage2_ab.channel_b.packing.packing_length, config.rollout.decoding.max_new_tokens
    total = RowLengths(0, Excess(limits[0], 0, 0, ""), Excess(limits[1], 0, 0, ""))
    for number in numbers:
        try:
            prompt, answer = ruler.measure(rows[number])
        except SampleError as error:
            first = total.first_unusable or f"({origins.find(rows[number])}): {error.found}"
            total = replace(total, num_unusable=total.num_unusable + 1, first_unusable=first)
            continue
        lengths = zip(limits, (prompt + answer, answer), strict=True)
        segment, said = (Excess(limit, int(length > limit), length, str(number)) for limit, length in lengths)
        total = total.merged(RowLengths(1, segment, said, 0, "", prompt, prompt, prompt + answer))
    if not total.num_rows:
        return total
    segments, answers = (
        replace(excess, place=str(origins.find(rows[int(excess.place)])))
        for excess in (total.segments, total.answers)
    )
    return replace(total, segments=segments, answers=answers)


class _Ruler:
    """Remembers what each prompt and each image size costs."""

    def __init__(self, encoder: Encoder, task: Task) -> None:
        self._encoder = encoder
        self._task = task
        self._of_sizes: dict[Sizes, tuple[int, tuple[int, int] | None]] = {}
        self._of_prompt: dict[str, int] = {}
        self._first: tuple[Mapping[str, Any], Sizes, int, int] | None = (
            None  # its row, sizes, tokens, text tokens
        )

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
        num_prompt, space = self._prompt(row, sizes)
        self._task.read_truth(row)
        objects = row.get("objects") or {}
        labels = [label.strip() for label in objects.get("ref") or []]
        scaled = [_scaled(box, objects, sizes, space) for box in objects.get("bbox") or []]
        text = fill_placeholders(str(messages[-1].get("content")), list(zip(labels, scaled, strict=False)))
        answer, _ = self._encoder.tokenise(text)
        return num_prompt, len(answer) + len(self._encoder.closing_token_ids)

    def _prompt(self, row: Mapping[str, Any], sizes: Sizes) -> tuple[int, tuple[int, int] | None]:
        text = "\n".join(str(turn.get("content")) for turn in row["messages"][:-1])
        if self._first is None:
            num_tokens, space = self._encode(row, sizes)
            self._of_sizes[sizes], self._of_prompt[text] = (num_tokens, space), 0
            self._first = (row, sizes, num_tokens, self._text_tokens(text))
        first_row, first_sizes, first_tokens, first_text_tokens = self._first
        if sizes not in self._of_sizes:
            if len(sizes) == len(first_sizes):
                self._of_sizes[sizes] = self._encode(first_row, sizes)
            else:  # another number of tags in the prompt
                return self._encode(row, sizes)
        num_tokens, space = self._of_sizes[sizes]
        more = self._of_prompt.get(text)
        if more is None:
            if len(self._of_prompt) < _NUM_PROMPTS and len(sizes) == len(first_sizes):
                more = self._of_prompt[text] = self._encode(row, first_sizes)[0] - first_tokens
            else:
                more = self._text_tokens(text) - first_text_tokens
        return num_tokens + more, space

    def _encode(self, row: Mapping[str, Any], sizes: Sizes) -> tuple[int, tuple[int, int] | None]:
        """The prompt of ``row`` with blank images of these sizes."""
        blank = {**row, "images": [Image.new("RGB", size) for size in sizes], "objects": None}
        sample = Sample(SampleKey(0, 0, 0), blank)
        encoded = self._encoder.encode_prompt(sample)
        return len(encoded.token_ids), encoded.space

    def _text_tokens(self, text: str) -> int:
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
