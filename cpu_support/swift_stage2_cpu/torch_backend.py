"""Called by PyTorch at the end of ``import torch``: declares torchvision's operators on a CPU build."""

from __future__ import annotations

import sys

_DECLARING_MODULE = "swift_stage2.compat"


def declare_torchvision_operators() -> None:
    """Does nothing on a build of torch for a GPU."""
    import torch

    if torch.version.cuda is not None or torch.version.hip is not None:
        return
    if _DECLARING_MODULE in sys.modules:
        return  # it is what imports torch just now, and declares by itself
    from swift_stage2.compat import declare_operators

    declare_operators()
