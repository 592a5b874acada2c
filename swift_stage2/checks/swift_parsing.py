"""Arguments through ms-swift's own parser, every refusal in one line.

Alone, that parser prints three hundred lines of usage before the line that matters, and its later checks end
in a traceback.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from traceback import walk_tb
from typing import Any

from swift_stage2.compat import declare_operators
from swift_stage2.config.swift_arguments import PLUGIN_PREFIX
from swift_stage2.errors import ConfigError, UserError, closest, without_list

declare_operators()  # before ms-swift imports torchvision

from swift.arguments import SftArguments  # noqa: E402
from swift.utils import parse_args  # noqa: E402

logger = logging.getLogger(__name__)

SECTION, OPTION, COMMAND_LINE = "section swift", "--swift", "the command line"
"""Where the user has written arguments: in a configuration, as ``--swift KEY=VALUE``, as options of a server."""
_REMEDIES = {
    OPTION: "its option --NAME is --swift NAME=VALUE",
    COMMAND_LINE: "see swift-stage2 rollout --help",
}
_UNKNOWN_KIND = (" not in [", "automatically match", "no suitable")

# Errors by which ms-swift's own checks of its arguments refuse them; a missing package is one.
_REFUSALS = (ValueError, TypeError, AssertionError, ImportError, OSError)


class LearnerArguments(SftArguments):  # type: ignore[misc]
    """ms-swift's arguments of ``swift sft``, of which packed rows need no flash attention."""

    def _check_padding_free(self) -> None:
        """Packs as ms-swift does; what keeps the rows of a pack apart is ``losses.set_text_positions``."""
        if self.packing:
            self.padding_free = True


def refuse_unreadable(
    argv: Sequence[str], arguments_class: type = LearnerArguments, *, where: str = SECTION
) -> None:
    """Names and values as ms-swift's parser reads them; what it checks after that is left out, so no model is needed.

    Raises:
        ConfigError: a name that it does not know, with the nearest that it does, or a value of another type.
    """
    known = tuple(field.name for field in dataclasses.fields(arguments_class) if field.init)
    rule = f"ms-swift must know every argument of {where}"
    for word in argv:
        name = word.partition("=")[0].removeprefix("--").replace("-", "_")
        if (
            word.startswith("--") and name not in known
        ):  # whose beginning ms-swift's parser would take for another
            near = closest(name, known)
            raise ConfigError(
                rule, got=f"{name!r}", remedy=f"did you mean {near!r}?" if near else "remove it"
            )
    unchecked = type(arguments_class.__name__, (arguments_class,), {"__post_init__": lambda self: None})
    _parse(argv, unchecked, where)


def parse_swift_arguments(
    argv: Sequence[str], arguments_class: type = LearnerArguments, *, where: str = SECTION
) -> Any:
    """ms-swift's arguments, read and checked by ms-swift. ``where``: where the user has written them.

    Raises:
        ConfigError: ms-swift refuses them; the message ends with its own words, or names the nearest argument.
    """
    refuse_unreadable(argv, arguments_class, where=where)
    return _parse(argv, arguments_class, where)


def _parse(argv: Sequence[str], arguments_class: type, where: str) -> Any:
    told = io.StringIO()
    try:
        with redirect_stderr(told):
            arguments, _ = parse_args(arguments_class, list(argv))
    except SystemExit as end:
        lines = told.getvalue().strip().splitlines() or ["no reason given"]
        raise _refusal(lines[-1].partition("error: ")[2] or lines[-1], where) from end
    except Exception as error:  # raised again unless a plugin's or a refusal
        if not isinstance(error, UserError) and (plugin := _plugin_behind(error)):
            words = f"{type(error).__name__}: {error}"
            raise ConfigError(
                "a plugin must be importable", got=f"{words} from {plugin}", remedy="mend that file"
            ) from error
        if unknown := unknown_kind(error):
            raise unknown from error
        if not isinstance(error, _REFUSALS):
            raise
        logger.debug("ms-swift refused its arguments", exc_info=True)
        raise _refusal(str(error) or type(error).__name__, where) from error
    sys.stderr.write(told.getvalue())
    return arguments


def _plugin_behind(error: Exception) -> str:
    """File and line of a plugin that raised while ms-swift imported it; empty if none did."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = walk_tb(error.__traceback__)
    places = [
        f"{frame.f_code.co_filename}:{line}"
        for frame, line in frames
        if str(frame.f_globals.get("__name__")).startswith(PLUGIN_PREFIX)
    ]
    return places[-1] if places else ""


def _refusal(words: str, where: str) -> ConfigError:
    reason = without_list(" ".join(words.split()))
    remedy = _REMEDIES.get(where, f"its option --NAME is the key NAME of {where}")
    if "process group has not been" in reason:
        remedy = "start by swift-stage2 launch, or torchrun: swift.ddp_backend is for ranks"
    return ConfigError(f"ms-swift refuses {where}: {reason}", remedy=f"correct it ({remedy})")


def unknown_kind(error: Exception) -> ConfigError | None:
    """The line to say where ``error`` means that ms-swift does not know a model's kind, perhaps a plugin's."""
    words = " ".join(str(error).split())
    # ms-swift looks up what args.json says without asking whether it is there
    if isinstance(error, KeyError):
        *_, (frame, _) = walk_tb(error.__traceback__)
        if frame.f_code.co_name != "get_model_info_meta":
            return None
        words = f"model_type {words}, which it has not"
    elif "model_type" not in words or not any(part in words for part in _UNKNOWN_KIND):
        return None
    return ConfigError(
        "ms-swift must know the model's kind",
        got=without_list(words),
        remedy="name the plugin that brings it by external_plugins, or its kind by model_type",
    )
