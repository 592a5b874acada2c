"""The real process beside the test's: what it makes is what a thread makes, and its end is never a hang."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from commands import run_python
from real_model import Rows, make_encoder, make_task, read_rows, rollout_of, sample_of
from swift.utils import import_external_file

from swift_stage2.channel_b import preprocessing_process
from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.preprocessing import EncodedRollout, Preprocessor, ScoredRollout
from swift_stage2.channel_b.preprocessing_process import ProcessPreprocessor
from swift_stage2.demo.scenes import SceneKind, write_scenes
from swift_stage2.errors import ConfigError, PreprocessorLost, SampleError
from swift_stage2.records import Pack, Rollout, Segment

pytestmark = [pytest.mark.slow, pytest.mark.ci]


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return make_encoder()


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    directory = tmp_path_factory.mktemp("scenes")
    return read_rows(write_scenes(directory, SceneKind.SHAPES, num_train=6, num_held_out=1, seed=4).train)


@pytest.fixture(scope="module")
def shared(encoder: Encoder) -> Iterator[ProcessPreprocessor]:
    """One process for the tests that leave it alive; loading ms-swift takes it seconds."""
    process = ProcessPreprocessor(encoder, make_task())
    process.await_ready()
    yield process
    process.close()


PLUGIN = """
import os, signal, time
from pathlib import Path
from swift_stage2.errors import SampleError

with Path(__file__).with_suffix(".imports").open("a") as imports:
    imports.write("once ")

class Parts:
    def attach_model(self): ...

    def encode_prompt(self, sample):
        if "end" in sample.row:
            os.kill(os.getpid(), signal.SIGSEGV)
        if "hang" in sample.row:
            time.sleep(60)
        raise SampleError("refused by a user's class")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessPreprocessor]:
    """A process that the test may kill; of a user's parts that load no ms-swift, which takes ten seconds."""
    parts = import_parts(tmp_path / "light.py", monkeypatch)
    process = ProcessPreprocessor(parts, parts)
    yield process
    process.close()


