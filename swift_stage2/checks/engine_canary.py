"""One greedy question at every round, answered by ms-swift's own engine on the learner's module."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from swift.infer_engine import InferRequest, RequestConfig, TransformersEngine

from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.records import Sample
from swift_stage2.servers import protocol
from swift_stage2.weights.proof import HALF_PRECISION_TIE_NATS, CanaryAnswer

HALF_PRECISION_DTYPES = (torch.float16, torch.bfloat16)
_CANARY_TOKENS = 16
_CANARY_ALTERNATIVES = 8


class EngineCanary:
    """The ``Canary`` of a sync round.

    ``half_precision``: the module computes in 16 bits, so that near ties count as the same answer.
    """

    def __init__(
        self, module: Any, template: Any, encoder: Encoder, sample: Sample, *, half_precision: bool
    ) -> None:
        self._module = module
        self._template = template
        self.request: dict[str, Any] = encoder.request(sample)
        self.config = protocol.greedy_config(_CANARY_TOKENS)
        self._closing = encoder.closing_token_ids
        # Of its own: answers are compared while training tokenises, and a fast tokenizer is not for two threads.
        self._decode = copy.deepcopy(template.tokenizer).decode
        self._tie_nats = HALF_PRECISION_TIE_NATS if half_precision else 0.0
        self._answer = CanaryAnswer()
        self._engine: TransformersEngine | None = None

    def answer(self) -> None:
        """Generates under the present weights; mode, gradients and random state are left as they were."""
        model = self._module
        was_training = model.training
        devices = [model.device] if model.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices), self._template.generate_context():
                if self._engine is None:
                    self._engine = TransformersEngine(model, template=self._template, max_batch_size=1)
                (response,) = self._engine.infer(
                    [InferRequest(**self.request)],
                    RequestConfig(**self.config, logprobs=True, top_logprobs=_CANARY_ALTERNATIVES),
                    use_tqdm=False,
                )
        finally:
            model.train(was_training)
        (choice,) = response.choices
        self._answer = CanaryAnswer(
            self._without_closing(choice.token_ids),
            tuple(
                {token["token"]: token["logprob"] for token in position["top_logprobs"]}
                for position in (choice.logprobs or {}).get("content", ())
            ),
            self._tie_nats,
        )

    def agrees(self, token_ids: Sequence[int]) -> bool:
        """Whether a server gave the learner's own answer; engines differ in showing the end of turn."""
        end = self._decode(self._closing[0])
        return self._answer.agrees(self._without_closing(token_ids), self._decode, end)

    def _without_closing(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        tokens = tuple(token_ids)
        for length in range(len(self._closing), 0, -1):
            if tokens[-length:] == self._closing[:length]:
                return tokens[:-length]
        return tokens
