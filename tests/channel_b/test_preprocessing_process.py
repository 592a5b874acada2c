"""The real process beside the test's: what it makes is what a thread makes, and its end is never a hang."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from real_model import PACKING_LENGTH, make_encoder, make_task, read_rows, rollout_of, sample_of
from swift.utils import import_external_file

from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.preprocessing import Judged, Prepared, ProcessPreprocessor, ThreadPreprocessor
from swift_stage2.demo.grounding_dataset import write_scenes
from swift_stage2.demo.scenes import SceneKind
from swift_stage2.errors import ConfigError, PreprocessorLost
from swift_stage2.records import Rollout
from swift_stage2.telemetry.timing import Trace

pytestmark = [pytest.mark.slow, pytest.mark.ci]


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return make_encoder()


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("scenes")
    return read_rows(write_scenes(directory, SceneKind.SHAPES, num_train=6, num_held_out=1, seed=4).train)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return Trace(True)


@pytest.fixture(scope="module")
def shared(encoder: Encoder, trace: Trace) -> Iterator[ProcessPreprocessor]:
    """One process for the tests that leave it alive; loading ms-swift takes it seconds."""
    process = ProcessPreprocessor(encoder, make_task(), packing_length=PACKING_LENGTH, trace=trace)
    process.await_ready()
    yield process
    process.close()


PLUGIN = """
from pathlib import Path
from swift_stage2.errors import SampleError

with Path(__file__).with_suffix(".imports").open("a") as imports:
    imports.write("once ")

class Parts:
    def with_span(self, span):
        return self

    def attach_model(self): ...

    def encode_prompt(self, sample):
        raise SampleError("refused by a user's class")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessPreprocessor]:
    """A process that the test may kill; of a user's parts that load no ms-swift, which takes ten seconds."""
    parts = import_parts(tmp_path / "light.py", monkeypatch)
    process = ProcessPreprocessor(parts, parts, packing_length=PACKING_LENGTH, trace=Trace(False))
    yield process
    process.close()