def import_parts(file: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An encoder and task of a user's file."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # ms-swift adds its folder
    file.write_text(PLUGIN)
    return import_external_file(str(file)).Parts()


@pytest.fixture
def rollouts(encoder: Encoder, rows: Rows) -> list[Rollout]:
    """Every row answered with its own ground truth."""
    samples = [sample_of(row, position) for position, row in enumerate(rows)]
    return [
        rollout_of(sample, encoder.answer_of(sample), encoder.encode_prompt(sample).token_ids, version=3)
        for sample in samples
    ]


def encoded_by(preprocessor: Any, rollouts: list[Rollout]) -> list[EncodedRollout]:
    outcomes = list(preprocessor.encode(rollouts))
    assert all(isinstance(outcome, EncodedRollout) for outcome in outcomes)
    return outcomes


def packed_by(preprocessor: Preprocessor, segments: list[Segment]) -> Pack:
    pack = preprocessor.pack("p", segments)
    assert pack is not None
    return pack


def test_packs_equal_those_of_a_thread(
    shared: ProcessPreprocessor, encoder: Encoder, rollouts: list[Rollout]
) -> None:
    thread = Preprocessor(encoder, make_task())
    theirs, ours = encoded_by(thread, rollouts), encoded_by(shared, rollouts)
    for expected, found in zip(theirs, ours, strict=True):
        assert found.segment == replace(expected.segment, encodings=())
        assert (found.target, found.space) == (expected.target, expected.space)
        assert found.target.quality.num_pairs > 0
    for chosen in ([4, 0], [1], [5, 2, 3]):
        expected_pack = packed_by(thread, [theirs[i].segment for i in chosen])
        pack = packed_by(shared, [ours[i].segment for i in chosen])
        assert replace(pack, batch={}) == replace(expected_pack, batch={})
        assert pack.batch.keys() == expected_pack.batch.keys()
        for name, expected_value in expected_pack.batch.items():
            value = pack.batch[name]
            if isinstance(value, torch.Tensor):
                assert value.dtype == expected_value.dtype, name
                assert torch.equal(value, expected_value), name
            else:
                assert value == expected_value, name


def test_verdicts_are_those_of_a_thread_and_a_bad_sample_costs_no_other(
    shared: ProcessPreprocessor, encoder: Encoder, rollouts: list[Rollout]
) -> None:
    rollouts[1] = replace(rollouts[1], prompt_token_ids=(1, 2))
    thread = Preprocessor(encoder, make_task())
    image = replace(rollouts[2], token_ids=(5, 6, 7))
    for in_group, asked in ((False, rollouts), (True, [*rollouts[:2], image, *rollouts[3:]])):
        found = shared.score(asked, in_group=in_group)
        for one, other in zip(found, thread.score(asked, in_group=in_group), strict=True):
            assert one == other or (type(one), str(one)) == (type(other), str(other))
        scored = [isinstance(each, ScoredRollout) for each in found]
        assert scored == [True, False, not in_group, True, True, True]
    assert "stands for an image, video or audio, got token_id=6" in str(found[2])
    found = shared.score(rollouts)
    encoded = shared.encode(rollouts)
    assert [isinstance(each, EncodedRollout) for each in encoded] == [True, False, *[True] * 4]
    assert str(encoded[1]) == str(found[1])


def test_a_segment_can_be_packed_once_and_not_after_it_was_forgotten(
    shared: ProcessPreprocessor, rollouts: list[Rollout]
) -> None:
    kept, forgotten = (encoded.segment for encoded in encoded_by(shared, rollouts[:2]))
    shared.forget([forgotten])
    assert packed_by(shared, [kept]).keys == (kept.key,)
    for segment in (forgotten, kept):
        assert not shared.holds(segment)
        assert shared.pack("q", [segment]) is None


def test_memory_of_packs_goes_with_their_tensors(
    shared: ProcessPreprocessor, rollouts: list[Rollout]
) -> None:
    def num_shared() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:swift_stage2-batch")

    def files_there() -> list[str]:
        names = Path(f"/proc/{shared.pid}/fd").iterdir()
        return [os.readlink(name) for name in names if "memfd" in os.readlink(name)]

    before, descriptors = num_shared(), psutil.Process().num_fds()
    (encoded,) = encoded_by(shared, rollouts[:1])
    pack = packed_by(shared, [encoded.segment])
    assert num_shared() == before + 1
    pixels = pack.batch["pixel_values"]
    total = float(pixels.sum())
    del pack
    encoded_by(shared, rollouts[:1])
    assert files_there() == [], "the process that made it keeps nothing once it is asked something else"
    assert float(pixels.sum()) == total, "a tensor holds the memory by itself"
    del pixels
    assert num_shared() == before
    assert psutil.Process().num_fds() == descriptors


def test_a_process_that_ends_is_replaced_and_costs_the_segments_that_it_held(
    shared: ProcessPreprocessor, rollouts: list[Rollout]
) -> None:
    rollouts = rollouts[:2]
    (encoded,) = encoded_by(shared, rollouts[:1])
    before = shared.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    again = encoded_by(shared, rollouts)
    assert shared.pid != before
    assert packed_by(shared, [each.segment for each in again]).num_tokens > encoded.segment.num_tokens
    assert shared.pack("p", [encoded.segment]) is None


def test_a_row_that_ends_two_processes_alone_is_refused_and_a_process_that_never_answers_fails(
    own: ProcessPreprocessor, rollouts: list[Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = rollouts[:2]
    bad = replace(bad, sample=replace(bad.sample, row={"end": True}))
    refused, ended = own.encode([good, bad])
    assert str(refused) == "refused by a user's class"
    assert isinstance(ended, SampleError)
    asked = f"it was to encode rollouts of data set rows {bad.sample.key.index};"
    assert re.search(f"was killed by SIGSEGV, .*: thread .{asked}", str(ended))
    monkeypatch.setattr(preprocessing_process, "_ANSWER_S", 0.5)
    hung = replace(bad, sample=replace(bad.sample, row={"hang": True}))
    with pytest.raises(PreprocessorLost, match=r"did not answer within 0\.5 s"):
        own.encode([hung] * preprocessing_process._MOST_LOST)
    assert not psutil.pid_exists(own.pid or 0)


def test_a_template_that_cannot_be_loaded_there_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = import_parts(tmp_path / "light.py", monkeypatch)
    (tmp_path / "light.py").write_text("raise RuntimeError('of the learner alone')")
    with (
        closing(ProcessPreprocessor(parts, parts)) as process,
        pytest.raises(PreprocessorLost, match=r"got RuntimeError: of the learner alone; .*: thread"),
    ):
        process.await_ready()


def test_a_process_that_cannot_take_the_place_of_one_that_ended_blames_no_row(
    own: ProcessPreprocessor, tmp_path: Path, rollouts: list[Rollout]
) -> None:
    own.await_ready()
    (tmp_path / "light.py").write_text("raise RuntimeError('edited meanwhile')")
    os.kill(own.pid or 0, signal.SIGKILL)
    with pytest.raises(PreprocessorLost, match="edited meanwhile"):
        own.encode(rollouts[:2])


def test_signals_to_the_whole_group_leave_it_to_its_rank(
    shared: ProcessPreprocessor, rollouts: list[Rollout]
) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(shared.pid or 0, number)
    assert encoded_by(shared, rollouts[:1])


def test_what_cannot_be_sent_is_refused_with_the_remedy(encoder: Encoder) -> None:
    task: Any = make_task()
    task.callback = lambda: None
    before = psutil.Process().children()
    with pytest.raises(ConfigError, match=r"must be picklable, got .*; write .*preprocessing: thread"):
        ProcessPreprocessor(encoder, task)
    assert psutil.Process().children() == before


def test_an_interrupt_wakes_who_waits_for_a_process_that_stands_still(own: ProcessPreprocessor) -> None:
    os.kill(own.pid or 0, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(own.await_ready)
        own.interrupt()
        assert isinstance(waiting.exception(timeout=60), PreprocessorLost)


def test_closing_leaves_no_process(own: ProcessPreprocessor) -> None:
    own.close()
    assert not psutil.pid_exists(own.pid or 0)
    own.close()


LEAVES = """
import sys, threading
from light import Parts
from swift_stage2.channel_b.preprocessing_process import ProcessPreprocessor

if __name__ == "__main__":
    process = ProcessPreprocessor(Parts(), Parts())
    process.await_ready()
    hung = process._pool.submit(__import__("time").sleep, 600)
    while not hung.running():
        threading.Event().wait(0.01)
"""


def test_a_rank_that_leaves_it_behind_in_the_middle_of_something_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "light.py").write_text(PLUGIN)
    (tmp_path / "rank.py").write_text(LEAVES)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = run_python("rank.py", cwd=tmp_path, timeout=120.0, variables={"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-2000:]
