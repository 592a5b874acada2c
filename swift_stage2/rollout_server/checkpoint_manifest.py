"""The tensors of a checkpoint as the learner names them, without loading one.

An engine that fuses parameters cannot tell: its own names are others. So the model is built as ms-swift builds
the learner's, on the meta device. Called by the vLLM engine.
"""

from __future__ import annotations

import torch

from swift_stage2.compat import declare_operators
from swift_stage2.servers.protocol import TensorSpec

declare_operators()  # before the first import of ms-swift, which imports torchvision

from swift.model import get_model_processor  # noqa: E402


def checkpoint_manifest(model_dir: str, model_type: str, dtype: torch.dtype) -> tuple[TensorSpec, ...]:
    """Name, shape and dtype of every parameter, tied weights once; floating-point ones in ``dtype``."""
    with torch.device("meta"):
        model, _ = get_model_processor(model_dir, model_type=model_type, return_dummy_model=True)
    return tuple(
        TensorSpec(
            name, tuple(parameter.shape), _name(dtype if parameter.is_floating_point() else parameter.dtype)
        )
        for name, parameter in model.named_parameters()
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
