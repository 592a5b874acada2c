"""Only start-up can find these out: missing servers, settings and data that do not fit the real template."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_rollout_server import Answer, FakeRolloutServer, json_answer
from free_port import free_port
from real_model import Rows, make_encoder, make_template, tiny_model

from swift_stage2 import assembly, wire
from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.checks import channel_b_parts, checks, servers
from swift_stage2.checks.channel_b_parts import wait_for_servers
from swift_stage2.checks.servers import FoundServers, examine
from swift_stage2.collectives import SingleRank
from swift_stage2.config import Stage2Config, load_config
from swift_stage2.errors import ConfigError, DatasetError, ServerUnavailable
from swift_stage2.learner import Learner
from swift_stage2.run import Stage2Run

Configure = Callable[..., Stage2Config]
Start = Callable[..., Stage2Run]


@pytest.fixture
def configure(tmp_path: Path) -> Configure:
    def configure(
        *urls: str,
        packing_length: int = 4096,
        dialect: str = "object_list",
        evaluation: dict[str, int] | None = None,
        rows_without_objects: str = "refuse",
        objective: str = "corrected_target",
        **rollout: Any,
    ) -> Stage2Config:
        content = {
            "stage2_ab": {
                "schedule": {"b_ratio": 0.5},
                "objective": objective,
                "evaluation": evaluation or {},
                "channel_b": {
                    "preprocessing": "thread",  # a process takes ten seconds to load ms-swift
                    "packing": {"packing_length": packing_length},
                    "target": {"dialect": dialect},
                    "rows_without_objects": rows_without_objects,
                },
            },
            "rollout": {
                "servers": [{"base_url": url, "group_port": 51216 + n} for n, url in enumerate(urls)],
                "decoding": {"max_new_tokens": 100},
                "start_timeout_s": 60.0,
                **rollout,
            },
        }
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(content))
        return load_config(path)

    return configure


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return make_encoder(packing_length=4096)


def _closed_port() -> str:
    return f"http://127.0.0.1:{free_port()}"


@pytest.fixture
def start(rows: Rows, tmp_path: Path) -> Iterator[Start]:
    """Starts a run in a directory of its own, which is closed when the test ends."""
    runs: list[Stage2Run] = []

    def start(config: Stage2Config, rows: Any = rows, **more: Any) -> Stage2Run:
        given: dict[str, Any] = {
            "rows": rows,
            "template": make_template(),
            "module": tiny_model()[0],
            "run_directory": str(tmp_path / f"run{len(runs)}"),
            "seed": 1,
            "total_steps": 10,
            "first_step": 0,
            "make_canary": lambda encoder, sample: None,
            "packed_loss": _token_count,
            "packs_per_step": 1,
            "logging_steps": 5,
        }
        runs.append(assembly.start_run(config, assembly.RunInputs(**given | more)))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


@pytest.fixture
def channel_bs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Each learner's channel B, in the order in which runs were started."""
    given: list[Any] = []

    def make_learner(**parts: Any) -> Learner:
        given.append(parts["channel_b"])
        return Learner(**parts)

    monkeypatch.setattr(assembly, "Learner", make_learner)
    return given


