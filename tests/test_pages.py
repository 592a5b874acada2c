"""The README's length, its YAML, every link between pages, and every command of ours with its options."""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path

import pytest

from swift_stage2 import cli
from swift_stage2.config import load_config

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("cpu_support/*.md")])
_LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(page: Path) -> Iterator[str]:
    for heading in re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for target, anchor in _LINK.findall(page.read_text(encoding="utf-8")):
        there = page.parent / target if target else page
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
            broken.append(f"{target}#{anchor}")
    assert broken == []


def test_the_readme_is_short_and_its_yaml_loads(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    (yaml,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "run.yaml").write_text(yaml, encoding="utf-8")
    assert load_config(tmp_path / "run.yaml").b_enabled


def commands(page: Path) -> Iterator[list[str]]:
    """The words behind ``swift-stage2`` of every line of shell that begins with it."""
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("swift-stage2 "):
                yield shlex.split(re.split(r" [|&>;]|;", line)[0], comments=True)[1:]


@cache
def options_of(command: tuple[str, ...]) -> frozenset[str]:
    """As ``--help`` tells them."""
    with redirect_stdout(io.StringIO()) as told, pytest.raises(SystemExit):
        cli.main([*command, "--help"])
    assert f"usage: swift-stage2 {' '.join(command)} " in told.getvalue()
    return frozenset(re.findall(r"--[\w-]+", told.getvalue()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_of_a_page_exists_with_its_options(page: Path) -> None:
    for words in commands(page):
        if words[0] in ("bench", "gpu-check") or "vllm" in words:
            continue  # other programs: a checkout's, and ms-swift's parser, which takes seconds to load
        has_sub = words[0] in ("import", "export", "data", "servers")
        known = options_of(tuple(words[: 1 + has_sub]))
        written = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert written <= known, words
