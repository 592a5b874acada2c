"""Other packages: prepared before they are imported or started (torchvision, DeepSpeed, Accelerate); their versions.

``surroundings`` is what a rank's numbers depend on beside configuration and data, kept by ``telemetry.record``.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

_ACCELERATOR = "DS_ACCELERATOR"  # read by DeepSpeed when it is imported
_DEFAULT_TIMEOUT_S = 1800.0  # Hugging Face's own default of ``ddp_timeout``
# Buffers, by a part of their names. A list replaces DeepSpeed's own choice, the model's routing biases.
_EXACT_BUFFERS = ("inv_freq", "e_score_correction_bias")

# Threads, devices, and what ms-swift's templates make of an image or a box.
ENVIRONMENT_NAMES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "QWENVL_BBOX_FORMAT",
    "ROOT_IMAGE_DIR",
    "MAX_PIXELS",
    "MIN_PIXELS",
    "IMAGE_MAX_TOKEN_NUM",
    "IMAGE_MIN_TOKEN_NUM",
)
_PACKAGES = ("torch", "transformers", "ms-swift", "accelerate")

# The operators that torchvision 0.26 or 0.28 refers to while it is imported; calling them still raises, as it should.
_OPERATORS = ("nms", "qnms")
_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
# A library object undoes its declarations when it is collected.
_declared: list[torch.library.Library] = []


def declare_operators() -> None:
    """Lets a torchvision built for CUDA import beside a CPU torch; called before ms-swift is imported; idempotent.

    Its Python files attach fake kernels to operators that its compiled library declares, which does not load there.
    With their schemas declared, its pure-Python transforms work, which image processors use. Does nothing when
    torchvision is absent or imported, when its library loads, or when the operators exist.
    """
    if "torchvision" in sys.modules:
        return
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return
    if _own_library_loads(Path(spec.submodule_search_locations[0])):
        return
    missing = [name for name in _OPERATORS if not hasattr(torch.ops.torchvision, name)]
    if missing:
        library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for name in missing:
            library.define(name + _SIGNATURE)  # type: ignore[no-untyped-call]
        _declared.append(library)


def _own_library_loads(directory: Path) -> bool:
    for path in (*directory.glob("_C*.so"), *directory.glob("_C*.pyd")):
        try:
            torch.ops.load_library(path)  # type: ignore[no-untyped-call]
        except (ImportError, OSError):
            continue
        return True
    return False


def start_communication(swift: Mapping[str, Any]) -> None:
    """On a CPU rank of torchrun, makes the gloo group known to torch and DeepSpeed alike; all ranks together.

    It must run before ms-swift starts torch's own: else DeepSpeed counts one rank when ZeRO-3 loads a model, and
    refuses the batch sizes. Without ``deepspeed`` and ``use_cpu`` in section ``swift`` nothing happens: on GPUs
    Accelerate does it.
    """
    if not (swift.get("deepspeed") and swift.get("use_cpu") is True and "RANK" in os.environ):
        return
    os.environ.setdefault(_ACCELERATOR, "cpu")
    deepspeed = importlib.import_module("deepspeed")
    timeout_s = float(swift.get("ddp_timeout") or _DEFAULT_TIMEOUT_S)
    deepspeed.init_distributed(
        dist_backend="gloo",
        auto_mpi_discovery=False,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def keep_buffers_exact() -> None:
    """Between ms-swift's reading of its arguments and its loading of the model: keeps float32 buffers under ZeRO-3.

    It would round the rotary frequencies, and learner and servers would disagree on every position. The user's own
    ``data_types.keep_in_fp32_modules`` stays.
    """
    integration: Any = importlib.import_module("transformers.integrations.deepspeed")
    config = integration.deepspeed_config()
    if config is not None and integration.is_deepspeed_zero3_enabled():
        config.setdefault("data_types", {}).setdefault("keep_in_fp32_modules", list(_EXACT_BUFFERS))


@contextmanager
def zero3_unknown() -> Iterator[None]:
    """Hugging Face gives every model made under ZeRO-3 its first weights, which one without weights cannot take."""
    integration: Any = importlib.import_module("transformers.integrations.deepspeed")
    reference = integration._hf_deepspeed_config_weak_ref
    config = reference() if reference is not None else None
    integration.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if config is not None:
            integration.set_hf_deepspeed_config(config)


def surroundings(device: torch.device) -> dict[str, Any]:
    """Of this process, with a model on ``device``: as JSON. No secrets: no name of the environment's holds one."""
    return {
        "directory": os.getcwd(),
        "environment": {name: os.environ[name] for name in ENVIRONMENT_NAMES if name in os.environ},
        "device": device.type,
        "threads": torch.get_num_threads(),
        "versions": installed_versions(),
    }


def installed_versions() -> dict[str, str]:
    """Of the packages whose releases a loss depends on."""
    return {name: version(name) for name in _PACKAGES}


def pack_here(context: Any, *, target: Callable[..., Any], jobs: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Does ms-swift's packing in this process, in the place of its ``packing._spawn_workers``.

    For a worker of its own that has failed ms-swift would wait without a deadline.
    """
    for words in jobs:
        for each in words:  # if this fails nobody reads the queue, and the process must still be able to end
            if hasattr(each, "cancel_join_thread"):
                each.cancel_join_thread()
        target(*words)
    return []