def _token_count(batch: Mapping[str, Any]) -> float:
    """A loss of isolated segments: it adds up."""
    return float(batch["input_ids"].numel())


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where vLLM is installed: the fake server is a stock one."""
    monkeypatch.setattr(servers, "vllm_is_installed", lambda: True)


# --- servers -----------------------------------------------------------------------------------------


def test_a_run_without_any_server_does_not_start(configure: Configure) -> None:
    missing = [_closed_port(), _closed_port()]
    config = configure(*missing, start_timeout_s=1.5)
    with pytest.raises(ServerUnavailable) as caught:
        wait_for_servers(config, SingleRank())
    message = str(caught.value)
    assert "rollout.start_timeout_s=1.5" in message
    assert any(url in message for url in missing)
    assert message.endswith("with a --host that this machine reaches, or correct rollout.servers")
    assert message.count("; ") == 1


def test_a_server_that_is_absent_is_told_of_once_and_the_others_are_found(
    configure: Configure, server: FakeRolloutServer, capsys: pytest.CaptureFixture[str]
) -> None:
    missing, warnings = _closed_port(), list[str]()
    config = configure(missing, server.url, start_timeout_s=8.0)
    found = wait_for_servers(config, SingleRank(), warnings.append)
    assert set(found.absent) == {missing}
    (warning,) = warnings
    assert warning.startswith("1 of 2 servers did not answer within rollout.start_timeout_s=8")
    assert warning.endswith(missing)
    assert re.search(
        rf"waiting up to 8 s for {missing} \(.*refused.*\) to answer … \d s", capsys.readouterr().err
    )


def _ours(**facts: Any) -> Callable[[Any], Answer]:
    info = wire.ServerInfo(stock=False, **{"state": "serving", "incarnation": "one", **facts})
    return lambda call: json_answer(info.to_json())


def test_an_absent_server_must_pass_the_checks_of_a_start(
    configure: Configure, server: FakeRolloutServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "_JOIN_S", 0.5)
    stock, found = server.on_get, FoundServers(names={"one": "http://127.0.0.1:1"})
    look = partial(examine, found=found, base_url=server.url)
    server.on_get = lambda call: Answer(status=503, body=b"loading")
    assert look(configure(server.url)) is None, "it is asked again"
    server.on_get = _ours()
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:1 by another name"):
        look(configure(server.url))
    server.on_get = stock
    monkeypatch.setattr(servers, "vllm_is_installed", lambda: False)
    with pytest.raises(ConfigError, match="vLLM must be installed beside the learner"):
        look(configure(server.url))
    assert found == FoundServers(names={"one": "http://127.0.0.1:1"})


def test_a_wrong_key_is_told_at_once_with_the_place_to_set_it(
    configure: Configure, server: FakeRolloutServer
) -> None:
    server.on_get = lambda call: Answer(status=401, body=b"send the key")
    with pytest.raises(ServerUnavailable, match=r"status 401.* holds no key; export "):
        wait_for_servers(configure(server.url, start_timeout_s=3600.0), SingleRank())
    assert len(server.calls) == 1  # no waiting mends it


def test_another_program_is_no_stock_server(
    configure: Configure, server: FakeRolloutServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_b_parts, "_WAIT_SLICE_S", 1.0)
    server.on_get = lambda call: Answer(status=404, body=b"<html>nothing here</html>")
    with pytest.raises(ServerUnavailable, match="must be a rollout server, got an answer of another program"):
        wait_for_servers(configure(server.url, start_timeout_s=3600.0), SingleRank())


@pytest.mark.parametrize(
    ("option", "max_turns", "words"),
    [
        ("enable_multi_turn", 1, "iff rollout.max_turns is above 1, got several turns at {} and max_turns=1"),
        ("engine_type", 2, "iff rollout.max_turns is above 1, got one turn at {} and max_turns=2"),
        ("use_gym_env", 2, "a gym's is its environment's, got use_gym_env at {}"),
        ("enable_multi_turn", 2, ""),
    ],
)
def test_a_server_takes_turns_iff_the_run_does(
    configure: Configure, server: FakeRolloutServer, option: str, max_turns: int, words: str
) -> None:
    said = {"engine_type": "GRPOVllmEngine", "enable_multi_turn": False, "use_gym_env": False, option: True}
    server.on_reset = lambda call: json_answer(said)
    config = configure(server.url, max_turns=max_turns)
    if not words:
        wait_for_servers(config, SingleRank())
        return
    with pytest.raises(ConfigError, match=words.format(server.url)):
        wait_for_servers(config, SingleRank())


@pytest.mark.slow
@pytest.mark.ci
def test_vllm_without_the_routes_for_weights_is_refused_with_the_line_to_start_it_by(
    configure: Configure, server: FakeRolloutServer
) -> None:
    server.on_get = lambda call: (
        Answer(body=b'{"version": "0.32.0"}') if call.path == "/version" else Answer(status=404)
    )
    with pytest.raises(ServerUnavailable, match="VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config"):
        wait_for_servers(configure(server.url), SingleRank())


def test_a_fault_that_needs_no_server_is_told_while_servers_load(configure: Configure, start: Start) -> None:
    """And what takes long beside it, as the preprocessing process's imports, has begun by then."""
    config = configure(_closed_port(), start_timeout_s=20.0)
    with pytest.raises(ConfigError, match="packed segments must not see each other"):
        start(config, packed_loss=lambda batch: math.nan)


