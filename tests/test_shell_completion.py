"""The completion script, sourced by a real bash."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from swift_stage2 import cli


@pytest.fixture
def script(capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["completion", "bash"]) == 0
    return capsys.readouterr().out


def complete(script: str, *words: str) -> list[str]:
    bash = shutil.which("bash")
    assert bash is not None
    typed = f'COMP_WORDS=({" ".join(words[:-1])} "{words[-1]}"); COMP_CWORD={len(words) - 1}'
    ask = f'{typed}; $(complete -p swift-stage2 | grep -o "_shtab[a-z0-9_]*"); echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(
        [bash, "-c", f"{script}\n{ask}"], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.split()


def test_commands_and_options_are_completed(script: str) -> None:
    assert complete(script, "swift-stage2", "la") == ["launch"]
    assert complete(script, "swift-stage2", "be") == ["bench"]
    assert complete(script, "swift-stage2", "launch", "--re") == ["--resume"]
