"""Tiny random models of the families in docs/data.md: their real classes, processors and ms-swift's own templates.

Only the vocabulary is made up, around the token ids that ms-swift's templates carry; whatever ms-swift looks up by type
or architecture is what it finds for the real checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from swift_stage2.compat import declare_operators

declare_operators()  # before transformers imports torchvision

import transformers  # noqa: E402

_NUM_PLAIN_TOKENS = 151643  # Qwen's; special ones follow
_SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
    *(
        "<img>",
        "</img>",
        "<IMG_CONTEXT>",
        "<video>",
        "<ref>",
        "</ref>",
        "<box>",
        "</box>",
        "<think>",
        "</think>",
    ),
)
TOKEN_IDS = {token: _NUM_PLAIN_TOKENS + number for number, token in enumerate(_SPECIAL_TOKENS)}
_VOCABULARY = -(-(_NUM_PLAIN_TOKENS + len(_SPECIAL_TOKENS)) // 64) * 64
_HIDDEN = 32
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """One family as ms-swift knows it. ``config``: what differs from the classes' own defaults."""

    model_type: str
    architecture: str
    patch_size: int = 14
    text: Mapping[str, Any] = field(default_factory=dict)
    vision: Mapping[str, Any] = field(default_factory=dict)
    whole: Mapping[str, Any] = field(default_factory=dict)
    template_type: str = ""

    def __str__(self) -> str:
        return self.model_type


_QWEN_VISION = {
    "depth": 2,
    "num_heads": 2,
    "in_channels": 3,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN = {
    "image_token_id": TOKEN_IDS["<|image_pad|>"],
    "video_token_id": TOKEN_IDS["<|video_pad|>"],
    "vision_start_token_id": TOKEN_IDS["<|vision_start|>"],
    "vision_end_token_id": TOKEN_IDS["<|vision_end|>"],
}


def _qwen3_vl(model_type: str, architecture: str, **text: Any) -> Family:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": True, "rope_theta": 1e4}
    return Family(
        model_type,
        architecture,
        patch_size=16,
        text={"head_dim": 16, "rope_parameters": rope, **text},
        vision={
            **_QWEN_VISION,
            "patch_size": 16,
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": _HIDDEN,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        whole=_QWEN,
    )


_MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}

FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            "qwen2_vl",
            "Qwen2VLForConditionalGeneration",
            text={"rope_parameters": _MROPE},
            vision={
                **_QWEN_VISION,
                "patch_size": 14,
                "embed_dim": 32,
                "hidden_size": _HIDDEN,
                "mlp_ratio": 2,
            },
            whole=_QWEN,
        ),
        Family(
            "qwen2_5_vl",
            "Qwen2_5_VLForConditionalGeneration",
            text={"rope_parameters": _MROPE},
            vision={
                **_QWEN_VISION,
                "patch_size": 14,
                "hidden_size": 32,
                "intermediate_size": 48,
                "out_hidden_size": _HIDDEN,
                "window_size": 56,
                "fullatt_block_indexes": [1],
            },
            whole=_QWEN,
        ),
        _qwen3_vl("qwen3_vl", "Qwen3VLForConditionalGeneration"),
        _qwen3_vl(
            "qwen3_vl_moe",
            "Qwen3VLMoeForConditionalGeneration",
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
        ),
        Family(
            "internvl",
            "InternVLForConditionalGeneration",
            text={"model_type": "qwen2"},
            vision={
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": [56, 56],
                "patch_size": [14, 14],
            },
            whole={"image_token_id": TOKEN_IDS["<IMG_CONTEXT>"], "image_seq_length": 4},
            template_type="internvl_hf",
        ),
    )
}


@cache
def _scratch() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="family-models-")


@cache
def family_directory(name: str) -> Path:
    """A directory as a checkpoint of the family has it, made once per process and removed at its end."""
    family = FAMILIES[name]
    directory = Path(_scratch().name, name)
    torch.manual_seed(3)
    model = getattr(transformers, family.architecture)(_config(family))
    # Weights of the usual first size let tokens hardly look at each other; these look.
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(directory)
    _processor(family).save_pretrained(directory)
    return directory


def load_family(name: str, *, dtype: torch.dtype = torch.float32, attn_impl: str = "sdpa") -> tuple[Any, Any]:
    """Model and processor as ms-swift loads them."""
    from swift.model import get_model_processor

    model, processor = get_model_processor(
        str(family_directory(name)),
        model_type=name,
        torch_dtype=dtype,
        device_map="cpu",
        attn_impl=attn_impl,
    )
    return model.eval(), processor


def family_template(model: Any, processor: Any, **options: Any) -> Any:
    """ms-swift's own template of the model, in mode ``train``; ``options`` are ms-swift's."""
    from swift.template import get_template

    template = get_template(
        processor, **{"template_type": template_type(processor.model_meta.model_type), **options}
    )
    template.model = model
    template.set_mode("train")
    return template


def template_type(name: str) -> str:
    """ms-swift's name for the family's template. It knows its own checkpoints by their names, and others not at all."""
    return FAMILIES[name].template_type or {"qwen3_vl_moe": "qwen3_vl"}.get(name, name)


def _config(family: Family) -> Any:
    architecture = getattr(transformers, family.architecture)
    text = {
        "vocab_size": _VOCABULARY,
        "hidden_size": _HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": TOKEN_IDS["<|im_end|>"],
        "pad_token_id": TOKEN_IDS["<|endoftext|>"],
        "tie_word_embeddings": False,
        **family.text,
    }
    return architecture.config_class(
        text_config=text, vision_config=dict(family.vision), tie_word_embeddings=False, **family.whole
    )


def _processor(family: Family) -> Any:
    tokenizer = _tokenizer()
    if family.model_type == "internvl":
        images = transformers.GotOcr2ImageProcessor(size={"height": 56, "width": 56}, max_patches=4)
        return transformers.InternVLProcessor(
            image_processor=images,
            tokenizer=tokenizer,
            video_processor=transformers.InternVLVideoProcessor(),
            image_seq_length=family.whole["image_seq_length"],
            chat_template=_CHAT_TEMPLATE,
        )
    patches = {"patch_size": family.patch_size, "merge_size": 2, "temporal_patch_size": 2}
    images = transformers.Qwen2VLImageProcessor(
        **patches, size={"shortest_edge": (2 * family.patch_size) ** 2, "longest_edge": 448 * 448}
    )
    kinds = {
        "qwen2_vl": (transformers.Qwen2VLProcessor, transformers.Qwen2VLVideoProcessor),
        "qwen2_5_vl": (transformers.Qwen2_5_VLProcessor, transformers.Qwen2VLVideoProcessor),
    }
    processor, videos = kinds.get(
        family.model_type, (transformers.Qwen3VLProcessor, transformers.Qwen3VLVideoProcessor)
    )
    return processor(
        image_processor=images,
        video_processor=videos(**patches),
        tokenizer=tokenizer,
        chat_template=_CHAT_TEMPLATE,
    )


def _tokenizer() -> Any:
    """Bytes are tokens; the rest up to Qwen's special tokens is filled with what no text holds."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    filled = [f"<filler {number}>" for number in range(_NUM_PLAIN_TOKENS - len(alphabet))]
    vocabulary = {token: number for number, token in enumerate([*alphabet, *filled])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL_TOKENS])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        chat_template=_CHAT_TEMPLATE,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
