"""What DeepSpeed needs to train here that ms-swift does not give it; called by ``train`` only.

On CPU ranks its communication must run before ms-swift starts torch's: else it counts one rank when ZeRO-3 loads
a model, and refuses the batch sizes. ZeRO-3 rounds buffers that Hugging Face computes in float32, the rotary
frequencies among them: learner and servers would then disagree on every position.
"""

from __future__ import annotations

import datetime
import importlib
import os
from collections.abc import Mapping
from typing import Any

_ACCELERATOR = "DS_ACCELERATOR"  # read by DeepSpeed when it is imported
_DEFAULT_TIMEOUT_S = 1800.0  # Hugging Face's own default of ``ddp_timeout``
# Buffers, by a part of their names. A list replaces DeepSpeed's own choice, the model's routing biases.
_EXACT_BUFFERS = ("inv_freq", "e_score_correction_bias")


def start_communication(swift: Mapping[str, Any]) -> None:
    """On a CPU rank of torchrun, makes the gloo group known to torch and DeepSpeed alike; all ranks together.

    ``swift`` is the section of the configuration. Without ``deepspeed`` and ``use_cpu`` nothing happens:
    on GPUs Accelerate does it.
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

    What the user's own DeepSpeed configuration says in ``data_types.keep_in_fp32_modules`` stays.
    """
    integration: Any = importlib.import_module("transformers.integrations.deepspeed")
    config = integration.deepspeed_config()
    if config is not None and integration.is_deepspeed_zero3_enabled():
        config.setdefault("data_types", {}).setdefault("keep_in_fp32_modules", list(_EXACT_BUFFERS))
