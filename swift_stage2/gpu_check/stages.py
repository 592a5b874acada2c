"""All stages in the order in which they run: cheap ones first, so that a short check still has a page."""

from __future__ import annotations

from swift_stage2.gpu_check.stage import Stage

_HERE = "swift_stage2.gpu_check"
_SWIFT = ("swift", "datasets", "peft", "fastapi", "uvicorn")

STAGES = (
    Stage(
        name="machine", weight=2, module=f"{_HERE}.machine",
        proves="what device and which packages are there",
    ),
    Stage(
        name="arithmetic", weight=3, module=f"{_HERE}.arithmetic",
        proves="checksums and looks for NaN give on the GPU what they give on the CPU",
    ),
    Stage(
        name="real-shapes", weight=6, module=f"{_HERE}.real_shapes", needs=("transformers",),
        proves="Qwen2.5-VL-3B and a 2-layer Qwen3-VL are made, saved and loaded at their real shapes",
    ),
    Stage(
        name="isolation", weight=6, module=f"{_HERE}.isolation", needs=_SWIFT,
        proves="packed segments do not see each other, and an injected leak is seen",
    ),
    Stage(
        name="streams", weight=3, module=f"{_HERE}.streams",
        proves="a late or never-ending transfer on a side stream neither stops training nor outlives its deadline",
    ),
    Stage(
        name="round-memory", weight=7, module=f"{_HERE}.round_memory", needs=("transformers", "peft"),
        proves="seconds and memory of export, LoRA merge and pack at 3B and 7B, and what a lack of memory does",
    ),
    Stage(
        name="handover", weight=4, module=f"{_HERE}.handover",
        proves="a pinned snapshot under a backward pass, and weights in another process by memory file and CUDA IPC",
    ),
    Stage(
        name="learner-lora", weight=12, module=f"{_HERE}.training", needs=_SWIFT, arguments={"tuner": "lora"},
        proves="LoRA and our server on one device: 12 steps, rounds proven by sums and canary",
    ),
    Stage(
        name="learner-full", weight=12, module=f"{_HERE}.training", needs=_SWIFT, arguments={"tuner": "full"},
        proves="full tuning and our server on one device: 12 steps, rounds proven by sums and canary",
    ),
    Stage(
        name="two-ranks", weight=10, module=f"{_HERE}.two_ranks", needs=_SWIFT,
        proves="two ranks on one device over gloo: equal plans, proven rounds, a common stop on SIGTERM",
    ),
    Stage(
        name="zero3", weight=8, module=f"{_HERE}.zero3", needs=(*_SWIFT, "deepspeed"),
        proves="ZeRO-3 with one rank: shapes under partitioning reach the server proven",
    ),
    Stage(
        name="nccl-rollout", weight=16, module=f"{_HERE}.nccl_rollout", needs=(*_SWIFT, "vllm"),
        proves="stock swift rollout over NCCL at TP 1 and 2: three rounds, SIGKILL and SIGSTOP in a push, rejoin",
    ),
)  # fmt: skip
