"""Arguments through ms-swift's own parser, every refusal in one line.

Alone, that parser prints three hundred lines of usage before the line that matters, and its later checks end
in a traceback. Used by the trainer and by the server on vLLM, which have ms-swift imported.
"""

from __future__ import annotations

import dataclasses
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
from swift_stage2.nearest_word import closest

logger = logging.getLogger(__name__)

# What ms-swift's checks of its own arguments raise; a missing package is one of them.
_REFUSALS = (ValueError, TypeError, AssertionError, ImportError, OSError)


def refuse_unreadable(
    argv: Sequence[str], arguments_class: type = SftArguments, *, where: str = "section swift"
) -> None:
    """Names and values as ms-swift's parser reads them; what it checks after that is left out, so no model is needed.

    Raises:
        ConfigError: a name that it does not know, with the nearest that it does, or a value of another type.
    """
    unchecked = type(arguments_class.__name__, (arguments_class,), {"__post_init__": lambda self: None})
    _, left_over = _parse(argv, unchecked, where)
    if not left_over:
        return
    name = next((word for word in left_over if word.startswith("-")), left_over[0])
    name = name.partition("=")[0].lstrip("-").replace("-", "_")
    known = tuple(field.name for field in dataclasses.fields(arguments_class) if field.init)
    near = closest(name, known)
    hint = f"did you mean {near!r}?" if near else "remove it"
    raise ConfigError(f"ms-swift must know every argument of {where}, got {name!r}; {hint}")


def parse_swift_arguments(
    argv: Sequence[str], arguments_class: type = SftArguments, *, where: str = "section swift"
) -> Any:
    """ms-swift's arguments, read and checked by ms-swift. ``where``: where the user has written them.

    Raises:
        ConfigError: ms-swift refuses them; the message ends with its own words, or names the nearest argument.
    """
    refuse_unreadable(argv, arguments_class, where=where)
    arguments, _ = _parse(argv, arguments_class, where)
    return arguments


def _parse(argv: Sequence[str], arguments_class: type, where: str) -> tuple[Any, list[str]]:
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
    return arguments, left_over


def _refusal(words: str, where: str) -> str:
    if "process group" in words and "RANK" not in os.environ:
        return (
            "swift.ddp_backend needs the ranks that torchrun starts, got a process without RANK; start it with "
            "torchrun --nproc_per_node N -m swift_stage2 train CONFIG.yaml, or with swift-stage2 launch"
        )
    reason = " ".join(words.split())
    return f"ms-swift refuses {where}: {reason}; correct it (its option --NAME is the key NAME of {where})"
