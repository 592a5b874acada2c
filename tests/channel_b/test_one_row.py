"""One row, from the data file to the gradient: through the files that the design page names, and no others.

Real source, client, HTTP, fence, template, preprocessing, queue, learner and trainer; the rollout server is a stand-in,
a round proves it without weights, and the preprocessing process is a thread, so that its calls are seen here.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from fake_rollout_server import Call, FakeRolloutServer, outputs
from real_model import PACKING_LENGTH, make_encoder, make_task, read_rows, sample_of
from rollout_batch import make_client

import swift_stage2
from swift_stage2.channel_b import preprocessing, preprocessing_worker
from swift_stage2.channel_b.attempts import Attempts
from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.pipeline import Pipeline
from swift_stage2.channel_b.preprocessing import ProcessPreprocessor
from swift_stage2.channel_b.ready_queue import ReadyQueue
from swift_stage2.channel_b.sample_source import SampleSource
from swift_stage2.collectives import SingleRank
from swift_stage2.demo.grounding_dataset import write_scenes
from swift_stage2.demo.scenes import SceneKind
from swift_stage2.fence import InferFence
from swift_stage2.learner import ChannelB, Learner
from swift_stage2.records import RoundOutcome, ServerReport
from swift_stage2.scheduling.pacing import Pacer
from swift_stage2.scheduling.round_schedule import RoundSchedule
from swift_stage2.scheduling.version_clock import VersionClock
from swift_stage2.scheduling.watches import TruncationGuard
from swift_stage2.telemetry.event_log import EventLog
from swift_stage2.telemetry.trace import Trace
from swift_stage2.training.stage2_trainer import Stage2Trainer

PACKAGE = Path(swift_stage2.__file__).parent
PAGE = PACKAGE.parent / "docs" / "design" / "channel_b.md"
PATIENCE_S = 60.0
MOST_FILES = 15


def _on_the_page() -> tuple[list[str], tuple[str, ...]]:
    """The path's files in order, and the files and folders that are not counted."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition("\n## One row, from file to gradient\n")
    path, _, beside = rest.partition("\n## ")[0].partition("Not counted")
    names = re.findall(r"`([\w/]+(?:\.py|/))`", beside)
    return re.findall(r"^\d+\. `([\w/]+\.py)`", path, re.MULTILINE), tuple(names)


class InAThread:
    """Stands in for ``Popen``: serves the descriptor that the process would have been given."""

    pid = os.getpid()

    def __init__(self, command: Sequence[str], **_: Any) -> None:
        *_, descriptor, _ = command
        self._channel = socket.socket(fileno=os.dup(int(descriptor)))
        self._connection = Connection(os.dup(int(descriptor)))
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # killed before it has answered
            preprocessing_worker.serve(self._channel, self._connection)

    def kill(self) -> None:
        with suppress(OSError):  # twice is once
            self._channel.shutdown(socket.SHUT_RDWR)

    def wait(self, timeout: float) -> int:
        self._thread.join(timeout)
        self._channel.close()
        self._connection.close()
        return 0


