"""A learner that holds untrained weights of a wanted size on the CPU and copies them; it trains nothing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.tiny_model import build_model, build_processor, build_tokenizer, save_model
from swift_stage2.servers import infer_wire
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.proof import CanaryAnswer
from swift_stage2.weights.snapshot import SnapshotFile

MIB = 1 << 20
BUCKET_MIB = 512
_CANARY_TOKENS = 4
_FLOAT32 = 4
# Feed-forward width is what grows: matrices of a usual shape, and generation that stays quick.
_SMALL = ({"hidden_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1},
          {"hidden_size": 32, "num_heads": 1, "depth": 1, "intermediate_size": 64, "out_hidden_size": 32})  # fmt: skip
_USUAL: tuple[dict[str, int], dict[str, int]] = ({}, {})
_USUAL_FROM_MIB = 16


def write_model(directory: Path, mib: int) -> None:
    """Writes a model directory of about ``mib`` MiB of float32 weights, at least 1."""
    text, vision = _USUAL if mib >= _USUAL_FROM_MIB else _SMALL
    tokenizer = build_tokenizer()

    def build(width: int) -> Any:
        text_of = {**text, "intermediate_size": width}
        return build_model(0, vocab_size=len(tokenizer), text=text_of, vision=vision)

    narrow, wide = (
        sum(parameter.numel() * _FLOAT32 for parameter in build(width).parameters()) for width in (64, 128)
    )
    width = max(16, round((mib * MIB - narrow) / ((wide - narrow) / 64)) + 64)
    save_model(build(width), build_processor(tokenizer), directory)


class TextCanary:
    """A greedy question without an image; the answer is Hugging Face's own ``generate``."""

    def __init__(self, module: Any, tokenizer: Any) -> None:
        self._request: dict[str, Any] = {"messages": [{"role": "user", "content": "Detect all objects"}]}
        self._config = infer_wire.greedy_config(_CANARY_TOKENS)
        self._module = module
        self._closing = (tokenizer.eos_token_id,)
        text = tokenizer.apply_chat_template(
            self._request["messages"], tokenize=False, add_generation_prompt=True
        )
        self._prompt = tokenizer(text, return_tensors="pt")["input_ids"].to(module.device)

    def answer(self) -> CanaryAnswer:
        with torch.no_grad():
            tokens = self._module.generate(
                input_ids=self._prompt,
                attention_mask=torch.ones_like(self._prompt),
                max_new_tokens=_CANARY_TOKENS,
                do_sample=False,
            )
        ids = CanaryAnswer.without_closing(tokens[0, self._prompt.shape[1] :].tolist(), self._closing)
        return CanaryAnswer(self._request, self._config, ids, self._closing)


class SyncLearner:
    """The weights on the CPU, and the memory that they are copied into."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

        module = Qwen2_5_VLForConditionalGeneration.from_pretrained(model, dtype=torch.float32).train(False)
        self.canary = TextCanary(module, AutoTokenizer.from_pretrained(model))
        self.export = WeightExport(module)
        # Of every system, which take turns: one of 1 GiB for each would leave servers no room.
        self.snapshot = SnapshotFile(self.export.manifest(), bucket_bytes=BUCKET_MIB * MIB)
        self.num_bytes = sum(tensor.nbytes for tensor in self._weights())
        touched = torch.ones(self.num_bytes, dtype=torch.uint8)
        parts = torch.split(touched, [tensor.nbytes for tensor in self._weights()])
        # In the weights' own dtypes, as a snapshot is.
        self._copies = [
            part.view(tensor.dtype).view_as(tensor)
            for part, tensor in zip(parts, self._weights(), strict=True)
        ]

    def seconds_to_copy(self) -> float:
        started = time.perf_counter()
        for copy, tensor in zip(self._copies, self._weights(), strict=True):
            copy.copy_(tensor)
        return time.perf_counter() - started

    def _weights(self) -> list[torch.Tensor]:
        names = [spec.name for spec in self.export.manifest()]
        return [tensor for _, tensor in self.export.read(names)]
