"""Builds the demo's model from nothing: a Qwen2.5-VL of 1.6 million parameters, its tokenizer and processor.

The vocabulary is written down, not learnt: every whole number up to 999 and every piece of an answer is one
token, everything else falls back to bytes. The directory that is saved loads like any Hugging Face model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from swift_stage2.compat import declare_operators
from swift_stage2.demo.scenes import COLOURS, DIGIT_LABEL, SHAPES

declare_operators()  # before transformers imports torchvision

from transformers import (  # noqa: E402
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
)
PAD_TOKEN_ID = SPECIAL_TOKENS.index("<|endoftext|>")
END_OF_TURN_ID = SPECIAL_TOKENS.index("<|im_end|>")
IMAGE_TOKEN_ID = SPECIAL_TOKENS.index("<|image_pad|>")
VIDEO_TOKEN_ID = SPECIAL_TOKENS.index("<|video_pad|>")
MAX_PIXELS = 448 * 448

_HIDDEN_SIZE = 128
_PATCH_SIZE = 14  # qwen_vl_utils resizes Qwen2.5-VL's images to multiples of 2 x 14
# Columns turn with the lowest frequencies. At Qwen's 1e6 or 1e4 they would not differ over a grid of four.
_ROPE_THETA = 100.0
_MAX_NUMBER = 999
_MAX_TOKENS = 4096
_PIECES = ('[{"bbox_2d": [', '"}, {"bbox_2d": [', '], "label": "', '"}]', ", ", "[]")
_WORDS = (
    *COLOURS,
    *(f" {shape}" for shape in SHAPES),
    DIGIT_LABEL,
    *("user", "assistant", "system", "Detect", " all", " objects", "desc", "object", "bbox", "label"),
)
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer whose pieces are listed in this file; it has no learnt merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    whole = [*_PIECES, *_WORDS, *(str(number) for number in range(10, _MAX_NUMBER + 1))]
    tokens = dict.fromkeys([*SPECIAL_TOKENS, *alphabet, *map(_as_byte_level, whole)])
    # With ignore_merges a piece that is in the vocabulary is one token; any other one falls apart into bytes.
    model = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], ignore_merges=True)
    tokenizer = Tokenizer(model)
    longest_first = sorted(_PIECES, key=len, reverse=True)
    words = [*map(re.escape, longest_first), r"\d{1,3}", r" ?[A-Za-z]+"]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("|".join(words)), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[t for t in SPECIAL_TOKENS if t not in ("<|im_end|>", "<|endoftext|>")],
        chat_template=_CHAT_TEMPLATE,
        model_max_length=_MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def build_processor(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLProcessor:
    """The processor of a model directory: images of at most ``MAX_PIXELS`` in patches of 14 x 14."""
    patches = {"patch_size": _PATCH_SIZE, "merge_size": 2, "temporal_patch_size": 2}
    pixels = {"shortest_edge": (2 * _PATCH_SIZE) ** 2, "longest_edge": MAX_PIXELS}
    return Qwen2_5_VLProcessor(  # type: ignore[no-untyped-call]
        image_processor=Qwen2VLImageProcessor(**patches, size=pixels),
        video_processor=Qwen2VLVideoProcessor(**patches),
        tokenizer=tokenizer,
        chat_template=_CHAT_TEMPLATE,
    )


def build_model(
    seed: int,
    *,
    vocab_size: int,
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
) -> Qwen2_5_VLForConditionalGeneration:
    """An untrained model in float32, the same for the same seed; ``text`` and ``vision`` override single sizes."""
    sections = {"type": "mrope", "rope_type": "default", "mrope_section": [4, 6, 6]}
    rope = {**sections, "rope_theta": _ROPE_THETA}
    text_config = {
        "vocab_size": vocab_size,
        "hidden_size": _HIDDEN_SIZE,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": _MAX_TOKENS,
        "tie_word_embeddings": True,
        "rope_scaling": rope,
        "bos_token_id": None,
        "eos_token_id": END_OF_TURN_ID,
        "pad_token_id": PAD_TOKEN_ID,
        **(text or {}),
    }
    vision_config = {
        "depth": 3,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_heads": 4,
        "in_channels": 3,
        "patch_size": _PATCH_SIZE,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "out_hidden_size": _HIDDEN_SIZE,
        "fullatt_block_indexes": [0, 1, 2],
        "tokens_per_second": 2,
        **(vision or {}),
    }
    whole: dict[str, Any] = {
        "image_token_id": IMAGE_TOKEN_ID,
        "video_token_id": VIDEO_TOKEN_ID,
        "vision_start_token_id": SPECIAL_TOKENS.index("<|vision_start|>"),
        "vision_end_token_id": SPECIAL_TOKENS.index("<|vision_end|>"),
        "tie_word_embeddings": text_config["tie_word_embeddings"],
        "eos_token_id": END_OF_TURN_ID,
        "pad_token_id": PAD_TOKEN_ID,
    }
    config = Qwen2_5_VLConfig(text_config=text_config, vision_config=vision_config, **whole)
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(config)  # type: ignore[no-untyped-call]
    model.generation_config.update(  # type: ignore[no-untyped-call]
        do_sample=False, eos_token_id=[END_OF_TURN_ID, PAD_TOKEN_ID], pad_token_id=PAD_TOKEN_ID
    )
    return model


def save_model(
    model: Qwen2_5_VLForConditionalGeneration,
    processor: Qwen2_5_VLProcessor,
    directory: str | os.PathLike[str],
) -> None:
    """Writes a complete Hugging Face model directory in float32 safetensors."""
    model.save_pretrained(directory)
    processor.save_pretrained(directory)


def _as_byte_level(text: str) -> str:
    [(piece, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return piece