@pytest.fixture
def seen() -> Iterator[set[str]]:
    """Files of the package of which a function was called, on any thread that starts while the test runs."""
    files: set[str] = set()

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            files.add(Path(frame.f_code.co_filename).relative_to(PACKAGE).as_posix())

    threading.setprofile(look)
    sys.setprofile(look)
    yield files
    sys.setprofile(None)
    threading.setprofile(None)


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: set[str]
) -> Iterator[Callable[[int], list[Any]]]:
    """Takes a step as the trainer does and returns its batches; ``seen`` begins with the first step."""
    encoder, task = make_encoder(), make_task()
    scenes = write_scenes(tmp_path, SceneKind.SHAPES, num_train=1, num_held_out=1, seed=4)
    row = next(row for row in read_rows(scenes.train) if len(row["objects"]["bbox"]) > 1)
    monkeypatch.setattr(preprocessing.subprocess, "Popen", InAThread)  # type: ignore[attr-defined]
    preprocessor = ProcessPreprocessor(encoder, task, packing_length=PACKING_LENGTH, trace=Trace(False))
    preprocessor.await_ready()
    source = SampleSource([row], task, rank=0, world_size=1, seed=1)
    clock, fence, guard = VersionClock(), InferFence(start_closed=True), TruncationGuard(1.0)
    queue = ReadyQueue(2, 2)
    pacer = Pacer(b_ratio=1.0, version_window=2, sync_every_steps=4, target_packs=1, packs_per_b_step=1)
    with FakeRolloutServer(on_infer=partial(_answer, encoder, row)) as server:
        attempts = Attempts()
        client = make_client(server.url, fence=fence, events=attempts)
        pipeline = Pipeline(
            source=source,
            client=client,
            attempts=attempts,
            make_request=encoder.request,
            preprocessor=preprocessor,
            queue=queue,
            clock=clock,
            pacer=pacer,
            guard=guard,
            events=MagicMock(),
            packing_length=PACKING_LENGTH,
            packing_min_fill_ratio=0.1,
            redraw_dropped=True,
            max_attempts=3,
        )
        report = ServerReport(proven=True, error=None, proof="canary", num_bytes=0, seconds={})
        round_ = RoundOutcome("r", 1, {0: report}, news=(0,))
        channel_b = ChannelB(
            source=source,
            client=client,
            queue=queue,
            pipeline=pipeline,
            fence=fence,
            clock=clock,
            guard=guard,
            rounds=RoundSchedule(1, 1000, backoff_steps=1, max_backoff_steps=64),
            sync=MagicMock(has_news=False, **{"hear.return_value": round_}),
            probe=MagicMock(**{"answering.return_value": (), "lost.return_value": ()}),
            abort=MagicMock(),
            run_id="run",
            base_urls=[server.url],
            max_inflight_per_server=1,
            min_ready_tokens=0,
            continue_on_failure=False,
        )
        learner = Learner(
            b_ratio=1.0,
            control=SingleRank(),
            events=MagicMock(log=EventLog(None)),
            starvation=None,
            fail_when_starved=False,
            channel_b=channel_b,
        )
        trainer: Any = object.__new__(Stage2Trainer)
        trainer.stage2 = SimpleNamespace(learner=learner, telemetry=MagicMock())
        trainer.state = SimpleNamespace(global_step=0)
        trainer.stop_agreed = False
        trainer._a_batches_in_epoch = 0
        trainer._get_num_items_in_batch = lambda batches, device: 1
        monkeypatch.setattr(Stage2Trainer.__mro__[1], "get_batch_samples", lambda *_: ([], 0), raising=False)

        def step(number: int) -> list[Any]:
            trainer.state.global_step = number
            if number == 0:
                seen.clear()
            return list(trainer.get_batch_samples(iter(()), 1, torch.device("cpu"))[0])

        learner.start()
        yield step
        learner.close()


def _answer(encoder: Encoder, row: dict[str, Any], call: Call) -> Any:
    sample = sample_of(row)
    prompt = list(encoder.encode_prompt(sample).token_ids)
    text = encoder.answer_of(sample)
    choice = {"message": {"content": text}, "finish_reason": "stop", "token_ids": [1]}
    return outputs([{"response": {"choices": [choice], "prompt_token_ids": prompt}} for _ in call.requests])


def test_the_page_names_at_most_fifteen_files_and_all_of_them_exist() -> None:
    path, beside = _on_the_page()
    assert 0 < len(path) <= MOST_FILES
    assert len(set(path)) == len(path)
    assert [name for name in (*path, *beside) if not (PACKAGE / name).exists()] == []


def test_a_row_passes_through_these_files_and_no_others(
    run: Callable[[int], list[Any]], seen: set[str]
) -> None:
    batches = run(0)
    between_steps = threading.Event()
    for number in range(1, 600):
        if batches:
            break
        between_steps.wait(0.1)
        batches = run(number)
    (batch,) = batches
    assert (batch["labels"] != -100).any()
    path, beside = _on_the_page()
    assert {file for file in seen if not file.startswith(beside)} == set(path)
