"""The learner's tensors against a server's: our manifest exactly, vLLM's fused names as far as they tell."""

from __future__ import annotations

from swift_stage2.doctor.examination import Verdict
from swift_stage2.doctor.server_identity import compare_manifests, compare_names
from swift_stage2.servers.protocol import TensorSpec
from swift_stage2.weights.stock_names import vllm_name

LAYER = "model.language_model.layers.0."
LEARNER = [
    TensorSpec("model.visual.patch_embed.proj.weight", (96, 3), "float32"),
    TensorSpec("model.language_model.embed_tokens.weight", (1282, 128), "float32"),
    *(TensorSpec(f"{LAYER}self_attn.{part}_proj.weight", (8, 8), "float32") for part in "qkvo"),
    *(TensorSpec(f"{LAYER}mlp.{part}_proj.weight", (8, 8), "float32") for part in ("gate", "up", "down")),
]
VLLM = [
    "visual.patch_embed.proj.weight",
    "language_model.model.embed_tokens.weight",
    "language_model.model.layers.0.self_attn.qkv_proj.weight",
    "language_model.model.layers.0.self_attn.o_proj.weight",
    "language_model.model.layers.0.mlp.gate_up_proj.weight",
    "language_model.model.layers.0.mlp.down_proj.weight",
]


def with_dtype(dtype: str) -> list[TensorSpec]:
    return [TensorSpec(spec.name, spec.shape, dtype) for spec in LEARNER]


def test_equal_manifests_are_counted() -> None:
    outcome = compare_manifests(LEARNER, LEARNER)
    assert outcome.verdict is Verdict.OK
    assert "9 tensors" in outcome.found
    assert "float32 on both sides" in outcome.found


def test_another_shape_and_a_missing_tensor_are_named_with_both_sides() -> None:
    other = [*LEARNER[1:-1], TensorSpec(LEARNER[-1].name, (8, 9), "float32")]
    outcome = compare_manifests(LEARNER, other)
    assert outcome.verdict is Verdict.FAILED
    assert "2 tensor(s) differ" in outcome.found
    assert f"{LAYER}mlp.down_proj.weight: learner 8x8, server 8x9" in outcome.found
    assert "patch_embed.proj.weight: learner 96x3, server none" in outcome.found
    assert outcome.fix == "start the server with the learner's model"


def test_another_dtype_is_a_warning_because_weights_are_converted() -> None:
    outcome = compare_manifests(LEARNER, with_dtype("bfloat16"))
    assert outcome.verdict is Verdict.WARNING
    assert "learner float32, server bfloat16" in outcome.found
    assert "start the server in the learner's dtype (float32)" in outcome.fix


def test_fused_names_fill_vllms() -> None:
    outcome = compare_names(LEARNER, VLLM)
    assert outcome.verdict is Verdict.OK
    assert "9 tensors fill all 6" in outcome.found
    assert "cannot be asked" in outcome.found


def test_experts_are_fused_over_their_numbers() -> None:
    assert vllm_name("model.layers.1.mlp.experts.7.up_proj.weight") == "layers.1.mlp.experts.w13_weight"
    assert vllm_name("model.layers.1.mlp.experts.7.down_proj.weight") == "layers.1.mlp.experts.w2_weight"


def test_a_tied_head_is_no_difference() -> None:
    assert compare_names(LEARNER, [*VLLM, "language_model.lm_head.weight"]).verdict is Verdict.OK


def test_a_name_that_only_one_side_has_is_told_as_not_fully_comparable() -> None:
    outcome = compare_names(LEARNER, [*VLLM, "language_model.model.layers.0.mystery.weight"])
    assert outcome.verdict is Verdict.WARNING
    assert "cannot be compared fully" in outcome.found
    assert "layers.0.mystery.weight" in outcome.found
    assert outcome.fix


def test_another_model_fails() -> None:
    outcome = compare_names(LEARNER, ["transformer.h.0.attn.weight", "transformer.wte.weight"])
    assert outcome.verdict is Verdict.FAILED
    assert outcome.fix == "start the server with the learner's model"
