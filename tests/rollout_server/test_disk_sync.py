"""Pushes over a directory: the real process that writes, the real server that reads, and all that goes wrong."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from live_server import MODEL, LearnerRound, RunningServer, load_learner, serve, text_request
from test_publisher_kills import KILLED, Learner
from test_weight_source import flip
from waiting import wait_for
from weight_updates import mark_suspect

from swift_stage2.config import Transport
from swift_stage2.records import RoundOutcome
from swift_stage2.rollout_server.transformers_engine import TransformersRolloutEngine
from swift_stage2.weights.snapshot import ReadSnapshot
from swift_stage2.wire import OfferAnswer, WeightOffer

RUN = "diskrun"

pytestmark = [pytest.mark.slow, pytest.mark.ci, pytest.mark.usefixtures("checkpoints_weights_again")]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def disk_server(loaded_engine: TransformersRolloutEngine, shared: Path) -> Iterator[RunningServer]:
    with serve(loaded_engine, weights_root=shared) as server:
        yield server


@pytest.fixture
def reader(disk_server: RunningServer) -> Iterator[RunningServer]:
    """The shared server; weights that a test left unproven are cleared up."""
    yield disk_server
    if disk_server.state() != "serving":
        LearnerRound(disk_server, load_learner(), run_id=RUN).run()


def make_learner(server: RunningServer, directory: Path) -> Learner:
    disk = {"transport": Transport.DISK, "disk_directory": str(directory), "disk_keep": 2}
    return Learner(server, RUN, **disk)


def retry(learner: Learner) -> RoundOutcome:
    """The version that is kept, to a server that was suspected and answers again."""
    mark_suspect(learner.sync, 0)
    life = learner.sync.lives[0]
    life.answered()
    life.retry_step = 0
    return learner.sync.wait()


@pytest.fixture(scope="module")
def of_the_module(disk_server: RunningServer, shared: Path) -> Iterator[Learner]:
    learner = make_learner(disk_server, shared)
    with closing(learner.sync):
        yield learner


@pytest.fixture
def learner(of_the_module: Learner, reader: RunningServer, shared: Path) -> Learner:
    """With one proven version of the run in the directory, and nothing else."""
    outcome = of_the_module.push()
    assert outcome.proven == (0,), outcome.reports[0].error
    name = name_of(outcome.version)
    wait_for(file_of(shared, name).is_file)
    for path in shared.iterdir():
        if path.stem != name:
            path.unlink(missing_ok=True)  # the process may be about it, too
    return of_the_module


def served(server: RunningServer) -> tuple[Any, ...]:
    """Whose weights answer, and what they answer."""
    (completion,) = server.infer([text_request()], max_tokens=4)
    return completion.run_id, completion.weight_version, completion.token_ids


def name_of(version: int | None) -> str:
    return f"{RUN}-{version}"


def file_of(shared: Path, name: str | None) -> Path:
    return shared / f"{name}.safetensors"


def newest(shared: Path) -> str | None:
    """The last proven version."""
    numbers = [int(path.stem.rpartition("-")[2]) for path in shared.glob(f"{RUN}-*.safetensors")]
    return name_of(max(numbers)) if numbers else None


def names(shared: Path) -> set[str]:
    return {path.name.removesuffix(".safetensors") for path in shared.iterdir()}


def test_pushes_over_a_directory_are_proven_and_the_last_versions_stay(
    reader: RunningServer, learner: Learner, shared: Path
) -> None:
    proven = []
    for _ in range(3):
        outcome = learner.push()
        assert outcome.proven == (0,), outcome.reports[0].error
        report = outcome.reports[0]
        assert (report.proof, report.transport) == ("checksums", "disk")
        assert served(reader)[:2] == (RUN, outcome.version)
        proven.append(name_of(outcome.version))
        wait_for(lambda: newest(shared) == proven[-1])
    wait_for(lambda: names(shared) == set(proven[-2:]))
    assert ReadSnapshot.open(str(file_of(shared, proven[-1]))).identity.version == outcome.version


@pytest.mark.parametrize("is_restarted", [False, True], ids=["same publisher", "next publisher"])
def test_a_retry_reads_the_version_that_lies_there_and_removes_it_in_no_case(
    reader: RunningServer, learner: Learner, shared: Path, is_restarted: bool
) -> None:
    version = learner.sync.version
    file = file_of(shared, name_of(version))
    written = file.stat().st_ino
    if is_restarted:
        learner.publisher.close()  # the next push starts another one
    LearnerRound(reader, load_learner(seed=9), run_id="somebody-else").run()
    for is_torn in (False, True):
        if is_torn:
            flip(file, -1)
        report = retry(learner).reports[0]
        assert report.proven is not is_torn, report.error
        assert file.stat().st_ino == written
        if not is_torn:
            assert served(reader)[:2] == (RUN, version)


def test_a_version_on_the_disk_loads_as_a_hugging_face_checkpoint(
    learner: Learner, shared: Path, tmp_path: Path
) -> None:
    from transformers import Qwen2_5_VLForConditionalGeneration

    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    shutil.copy(file_of(shared, newest(shared)), checkpoint / "model.safetensors")
    shutil.copy(MODEL / "config.json", checkpoint)
    loaded = Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    theirs = dict(loaded.named_parameters())
    for name, parameter in learner.module.named_parameters():
        assert torch.equal(theirs[name], parameter), name


def lead_elsewhere(file: Path) -> None:
    file.symlink_to(file.rename(file.parents[1] / f"elsewhere{file.name}"))


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped byte": (lambda path: flip(path, -1), "with other checksums"),
    "link that leaves the root": (lead_elsewhere, "symbolic links"),
}


def test_a_fault_of_the_directory_fails_its_push_and_the_old_weights_serve_on(
    reader: RunningServer, learner: Learner, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot, old = reader.service.slot, newest(shared)
    before, take = served(reader), slot.offer
    for fault, (commit, told) in FAULTS.items():

        def spoil(offer: WeightOffer, commit: Any = commit) -> OfferAnswer:
            commit(shared / f".{name_of(learner.sync.version)}.safetensors")
            return take(offer)

        monkeypatch.setattr(slot, "offer", spoil)
        outcome = learner.push()
        assert outcome.failed == (0,), fault
        assert told in str(outcome.reports[0].error), fault
        assert (reader.state(), served(reader), newest(shared)) == ("serving", before, old), fault
    monkeypatch.undo()
    after = learner.push()
    assert after.proven == (0,), after.reports[0].error
    assert served(reader)[:2] == (RUN, after.version)
    wait_for(lambda: newest(shared) == name_of(after.version))
    wait_for(lambda: names(shared) == {old, name_of(after.version)})


def test_a_process_that_is_killed_while_a_server_reads_leaves_no_version(
    reader: RunningServer, learner: Learner, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot, old, before = reader.service.slot, newest(shared), served(reader)
    take = slot.offer

    def kill(offer: WeightOffer) -> OfferAnswer:
        os.kill(learner.publisher.pid, signal.SIGKILL)
        return take(offer)

    monkeypatch.setattr(slot, "offer", kill)
    killed = learner.push()
    assert killed.reports[0].error == KILLED
    monkeypatch.undo()
    assert (shared / f".{name_of(killed.version)}.safetensors").is_file()
    assert (newest(shared), served(reader)) == (old, before)
    after = learner.push()
    assert after.proven == (0,), after.reports[0].error
    wait_for(lambda: newest(shared) == name_of(after.version))
    wait_for(lambda: names(shared) == {old, name_of(after.version)})


def test_a_server_that_reads_no_directory_is_told_how_to_start_it(
    server: RunningServer, tmp_path: Path
) -> None:
    learner = make_learner(server, tmp_path)
    with closing(learner.sync):
        error = str(learner.push().reports[0].error)
    assert "must be told where to read weights" in error
