"""The configuration becomes commands, environments and devices."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from builders import config_of, on_vllm, sharing

from swift_stage2.config import Stage2Config, load_config
from swift_stage2.errors import ConfigError
from swift_stage2.launch.plan import EXIT_STATUS_FILE, LaunchPart, plan_launch

OUTER = {
    "PATH": "/bin", "RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500", "NPROC_PER_NODE": "8",
    "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
}  # fmt: skip


def config(**sections: Any) -> Stage2Config:
    swift = {"model": "stage1", "output_dir": "/runs/a"}
    return config_of({"swift": swift, "rollout.servers": [{"base_url": "http://127.0.0.1:8000"}]}, sections)


def servers(*entries: dict[str, Any]) -> dict[str, Any]:
    return {
        "servers": list(entries),
        "learner": {"nproc_per_node": 2, "devices": [0, 1], "shutdown_timeout_s": 77},
    }


def test_the_learner_is_torchrun_with_our_grace() -> None:
    plan = plan_launch(config(launch=servers({"devices": [2]})), Path("/c/run.yaml"), OUTER)
    argv = plan.learner.argv
    assert argv[:4] == (sys.executable, "-u", "-m", "swift_stage2.collectives")
    assert "--nproc-per-node=2" in argv
    assert plan.learner.environment["PET_SHUTDOWN_TIMEOUT"] == "77"
    assert argv[-4:] == ("-m", "swift_stage2", "train", "/c/run.yaml")
    assert plan.learner.grace_s > 77
    assert plan.log_dir == Path("/runs/a/logs")
    assert plan.learner.environment[EXIT_STATUS_FILE] == str(plan.exit_status_file)


def test_every_process_sees_its_own_devices_and_nothing_of_an_outer_launcher() -> None:
    plan = plan_launch(config(launch=servers({"devices": [2, 3]})), Path("run.yaml"), OUTER)
    (server,) = plan.servers
    assert plan.learner.environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert server.command.environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    for command in (plan.learner, server.command):
        assert command.environment["PATH"] == "/bin"
        assert not {"RANK", "WORLD_SIZE", "MASTER_PORT", "NPROC_PER_NODE"} & set(command.environment)


@pytest.mark.parametrize(
    ("visible", "learner", "server"),
    [
        ("4, 5,6", "4,5", "6"),
        ("GPU-a,MIG-b,GPU-c", "GPU-a,MIG-b", "GPU-c"),
        ("GPU-c,MIG-b,7", "GPU-c,MIG-b", "7"),
        (None, "0,1", "2"),
    ],
)
def test_devices_count_those_that_launch_itself_sees(visible: str | None, learner: str, server: str) -> None:
    outer = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    plan = plan_launch(config(launch=servers({"devices": [2]})), Path("run.yaml"), outer)
    assert plan.learner.environment["CUDA_VISIBLE_DEVICES"] == learner
    assert plan.servers[0].command.environment["CUDA_VISIBLE_DEVICES"] == server


@pytest.mark.parametrize(
    ("visible", "device", "message"),
    [
        ("4,5", 2, r"launch.servers\[0\].devices must be GPUs .* got 2 and CUDA_VISIBLE_DEVICES=4,5, 2 device"),
        ("4,5,-1,6", 2, r"4,5,-1,6, 2 device\(s\)"),
        ("", 2, r"got 2 and CUDA_VISIBLE_DEVICES=, 0 device\(s\)"),
        ("4,5,6", "GPU-c", "got GPU-c and CUDA_VISIBLE_DEVICES=4,5,6"),
        ("4,GPU-c", "GPU-c", "devices of their own, got device GPU-c for both learner and servers.0."),
    ],
)  # fmt: skip
def test_a_device_that_launch_cannot_give_is_refused(visible: str, device: int | str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_launch(
            config(launch=servers({"devices": [device]})), Path("run.yaml"), {"CUDA_VISIBLE_DEVICES": visible}
        )


NO_VLLM_GRAPHS = {"vllm_enforce_eager": True}
PLACE = "--host 127.0.0.1 --port 8000"
KEY_NAME = "--api-key-env SWIFT_ROLLOUT_API_KEY"


@pytest.mark.parametrize(
    ("entry", "key", "words"),
    [
        (
            {"engine": "swift", "args": {"vllm_data_parallel_size": 3, **NO_VLLM_GRAPHS}},
            "",
            f"-m swift.cli.rollout --model stage1 {PLACE} --vllm_data_parallel_size 3 --vllm_enforce_eager true",
        ),
        (
            {"engine": "swift"},
            "hush",
            f"-m swift_stage2.rollout_server.stock_program SWIFT_ROLLOUT_API_KEY --model stage1 {PLACE}",
        ),
        (
            {"engine": "transformers", "model": "other", "args": {"max-batch-size": 8, "insecure": True}},
            "hush",
            f"-m swift_stage2 rollout --engine transformers other {PLACE} {KEY_NAME} --insecure --max-batch-size 8",
        ),
        (
            {"engine": "vllm", "args": NO_VLLM_GRAPHS},
            "hush",
            f"-m swift_stage2 rollout --engine vllm --model stage1 {PLACE} {KEY_NAME} --vllm_enforce_eager true",
        ),
    ],
)
def test_a_server_gets_model_place_and_options_and_never_the_token(
    monkeypatch: pytest.MonkeyPatch, entry: dict[str, Any], key: str, words: str
) -> None:
    monkeypatch.setenv("SWIFT_ROLLOUT_API_KEY", key)
    plan = plan_launch(config(launch=servers(entry)), Path("run.yaml"), OUTER)
    assert " ".join(plan.servers[0].command.argv[2:]) == words


@pytest.mark.parametrize("engine", ["vllm", "transformers", "swift"])
def test_places_of_weights_reach_servers_of_ours_alone(engine: str) -> None:
    """A stock one binds what the learner names to it."""
    address = {"base_url": "http://127.0.0.1:8000", "group_bind": "10.0.0.5"}
    rollout: dict[str, Any] = {"servers": [address]}
    if engine != "swift":
        rollout["sync"] = {"transport": "disk", "disk_directory": "/shared/weights"}
    plan = plan_launch(config(launch=servers({"engine": engine}), rollout=rollout), Path("run.yaml"), OUTER)
    words = " ".join(plan.servers[0].command.argv)
    assert ("--group-bind 10.0.0.5 --weights-root /shared/weights" in words) is (engine != "swift")
    assert ("--group-bind" in words) is (engine != "swift")


def test_a_merger_takes_the_place_of_its_stock_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWIFT_ROLLOUT_API_KEY", "hush")
    entry = {
        "merge": True, "upstream_port": 8100, "devices": [3],
    }  # fmt: skip
    rollout = {
        "servers": [{"base_url": "http://127.0.0.1:8000"}],
        "max_inflight_per_server": 96,
        "request_timeout_s": 400,
    }
    (server,) = plan_launch(config(launch=servers(entry), rollout=rollout), Path("run.yaml"), OUTER).servers
    assert server.merger is not None
    assert server.merger.argv[2:] == (
        "-m", "swift_stage2", "merge", "--upstream", "http://127.0.0.1:8100", "--host", "127.0.0.1", "--port", "8000",
        "--max-batch-size", "96", "--upstream-timeout-s", "800.0",
        "--api-key-env", "SWIFT_ROLLOUT_API_KEY",
    )  # fmt: skip
    assert "hush" not in " ".join(server.merger.argv)
    assert server.merger.environment["CUDA_VISIBLE_DEVICES"] == ""
    argv = server.command.argv
    assert argv[argv.index("--port") + 1] == "8100"
    assert server.http_ports == (8100, 8000)
    assert [command.name for command in server.commands()] == ["server0", "merger0"]


@pytest.mark.parametrize(
    ("changes", "words", "again"),
    [
        ({}, ["--sleep-level", "2"], ["--load-when-asked"]),
        ({"stage2_ab.mode": "async"}, [], []),
        ({"launch.share_devices": False, "launch.learner.devices": [1]}, [], []),
    ],
    ids=["alternating", "async", "apart"],
)
def test_servers_sleep_while_a_step_trains_and_do_not_load_again_beside_it(
    changes: dict[str, Any], words: list[str], again: list[str]
) -> None:
    swift = {"model": "stage1", "output_dir": "/runs/a"}
    of_its_own = {"engine": "transformers", "devices": [], "args": {"sleep-level": 1}}
    both = sharing(on_vllm(0.4), of_its_own) | {"swift": swift, "stage2_ab.mode": "inline"}
    plan = plan_launch(config_of(both, changes), Path("run.yaml"), OUTER)
    for server in plan.servers:
        (first,), (second,) = server.commands(), server.commands(again=True)
        assert [*first.argv, *again] == [*second.argv]
        assert ("--sleep-level 2" in " ".join(first.argv)) is bool(words)
    argv = plan.servers[1].command.argv
    levels = [argv[at + 1] for at, word in enumerate(argv) if word == "--sleep-level"]
    assert levels == [*words[1:], "1"]  # what is written for it counts


def test_a_servers_own_environment_reaches_it_alone() -> None:
    entry = {"env": {"VLLM_CPU_KVCACHE_SPACE": 1, "PATH": "/opt/bin"}, "devices": [2]}
    plan = plan_launch(config(launch=servers(entry)), Path("run.yaml"), OUTER)
    environment = plan.servers[0].command.environment
    assert (environment["VLLM_CPU_KVCACHE_SPACE"], environment["PATH"]) == ("1", "/opt/bin")
    assert environment["CUDA_VISIBLE_DEVICES"] == "2"
    assert plan.learner.environment["PATH"] == "/bin"
    assert "VLLM_CPU_KVCACHE_SPACE" not in plan.learner.environment


@pytest.mark.parametrize(
    ("sections", "num_ranks", "message"),
    [
        (
            {"swift": {"model": "m"}},
            None,
            r"swift\.output_dir must name the run directory, got output_dir=None",
        ),
        (
            {"swift": {"output_dir": "o"}, "launch": {"servers": [{}]}},
            None,
            r"launch\.servers\[0\] needs a model",
        ),
        ({"launch": servers({})}, 3, r"nproc_per_node=3 devices=\[0, 1\]"),
    ],
)
def test_plans_that_cannot_be_carried_out_are_refused(
    sections: dict[str, Any], num_ranks: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_launch(config(**sections), Path("run.yaml"), OUTER, num_ranks)


@pytest.mark.parametrize("name", ["2_learner_6_rollout", "4_learner_4_rollout_merged"])
def test_the_examples_for_eight_gpus_give_every_gpu_to_one_process(name: str) -> None:
    file = Path(__file__).parents[2] / "configs" / f"qwen2_5_vl_{name}.yaml"
    plan = plan_launch(load_config(file), file, OUTER)
    commands = [plan.learner, *(server.command for server in plan.servers)]
    devices = [
        device for command in commands for device in command.environment["CUDA_VISIBLE_DEVICES"].split(",")
    ]
    assert sorted(devices) == list("01234567")


SEVERAL = {"nnodes": 2, "nproc_per_node": 8, "rdzv_endpoint": "learner-0:29400"}


@pytest.mark.parametrize("here", [True, False])
def test_a_check_has_the_doctor_in_the_learners_place_and_starts_the_servers_of_this_host(here: bool) -> None:
    plan = plan_launch(
        config(launch={"servers": [{"devices": [2]}], "learner": SEVERAL}),
        Path("/c/run.yaml"),
        OUTER,
        part=LaunchPart.CHECK,
        is_here=lambda host: here,
        check_options=("--step-seconds=3.0",),
    )
    assert plan.is_check
    assert [server.index for server in plan.servers] == [0] * here
    words = "-m swift_stage2 doctor /c/run.yaml --live --nproc-per-node=8 --step-seconds=3.0"
    assert " ".join(plan.learner.argv[2:]) == words
    assert plan.learner.environment["CUDA_VISIBLE_DEVICES"] == OUTER["CUDA_VISIBLE_DEVICES"]  # it counts them


def test_one_file_gives_every_host_of_the_learner_its_ranks() -> None:
    launch = {"servers": [{}], "learner": SEVERAL}
    plans = [
        plan_launch(config(launch=launch), Path("run.yaml"), OUTER, part=LaunchPart.LEARNER, node_rank=rank)
        for rank in (0, 1)
    ]
    for rank, plan in enumerate(plans):
        assert plan.servers == ()
        assert {
            "--nnodes=2", f"--node-rank={rank}", "--rdzv-backend=static", "--rdzv-endpoint=learner-0:29400",
            "--nproc-per-node=8",
        } < set(plan.learner.argv)  # fmt: skip
        assert plan.learner.argv[3] == "torch.distributed.run"
        assert plan.learner.name == f"learner.node{rank}"
        assert plan.exit_status_file.name == f"learner.node{rank}.exit_status"


def test_servers_alone_have_no_learner() -> None:
    launch = {"servers": [{}], "learner": SEVERAL}
    plan = plan_launch(config(launch=launch), Path("run.yaml"), OUTER, part=LaunchPart.SERVERS)
    assert plan.learner is None
    assert plan.server_indices == [0]


@pytest.mark.parametrize(
    ("launch", "options", "message"),
    [
        ({"servers": [{}], "learner": SEVERAL}, {}, "run launch --servers-only on the servers' hosts"),
        ({"learner": SEVERAL}, {"node_rank": 2}, "got node_rank=2 nnodes=2"),
        ({"learner": SEVERAL}, {"node_rank": -1}, "got node_rank=-1 nnodes=2"),
        ({"learner": SEVERAL}, {}, "with 0 on the host that rdzv_endpoint names"),
    ],
)
def test_hosts_of_the_learner_that_cannot_be_are_refused(
    launch: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_launch(config(launch=launch), Path("run.yaml"), OUTER, **options)


@pytest.mark.parametrize(
    ("hosts", "part", "is_refused"),
    [
        (("10.0.0.1", "10.0.0.2"), LaunchPart.SERVERS, False),
        (("10.0.0.1", "10.0.0.1"), LaunchPart.SERVERS, True),
        (("10.0.0.1",), LaunchPart.LEARNER, False),
        (("10.0.0.1",), LaunchPart.ALL, True),  # on one machine, however it is named
        (("127.0.0.1",), LaunchPart.LEARNER, True),
    ],
)
def test_devices_are_numbered_host_by_host(
    hosts: tuple[str, ...], part: LaunchPart, is_refused: bool
) -> None:
    addresses = [
        {"base_url": f"http://{host}:{8000 + index}", "group_port": 9000 + index}
        for index, host in enumerate(hosts)
    ]
    launch = servers(*({"devices": [0]} for _ in hosts))
    launch["learner"] = {"devices": [0] if len(hosts) == 1 else [1]}

    def plan() -> None:
        plan_launch(config(launch=launch, rollout={"servers": addresses}), Path("run.yaml"), OUTER, part=part)

    if is_refused:
        with pytest.raises(ConfigError, match="need devices of their own, got device 0 for both"):
            plan()
    else:
        plan()
