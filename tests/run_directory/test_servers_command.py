"""The command against the real thread that hears requests; what the main threads do of it is played by the test."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from swift_stage2.cli import main
from swift_stage2.config import ServerConfig
from swift_stage2.errors import ConfigError, ServerUnavailable, UserError
from swift_stage2.learner.server_requests import AddedServer, ServerRequests
from swift_stage2.process.background import BackgroundFailures
from swift_stage2.run_directory.lock import hold_run_directory
from swift_stage2.run_directory.server_board import (
    ServerBoard,
    ServerStanding,
    clear_requests,
    leave_request,
    take_requests,
)
from swift_stage2.run_directory.servers_command import add_server

FIRST = ServerStanding("http://127.0.0.1:8000", "proven", proof="version 3 of round r-2, proven by step 8")
LATE = ServerConfig(base_url="http://127.0.0.1:8001", group_port=29700, group_host="10.0.0.5")
PATIENCE_S = 60.0


def admit(server: ServerConfig, others: Any) -> AddedServer:
    if server.port == 9:
        raise ServerUnavailable("a server must answer rank 0 before it is added, got no answer")
    return AddedServer(address=server, is_ours=True)


class Run:
    """A run's rank 0, whose thread is real; its main thread takes a server in as soon as one waits."""

    def __init__(self, run_dir: Path) -> None:
        self.failures = BackgroundFailures()
        self.requests = ServerRequests(run_dir, admit, rank=0, failures=self.failures, interval_s=0.01)
        self.then = ServerStanding(LATE.base_url, "proven", is_added=True, proof="version 3")
        self.taken: list[AddedServer] = []
        self._stopped = threading.Event()
        self._steps = threading.Thread(target=self._step)
        self.requests.show((FIRST,))
        self.requests.start()
        self._steps.start()

    def _step(self) -> None:
        while not self._stopped.wait(0.005):
            if self.requests.has_one:
                self.taken.append(self.requests.take())
                self.requests.show((FIRST, self.then))

    def stop(self) -> None:
        self._stopped.set()
        self._steps.join(PATIENCE_S)
        self.requests.stop()
        assert self.failures.take() == ()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with hold_run_directory(tmp_path):
        run = Run(tmp_path)
        board, pause = tmp_path / "servers" / "board.json", threading.Event()
        while not board.exists():
            pause.wait(0.005)
        yield run
        run.stop()


def test_a_server_is_added_with_its_addresses_and_waited_for(tmp_path: Path, run: Run) -> None:
    assert add_server(tmp_path, LATE, timeout_s=PATIENCE_S) == run.then
    assert run.taken == [AddedServer(address=LATE, is_ours=True)]
    assert [path.name for path in (tmp_path / "servers").iterdir()] == ["board.json"]


