"""ms-swift's own pipeline up to where training would begin: arguments, processor, template, rows, and the model.

The one file of the doctor that knows ms-swift. It leaves out steps that need the ranks of
torchrun or write into the run directory, and builds everything that a server is compared with as the trainer does.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from swift_stage2.compat import declare_operators

declare_operators()  # before ms-swift imports torchvision

import torch  # noqa: E402
from swift.dataset import DatasetLoader  # noqa: E402
from swift.infer_engine import InferRequest, RequestConfig, TransformersEngine  # noqa: E402
from swift.pipelines import SwiftSft  # noqa: E402
from swift.pipelines.utils import get_cached_dataset  # noqa: E402
from torch import nn  # noqa: E402

from swift_stage2.channel_b.encoding import Encoder  # noqa: E402
from swift_stage2.checks.swift_parsing import SECTION, parse_swift_arguments  # noqa: E402
from swift_stage2.config.swift_arguments import as_argv  # noqa: E402
from swift_stage2.records import Sample  # noqa: E402
from swift_stage2.servers import infer_wire  # noqa: E402
from swift_stage2.weights.proof import HALF_PRECISION_TIE_NATS, CanaryAnswer  # noqa: E402

# These need the ranks that torchrun starts; none of them changes what is loaded.
_NEEDS_RANKS = ("ddp_backend", "deepspeed", "fsdp")
HALF_PRECISION_DTYPES = (torch.float16, torch.bfloat16)
_CANARY_TOKENS = 16
_CANARY_ALTERNATIVES = 8


class LearnerPreparation(SwiftSft):  # type: ignore[misc]
    """The state that the trainer would start from. Without weights it holds processor and template only."""

    def __init__(self, arguments: Any, *, with_weights: bool) -> None:
        self._with_weights = with_weights
        super().__init__(arguments)

    def _prepare_model_tokenizer(self, **options: Any) -> None:
        super()._prepare_model_tokenizer(load_model=self._with_weights, **options)

    @property
    def model_directory(self) -> Path:
        """Where the model's files are on this machine."""
        return Path(self.args.model_dir)

    @property
    def gradient_accumulation_steps(self) -> int:
        """As written, or what ms-swift chooses on one rank."""
        return int(self.args.training_args.gradient_accumulation_steps)

    @cached_property
    def row_sets(self) -> tuple[Any, Any]:
        """Training rows, which channel B draws from, too, and validation rows, if any, as ms-swift reads them."""
        given = self.args.dataset or self.args.val_dataset
        train, validation = (
            DatasetLoader.concat_datasets([*cached, *([] if read is None else [read])])
            for cached, read in zip(
                get_cached_dataset(self.args), self._get_dataset() if given else (None, None), strict=True
            )
        )
        return train, validation or ()

    def module(self) -> nn.Module:
        """The model as a sync round exports it: with its adapter, if it is tuned by one."""
        module: nn.Module = self.prepare_model(
            self.args, self.model, template=self.template, train_dataset=None
        )
        return module.eval()

    def canary(self, module: nn.Module, encoder: Encoder, sample: Sample) -> EngineCanary:
        half_precision = self.args.torch_dtype in HALF_PRECISION_DTYPES
        return EngineCanary(module, self.template, encoder, sample, half_precision=half_precision)


def prepare_learner(
    swift: Mapping[str, Any], scratch: Path, *, with_weights: bool, where: str = SECTION
) -> LearnerPreparation:
    """Reads section ``swift`` as the trainer does; whatever ms-swift writes goes to ``scratch``.

    ``where``: where the user has written the arguments, for errors.

    Raises:
        ConfigError: ms-swift refuses an argument, or does not know it.
    """
    os.environ.setdefault("QWENVL_BBOX_FORMAT", "new")  # as in training.sft
    kept = {name: value for name, value in swift.items() if name not in _NEEDS_RANKS}
    arguments = {**kept, "output_dir": str(scratch), "add_version": False, "report_to": "none"}
    parsed = parse_swift_arguments(as_argv(arguments), where=where)
    return LearnerPreparation(parsed, with_weights=with_weights)


@contextmanager
def _one_by_one(template: Any) -> Iterator[None]:
    """``template`` as generation needs it: its collator packs nothing."""
    packs = template.packing, template.padding_free
    template.packing = template.padding_free = False
    try:
        with template.generate_context():
            yield
    finally:
        template.packing, template.padding_free = packs


class EngineCanary:
    """The ``Canary`` of a sync round.

    ``half_precision``: the module computes in 16 bits, so that near ties count as the same answer.
    """

    def __init__(
        self, module: Any, template: Any, encoder: Encoder, sample: Sample, *, half_precision: bool
    ) -> None:
        self._module = module
        self._template = template
        self._request: dict[str, Any] = encoder.request(sample)
        self._config = infer_wire.greedy_config(_CANARY_TOKENS)
        self._closing = encoder.closing_token_ids
        self._tie_nats = HALF_PRECISION_TIE_NATS if half_precision else 0.0
        self._engine: TransformersEngine | None = None

    def answer(self) -> CanaryAnswer:
        """Generates under the present weights; mode, gradients and random state are left as they were."""
        model = self._module
        was_training = model.training
        devices = [model.device] if model.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices), _one_by_one(self._template):
                if self._engine is None:
                    self._engine = TransformersEngine(model, template=self._template, max_batch_size=1)
                (response,) = self._engine.infer(
                    [InferRequest(**self._request)],
                    RequestConfig(**self._config, logprobs=True, top_logprobs=_CANARY_ALTERNATIVES),
                    use_tqdm=False,
                )
        finally:
            model.train(was_training)
        (choice,) = response.choices
        positions = (choice.logprobs or {}).get("content", ()) if self._tie_nats else ()
        return CanaryAnswer(
            self._request,
            self._config,
            CanaryAnswer.without_closing(choice.token_ids, self._closing),
            tuple(self._closing),
            tuple(self._ties(position["top_logprobs"]) for position in positions),
        )

    def _ties(self, likely: Sequence[Mapping[str, Any]]) -> frozenset[int]:
        """Ids of the tokens that are about as likely as the likeliest one."""
        best = max(token["logprob"] for token in likely)
        texts = {token["token"] for token in likely if best - token["logprob"] <= self._tie_nats}
        return frozenset(number for text in texts for number in self._ids_of_texts[text])

    @cached_property
    def _ids_of_texts(self) -> Mapping[str, Sequence[int]]:
        """By text, the tokens that ms-swift writes so; it names no ids."""
        tokenizer, ids = self._template.tokenizer, defaultdict[str, list[int]](list)
        for number, text in enumerate(tokenizer.batch_decode([[number] for number in range(len(tokenizer))])):
            ids[text].append(number)
        return ids
