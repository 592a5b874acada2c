"""A bucket as it travels: its tensors' bytes, one behind the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swift_stage2.weights.tensors import describe_flat


def flatten(bucket: Sequence[tuple[str, torch.Tensor]]) -> tuple[torch.Tensor, list[dict[str, object]]]:
    """One uint8 tensor, and where each tensor lies in it."""
    return torch.cat(
        [tensor.contiguous().reshape(-1).view(torch.uint8) for _, tensor in bucket]
    ), describe_flat(bucket)