def test_the_commands_line_and_the_list_name_the_server(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "servers",
        "add",
        str(tmp_path),
        LATE.base_url,
        "--group-port",
        "29700",
        "--group-host",
        "10.0.0.5",
    ]
    assert main([*command, "--timeout-s", "20"]) == 0
    assert capsys.readouterr().out == "http://127.0.0.1:8001 (added): proven, version 3\n"
    assert run.taken[0].address == LATE
    assert main(["servers", "list", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "http://127.0.0.1:8000: proven, version 3 of round r-2, proven by step 8",
        "http://127.0.0.1:8001 (added): proven, version 3",
    ]


def test_a_refusal_of_the_learner_is_the_commands_last_line(tmp_path: Path, run: Run) -> None:
    with pytest.raises(UserError, match="must answer rank 0 before it is added"):
        add_server(tmp_path, ServerConfig(base_url="http://127.0.0.1:9"), timeout_s=PATIENCE_S)
    assert run.taken == []


def test_a_transfer_that_fails_is_told(tmp_path: Path, run: Run) -> None:
    run.then = ServerStanding(LATE.base_url, "suspect", is_added=True, fault="the weight group did not form")
    with pytest.raises(
        UserError, match="joined the run and is not proven: the weight group did not form; mend"
    ):
        add_server(tmp_path, LATE, timeout_s=PATIENCE_S)


def test_the_wait_for_a_proof_ends(tmp_path: Path, run: Run) -> None:
    run.then = ServerStanding(LATE.base_url, "suspect", is_added=True)
    with pytest.raises(
        UserError, match=r"within --timeout-s=3, got .*8001, which has joined and waits for weights"
    ):
        add_server(tmp_path, LATE, timeout_s=3.0)


def test_a_server_of_the_run_is_not_asked_for_again(tmp_path: Path, run: Run) -> None:
    with pytest.raises(ConfigError, match=r"is added once, got URL=http://127\.0\.0\.1:8000"):
        add_server(tmp_path, ServerConfig(base_url=FIRST.base_url), timeout_s=PATIENCE_S)


def test_a_run_that_has_ended_takes_nobody(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.stop()
    with pytest.raises(UserError, match="whose run has ended; start or resume"):
        add_server(tmp_path, LATE, timeout_s=PATIENCE_S)
    assert main(["servers", "list", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("the run has ended\n")


def test_a_run_that_was_killed_takes_nobody_and_the_next_finds_no_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clear_requests(tmp_path)
    ServerBoard((FIRST,)).write(tmp_path)
    with pytest.raises(UserError, match="whose run was killed; start or resume"):
        add_server(tmp_path, LATE, timeout_s=PATIENCE_S)
    assert take_requests(tmp_path) == []
    assert main(["servers", "list", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("\nthe run was killed: none of its processes is left\n")


def test_a_short_wait_calls_no_run_over_that_goes_on(tmp_path: Path) -> None:
    clear_requests(tmp_path)
    ServerBoard((FIRST,)).write(tmp_path)
    with (
        hold_run_directory(tmp_path),
        pytest.raises(
            UserError, match=r"within --timeout-s=0\.1, got .*8001, which the learner has not heard of"
        ),
    ):
        add_server(tmp_path, LATE, timeout_s=0.1)
    assert take_requests(tmp_path) == []


def test_a_directory_of_runs_is_told_the_newest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("v9-late", "v10-later"):
        clear_requests(tmp_path / name)
        ServerBoard((FIRST,)).write(tmp_path / name)
    os.utime(tmp_path / "v9-late" / "servers" / "board.json", (0, 0))
    for command in (["list", str(tmp_path)], ["add", str(tmp_path), LATE.base_url]):
        assert main(["servers", *command]) == 2
        told = capsys.readouterr().err
        assert f"with 2 of them in it; name the one that is meant, the newest is {tmp_path}/v10-later" in told


def test_requests_of_an_earlier_process_are_forgotten(tmp_path: Path) -> None:
    clear_requests(tmp_path)
    request = leave_request(tmp_path, LATE)
    assert clear_requests(tmp_path) == [request.name]
    assert take_requests(tmp_path) == []


def test_who_asks_while_a_killed_run_is_resumed_is_told_to_ask_once_more(tmp_path: Path) -> None:
    clear_requests(tmp_path)
    ServerBoard((FIRST,)).write(tmp_path)  # of the killed run
    with hold_run_directory(tmp_path), ThreadPoolExecutor(1) as pool:
        told = pool.submit(add_server, tmp_path, LATE, timeout_s=PATIENCE_S)
        pause = threading.Event()
        while not list((tmp_path / "servers").glob("add-*.json")):
            pause.wait(0.005)
        run = Run(tmp_path)  # it has loaded its model
        with pytest.raises(UserError, match="got a request from before; add it once more"):
            told.result(PATIENCE_S)
        run.stop()
    assert run.taken == []


def test_a_request_that_fails_oddly_is_told_and_the_one_behind_it_is_answered(tmp_path: Path) -> None:
    def admit_or_fail(server: ServerConfig, others: Any) -> AddedServer:
        if server == LATE:
            raise KeyError("tensors")
        return admit(server, others)

    failures = BackgroundFailures()
    requests = ServerRequests(tmp_path, admit_or_fail, rank=0, failures=failures)
    clear_requests(tmp_path)
    requests.show((FIRST,))
    other = ServerConfig(base_url="http://127.0.0.1:8002")
    for number, server in enumerate((LATE, other)):
        leave_request(tmp_path, server).rename(tmp_path / "servers" / f"add-{number}.json")
    requests._look()
    assert requests.take() == AddedServer(address=other, is_ours=True)
    refusal = ServerBoard.read(tmp_path).refusals["add-0.json"]
    assert refusal == "the run could not ask the server: KeyError: 'tensors'"
    assert len(failures.take()) == 1


def test_a_request_that_cannot_be_taken_away_keeps_no_other_from_being_taken(tmp_path: Path) -> None:
    clear_requests(tmp_path)
    leave_request(tmp_path, LATE).rename(tmp_path / "servers" / "add-0.json")
    (tmp_path / "servers" / "add-1.json").mkdir()
    leave_request(tmp_path, LATE).rename(tmp_path / "servers" / "add-2.json")
    (first, (name, error), last) = take_requests(tmp_path)
    assert (first, name, last) == (("add-0.json", LATE), "add-1.json", ("add-2.json", LATE))
    assert "must be able to take a request away, got" in str(error)


def test_a_request_that_is_taken_at_the_deadline_is_not_called_unheard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clear_requests(tmp_path)
    ServerBoard((FIRST,)).write(tmp_path)
    taken, unlink = [], Path.unlink

    def taken_first(path: Path, missing_ok: bool = False) -> None:
        monkeypatch.setattr(Path, "unlink", unlink)
        taken.extend(take_requests(tmp_path))
        path.unlink(missing_ok)

    monkeypatch.setattr(Path, "unlink", taken_first)
    with (
        hold_run_directory(tmp_path),
        pytest.raises(UserError, match="which no step has taken in yet; the run goes on with it"),
    ):
        add_server(tmp_path, LATE, timeout_s=0.1)
    assert [server for _, server in taken] == [LATE]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["http://127.0.0.1"], "URL must hold the server's port, got URL='http://127.0.0.1'"),
        (["http://user:secret@127.0.0.1:8001"], "got credentials in URL="),
        (["http://127.0.0.1:8001", "--group-port", "80"], "--group-port must be in the range 1024..65535"),
        (["http://127.0.0.1:8001", "--group-host", "a:1"], "got --group-host='a:1'; write it like 10.0.0.5"),
        (["http://127.0.0.1:8001", "--timeout-s", "nan"], "--timeout-s must be above 0"),
        (
            ["http://127.0.0.1:8001"],
            "without servers/board.json; name the directory that holds the run's audit/",
        ),
    ],
)
def test_mistakes_of_the_caller_are_one_line(
    tmp_path: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["servers", "add", str(tmp_path), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert "secret" not in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a request must be JSON"),
        ("[1]", "must be a JSON object"),
        ('{"base_url": 5}', "base_url"),
        ('{"base_url": "http://a:1", "port": 5}', "port"),
        ("[" * 100_000, "a request must be JSON"),
    ],
)
def test_a_request_of_another_hand_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    clear_requests(tmp_path)
    (tmp_path / "servers" / "add-by-hand.json").write_text(text)
    ((name, error),) = take_requests(tmp_path)
    assert name == "add-by-hand.json"
    assert isinstance(error, ConfigError)
    assert words in str(error)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"servers": 3}',
        json.dumps({"servers": [{"url": "x"}]}),
        json.dumps({"servers": [], "refusals": []}),
        json.dumps({"servers": [{"base_url": "x", "state": "proven", "is_added": "no"}]}),
    ],
)
def test_a_board_that_cannot_be_read_is_told(tmp_path: Path, text: str) -> None:
    clear_requests(tmp_path)
    (tmp_path / "servers" / "board.json").write_text(text)
    with pytest.raises(UserError, match="must be as this release writes it"):
        ServerBoard.read(tmp_path)
