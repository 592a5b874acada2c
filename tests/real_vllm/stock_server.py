"""The unmodified ``swift rollout`` with vLLM on this CPU, as a process of its own, for the tests of this folder."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import swift_stage2_cpu
from stopped_process import stop_process
from torchrun_job import free_port

from swift_stage2 import demo

MODEL = Path(demo.__file__).parent / "stage1"
TEMPLATE = Path(demo.__file__).parent / "tiny_template.py"
CPU_PLUGIN = Path(swift_stage2_cpu.__file__).parent / "swift_plugin.py"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "QWENVL_BBOX_FORMAT": "new",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
START_S = 900.0
_END_S = 60.0
VARIABLE = "STAGE2_TEST_FAULT_FILE"
"""Of ``faulty_worker``, which must not be imported here: it imports vLLM."""


def stock_arguments(port: int, model: Path = MODEL, plugins: Sequence[Path] = ()) -> list[str]:
    return [
        "-m", "swift.cli.rollout", "--model", str(model), "--model_type", "stage2_tiny_vl",
        "--template", "stage2_tiny_vl", "--external_plugins", str(TEMPLATE), str(CPU_PLUGIN), *map(str, plugins),
        "--host", "127.0.0.1", "--port", str(port), "--torch_dtype", "float32",
        "--vllm_enforce_eager", "true", "--vllm_max_model_len", "1024",
    ]  # fmt: skip


@dataclass(frozen=True)
class ServerProcess:
    """A server that was started here, and everything below it."""

    base_url: str
    process: subprocess.Popen[bytes]
    log: Path
    group_port: int = field(default_factory=free_port)

    @property
    def port(self) -> int:
        return int(self.base_url.rpartition(":")[2])

    def descendants(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.process.pid)
            return [*top.children(recursive=True), top]
        return []

    def named(self, name: str) -> psutil.Process:
        """The one descendant whose command line starts with ``name``, for instance ``VLLM::Worker``."""
        found = [each for each in self.descendants() if " ".join(each.cmdline()).startswith(name)]
        assert len(found) == 1, [each.cmdline() for each in self.descendants()]
        return found[0]

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Takes no call and answers none meanwhile; what is sent to it waits."""
        try:
            stop_process(self.process.pid)
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def wait_until_it_answers(self) -> None:
        end = time.monotonic() + START_S
        body = {
            "infer_requests": [{"messages": [{"role": "user", "content": "?"}]}],
            "request_config": {"max_tokens": 1},
        }
        while True:
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < end, self.log.read_text(errors="replace")[-3000:]
            with contextlib.suppress(httpx.HTTPError):
                reply = httpx.post(f"{self.base_url}/infer/", json=body, trust_env=False, timeout=START_S)
                if reply.status_code == 200:
                    return
            time.sleep(0.5)  # bounded polling of another process's start

    def end(self) -> None:
        """SIGKILL to all of it but resource trackers, which remove shared memory and end then; waits for the end."""
        alive = self.descendants()
        for each in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                if not any("resource_tracker" in word for word in each.cmdline()):
                    each.kill()
        _, left = psutil.wait_procs(alive, timeout=_END_S)
        assert not left, left


def start_stock(
    directory: Path,
    port: int,
    extra: Sequence[str] = (),
    *,
    model: Path = MODEL,
    plugins: Sequence[Path] = (),
) -> ServerProcess:
    """Starts it and returns at once; see ``wait_until_it_answers``."""
    return start(directory, f"http://127.0.0.1:{port}", [*stock_arguments(port, model, plugins), *extra])


def start(directory: Path, base_url: str, arguments: Sequence[str]) -> ServerProcess:
    log = directory / f"server-{base_url.rpartition(':')[2]}.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-u", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | ENVIRONMENT,
        )
    return ServerProcess(base_url, process, log)
