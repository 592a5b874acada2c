"""The tiny model's rollout server on one machine without a GPU: its entry in ``launch.servers``, for every engine."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from swift_stage2.config import ServerEngine
from swift_stage2.rollout_server.command_line import CPU_SUPPORT, require_vllm

TEMPLATE_FILE = Path(__file__).parent / "tiny_template.py"
MODEL_TYPE = "stage2_tiny_vl"
_CPU_PLUGIN = "swift_plugin.py"


def server_entry(engine: ServerEngine) -> dict[str, Any]:
    """The entry, without ``model``.

    Raises:
        UserError: vLLM, or what it needs without a GPU, is not installed.
    """
    if engine is ServerEngine.TRANSFORMERS:
        options: dict[str, Any] = {
            "external-plugins": str(TEMPLATE_FILE),
            "model-type": MODEL_TYPE,
            "template": MODEL_TYPE,
            "torch-dtype": "float32",
            "num-threads": 1,
        }
        return {"engine": engine.value, "args": options}
    options = {
        "external_plugins": [str(TEMPLATE_FILE), str(_cpu_plugin())],
        "model_type": MODEL_TYPE,
        "template": MODEL_TYPE,
        "torch_dtype": "float32",
        "vllm_enforce_eager": True,
        "vllm_max_model_len": 1024,
    }
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": 1,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": 1,
    }
    return {"engine": engine.value, "args": options, "env": environment}


def _cpu_plugin() -> Path:
    require_vllm(without_gpu=True)
    spec = importlib.util.find_spec(CPU_SUPPORT)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / _CPU_PLUGIN
