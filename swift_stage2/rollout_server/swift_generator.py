"""ms-swift's TransformersEngine with rows that are drawn, limited and aborted one by one; its seams for both engines.

A row's draws depend on its seed alone, so that rows of different callers share a batch without sharing randomness.
Nothing is opened by name and no checkpoint's code runs. Errors of ms-swift's templates leave as they are, per row.
Imported on the engine's thread: ms-swift takes seconds.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, NoReturn

import torch
from PIL import Image
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    dynamic_module_utils,
)

from swift_stage2.compat import declare_operators
from swift_stage2.errors import SampleError, UserError
from swift_stage2.rollout_server.engine import GenerationRequest, JobAborted
from swift_stage2.servers.image_opening import decode_image
from swift_stage2.servers.infer_wire import SamplingOptions
from swift_stage2.wire import TensorSpec

declare_operators()  # before the first import of ms-swift, which imports torchvision

from swift.infer_engine import TransformersEngine  # noqa: E402
from swift.model import get_model_processor  # noqa: E402
from swift.template.vision_utils import rescale_image  # noqa: E402
from swift.utils import import_external_file, to_device  # noqa: E402

_log = logging.getLogger(__name__)
__all__ = ["EncodedRow", "GeneratedRow", "SwiftGenerator", "import_external_file"]


def draw_uniforms(seeds: Sequence[int | None], num_steps: int, device: torch.device) -> torch.Tensor:
    """Uniform numbers in [0, 1), shape (rows, num_steps), float64; row i depends on ``seeds[i]`` only.

    Drawn on the CPU, so that a seed means the same on every device.
    """
    rows = []
    for seed in seeds:
        generator = torch.Generator()
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        rows.append(torch.rand(num_steps, dtype=torch.float64, generator=generator))
    return torch.stack(rows).to(device)


class RowSampler(LogitsProcessor):
    """Warps scores and leaves one token per row the largest: the drawn one, or the best when greedy.

    Inverse transform sampling over the cumulative probabilities. With ``uniforms`` None the choice is greedy.
    """

    def __init__(
        self, warpers: Sequence[LogitsProcessor], uniforms: torch.Tensor | None, *, with_log_probs: bool
    ) -> None:
        self._warpers = tuple(warpers)
        self._uniforms = uniforms
        self._with_log_probs = with_log_probs
        self._log_probs: list[torch.Tensor] = []
        self._step = 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        for warp in self._warpers:
            scores = warp(input_ids, scores)
        chosen = self._choose(scores)
        if self._with_log_probs:
            self._log_probs.append(torch.log_softmax(scores.float(), -1).gather(1, chosen))
        self._step += 1
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)  # type: ignore[return-value]

    def log_probs(self) -> list[list[float]] | None:
        """Per row, the log-probability of every token chosen so far under the warped distribution."""
        return torch.cat(self._log_probs, dim=1).tolist() if self._log_probs else None

    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        if self._uniforms is None:
            return scores.argmax(-1, keepdim=True)
        cumulative = torch.softmax(scores.double(), -1).cumsum(-1)
        threshold = self._uniforms[:, self._step : self._step + 1] * cumulative[:, -1:]
        return torch.searchsorted(cumulative, threshold, right=True).clamp_(max=scores.shape[-1] - 1)


class RowEnd(IntEnum):
    """Why a row ended; the names are the wire's finish reasons."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3


class RowLedger(StoppingCriteria):
    """Ends rows and remembers where: a stop token counts before the limit, the limit before an abort.

    ``lengths`` counts the tokens of a row including its stop token, so that a padding token that was really
    sampled is never mistaken for padding.
    """

    def __init__(
        self,
        *,
        prompt_length: int,
        limits: Sequence[int],
        stop_token_ids: Sequence[int],
        between_tokens: Callable[[int], Sequence[bool]],
        device: torch.device,
    ) -> None:
        self._prompt_length = prompt_length
        self._limits = torch.tensor(limits, device=device)
        self._stop_token_ids = torch.tensor(stop_token_ids, dtype=torch.long, device=device)
        self._between_tokens = between_tokens
        self._ends = torch.full((len(limits),), RowEnd.RUNNING, device=device)
        self._lengths = torch.zeros(len(limits), dtype=torch.long, device=device)

    def __call__(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **_: object
    ) -> torch.BoolTensor:
        length = input_ids.shape[1] - self._prompt_length
        running = self._ends == RowEnd.RUNNING
        stopped = torch.isin(input_ids[:, -1], self._stop_token_ids)
        aborted = torch.tensor(self._between_tokens(length), device=stopped.device)
        end = torch.where(aborted, RowEnd.ABORT, RowEnd.RUNNING)
        end = torch.where(self._limits <= length, RowEnd.LENGTH, end)
        end = torch.where(stopped, RowEnd.STOP, end)
        self._ends = torch.where(running, end, self._ends)
        self._lengths = torch.where(running, length, self._lengths)
        return self._ends != RowEnd.RUNNING  # type: ignore[return-value]

    def ends(self) -> list[tuple[int, RowEnd]]:
        """Length in tokens and reason of every row."""
        return [
            (length, RowEnd(end))
            for length, end in zip(self._lengths.tolist(), self._ends.tolist(), strict=True)
        ]


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """One conversation as the model reads it, with the most tokens that it may add."""

    inputs: dict[str, Any]
    template_inputs: Any
    prompt_token_ids: tuple[int, ...]
    images_size: tuple[tuple[int, int], ...]
    limit: int
    seed: int | None


