"""The stock server gets its token without anybody else reading it; ms-swift, which needs vLLM here, is stood in for."""

from __future__ import annotations

from pathlib import Path

from commands import run_python

_UTILS = """
import logging
logging.basicConfig(level=logging.INFO)
def get_logger():
    return logging.getLogger("swift")
"""
_PIPELINES = """
import os
from pathlib import Path
from swift.utils import get_logger
def rollout_main(arguments):
    get_logger().info("args: %s", arguments)
    Path("got").write_text("\\n".join(arguments))
    Path("shown").write_bytes(Path("/proc/self/cmdline").read_bytes())
"""


def test_the_token_reaches_the_server_and_neither_the_list_of_processes_nor_the_log(tmp_path: Path) -> None:
    package = tmp_path / "swift"
    package.mkdir()
    for name, source in (("__init__", ""), ("utils", _UTILS), ("pipelines", _PIPELINES)):
        (package / f"{name}.py").write_text(source)
    ended = run_python(
        "-m",
        "swift_stage2.rollout_server.stock_program",
        "THE_KEY",
        "--model",
        "m",
        cwd=tmp_path,
        variables={"THE_KEY": "hush-hush", "PYTHONPATH": str(tmp_path)},
    )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "got").read_text().split() == ["--model", "m", "--api_key", "hush-hush"]
    assert b"hush-hush" not in (tmp_path / "shown").read_bytes()
    assert "'--api_key', '***'" in ended.stderr
    assert "hush-hush" not in ended.stderr + ended.stdout