def import_parts(file: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An encoder and task of a user's file."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # ms-swift adds its folder
    file.write_text(PLUGIN)
    return import_external_file(str(file)).Parts()


def rollouts_of(encoder: Encoder, rows: list[dict[str, Any]]) -> list[Rollout]:
    """Every row answered with its own ground truth."""
    samples = [sample_of(row, position) for position, row in enumerate(rows)]
    return [
        rollout_of(sample, encoder.answer_of(sample), encoder.encode_prompt(sample).token_ids, version=3)
        for sample in samples
    ]


def prepared_by(preprocessor: Any, rollouts: list[Rollout]) -> list[Prepared]:
    outcomes = list(preprocessor.prepare(rollouts))
    assert all(isinstance(outcome, Prepared) for outcome in outcomes)
    return outcomes


def test_packs_equal_those_of_a_thread(
    shared: ProcessPreprocessor, encoder: Encoder, rows: list[dict[str, Any]]
) -> None:
    thread = ThreadPreprocessor(encoder, make_task(), packing_length=PACKING_LENGTH)
    rollouts = rollouts_of(encoder, rows)
    theirs, ours = prepared_by(thread, rollouts), prepared_by(shared, rollouts)
    for expected, found in zip(theirs, ours, strict=True):
        assert found.segment == replace(expected.segment, encodings=())
        assert (found.target, found.space) == (expected.target, expected.space)
        assert found.target.quality.num_pairs > 0
    for chosen in ([4, 0], [1], [5, 2, 3]):
        expected_pack = thread.pack("p", [theirs[i].segment for i in chosen])
        pack = shared.pack("p", [ours[i].segment for i in chosen])
        assert replace(pack, batch={}) == replace(expected_pack, batch={})
        assert pack.batch.keys() == expected_pack.batch.keys()
        for name, expected_value in expected_pack.batch.items():
            value = pack.batch[name]
            if isinstance(value, torch.Tensor):
                assert value.dtype == expected_value.dtype, name
                assert torch.equal(value, expected_value), name
            else:
                assert value == expected_value, name


def test_evaluation_judges_alike(
    shared: ProcessPreprocessor, encoder: Encoder, rows: list[dict[str, Any]]
) -> None:
    rollouts = rollouts_of(encoder, rows)
    rollouts[1] = replace(rollouts[1], prompt_token_ids=(1, 2))
    thread = ThreadPreprocessor(encoder, make_task(), packing_length=PACKING_LENGTH)
    for found, expected in zip(shared.judge(rollouts), thread.judge(rollouts), strict=True):
        if isinstance(expected, Judged):
            assert found == expected
        else:
            assert type(found) is type(expected)
            assert str(found) == str(expected)
            assert "the server's prompt must equal" in str(found)


def test_a_bad_sample_is_refused_and_costs_no_other(
    shared: ProcessPreprocessor, encoder: Encoder, rows: list[dict[str, Any]]
) -> None:
    first, second, third = rollouts_of(encoder, rows)[:3]
    second = replace(second, prompt_token_ids=(7,))
    outcomes = list(shared.prepare([first, second, third]))
    assert [isinstance(outcome, Prepared) for outcome in outcomes] == [True, False, True]
    assert "the server's prompt must equal the learner's" in str(outcomes[1])


def test_a_segment_can_be_packed_once_and_not_after_it_was_forgotten(
    shared: ProcessPreprocessor, encoder: Encoder, rows: list[dict[str, Any]]
) -> None:
    kept, forgotten = (prepared.segment for prepared in prepared_by(shared, rollouts_of(encoder, rows)[:2]))
    shared.forget([forgotten])
    assert shared.pack("p", [kept]).keys == (kept.key,)
    for segment in (forgotten, kept):
        with pytest.raises(PreprocessorLost, match=r"must be able to pack 1 segments, got KeyError"):
            shared.pack("q", [segment])


def test_memory_of_packs_goes_with_their_tensors(
    shared: ProcessPreprocessor, encoder: Encoder, rows: list[dict[str, Any]]
) -> None:
    def num_shared() -> tuple[int, int]:
        """Of this process and of the worker."""
        places = (Path(f"/proc/{pid}/maps") for pid in (os.getpid(), shared.pid))
        ours, theirs = (place.read_text().count("memfd:swift_stage2-batch") for place in places)
        return ours, theirs

    before, descriptors = num_shared(), psutil.Process().num_fds()
    (prepared,) = prepared_by(shared, rollouts_of(encoder, rows)[:1])
    pack = shared.pack("p", [prepared.segment])
    assert num_shared() == (before[0] + 1, before[1]), "the process that made it keeps nothing"
    pixels = pack.batch["pixel_values"]
    total = float(pixels.sum())
    del pack
    assert float(pixels.sum()) == total, "a tensor holds the memory by itself"
    del pixels
    assert num_shared() == before
    assert psutil.Process().num_fds() == descriptors


@pytest.mark.slow
def test_its_death_names_the_rows_that_it_worked_on(
    own: ProcessPreprocessor, encoder: Encoder, rows: list[dict[str, Any]]
) -> None:
    own.await_ready()
    rollouts = rollouts_of(encoder, rows)[:2]
    indices = ", ".join(str(rollout.sample.key.index) for rollout in rollouts)
    os.kill(own.pid, signal.SIGSEGV)
    with pytest.raises(
        PreprocessorLost, match=rf"killed by SIGSEGV.* prepare rollouts of data set rows {indices};"
    ):
        prepared_by(own, rollouts)


@pytest.mark.parametrize("is_ready", [True, False])
def test_its_death_is_told_at_once(
    own: ProcessPreprocessor, encoder: Encoder, rows: list[dict[str, Any]], is_ready: bool
) -> None:
    if is_ready:
        own.await_ready()
    os.kill(own.pid, signal.SIGKILL)
    with pytest.raises(PreprocessorLost, match="was killed by SIGKILL"):
        prepared_by(own, rollouts_of(encoder, rows)[:1]) if is_ready else own.await_ready()


def test_signals_to_the_whole_group_leave_it_to_its_rank(
    shared: ProcessPreprocessor, encoder: Encoder, rows: list[dict[str, Any]]
) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(shared.pid, number)
    assert prepared_by(shared, rollouts_of(encoder, rows)[:1])


def test_what_cannot_be_sent_is_refused_with_the_remedy(encoder: Encoder) -> None:
    task: Any = make_task()
    task.callback = lambda: None
    before = psutil.Process().children()
    with pytest.raises(ConfigError, match=r"must be picklable, got .*; write .*preprocessing: thread"):
        ProcessPreprocessor(encoder, task, packing_length=PACKING_LENGTH, trace=Trace(False))
    assert psutil.Process().children() == before


def test_an_interrupt_wakes_who_waits_for_a_process_that_stands_still(own: ProcessPreprocessor) -> None:
    os.kill(own.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(own.await_ready)
        own.interrupt()
        assert isinstance(waiting.exception(timeout=60), PreprocessorLost)


def test_closing_leaves_no_process(own: ProcessPreprocessor) -> None:
    own.close()
    assert not psutil.pid_exists(own.pid)
    own.close()
