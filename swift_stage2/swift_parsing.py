"""Arguments through ms-swift's own parser, every refusal in one line.

Alone, that parser prints three hundred lines of usage before the line that matters, and its later checks end
in a traceback. Used by the trainer and by the server on vLLM, which have ms-swift imported.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from typing import Any

from swift.arguments import SftArguments
from swift.utils import parse_args

from swift_stage2.errors import ConfigError

logger = logging.getLogger(__name__)

# What ms-swift's checks of its own arguments raise; a missing package is one of them.
_REFUSALS = (ValueError, TypeError, AssertionError, ImportError, OSError)


def parse_swift_arguments(
    argv: Sequence[str], arguments_class: type = SftArguments, *, where: str = "section swift"
) -> Any:
    """ms-swift's arguments, read and checked by ms-swift. ``where``: where the user has written them.

    Raises:
        ConfigError: ms-swift refuses them; the message ends with its own words.
    """
    told = io.StringIO()
    try:
        with redirect_stderr(told):
            arguments, left_over = parse_args(arguments_class, list(argv))
    except SystemExit as end:
        lines = told.getvalue().strip().splitlines() or ["no reason given"]
        raise ConfigError(_refusal(lines[-1].partition("error: ")[2] or lines[-1], where)) from end
    except _REFUSALS as error:
        logger.debug("ms-swift refused its arguments", exc_info=True)
        raise ConfigError(_refusal(str(error) or type(error).__name__, where)) from error
    sys.stderr.write(told.getvalue())
    if left_over:
        raise ConfigError(_refusal(f"it does not know {left_over}", where))
    return arguments


def _refusal(words: str, where: str) -> str:
    if "process group" in words and "RANK" not in os.environ:
        return (
            "swift.ddp_backend needs the ranks that torchrun starts, got a process without RANK; start it with "
            "torchrun --nproc_per_node N -m swift_stage2 train CONFIG.yaml, or with swift-stage2 launch"
        )
    return f"ms-swift refuses {where}: {' '.join(words.split())}; mend it there"
