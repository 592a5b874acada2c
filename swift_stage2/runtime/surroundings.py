"""The surroundings that a rank's numbers depend on, beside configuration and data; kept by ``telemetry.record``.

No secrets: the environment is a list of names, and none of them holds one.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Any

import torch

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


def surroundings(device: torch.device) -> dict[str, Any]:
    """Of this process, with a model on ``device``: as JSON."""
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
