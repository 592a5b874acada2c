"""Asks a running server for answers to all rows, and turns its boxes into pixels of the stored images.

The model's own template says what the prompt is and what boxes are measured in. A server that reads another prompt is
refused: it would resize images in another way, and every box would be off. Log-probabilities are asked for, and an
answer without them, or of several turns, gives no scores. A row that the server refuses or that the
template cannot take is told and counted; a server that is lost ends the command. Every call has its deadline.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from swift_stage2.channel_b.dialects import Dialect
from swift_stage2.channel_b.encoding import Encoder, PromptEncoding
from swift_stage2.channel_b.object_scores import object_log_probs
from swift_stage2.channel_b.parsing import parse_rollout
from swift_stage2.channel_b.rollouts.requests import PostEnd, PostResult
from swift_stage2.channel_b.rollouts.routes import InferRoute, route_to
from swift_stage2.columns import LOG_PROBS
from swift_stage2.config import DecodingConfig, RolloutConfig
from swift_stage2.data.picture import UNREADABLE, look_at
from swift_stage2.data.prediction import FAILED, LabelledBoxes, Prediction, TrueRow, in_pixels
from swift_stage2.errors import SampleError, ServerUnavailable, UserError
from swift_stage2.evaluate.served_model import of_server_alone, require_answer
from swift_stage2.records import Sample, SampleKey
from swift_stage2.runtime.output import say
from swift_stage2.servers import infer_wire
from swift_stage2.servers.session import Deadline, run

_SEED = 1
_BUSY_PAUSE_S = 1.0
_MOST_TOLD = 5
_OF_THE_REQUEST = (PostEnd.ERROR_ANSWER, PostEnd.TIMED_OUT)


@dataclass(frozen=True, kw_only=True, slots=True)
class AskingSettings:
    """How rows are asked. ``timeout_s`` bounds every call, ``num_in_flight`` the rows that are out at once."""

    dialect: Dialect
    max_new_tokens: int
    timeout_s: float
    num_in_flight: int
    temperature: float = 0.0
    on_answer: Callable[[TrueRow, PromptEncoding, str], None] = lambda row, prompt, answer: None
    """Is told every answer as it arrives."""


@contextmanager
def model_encoder(model: str, data: Path, swift: Mapping[str, Any]) -> Iterator[Encoder]:
    """The template of ``model`` as the learner has it; ``swift`` are further arguments of ms-swift.

    Of a run's checkpoint ms-swift reads what the run was given: plugins, kind, template.

    Raises:
        ConfigError: ms-swift refuses an argument.
    """
    asked = {key: value for key, value in swift.items() if key not in of_server_alone(swift)}
    arguments = {
        "check_model": False,
        "load_args": True,
        **asked,
        "model": model,
        "dataset": [os.fspath(data)],
    }
    from swift_stage2.checks.preparation import prepare_learner  # loads ms-swift
    from swift_stage2.checks.swift_parsing import OPTION

    with TemporaryDirectory(prefix="swift-stage2-evaluate-") as scratch:
        prepared = prepare_learner(arguments, Path(scratch), with_weights=False, where=OPTION)
        yield Encoder(prepared.template, packing_length=1)


def ask_server(
    base_url: str,
    rows: Sequence[TrueRow],
    encoder: Encoder,
    questions: AskingSettings,
    on_progress: Callable[[int], None] = lambda num_done: None,
) -> list[Prediction]:
    """One prediction per row. Of one that brought no answer ``finish_reason`` is ``FAILED``.

    Raises:
        ConfigError: ``base_url`` is none.
        ServerUnavailable: the server does not answer, is lost, refuses the key, or answers no row at all.
        UserError: it reads other prompts than the model's template writes.
    """
    info, key = require_answer(base_url), RolloutConfig().api_key()
    route = partial(route_to, base_url, info.chat_model, api_key=key)
    return _Asking(route, encoder, questions, on_progress).run(rows)


@dataclass(frozen=True, slots=True)
class _AskedRow:
    row: TrueRow
    size: tuple[int, int]
    request: dict[str, Any]
    prompt: PromptEncoding


@dataclass(slots=True)
class _Asking:
    """One run over all rows; it encodes and reads answers while calls are out."""

    make_route: Callable[[], InferRoute]
    encoder: Encoder
    questions: AskingSettings
    on_progress: Callable[[int], None]
    answered: dict[int, Prediction] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    num_late: int = 0
    """Calls, one after the other, that their deadline ended."""

    def run(self, rows: Sequence[TrueRow]) -> list[Prediction]:
        run(self._ask_all(rows))
        if len(self.failures) == len(rows):
            raise ServerUnavailable(f"no row was answered, the first because: {self.failures[0]}")
        for told in self.failures[:_MOST_TOLD]:
            say(told, is_error=True)
        return [self.answered[row.number] for row in rows]

    async def _ask_all(self, rows: Sequence[TrueRow]) -> None:
        route, room = self.make_route(), asyncio.Semaphore(self.questions.num_in_flight)
        try:
            async with asyncio.TaskGroup() as calls:
                for row in rows:
                    await room.acquire()  # deadline: a call's own
                    calls.create_task(self._ask(route, row, room))
                    await asyncio.sleep(0)  # the call leaves before the next row is encoded
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _ask(self, route: InferRoute, row: TrueRow, room: asyncio.Semaphore) -> None:
        try:
            if (question := self._prepare(row)) is not None:
                self._take(question, await self._post(route, question))
        finally:
            room.release()
            self.on_progress(len(self.answered))

    def _prepare(self, row: TrueRow) -> _AskedRow | None:
        size = (1, 1)
        try:
            picture = look_at(row.image)
            size = picture.width, picture.height
            sample = Sample(SampleKey(0, row.number, row.number), row.row)
            request = self.encoder.request(sample)
            return _AskedRow(row, size, request, self.encoder.encode_prompt(sample))
        except (SampleError, *UNREADABLE) as error:
            self._fail(row, size, str(error))
            return None

    async def _post(self, route: InferRoute, question: _AskedRow) -> PostResult:
        """A server without room is asked again until the call's time is over."""
        asked = self.questions
        decoding = DecodingConfig(temperature=asked.temperature, max_new_tokens=asked.max_new_tokens)
        config = infer_wire.request_config(**asdict(decoding), seed=_SEED, columns=[LOG_PROBS])
        deadline = Deadline(asked.timeout_s)
        while True:
            result = await route.generate(
                [question.request], config, timeout_s=deadline.remaining_s(), may_lack=[LOG_PROBS.name]
            )
            if result.end is not PostEnd.BUSY or deadline.expired:
                return result
            await asyncio.sleep(_BUSY_PAUSE_S)

    def _take(self, question: _AskedRow, result: PostResult) -> None:
        if result.end is PostEnd.ANSWERED:
            self.num_late = 0
            (completion,) = result.completions
            self.answered[question.row.number] = self._read(question, completion)
            return
        if result.end not in _OF_THE_REQUEST:
            raise ServerUnavailable("the server must answer to the end", got=result.reason)
        self.num_late = self.num_late + 1 if result.end is PostEnd.TIMED_OUT else 0
        if self.num_late >= max(2, self.questions.num_in_flight):  # every other row would wait as long
            raise ServerUnavailable(
                "the server must answer to the end",
                got=f"{self.num_late} calls in a row without an answer: {result.reason}",
            )
        self._fail(question.row, question.size, result.reason)

    def _read(self, question: _AskedRow, completion: infer_wire.Completion) -> Prediction:
        prompt, (width, height) = question.prompt, question.size
        if completion.prompt_token_ids != prompt.token_ids:
            raise UserError(
                "the server must read a prompt as the template of --model writes it, or its boxes mean other places",
                got=f"{len(completion.prompt_token_ids)} tokens there and {len(prompt.token_ids)} here for row "
                f"{question.row.number} of {width} x {height} pixels",
                remedy="give both sides one model, template and pixel limits (MAX_PIXELS, --swift max_pixels=N)",
            )
        self.questions.on_answer(question.row, prompt, completion.text)
        found = parse_rollout(completion.text, self.questions.dialect).counted
        log_probs = object_log_probs(
            [each.places for each in found],
            completion.text,
            completion.token_ids,
            None if completion.turns else completion.log_probs,
            self.encoder.decode,
        )
        return Prediction(
            image=question.row.image,
            width=width,
            height=height,
            objects=in_pixels(
                [(each.label, each.box) for each in found], prompt.space or question.size, question.size
            ),
            log_probs=log_probs,
            answer=completion.text,
            finish_reason=completion.finish_reason,
        )

    def _fail(self, row: TrueRow, size: tuple[int, int], reason: str) -> None:
        told = f"row {row.number} ({row.image}) has no answer: {reason}"
        self.failures.append(" ".join(told.split()))
        self.answered[row.number] = Prediction(
            image=row.image, width=size[0], height=size[1], objects=LabelledBoxes(), finish_reason=FAILED
        )
