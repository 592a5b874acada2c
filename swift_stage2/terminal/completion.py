"""``swift-stage2 completion bash|zsh``: a script that completes commands and options, read off every ``--help``."""

from __future__ import annotations

import importlib
import io
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress

from swift_stage2.terminal.parser import CommandParser

_OPTION = re.compile(r"^  (?:-\w, )?(--[\w-]+)", re.MULTILINE)
_NAME = re.compile(r"^    ([a-z][a-z-]*)", re.MULTILINE)
_BENCH_S = 60.0
_ZSH_START = "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n"
_SCRIPT = """\
_swift_stage2() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" words=""
    case "${{COMP_WORDS[1]}} ${{COMP_WORDS[2]}}" in
{branches}
    esac
    if [ "$COMP_CWORD" -eq 1 ]; then words="{commands}"; fi
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -F _swift_stage2 swift-stage2
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the script; names of files are left to the shell."""
    parser = CommandParser(
        prog="swift-stage2 completion",
        description="Prints a script that completes commands and options. It takes seconds, so keep it in a file: "
        "swift-stage2 completion bash > ~/.swift-stage2.sh, and put `source ~/.swift-stage2.sh` into ~/.bashrc.",
    )
    parser.add_argument("shell", choices=("bash", "zsh"))
    shell = parser.parse_args(argv).shell
    print((_ZSH_START if shell == "zsh" else "") + completion_script(), end="")
    return 0


def completion_script() -> str:
    """Functions for bash, which zsh takes as well."""
    commands = _NAME.findall(_help())
    branches = []
    for command in commands:
        text = _help(command)
        names = _NAME.findall(text) if text.partition("\n\n")[0].endswith("...") else []
        branches += [_branch(f'"{command} {name}"', _OPTION.findall(_help(command, name))) for name in names]
        branches.append(_branch(f'"{command} "*', [*names, *_OPTION.findall(text)]))
    return _SCRIPT.format(branches="\n".join(branches), commands=" ".join([*commands, "--help", "--version"]))


def _branch(pattern: str, words: Sequence[str]) -> str:
    return f'        {pattern}) words="{" ".join(dict.fromkeys(words))}" ;;'


def _help(*words: str) -> str:
    if words and words[0] in ("bench", "gpu-check"):  # it would take this process's place
        command = (sys.executable, "-m", "swift_stage2", *words, "--help")
        return subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=_BENCH_S, check=False
        ).stdout
    cli = importlib.import_module("swift_stage2.cli")  # which names this file
    told = io.StringIO()
    with redirect_stdout(told), redirect_stderr(told), suppress(SystemExit):
        cli.main([*words, "--help"])
    return told.getvalue()
