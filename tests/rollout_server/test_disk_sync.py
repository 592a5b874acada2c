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
from live_server import MODEL, LearnerRound, RunningServer, free_port, load_learner, serve, text_request
from small_disk import SmallDisk
from test_publisher_kills import KILLED
from test_weight_source import cut, flip
from waiting import wait_for
from weight_updates import make_updates_by_checksums, mark_suspect, process_publisher, server_at

from swift_stage2.config import Transport
from swift_stage2.records import RoundOutcome
from swift_stage2.rollout_server.transformers_engine import TransformersRolloutEngine
from swift_stage2.weights.snapshot import ReadSnapshot
from swift_stage2.wire import OfferAnswer, RefusalReason, WeightOffer, WeightWay

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


class Learner:
    """Rank 0, whose weights move before every version."""

    def __init__(self, servers: list[RunningServer], directory: Path) -> None:
        self.module = load_learner(seed=1)
        self.publisher = process_publisher(
            *[server_at(server.base_url, free_port()) for server in servers],
            transport=Transport.DISK,
            disk_directory=str(directory),
        )
        self.sync = make_updates_by_checksums(self.module, self.publisher, run_id=RUN)
        self._servers = servers
        self._versions = servers[0].versions

    @property
    def version(self) -> int:
        return self.sync.version

    def begin(self) -> str:
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.add_(0.01)
        self.sync.begin(range(len(self._servers)), version=next(self._versions))
        return name_of(self.version)

    def push(self) -> RoundOutcome:
        self.begin()
        return self.sync.wait()

    def retry(self) -> RoundOutcome:
        """The version that is kept, to a server that was suspected and answers again."""
        mark_suspect(self.sync, 0)
        life = self.sync.lives[0]
        life.answered()
        life.retry_step = 0
        return self.sync.wait()


@pytest.fixture(scope="module")
def of_the_module(disk_server: RunningServer, shared: Path) -> Iterator[Learner]:
    learner = Learner([disk_server], shared)
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
    version = learner.version
    file = file_of(shared, name_of(version))
    written = file.stat().st_ino
    if is_restarted:
        learner.publisher.close()  # the next push starts another one
    LearnerRound(reader, load_learner(seed=9), run_id="somebody-else").run()
    for is_torn in (False, True):
        if is_torn:
            flip(file, -1)
        report = learner.retry().reports[0]
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


def replace_by_another_run(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(RUN.encode(), RUN.upper().encode(), 1))


def lead_elsewhere(file: Path) -> None:
    file.symlink_to(file.rename(file.parents[1] / f"elsewhere{file.name}"))


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped byte": (lambda path: flip(path, -1), "with other checksums"),
    "cut file": (cut, "a snapshot must be a safetensors file"),
    "missing file": (Path.unlink, "No such file or directory"),
    "another run": (replace_by_another_run, "of run diskrun, got version="),
    "link that leaves the root": (lead_elsewhere, "symbolic links"),
}


def test_a_fault_of_the_directory_fails_its_push_and_the_old_weights_serve_on(
    reader: RunningServer, learner: Learner, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot, old = reader.service.slot, newest(shared)
    before, take = served(reader), slot.offer
    for fault, (commit, told) in FAULTS.items():

        def spoil(offer: WeightOffer, commit: Any = commit) -> OfferAnswer:
            commit(shared / f".{name_of(learner.version)}.safetensors")
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


@pytest.mark.parametrize("small_disk", ["16m"], indirect=True)
def test_a_full_disk_fails_the_push_in_one_line_and_the_next_one_with_room_is_proven(
    loaded_engine: TransformersRolloutEngine, small_disk: SmallDisk
) -> None:
    with serve(loaded_engine, weights_root=small_disk.path) as server:
        LearnerRound(server, load_learner()).run()
        before, learner = served(server), Learner([server], small_disk.path)
        small_disk.fill(leaving_bytes=3 << 20)
        with closing(learner.sync):
            outcome = learner.push()
            assert outcome.failed == (0,)
            error = str(outcome.reports[0].error)
            assert "\n" not in error
            assert f"rollout.sync.disk_directory must take 0.01 GB of weights, got {small_disk.path}" in error
            assert "No space left on device" in error
            assert "free room there" in error
            assert list(small_disk.path.iterdir()) == [small_disk.filler]
            assert (server.state(), served(server)) == ("serving", before)
            small_disk.make_room()
            after = learner.push()
            assert after.proven == (0,), after.reports[0].error


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


def test_a_process_that_is_killed_while_it_writes_leaves_what_nobody_takes(
    reader: RunningServer, learner: Learner, shared: Path
) -> None:
    before, old = served(reader), newest(shared)
    name = learner.begin()
    learner.sync.look()
    learner.sync.look()
    written = shared / f".{name}.safetensors", file_of(shared, name)
    wait_for(lambda: any(path.is_file() for path in written))
    pid = learner.publisher.pid
    os.kill(pid, signal.SIGKILL)
    assert learner.sync.wait().reports[0].error in (None, KILLED)
    if served(reader) == before:
        assert newest(shared) == old
    wait_for(lambda: learner.publisher.pid != pid or learner.publisher.has_ended)
    after = learner.push()
    assert after.proven == (0,), after.reports[0].error
    wait_for(lambda: newest(shared) == name_of(after.version))
    assert not written[0].exists()


def test_a_server_that_reads_no_directory_is_told_how_to_start_it(
    server: RunningServer, tmp_path: Path
) -> None:
    learner = Learner([server], tmp_path)
    with closing(learner.sync):
        error = str(learner.push().reports[0].error)
    assert "must be told where to read weights" in error
    round_ = LearnerRound(server, learner.module)
    reply = round_.offer(WeightWay.DISK)
    assert (reply.status_code, reply.json()["reason"]) == (409, RefusalReason.NO_ROOT)
    assert "--weights-root" in reply.json()["detail"]