@dataclass(frozen=True, slots=True)
class GeneratedRow:
    """The tokens as they were sampled: the stop token is included, as vLLM and so the stock server do."""

    text: str
    token_ids: tuple[int, ...]
    end: RowEnd
    log_probs: tuple[float, ...] | None


class SwiftGenerator(TransformersEngine):  # type: ignore[misc]
    """The model and its template. Loading follows ms-swift; sampling and stopping are per row."""

    def prepare(self) -> None:
        """Sets what every call relies on: inference mode of the template, eval mode of the model."""
        self.model.eval()
        self.template.set_mode("transformers")
        seal_template(self.template)
        if self.template.use_model:
            self.template.model = self.model

    def encode_row(
        self, request: GenerationRequest, is_aborted: Callable[[], bool] = lambda: False
    ) -> EncodedRow:
        """Encodes one conversation. ``is_aborted`` is asked before every image.

        Raises:
            JobAborted: it was true.
            SampleError: an image that is none, or no room for a token.
            Exception: whatever ms-swift's template raises on data it cannot encode.
        """
        conversation = {**request.conversation, "images": decode_images(request, is_aborted, self.template)}
        inputs = self.template.encode(conversation, return_template_inputs=True)
        template_inputs = inputs.pop("template_inputs")
        prompt = tuple(inputs["input_ids"])
        room = (self.max_model_len or len(prompt)) - len(prompt)
        if room <= 0:
            raise SampleError(
                "a prompt must leave room for one token",
                got=f"prompt_tokens={len(prompt)} max_model_len={self.max_model_len}",
                remedy="shorten it or shrink its images",
            )
        limit = room if request.max_new_tokens is None else min(request.max_new_tokens, room)
        sizes = tuple(image.size for image in template_inputs.images if isinstance(image, Image.Image))
        return EncodedRow(inputs, template_inputs, prompt, sizes, limit, _row_seed(request))

    @torch.inference_mode()
    def generate_rows(
        self,
        rows: Sequence[EncodedRow],
        sampling: SamplingOptions,
        between_tokens: Callable[[int], Sequence[bool]],
    ) -> list[GeneratedRow]:
        """Generates one batch. ``between_tokens`` is told after each how many there are; it may change the weights, and
        says which rows nobody waits for any more."""
        batch = to_device(self.template.data_collator([dict(row.inputs) for row in rows]), self.model.device)
        if self.model_meta.is_multimodal:
            _, batch = self.template.pre_forward_hook(self.model, None, batch)
        batch.pop("labels", None)
        num_prompt = batch["input_ids"].shape[1] if "input_ids" in batch else 0
        longest = max(row.limit for row in rows)
        ledger = RowLedger(
            prompt_length=num_prompt,
            limits=[row.limit for row in rows],
            stop_token_ids=self._stop_ids(),
            between_tokens=between_tokens,
            device=self.model.device,
        )
        warpers = self._warpers(sampling)
        seeds = [row.seed for row in rows]
        uniforms = None if warpers is None else draw_uniforms(seeds, longest, self.model.device)
        sampler = RowSampler(warpers or (), uniforms, with_log_probs=bool(sampling.logprobs))
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=longest,
            do_sample=False,  # RowSampler draws
            repetition_penalty=self._setting(sampling, "repetition_penalty") or 1.0,
            eos_token_id=self._stop_ids(),
            pad_token_id=self.tokenizer.pad_token_id,
        )
        arguments = self.template.prepare_generate_kwargs(
            {"generation_config": config, **batch}, model=self.model
        )
        arguments["stopping_criteria"] = StoppingCriteriaList([ledger])
        arguments["logits_processor"] = LogitsProcessorList([sampler])
        sequences = self.template.generate(self.model, **arguments)[:, num_prompt:].tolist()
        log_probs = sampler.log_probs()
        generated = []
        for i, (row, (length, end)) in enumerate(zip(rows, ledger.ends(), strict=True)):
            tokens = sequences[i][:length]
            text = self.template.decode_generate_ids(tokens, template_inputs=row.template_inputs)
            drawn = tuple(log_probs[i][:length]) if log_probs else None
            generated.append(GeneratedRow(text, tuple(tokens), end, drawn))
        return generated

    def _warpers(self, sampling: SamplingOptions) -> list[LogitsProcessor] | None:
        """None when greedy."""
        if sampling.temperature is None and not getattr(self.generation_config, "do_sample", False):
            return None
        temperature, top_k, top_p = (
            self._setting(sampling, name) for name in ("temperature", "top_k", "top_p")
        )
        if temperature == 0:
            return None
        warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(float(temperature or 1.0))]
        if top_k is not None and top_k > 0:
            warpers.append(TopKLogitsWarper(top_k))
        if top_p is not None and top_p < 1:
            warpers.append(TopPLogitsWarper(top_p))
        return warpers

    def _setting(self, sampling: SamplingOptions, name: str) -> Any:
        """Settings that a request does not give are those of the model's generation config."""
        given = getattr(sampling, name)
        return getattr(self.generation_config, name, None) if given is None else given

    def _stop_ids(self) -> list[int]:
        """The model's end tokens and the template's stop words, as vLLM is given them by ms-swift."""
        configured = getattr(self.generation_config, "eos_token_id", None)
        ends = [configured] if isinstance(configured, int) else list(configured or [])
        stop_words = self._get_stop_token_ids(self.template.template_meta.stop_words)
        return sorted({*ends, self.tokenizer.eos_token_id, *stop_words} - {None})


