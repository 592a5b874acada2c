"""Keeps Python that a checkpoint brings along from being run: ms-swift trusts every checkpoint unless it is told.

Called once, before a model is loaded; what was asked for on the command line stays out of here.
"""

from __future__ import annotations

from typing import NoReturn

from transformers import dynamic_module_utils

from swift_stage2.errors import UserError


def refuse_foreign_code() -> None:
    """From now on, a checkpoint that wants to run code of its own raises UserError in this process.

    ms-swift names ``trust_remote_code=True`` in many places; whatever they say, transformers loads such code here.
    """
    dynamic_module_utils.get_class_in_module = _refuse
    dynamic_module_utils.get_cached_module_file = _refuse


def _refuse(*arguments: object, **_: object) -> NoReturn:
    raise UserError(
        f"a checkpoint may not bring its own code, got {arguments[0]}; read that code, then start the server with "
        "--trust-remote-code"
    )
