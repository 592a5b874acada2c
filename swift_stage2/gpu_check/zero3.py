"""Stage *zero3*: the same path with every parameter partitioned over one rank, as DeepSpeed holds it."""

from __future__ import annotations

from swift_stage2.errors import CheckSkipped
from swift_stage2.gpu_check import training
from swift_stage2.gpu_check.stage import Context


def run(context: Context) -> None:
    """Raises ``CheckSkipped`` where DeepSpeed cannot be imported, and what *learner-full* raises."""
    try:
        import deepspeed  # noqa: F401
    except Exception as error:  # it builds and probes while it is imported, and raises whatever that raises
        raise CheckSkipped(f"DeepSpeed cannot be imported: {type(error).__name__}: {error}") from error
    training.run(context, "full", {"deepspeed": "zero3"})