def _row_seed(request: GenerationRequest) -> int | None:
    """Mixes the call's seed with the conversation: one call's rows must not all draw the same numbers."""
    if request.seed is None:
        return None
    text = json.dumps([request.seed, request.conversation], sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


# --- seams to ms-swift that both engines use -----------------------------------------------------
def decode_images(
    request: GenerationRequest, is_aborted: Callable[[], bool], template: Any
) -> list[Image.Image]:
    """The request's images as RGB, each shrunk as ``template`` would before the next is decoded.

    Raises:
        JobAborted: ``is_aborted``.
        SampleError: one is no image.
    """
    images = []
    max_pixels = (
        None if request.conversation.get("objects") else template.max_pixels
    )  # boxes are of the whole image
    for image in request.conversation.get("images", ()):
        if is_aborted():
            raise JobAborted
        images.append(rescale_image(decode_image(image), max_pixels))
    return images


def seal_template(template: Any) -> None:
    """Changes this one template, in place: pictures are the only images, tags stay text, encoding is tried once."""
    template._load_image = _only_pictures
    template._replace_image_tags = lambda inputs: None
    # ms-swift encodes up to three times; an error of the data comes back every time. Its other wrapper is this one.
    template.encode = torch.inference_mode()(partial(inspect.unwrap(type(template).encode), template))


def _only_pictures(image: Any, load_images: bool) -> Image.Image:
    if not isinstance(image, Image.Image):
        raise SampleError("a request's images are opened before they are encoded", got="one by name")
    return image


def refuse_foreign_code() -> None:
    """From now on, a checkpoint that wants to run code of its own raises UserError in this process.

    Called before a model is loaded. ms-swift names ``trust_remote_code=True`` in many places, and warns of it in its
    log, where it would not be true; whatever they say, transformers loads such code here.
    """
    logging.getLogger("swift").addFilter(lambda record: "trust_remote_code=True" not in record.getMessage())
    _log.info("Python that the checkpoint brings is refused; --trust-remote-code would run it")
    dynamic_module_utils.get_class_in_module = _refuse
    dynamic_module_utils.get_cached_module_file = _refuse


def _refuse(*arguments: object, **_: object) -> NoReturn:
    raise UserError(
        "a checkpoint may not bring its own code",
        got=str(arguments[0]),
        remedy="read that code, then start the server with --trust-remote-code",
    )


def checkpoint_manifest(model_dir: str, model_type: str, dtype: torch.dtype) -> tuple[TensorSpec, ...]:
    """Name, shape and dtype of every parameter as the learner names it, tied weights once; floats in ``dtype``.

    The model is built as ms-swift builds the learner's, on the meta device: an engine that fuses parameters cannot
    tell.
    """
    with torch.device("meta"):
        model, _ = get_model_processor(model_dir, model_type=model_type, return_dummy_model=True)
    kinds = {name: dtype if p.is_floating_point() else p.dtype for name, p in model.named_parameters()}
    return tuple(
        TensorSpec(name, tuple(parameter.shape), str(kinds[name]).removeprefix("torch."))
        for name, parameter in model.named_parameters()
    )