def test_a_run_without_its_server_does_not_start_and_leaves_nothing_open(
    configure: Configure, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[assembly.Telemetry] = []
    close = assembly.Telemetry.close
    monkeypatch.setattr(
        assembly.Telemetry, "close", lambda telemetry: (closed.append(telemetry), close(telemetry))
    )
    with pytest.raises(ServerUnavailable):
        start(configure(_closed_port(), start_timeout_s=0.2))
    assert len(closed) == 1


class TwoHosts(SingleRank):
    """The control group of both ranks in turn: each tells its text, then each hears both."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def gather(self, text: str) -> tuple[str, ...]:
        if len(self.texts) < 2:
            self.texts.append(text)
            return (text,)
        assert text in self.texts
        return tuple(self.texts)


def _told_of(*settings: dict[str, Any]) -> str:
    """What both ranks are told of the settings that each of them has read; "" if these agree."""
    control = TwoHosts()
    for mine in settings:
        checks.refuse_differing_settings({"control_timeout_s": 10.0} | mine, control)
    told = []
    for mine in settings:
        try:
            checks.refuse_differing_settings({"control_timeout_s": 10.0} | mine, control)
            told.append("")
        except ConfigError as error:
            told.append(str(error))
    first, second = told
    assert first == second
    return first


def test_hosts_with_different_files_are_told_the_setting_and_both_values() -> None:
    every, remedy = "every rank must have the same settings, got ", "; give every host the same file"
    assert _told_of({}, {}) == ""
    assert _told_of(*({"launch": {"learner": {"node_rank": rank}}} for rank in (0, 1))) == ""
    rates = (
        {"swift": {"learning_rate": 1e-5 * (rank + 1), "output_dir": "/runs/a", "seed": float("nan")}}
        for rank in (0, 1)
    )
    assert _told_of(*rates) == f"{every}swift.learning_rate=1e-05 on rank 0 and 2e-05 on rank 1{remedy}"
    two_differ = (
        {
            "swift": {"learning_rate": 1e-5, **({"lora_rank": 8} if rank else {})},
            "rollout": {"servers": [rank]},
        }
        for rank in (0, 1)
    )
    assert _told_of(*two_differ) == f"{every}rollout.servers=[0] on rank 0 and [1] on rank 1{remedy}"


# --- a whole run -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.ci
def test_a_run_is_built_from_its_parts_and_resumes_where_it_was(
    configure: Configure, server: FakeRolloutServer, start: Start, channel_bs: list[Any]
) -> None:
    config = configure(server.url)
    run = start(config)
    source, clock = channel_bs[0].source, channel_bs[0].clock
    outstanding = source.draw(3)
    clock.advance()
    clock.advance()
    state = run.checkpoint(step=7)
    run.close()
    again = start(config)
    again.resume(lambda: state)
    channel_b = channel_bs[1]
    assert (channel_b.clock.current, channel_b.schedule.next_version) == (2, 3)
    assert channel_b.evaluation is None, "evaluations are off by default"
    assert channel_b.client.busy() == set(), "the first proof opens a fence"
    assert channel_b.source.draw(3) == outstanding
    again.close()
    again.close()
    assert server.infer_calls == [], "nothing is inferred before a proof"


@pytest.mark.slow
def test_a_run_resumes_with_answers_written_as_before_only(
    configure: Configure, server: FakeRolloutServer, rows: Rows, start: Start
) -> None:
    """And what was learned is what the run writes."""
    config = configure(server.url)
    compact = [_with_answer(row, lambda answer: answer.replace(", ", ",")) for row in rows]
    run = start(config, compact)
    state = run.checkpoint(step=7)
    assert state["learner"]["answer_fingerprint"][0].startswith('[{"bbox_2d": [0, 1, 2, 3],"label": "é"},{')
    run.close()
    again = start(config)
    with pytest.raises(DatasetError, match="resume needs answers written as before") as caught:
        again.resume(lambda: state)
    assert '],"label"' in str(caught.value)
    assert '], "label"' in str(caught.value)
    again.close()
    start(config, compact).resume(lambda: state)


def _with_answer(row: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    answer = {"role": "assistant", "content": change(row["messages"][-1]["content"])}
    return {**row, "messages": [*row["messages"][:-1], answer]}


@pytest.mark.slow
def test_an_evaluation_that_had_not_ended_is_resumed(
    configure: Configure, server: FakeRolloutServer, rows: Rows, start: Start, channel_bs: list[Any]
) -> None:
    config = configure(server.url, evaluation={"every_steps": 4})
    run = start(config, validation_rows=rows[:3])
    part = channel_bs[0].evaluation.part
    pipeline = channel_bs[0].pipeline
    assert (pipeline.ask_evaluation, pipeline.take_evaluated) == (part.ask, part.take)
    part.begin(1)
    assert part.end().num_wanted == 3, "there are no more rows"
    state = json.loads(json.dumps(run.checkpoint(step=7)))
    assert state["learner"]["unfinished_evaluation"] is None
    state["learner"]["unfinished_evaluation"] = 4
    run.close()
    again = start(config, validation_rows=rows[:3])
    again.resume(lambda: state)
    assert again.checkpoint(step=7)["learner"]["unfinished_evaluation"] == 4


@pytest.mark.parametrize("validation_rows", [None, []])
def test_evaluations_without_rows_do_not_start(
    configure: Configure, server: FakeRolloutServer, start: Start, validation_rows: Any
) -> None:
    config = configure(server.url, evaluation={"every_steps": 4})
    with pytest.raises(
        ConfigError, match="needs ms-swift's validation set, got none and every_steps=4; write"
    ):
        start(config, validation_rows=validation_rows)


@pytest.mark.slow
def test_parts_of_two_checkpoints_are_refused(
    configure: Configure, server: FakeRolloutServer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(configure(server.url))
    states = [run.checkpoint(step=7) for _ in range(2)]
    monkeypatch.setattr(SingleRank, "gather", lambda control, mine: (mine, states[1]["save_id"]))
    with pytest.raises(ConfigError, match=f"rank 1 save_id={states[1]['save_id']}; resume from another"):
        run.resume(lambda: states[0])


def test_without_channel_b_nothing_of_it_exists(
    start: Start, tmp_path: Path, server: FakeRolloutServer, channel_bs: list[Any]
) -> None:
    path = tmp_path / "plain.yaml"
    path.write_text("stage2_ab: {schedule: {b_ratio: 0}}\n")
    run = start(load_config(path))
    assert channel_bs == [None]
    assert run.checkpoint(step=7)["learner"] == {}
    run.close()
    assert server.calls == []
