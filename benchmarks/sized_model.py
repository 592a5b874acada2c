"""Models of a wanted number of bytes for benches of weight transfers: untrained, float32, the demo's tokenizer."""

from __future__ import annotations

from pathlib import Path

from swift_stage2.demo.tiny_model import build_model, build_processor, build_tokenizer, save_model
from swift_stage2.errors import UserError

_FLOAT32 = 4
_MIB = 1 << 20
# Feed-forward width is what grows: matrices of a usual shape, and generation that stays quick.
_SMALL = ({"hidden_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1},
          {"hidden_size": 32, "num_heads": 1, "depth": 1, "intermediate_size": 64, "out_hidden_size": 32})  # fmt: skip
_USUAL: tuple[dict[str, int], dict[str, int]] = ({}, {})
_USUAL_FROM_MIB = 16


def write_model(directory: Path, mib: int) -> int:
    """Writes a model directory of about ``mib`` MiB of weights and returns their bytes.

    Raises:
        UserError: fewer than 1 MiB.
    """
    if mib < 1:
        raise UserError(f"a model needs at least 1 MiB of weights, got mib={mib}")
    text, vision = _USUAL if mib >= _USUAL_FROM_MIB else _SMALL
    tokenizer = build_tokenizer()
    vocab_size = len(tokenizer)
    narrow, wide = (
        _num_bytes(vocab_size, {**text, "intermediate_size": width}, vision) for width in (64, 128)
    )
    per_column = (wide - narrow) / 64
    width = max(16, round((mib * _MIB - narrow) / per_column) + 64)
    model = build_model(0, vocab_size=vocab_size, text={**text, "intermediate_size": width}, vision=vision)
    save_model(model, build_processor(tokenizer), directory)
    return sum(parameter.numel() * _FLOAT32 for parameter in model.parameters())


def _num_bytes(vocab_size: int, text: dict[str, int], vision: dict[str, int]) -> int:
    model = build_model(0, vocab_size=vocab_size, text=text, vision=vision)
    return sum(parameter.numel() * _FLOAT32 for parameter in model.parameters())
