"""Data-loader workers of a rank that is asked to end: they work on for its last steps, and end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.ci]

PATIENCE_S = 120.0
RANK = """
import os, signal, sys, time
from torch.utils.data import DataLoader

NUM_ROWS = 40

def both_signals():
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)

class Rows:
    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, index):
        both_signals()
        return index

def begin(worker):
    both_signals()

if __name__ == "__main__":
    from swift_stage2.runtime.worker import workers_heed_no_stop

    heard = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: heard.append(number))
    context, is_persistent, is_killed = sys.argv[1], sys.argv[2] == "True", sys.argv[3] == "True"
    with workers_heed_no_stop():
        loader = DataLoader(Rows(), num_workers=2, multiprocessing_context=context, worker_init_fn=begin,
                            persistent_workers=is_persistent)
        for epoch in range(2):
            batches = iter(loader)  # kept until the process ends
            first = next(batches)
            if epoch == 0:
                os.killpg(0, signal.SIGTERM)
                os.killpg(0, signal.SIGINT)
            assert len([first, *batches]) == NUM_ROWS
        batches = iter(loader)
        next(batches)
        print(len(heard), *(worker.pid for worker in batches._workers), flush=True)
        if is_killed:
            time.sleep(600)
"""


@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.parametrize("is_persistent", [False, True])
def test_they_outlive_every_signal_and_end_with_their_rank_quietly(
    tmp_path: Path, context: str, is_persistent: bool
) -> None:
    """A worker's first act, and every later one, is to signal itself; the rank's group is signalled once."""
    (tmp_path / "rank.py").write_text(RANK)
    with rank(tmp_path / "rank.py", context, is_persistent, is_killed=False) as process:
        output, errors = process.communicate(timeout=PATIENCE_S)  # whose end every worker holds open
    assert (process.returncode, output.split()[:1]) == (0, ["2"]), errors
    assert "Error" not in errors, errors
    assert "Exception" not in errors, errors


def test_they_end_with_a_rank_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    with rank(tmp_path / "rank.py", "fork", is_persistent=True, is_killed=True) as process:
        assert process.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()[1:]]
        process.kill()
        assert len(workers) == 2
        assert not psutil.wait_procs(workers, timeout=PATIENCE_S)[1]


@contextmanager
def rank(path: Path, context: str, is_persistent: bool, is_killed: bool) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, str(path), context, str(is_persistent), str(is_killed)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
