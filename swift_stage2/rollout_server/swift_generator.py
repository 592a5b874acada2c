"""ms-swift's TransformersEngine with rows that are drawn, limited and aborted one by one.

Encodes one conversation (any thread) and generates one batch of encoded rows (the engine thread only). The
one file of the server that knows ms-swift; errors of its templates leave it as they are, per row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from swift_stage2.compat import declare_operators
from swift_stage2.errors import SampleError
from swift_stage2.rollout_server.jobs import GenerationRequest, Sampling
from swift_stage2.rollout_server.row_sampling import RowEnd, RowLedger, RowSampler, draw_uniforms
from swift_stage2.rollout_server.swift_seams import decode_images, seal_template

declare_operators()  # before the first import of ms-swift, which imports torchvision

from swift.infer_engine import TransformersEngine  # noqa: E402
from swift.template.utils import StopWordsCriteria  # noqa: E402
from swift.utils import import_external_file, to_device  # noqa: E402

__all__ = ["EncodedRow", "GeneratedRow", "SwiftGenerator", "import_external_file"]


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """One conversation as the model reads it, with the most tokens that it may still add."""

    inputs: dict[str, Any]
    template_inputs: Any
    prompt_token_ids: tuple[int, ...]
    images_size: tuple[tuple[int, int], ...]
    limit: int
    seed: int | None


@dataclass(frozen=True, slots=True)
class GeneratedRow:
    """What was sampled, verbatim: the stop token is included, as vLLM and so the stock server do."""

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
            SampleError: an image that is none, or a prompt that leaves no room for a token.
            Exception: whatever ms-swift's template raises on data it cannot encode.
        """
        conversation = {**request.conversation, "images": decode_images(request, is_aborted)}
        inputs = self.template.encode(conversation, return_template_inputs=True)
        template_inputs = inputs.pop("template_inputs")
        prompt = tuple(inputs["input_ids"])
        room = (self.max_model_len or len(prompt)) - len(prompt)
        if room <= 0:
            raise SampleError(
                f"a prompt must leave room for one token, got prompt_tokens={len(prompt)} "
                f"max_model_len={self.max_model_len}; shorten it or shrink its images"
            )
        limit = room if request.max_new_tokens is None else min(request.max_new_tokens, room)
        sizes = tuple(image.size for image in template_inputs.images if isinstance(image, Image.Image))
        return EncodedRow(inputs, template_inputs, prompt, sizes, limit, _row_seed(request))

    @torch.inference_mode()
    def generate_rows(
        self,
        rows: Sequence[EncodedRow],
        sampling: Sampling,
        *,
        with_log_probs: bool,
        aborted: Callable[[], Sequence[bool]],
    ) -> list[GeneratedRow]:
        """Generates one batch. ``aborted`` is asked after every token."""
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
            stop_words=StopWordsCriteria(self.tokenizer, list(sampling.stop)) if sampling.stop else None,
            aborted=aborted,
            device=self.model.device,
        )
        warpers = self._warpers(sampling)
        seeds = [row.seed for row in rows]
        uniforms = None if warpers is None else draw_uniforms(seeds, longest, self.model.device)
        sampler = RowSampler(warpers or (), uniforms, with_log_probs=with_log_probs)
        penalty = sampling.repetition_penalty
        if penalty is None:
            penalty = getattr(self.generation_config, "repetition_penalty", None) or 1.0
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=longest,
            do_sample=False,  # RowSampler draws
            repetition_penalty=penalty,
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
        for i, (length, end) in enumerate(ledger.ends()):
            tokens = sequences[i][:length]
            text = self.template.decode_generate_ids(tokens, template_inputs=rows[i].template_inputs)
            generated.append(
                GeneratedRow(text, tuple(tokens), end, tuple(log_probs[i][:length]) if log_probs else None)
            )
        return generated

    def _warpers(self, sampling: Sampling) -> list[LogitsProcessor] | None:
        """None when greedy. What a request leaves open comes from the model's generation config."""
        default = self.generation_config
        samples_by_default = bool(getattr(default, "do_sample", False))
        temperature = sampling.temperature
        if temperature is None:
            temperature = (getattr(default, "temperature", None) or 1.0) if samples_by_default else 0.0
        if temperature == 0:
            return None
        top_k = sampling.top_k if sampling.top_k is not None else getattr(default, "top_k", None)
        top_p = sampling.top_p if sampling.top_p is not None else getattr(default, "top_p", None)
        warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(float(temperature))]
        if top_k is not None and top_k > 0:
            warpers.append(TopKLogitsWarper(top_k))
        if top_p is not None and top_p < 1:
            warpers.append(TopPLogitsWarper(top_p))
        return warpers

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
