"""The configuration: what is read, what is refused and how it is said, what is warned about."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from dataclasses import fields, is_dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.config import ServerConfig, ServerProcess, Stage2Config, StarvationAction, load_config
from swift_stage2.config.binding import bind
from swift_stage2.config.stage2_ab import PrefetchConfig
from swift_stage2.config.swift_arguments import UNSUPPORTED, as_argv, refuse_unknown_names
from swift_stage2.config.yaml_text import write_yaml
from swift_stage2.errors import ConfigError, UserError

BASE: dict[str, Any] = {
    "swift": {"model": "m", "dataset": ["d.jsonl"], "output_dir": "out", "gradient_accumulation_steps": 4},
    "stage2_ab": {"schedule": {"b_ratio": 0.25}},
    "rollout": {"servers": [{"base_url": "http://127.0.0.1:8000", "group_port": 51216}]},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """BASE with the value at a dotted path replaced."""
    data = copy.deepcopy(BASE)
    section = data
    *sections, key = path.split(".")
    for name in sections:
        section = section.setdefault(name, {})
    section[key] = value
    return data


def load(tmp_path: Path, data: Any) -> Stage2Config:
    file = tmp_path / "run.yaml"
    file.write_text(data if isinstance(data, str) else yaml.safe_dump(data), encoding="utf-8")
    return load_config(file)


def refusal(tmp_path: Path, data: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, data)
    message = str(caught.value)
    assert "\n" not in message
    assert "run.yaml" in message
    return message


PREFETCH = "stage2_ab.channel_b.prefetch"
DECODING = "rollout.decoding"


def test_defaults_are_those_of_the_design(tmp_path: Path) -> None:
    config = load(tmp_path, BASE)
    channel_b, rollout = config.stage2_ab.channel_b, config.rollout
    prefetch = channel_b.prefetch
    assert (prefetch.queue_limit, prefetch.version_window, prefetch.sync_every_steps) == (None, 2, 4)
    assert (prefetch.prefetch_target_packs, prefetch.min_ready_tokens, prefetch.max_attempts) == (None, 0, 3)
    assert prefetch.redraw_dropped is True
    assert (channel_b.packing.packing_length, channel_b.packing.packing_min_fill_ratio) == (4096, 0.65)
    assert (channel_b.matching.iou_threshold, channel_b.matching.top_k, channel_b.matching.same_label) == (
        0.3,
        10,
        False,
    )
    assert (channel_b.target.dialect, config.stage2_ab.dialect) == (None, "object_list")
    assert channel_b.on_pipeline_failure == "raise"
    assert channel_b.matching.max_distance == 0.05
    assert channel_b.max_truncated_ratio == 0.3
    assert (config.stage2_ab.starvation.action, config.stage2_ab.starvation.grace_steps) == ("warn", 200)
    assert rollout.servers == (ServerConfig(base_url="http://127.0.0.1:8000", group_port=51216),)
    assert (rollout.max_inflight_per_server, rollout.request_timeout_s) == (16, 240.0)
    assert (rollout.decoding.temperature, rollout.decoding.top_p, rollout.decoding.top_k) == (0.01, 1.0, -1)
    assert (rollout.sync.mode, rollout.sync.timeout_s, rollout.sync.bucket_mib) == ("full", 300.0, 512)
    assert config.control_timeout_s == 1800.0


@pytest.mark.parametrize(
    ("path", "value", "parts"),
    [
        ("stage2_ab.schedule.b_ratio", 1.2, ["b_ratio=1.2", "0..1", "stage2_ab.schedule"]),
        ("stage2_ab.schedule.b_ratio", -0.1, ["b_ratio=-0.1", "0..1"]),
        ("stage2_ab.schedule.b_ratio", math.nan, ["b_ratio=nan", "0..1"]),
        (f"{PREFETCH}.queue_limit", 0, ["queue_limit=0", "at least 1"]),
        (f"{PREFETCH}.version_window", -1, ["version_window=-1", "at least 0", "the default is 2"]),
        (f"{PREFETCH}.sync_every_steps", 0, ["sync_every_steps=0", "at least 1"]),
        (f"{PREFETCH}.prefetch_target_packs", 0, ["prefetch_target_packs=0", "at least 1"]),
        (f"{PREFETCH}.prefetch_target_packs", 9, ["prefetch_target_packs=9", "queue_limit=8", "queue_limit: 9"]),
        (PREFETCH, {"queue_limit": 4, "prefetch_target_packs": 5}, ["prefetch_target_packs=5", "queue_limit=4"]),
        (f"{PREFETCH}.queue_limit", 3, ["B could never run", "gradient_accumulation_steps=4", "queue_limit=3"]),
        (f"{PREFETCH}.prefetch_target_packs", 2, ["B could never run", "gradient_accumulation_steps=4", "=2"]),
        (f"{PREFETCH}.max_attempts", 0, ["max_attempts=0"]),
        (f"{PREFETCH}.max_rollouts_per_version", 0, ["max_rollouts_per_version=0", "at least 1", "leave it out"]),
        (f"{PREFETCH}.max_rollouts_per_version", 3, ["B could never run", "gradient_accumulation_steps=4 packs of a "
         "sample or more", "max_rollouts_per_version=3", "max_rollouts_per_version: 4 or more"]),
        ("rollout.max_inflight_per_server", 4097, ["max_inflight_per_server=4097", "at most 4096"]),
        ("swift.report_to", "no", ["report_to='no', a truth value in YAML; write report_to: none"]),
        ("swift.report_to", False, ["report_to=False, a truth value in YAML"]),
        ("swift.report_to", ["tensorbord"], ["did you mean 'tensorboard'?"]),
        ("swift.deepspeed", "none", ["got deepspeed='none'; remove the key"]),
        ("swift.dataloader_num_workers", -3, ["dataloader_num_workers=-3", "at least 0"]),
        ("swift.gradient_accumulation_steps", 0, ["gradient_accumulation_steps=0", "at least 1"]),
        ("swift.gradient_accumulation_steps", "4", ["gradient_accumulation_steps='4'", "integer"]),
        (PREFETCH, {"version_window": 0, "sync_every_steps": 1}, ["version_window=0", "sync_every_steps=1", "fresh"]),
        (f"{DECODING}.temperature", -1, ["temperature=-1.0", "at least 0"]),
        (f"{DECODING}.top_p", 0, ["top_p=0.0", "above 0 and at most 1"]),
        (f"{DECODING}.top_p", 1.01, ["top_p=1.01", "at most 1"]),
        (f"{DECODING}.top_k", 0, ["top_k=0", "-1"]),
        (f"{DECODING}.top_k", -2, ["top_k=-2"]),
        (f"{DECODING}.max_new_tokens", 0, ["max_new_tokens=0"]),
        ("rollout.request_timeout_s", 0, ["request_timeout_s=0.0", "above 0"]),
        ("rollout.request_timeout_s", math.inf, ["request_timeout_s=inf", "finite"]),
        ("rollout.request_timeout_s", None, ["request_timeout_s=None", "a number"]),
        ("rollout.start_timeout_s", -3, ["start_timeout_s=-3.0"]),
        ("rollout.sync.timeout_s", 0, ["timeout_s=0.0", "rollout.sync"]),
        ("rollout.sync.mode", "delta", ["mode='delta'; write full"]),
        ("stage2_ab.mode", "sync", ["must be async or inline, got mode='sync'; write one of them"]),
        ("control_timeout_s", 0, ["control_timeout_s=0.0"]),
        ("control_timeout_s", 929, ["control_timeout_s=929", "3 * (300 + 10)", "930 or more"]),
        ("rollout.servers", [], ["rollout.servers", "b_ratio=0.25", "b_ratio: 0"]),
        ("rollout.servers", [{"base_url": "127.0.0.1:8000"}], ["base_url='127.0.0.1:8000'", "http://"]),
        ("rollout.servers", [{"base_url": "http://h"}], ["base_url='http://h'", "server's port", "port 80", ":8000"]),
        ("rollout.servers", [{"base_url": "https://h:"}], ["base_url='https://h:'", "port 443"]),
        ("rollout.servers", [{"base_url": "http://h:8000/x"}], ["base_url", "scheme, host and port only"]),
        ("rollout.servers", [{"base_url": "http://h:99999"}], ["base_url='http://h:99999'"]),
        ("rollout.servers", [{"group_port": 5}], ["rollout.servers[0].base_url is required"]),
        ("rollout.servers", [{"base_url": "http://h:1", "group_port": 80}],
         ["rollout.servers[0]: group_port must be in the range 1024..65535", "group_port=80; write 29600"]),
        ("rollout.servers", [{"base_url": "http://h:1024", "group_port": 1024}], ["group_port=1024", "must differ"]),
        (
            "rollout.servers",
            [{"base_url": "http://h:1", "group_host": "tcp://h"}],
            ["group_host='tcp://h'", "without scheme and port"],
        ),
        (
            "rollout.servers",
            [{"base_url": "http://h:1", "group_bind": "10.0.0.5:7"}],
            ["group_bind='10.0.0.5:7'", "without scheme and port"],
        ),
        ("rollout.servers", [{"base_url": "http://h:1"}] * 2,
         ["port 1 of host h for both servers[0].base_url and servers[1].base_url; remove one, or"]),
        (
            "rollout.servers",
            [{"base_url": "http://h:1"}, {"base_url": "http://h:2"}],
            ["port 29600 of host h for both servers[0].group_port and servers[1].group_port"],
        ),
        ("stage2_ab.channel_b.target.weights", dict.fromkeys(
            ("structure", "matched_label", "missed_label", "matched_coordinates", "missed_coordinates", "closure"), 0
        ), ["at least one target weight"]),
        ("launch.servers", [{"engine": "swift"}, {"engine": "swift"}], ["2 launch.servers and 1 rollout.servers"]),
        ("launch", {"servers": [{"devices": [0, 1]}], "learner": {"devices": [1]}}, ["device 1", "servers[0]"]),
        (
            "launch.learner",
            {"devices": [0], "nproc_per_node": 2},
            ["nproc_per_node=2", "devices=[0]", "write nproc_per_node: 1, or"],
        ),
        ("launch.learner", {"devices": [0, 0]}, ["devices=[0, 0]"]),
        (
            "launch.servers",
            [{"engine": "vllm", "merge": True, "upstream_port": 9}],
            ["engine='vllm'", "remove merge"],
        ),
        ("launch.servers", [{"merge": True}], ["merge=True upstream_port=None", "write both or neither"]),
        ("launch.servers", [{"upstream_port": 9}], ["merge=False upstream_port=9"]),
        ("launch.servers", [{"merge": True, "upstream_port": 0}], ["upstream_port=0", "1..65535"]),
        (
            "launch.servers",
            [{"merge": True, "upstream_port": 51216}],
            ["servers[0].upstream_port=51216 more than once"],
        ),
        ("launch.servers", [{"env": {"CUDA_VISIBLE_DEVICES": "1"}}], ["CUDA_VISIBLE_DEVICES", "write devices"]),
        ("launch.servers", [{"env": {"A": True}}], ["A=True", "quote it"]),
        ("launch.servers", [{"env": {"A": [1]}}], ["A=[1]", "quote it"]),
        ("launch.restart.max_restarts", 0, ["max_restarts=0", "policy: never"]),
        ("launch.restart.backoff_s", -1, ["backoff_s=-1"]),
        ("launch.restart.policy", "always", ["policy='always'", "on_failure"]),
    ],
)  # fmt: skip
def test_refused_values_are_named_with_range_and_remedy(
    tmp_path: Path, path: str, value: Any, parts: list[str]
) -> None:
    message = refusal(tmp_path, changed(path, value))
    for part in parts:
        assert part in message


@pytest.mark.parametrize("on_pending", ["abort", "resume"])
def test_a_stock_server_that_launch_starts_cannot_be_asked_to_abort(tmp_path: Path, on_pending: str) -> None:
    data = changed("rollout.sync.on_pending", on_pending)
    message = refusal(tmp_path, data | {"launch": {"servers": [{"engine": "swift"}]}})
    for part in (
        f"on_pending: {on_pending} needs",
        "launch.servers[0].engine='swift'",
        "on_pending: wait, or engine: vllm",
    ):
        assert part in message
    load(tmp_path, data | {"launch": {"servers": [{"engine": "vllm"}]}})
    load(tmp_path, data | {"launch": {"servers": []}})


def test_a_rollout_is_resumed_no_oftener_than_its_tokens_stay_fresh(tmp_path: Path) -> None:
    data = changed("rollout.sync.on_pending", "resume")
    assert load(tmp_path, data).max_resumes == 2, "the version window"
    data["rollout"]["max_resumes"] = 1
    assert load(tmp_path, data).max_resumes == 1
    data["rollout"]["max_resumes"] = 3
    assert "max_resumes=3 version_window=2; write max_resumes: 2" in refusal(tmp_path, data)
    data["stage2_ab"]["channel_b"] = {"prefetch": {"version_window": 0}}
    assert "on_pending: resume needs version_window of at least 1" in refusal(tmp_path, data)
    del data["stage2_ab"]["channel_b"]
    data["rollout"]["max_resumes"] = -1
    assert "max_resumes must be at least 0, got max_resumes=-1; 0 waits" in refusal(tmp_path, data)
    aborting = changed("rollout.sync.on_pending", "abort")
    assert load(tmp_path, aborting).max_resumes is None
    aborting["rollout"]["max_resumes"] = 1
    assert "max_resumes needs rollout.sync.on_pending: resume, got max_resumes=1" in refusal(
        tmp_path, aborting
    )


@pytest.mark.parametrize(
    ("sync", "told"),
    [
        (
            {"transport": "disk"},
            "transport: disk and disk_directory must be written together, got transport='disk'",
        ),
        (
            {"disk_directory": "/w"},
            "got transport='auto' disk_directory='/w'; write both, the directory like /shared/weights",
        ),
        (
            {"transport": "disk", "disk_directory": "weights"},
            "disk_directory must be an absolute path, because learner and servers may work in other directories",
        ),
        ({"transport": "disk", "disk_directory": "/w", "disk_keep": 0}, "disk_keep must be at least 1"),
    ],
)
def test_the_directory_of_weights_is_named_in_full_and_with_its_transport(
    tmp_path: Path, sync: dict[str, Any], told: str
) -> None:
    assert told in refusal(tmp_path, changed("rollout.sync", sync))
    loaded = load(tmp_path, changed("rollout.sync", {"transport": "disk", "disk_directory": "/w"}))
    assert (loaded.rollout.sync.disk_directory, loaded.rollout.sync.disk_keep) == ("/w", 2)


@pytest.mark.parametrize("transport", ["shared_memory", "disk"])
def test_a_stock_server_that_launch_starts_reads_no_memory_and_no_directory(
    tmp_path: Path, transport: str
) -> None:
    data = changed("rollout.sync.transport", transport)
    if transport == "disk":
        data["rollout"]["sync"]["disk_directory"] = "/shared/weights"
    message = refusal(tmp_path, data | {"launch": {"servers": [{"engine": "swift"}]}})
    for part in (
        f"{transport} needs servers of ours",
        "launch.servers[0].engine='swift'",
        "transport: auto",
    ):
        assert part in message
    load(tmp_path, data | {"launch": {"servers": [{"engine": "vllm"}]}})
    load(tmp_path, data | {"launch": {"servers": []}})


@pytest.mark.parametrize(
    ("path", "value", "parts"),
    [
        (f"{PREFETCH}.version_windw", 2, ["'version_windw'", "did you mean 'version_window'", PREFETCH]),
        ("stage2_abc", {}, ["top level", "'stage2_ab'"]),
        ("b_ratio", 0.5, ["belongs at 'stage2_ab.schedule.b_ratio'"]),
        ("rollout.temperature", 0.5, ["belongs at 'rollout.decoding.temperature'"]),
        ("rollout.timeout_s", 5, ["belongs at 'rollout.sync.timeout_s'"]),  # though near to start_timeout_s
        ("engine", "vllm", ["belongs at 'launch.servers[].engine'"]),
        ("rollout.mode", "inline", ["belongs at 'stage2_ab.mode' or 'rollout.sync.mode'"]),
        ("rollout.servers", [{"base_ulr": "http://h:1"}], ["rollout.servers[0]", "did you mean 'base_url'"]),
        ("rollout.sync.qqqq", 1, ["'qqqq'", "its keys are", "bucket_mib"]),
        ("temperature", 0.5, ["temperature is retired", "rollout.decoding.temperature"]),
        ("rollout_buffer", {}, ["rollout_buffer is retired", PREFETCH]),
        (
            "stage2_ab.channel_b.rollout_buffer",
            {},
            ["stage2_ab.channel_b.rollout_buffer is retired", PREFETCH],
        ),
    ],
)
def test_unknown_and_retired_keys_name_the_right_one(
    tmp_path: Path, path: str, value: Any, parts: list[str]
) -> None:
    message = refusal(tmp_path, changed(path, value))
    for part in parts:
        assert part in message


def _keys(section: type, place: str = "") -> list[tuple[str, tuple[str, ...]]]:
    """(dotted path of a section, its keys) for every section that is no list entry."""
    hints = get_type_hints(section)
    found = [(place, tuple(item.name for item in fields(section)))]
    for item in fields(section):
        if isinstance(hints[item.name], type) and is_dataclass(hints[item.name]):
            found += _keys(hints[item.name], f"{place}.{item.name}" if place else item.name)
    return found


@pytest.mark.parametrize(("place", "keys"), _keys(Stage2Config))
def test_a_misspelt_key_is_refused_at_every_level(tmp_path: Path, place: str, keys: tuple[str, ...]) -> None:
    for key in keys:
        misspelt = key[:-1] + "zz"
        message = refusal(tmp_path, changed(f"{place}.{misspelt}" if place else misspelt, 1))
        assert repr(misspelt) in message
        assert "did you mean" in message or "its keys are" in message


def _numbers(section: type, place: str = "") -> list[str]:
    """Dotted path of every key whose value may have a fraction."""
    hints = get_type_hints(section)
    found: list[str] = []
    for item in fields(section):
        hint, path = hints[item.name], f"{place}{item.name}"
        if isinstance(hint, type) and is_dataclass(hint):
            found += _numbers(hint, f"{path}.")
        elif float in (hint, *get_args(hint)):
            found.append(path)
    return found


@pytest.mark.parametrize("path", [*_numbers(Stage2Config), "stage2_ab.channel_b.reward.weights.f1"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_number_that_is_not_finite_is_told_as_such(tmp_path: Path, path: str, value: float) -> None:
    message = refusal(tmp_path, changed(path, value))
    assert "finite number" in message
    assert f"{path.rpartition('.')[2]}={value}" in message


@pytest.mark.parametrize(
    ("path", "value", "wanted"),
    [
        (
            f"{PREFETCH}.queue_limit",
            True,
            "an integer, got queue_limit=True; write for example queue_limit: 4",
        ),
        (f"{PREFETCH}.queue_limit", 8.0, "an integer"),
        (f"{PREFETCH}.queue_limit", "8", "an integer, got queue_limit='8'; write for example queue_limit: 8"),
        (f"{PREFETCH}.queue_limit", "1" * 400, "an integer"),
        (
            f"{PREFETCH}.redraw_dropped",
            1,
            "true or false, got redraw_dropped=1; write for example redraw_dropped: true",
        ),
        ("stage2_ab.schedule.b_ratio", True, "a number"),
        (
            "stage2_ab.schedule.b_ratio",
            "0.25",
            "a number, got b_ratio='0.25'; write for example b_ratio: 0.25",
        ),
        (
            "rollout.api_key_env",
            7,
            "a text, got api_key_env=7; write for example api_key_env: 'SWIFT_ROLLOUT_API_KEY'",
        ),
        ("rollout.servers", {"base_url": "http://h:1"}, "write for example servers: [{base_url: …}]"),
        (
            "rollout.servers",
            ["http://h:1"],
            "a mapping, got servers[0]='http://h:1'; write for example the entry {base_url: …}",
        ),
        ("rollout", None, "a mapping, got rollout=None; write for example rollout: {servers: …}"),
        ("swift", ["--model", "m"], "write for example swift: {name: value}"),
        (
            "launch.learner",
            {"devices": [0, "1"]},
            "or names GPU-… or MIG-…, got devices=[0, '1']; write each once, and numbers without quotes",
        ),
        ("launch.learner.devices", [0, 1.5], "an integer, got devices[1]=1.5; write for example the entry 4"),
        ("launch.learner.devices", 0, "write for example devices: [4]"),
        ("rollout.sync.on_pending", 3, "wait or abort or resume, got on_pending=3; write one of them"),
        (
            "rollout.sync.straggler_s",
            "60s",
            "a number, got straggler_s='60s'; write for example straggler_s: 60",
        ),
        ("rollout.sync.transport", "TCP", "got transport='TCP'; did you mean 'tcp'?"),
        ("stage2_ab.starvation.action", "wran", "did you mean 'warn'"),
        ("stage2_ab.channel_b.target.dialect", "object_lst", "did you mean 'object_list'"),
    ],
)
def test_wrong_types_are_refused_with_their_place(tmp_path: Path, path: str, value: Any, wanted: str) -> None:
    message = refusal(tmp_path, changed(path, value))
    assert wanted in message
    assert path in message


@pytest.mark.parametrize(
    ("section", "key", "beside"),
    [
        ("rollout", "max_resumes", BASE["rollout"] | {"sync": {"on_pending": "resume"}}),
        ("rollout.sync", "disk_directory", {"transport": "disk"}),
        ("launch.learner", "node_rank", {}),
        ("launch.learner", "rdzv_endpoint", {"nnodes": 2}),
    ],
)
def test_the_example_for_a_wrong_type_is_taken(
    tmp_path: Path, section: str, key: str, beside: dict[str, Any]
) -> None:
    message = refusal(tmp_path, changed(section, beside | {key: ["two"]}))
    example = yaml.safe_load(message.partition("; write for example ")[2])
    load(tmp_path, changed(section, beside | example))


def test_an_integer_may_stand_for_a_float(tmp_path: Path) -> None:
    config = load(tmp_path, changed("rollout.request_timeout_s", 30))
    assert config.rollout.request_timeout_s == 30.0
    assert type(config.rollout.request_timeout_s) is float


@pytest.mark.parametrize("missing", ["stage2_ab", "stage2_ab.schedule", "stage2_ab.schedule.b_ratio"])
def test_b_ratio_has_no_default(tmp_path: Path, missing: str) -> None:
    *sections, key = missing.split(".")
    data = copy.deepcopy(BASE)
    section = data
    for name in sections:
        section = section[name]
    del section[key]
    assert f"{missing} is required" in refusal(tmp_path, data)


@pytest.mark.parametrize(
    "others",
    [{"control_timeout_s": 3}, {"launch": {"servers": [{"engine": "swift"}]}}],
    ids=lambda it: next(iter(it)),
)
def test_missing_servers_are_told_before_what_follows_from_them(
    tmp_path: Path, others: dict[str, Any]
) -> None:
    data = {key: value for key, value in BASE.items() if key != "rollout"} | others
    message = refusal(tmp_path, data)
    assert "rollout.servers must name at least one server" in message
    assert "write rollout: {servers: [{base_url: " in message


def test_without_channel_b_nothing_of_it_is_needed(tmp_path: Path) -> None:
    data = {
        "swift": {"packing": True, "gradient_accumulation_steps": 64},
        "stage2_ab": {"schedule": {"b_ratio": 0}},
        "control_timeout_s": 60,
    }
    config = load(tmp_path, data)
    assert not config.b_enabled
    assert config.rollout.servers == ()
    assert config.warnings == ()


def test_the_default_group_port_is_none_that_linux_takes_for_outgoing_connections() -> None:
    assert ServerConfig(base_url="http://h:8000").group_port not in range(32768, 61000)


@pytest.mark.parametrize("rule", UNSUPPORTED, ids=lambda rule: rule.key)
def test_unsupported_arguments_are_refused_with_a_reason(tmp_path: Path, rule: Any) -> None:
    value = next(value for value in (True, 2, "seq_cls", "left", "zero3", False) if rule.refused(value))
    message = refusal(tmp_path, changed(f"swift.{rule.key}", value))
    for part in (f"swift.{rule.key}", rule.reason, rule.remedy, repr(value)):
        assert part in message


def by_rewards(path: str = "", value: Any = None) -> dict[str, Any]:
    """A run that trains rollouts by their rewards, with one key changed."""
    data = changed(path, value) if path else copy.deepcopy(BASE)
    data["stage2_ab"].setdefault("objective", "grpo")
    rollout = data["rollout"]
    rollout.setdefault("num_generations", 4)
    rollout["decoding"] = {"temperature": 1.0, **rollout.get("decoding", {})}
    data["swift"] = {"model": "m", "tuner_type": "full", **data.get("swift", {})}
    return data


@pytest.mark.parametrize("objective", ["grpo", "mixed"])
def test_rollouts_may_be_trained_by_their_rewards(tmp_path: Path, objective: str) -> None:
    assert load(tmp_path, by_rewards("stage2_ab.objective", objective)).stage2_ab.has_own_loss


GRPO = "stage2_ab.channel_b.grpo"


@pytest.mark.parametrize(
    ("path", "value", "parts"),
    [
        ("stage2_ab.objective", "corrected_target", ("num_generations=4", "grpo or mixed")),
        ("rollout.num_generations", 1, ("num_generations=1 min_group=2", "num_generations: 4 or more")),
        ("rollout.num_generations", 4096, ("num_generations", "at most 1024")),
        (f"{GRPO}.min_group", 5, ("num_generations=4 min_group=5",)),
        (f"{GRPO}.min_group", 1, ("min_group must be at least 2", "compare")),
        (f"{GRPO}.max_importance_weight", 0.5, ("max_importance_weight must be at least 1",)),
        (f"{GRPO}.straggler_s", 0, ("straggler_s", "deadline")),
        (f"{PREFETCH}.max_rollouts_per_version", 3, ("max_rollouts_per_version=3 num_generations=4",)),
        (f"{DECODING}.temperature", 0.01, ("temperature=0.01", "temperature: 1.0")),
        (f"{DECODING}.top_p", 0.95, ("top_p=0.95", "top_p: 1")),
        (f"{DECODING}.top_k", 20, ("top_k=20", "top_k: -1")),
        (f"{DECODING}.repetition_penalty", 1.1, ("repetition_penalty=1.1",)),
        ("swift.tuner_type", "lora", ("lora_dropout=0.05, ms-swift's default", "lora_dropout: 0")),
        (f"{GRPO}.kl_weight", 0.05, ("kl_weight=0.05 and a model that has none", "tuner_type: lora")),
        (f"{GRPO}.kl_weight", -1, ("kl_weight must be at least 0", "0.05")),
        ("swift.loss_type", "mine", ("swift.loss_type", "grpo and mixed")),
        (
            "stage2_ab.channel_b.reward.weights",
            dict.fromkeys(("f1", "iou", "format", "duplicates", "misses"), 0),
            ("of 0 for all terms",),
        ),
    ],
)
def test_what_rewards_cannot_be_compared_by_is_refused(
    tmp_path: Path, path: str, value: Any, parts: tuple[str, ...]
) -> None:
    message = refusal(tmp_path, by_rewards(path, value))
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(("name", "value"), [("init_weights", "pissa"), ("lora_bias", "all")])
def test_the_reference_model_is_the_one_that_training_began_with(
    tmp_path: Path, name: str, value: str
) -> None:
    data = by_rewards(f"{GRPO}.kl_weight", 0.05)
    data["swift"] |= {"tuner_type": "lora", "lora_dropout": 0, "init_weights": True, "lora_bias": "none"}
    assert load(tmp_path, data).stage2_ab.channel_b.grpo.kl_weight == 0.05
    changed = {**data, "swift": {**data["swift"], name: value}}
    assert f"swift.{name}='{value}', which changes it" in refusal(tmp_path, changed)
    data["swift"]["fsdp"] = "fsdp2"
    assert "kl_weight is not supported with swift.fsdp" in refusal(tmp_path, data)


def test_a_corrected_answer_is_in_the_group_or_beside_it(tmp_path: Path) -> None:
    data = by_rewards(f"{GRPO}.target_in_group", True)
    assert load(tmp_path, data).stage2_ab.trains_targets_beside
    data["stage2_ab"]["objective"] = "mixed"
    assert "remove target_in_group" in refusal(tmp_path, data)


@pytest.mark.parametrize("target", [{"missed_order": "any"}, {"weights": {"duplicate": 0.5}}])
@pytest.mark.parametrize(("key", "value"), [("enable_dft_loss", True), ("loss_type", "mine")])
def test_two_losses_are_refused(tmp_path: Path, key: str, value: Any, target: Any) -> None:
    data = changed(f"swift.{key}", value)
    assert load(tmp_path, data).swift[key] == value
    data["stage2_ab"]["channel_b"] = {"target": target}
    for part in (f"swift.{key}", "missed_order: any", "weights.duplicate", repr(value)):
        assert part in refusal(tmp_path, data)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("packing", False),
        ("streaming", "false"),
        ("sequence_parallel_size", 1),
        ("task_type", "causal_lm"),
        ("tuner_type", "full"),
        ("tuner_type", "lora"),
        ("truncation_strategy", "delete"),
        ("deepspeed", "zero2"),
        ("deepspeed", "zero3"),
        ("average_tokens_across_devices", True),
        ("group_by_length", True),
        ("quant_bits", None),
        ("fsdp", ""),
        ("fsdp", "fsdp2"),
        ("fsdp", {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": 2}}),
        ("fsdp", {"_comment": "no offload", "fsdp": "full_shard", "fsdp_config": {"offload_params": False}}),
    ],
)
def test_harmless_values_of_the_same_arguments_are_accepted(tmp_path: Path, key: str, value: Any) -> None:
    assert load(tmp_path, changed(f"swift.{key}", value)).swift[key] == value


@pytest.mark.parametrize(
    "value",
    [
        "full_shard",
        "mine.json",
        {"fsdp_config": {"fsdp_version": 1}},
        {"fsdp_config": {"version": 1}},
        {"fsdp": "full_shard auto_wrap offload"},
        {"fsdp_config": {"fsdp_version": 2, "cpu_offload": True}},
        {"fsdp_config": {"fsdp_version": 2, "offload_params": True}},
    ],
)
def test_of_fsdp_only_the_second_version_is_taken_and_never_offloaded(tmp_path: Path, value: Any) -> None:
    assert "write fsdp: fsdp2" in refusal(tmp_path, changed("swift.fsdp", value))


@pytest.mark.parametrize(("key", "value"), [("deepspeed", "zero3"), ("save_only_model", True)])
def test_fsdp_stands_alone(tmp_path: Path, key: str, value: Any) -> None:
    data = changed("swift.fsdp", "fsdp2")
    data["swift"] |= {key: value, "tuner_type": "full"}
    assert f"ms-swift takes swift.fsdp or swift.{key}, not both, got {key}=" in refusal(tmp_path, data)


@pytest.mark.parametrize(("tuner", "is_refused"), [("lora", True), (None, True), ("full", False)])
def test_an_adapter_is_not_resumed_under_fsdp2(tmp_path: Path, tuner: str | None, is_refused: bool) -> None:
    data = changed("swift.fsdp", "fsdp2")
    data["swift"] |= {"resume_from_checkpoint": "run/checkpoint-6"} | ({"tuner_type": tuner} if tuner else {})
    if is_refused:
        assert "resume_from_checkpoint is not supported with LoRA under FSDP2" in refusal(tmp_path, data)
    else:
        load(tmp_path, data)


def test_a_queue_that_outlives_its_packs_is_warned_about_with_the_useful_limit(tmp_path: Path) -> None:
    data = changed("swift.gradient_accumulation_steps", 1)
    data["stage2_ab"]["channel_b"] = {"prefetch": {"queue_limit": 4}}
    (warning,) = load(tmp_path, data).warnings  # useful: 1 * ceil(3 * 0.25 * 4) = 3
    assert "queue_limit=4" in warning
    assert "queue_limit: 3" in warning
    data["stage2_ab"]["channel_b"]["prefetch"] = {"queue_limit": 3, "prefetch_target_packs": 3}
    assert load(tmp_path, data).warnings == ()
    del data["stage2_ab"]["channel_b"]
    (unwritten,) = load(tmp_path, data).warnings
    assert "queue_limit=8 (the default)" in unwritten


@pytest.mark.parametrize(("bucket_mib", "needed"), [(1, 11), (512, 16), (4000, 50)])
def test_a_round_too_short_for_one_bucket_is_warned_about_with_the_seconds_it_needs(
    tmp_path: Path, bucket_mib: int, needed: int
) -> None:
    data = changed("rollout.sync", {"timeout_s": needed - 0.5, "bucket_mib": bucket_mib})
    (warning,) = load(tmp_path, data).warnings
    assert f"timeout_s={needed - 0.5:g}" in warning
    assert f"bucket_mib={bucket_mib}" in warning
    assert f"write rollout.sync.timeout_s: {needed} or more" in warning
    data["rollout"]["sync"]["timeout_s"] = needed
    assert load(tmp_path, data).warnings == ()


@given(st.integers(0, 1000), st.integers(1, 6), st.integers(1, 9), st.integers(1, 8))
def test_the_useful_queue_limit_is_exact(
    thousandths: int, window: int, every: int, accumulation: int
) -> None:
    data = copy.deepcopy(BASE)
    data["swift"] = {}
    data["stage2_ab"]["schedule"]["b_ratio"] = thousandths / 1000
    data["stage2_ab"]["channel_b"] = {"prefetch": {"version_window": window, "sync_every_steps": every}}
    steps = Fraction((window + 1) * every * thousandths, 1000)
    expected = accumulation * max(1, -(-steps.numerator // steps.denominator))
    rules = bind(Stage2Config, data).inequalities(accumulation)
    (useful,) = [rule for rule in rules if rule.name == "useful limit"]
    assert useful.numbers.endswith(f"= {expected}")
    assert useful.holds == (expected >= 8), "a derived limit above 8 is of use"


@pytest.mark.parametrize(
    ("prefetch", "b_ratio", "accumulation", "target", "limit"),
    [
        # A pack may age 2 * 4 steps: at b_ratio 0.25 they hold two B steps, at 1 eight.
        ({}, "0.25", 4, 8, 8),
        ({}, "1", 4, 32, 32),
        ({}, "1", 2, 16, 16),
        ({}, "0.3", 1, 4, 8),
        ({}, "0.3", 9, 27, 27),
        ({"sync_every_steps": 1}, "0.25", 4, 4, 8),
        ({"sync_every_steps": 50_000}, "1", 4, 32, 32),
        ({"version_window": 0}, "1", 16, 16, 16),
        ({"queue_limit": 6}, "1", 4, 6, 6),
        ({"queue_limit": 40}, "1", 4, 32, 40),
        ({"queue_limit": 3}, "1", 4, 4, 3),
        ({"prefetch_target_packs": 5}, "1", 4, 5, 8),
        ({"queue_limit": 9, "prefetch_target_packs": 9}, "0.1", 4, 9, 9),
    ],
)
def test_target_and_limit_follow_from_the_steps_that_a_pack_may_age_unless_they_are_written(
    prefetch: dict[str, int], b_ratio: str, accumulation: int, target: int, limit: int
) -> None:
    found = PrefetchConfig(**prefetch)  # type: ignore[arg-type]
    assert found.target(accumulation, Fraction(b_ratio)) == target
    assert found.limit(accumulation, Fraction(b_ratio)) == limit


def test_accumulation_that_swift_decides_is_checked_when_it_is_known(tmp_path: Path) -> None:
    data = copy.deepcopy(BASE)
    del data["swift"]["gradient_accumulation_steps"]
    config = load(tmp_path, data)
    assert config.gradient_accumulation_steps is None
    config.check_accumulation(5)
    data["stage2_ab"]["channel_b"] = {"prefetch": {"prefetch_target_packs": 4}}
    config = load(tmp_path, data)
    config.check_accumulation(4)
    with pytest.raises(ConfigError, match=r"B could never run.*=5.*prefetch_target_packs=4"):
        config.check_accumulation(5)


@pytest.mark.parametrize(
    ("samples_per_pack", "needed"), [(1.0, 4), (2.6, 11), (2.75, 11), (3.0, 12), (13.0, 52)]
)
def test_a_budget_fills_a_step_or_is_refused_by_its_name(
    tmp_path: Path, samples_per_pack: float, needed: int
) -> None:
    for budget in (None, 4, needed - 1, needed):
        data = changed(f"{PREFETCH}.max_rollouts_per_version", budget)
        if budget is not None and budget < 4:
            continue  # refused at load: a pack holds one sample at least
        rule = load(tmp_path, data).stage2_ab.channel_b.prefetch.budget_inequality(4, samples_per_pack)
        assert rule.holds == (budget is None or budget >= needed)
        assert f"max_rollouts_per_version={budget}" in rule.refusal
        assert rule.numbers.endswith(f">= 4 * {samples_per_pack:g} = {needed}")
        assert f"max_rollouts_per_version: {needed} or more" in rule.remedy


def test_a_budget_is_held_against_the_accumulation_that_swift_decides(tmp_path: Path) -> None:
    data = changed(f"{PREFETCH}.max_rollouts_per_version", 3)
    del data["swift"]["gradient_accumulation_steps"]
    config = load(tmp_path, data)
    config.check_accumulation(3)
    with pytest.raises(ConfigError, match=r"B could never run.*=4 packs.*max_rollouts_per_version=3"):
        config.check_accumulation(4)


@pytest.mark.parametrize(
    ("text", "exact"), [("0.3", Fraction(3, 10)), ("0.875", Fraction(7, 8)), ("1e-3", Fraction(1, 1000))]
)
def test_b_ratio_is_the_decimal_that_was_written(tmp_path: Path, text: str, exact: Fraction) -> None:
    servers = "rollout: {servers: [{base_url: 'http://h:1'}]}"
    config = load(tmp_path, f"stage2_ab: {{schedule: {{b_ratio: {text}}}}}\n{servers}\n")
    assert config.stage2_ab.schedule.exact_b_ratio == exact


def test_yaml_scalars_are_those_of_version_1_2(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        """
        swift: {learning_rate: 1e-5, note: 2026-01-02, answer: no, n: 010, time: 12:30, flag: true, none: null}
        stage2_ab: {schedule: {b_ratio: 0}, starvation: {action: off}}
        """,
    )
    assert config.stage2_ab.starvation.action is StarvationAction.OFF
    assert dict(config.swift) == {
        "learning_rate": 1e-5, "note": "2026-01-02", "answer": "no", "n": 10, "time": "12:30", "flag": True,
        "none": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("stage2_ab:\n  schedule: {b_ratio: 0}\nstage2_ab: {}\n", ["line 3", "'stage2_ab' also on line 1"]),
        ("stage2_ab: {schedule: {b_ratio: 0, b_ratio: 1}}", ["'b_ratio' also on line 1"]),
        ("stage2_ab: {schedule: ", ["line 1, column 23: ", "valid YAML", "close every bracket"]),
        (
            "swift:\n\tmodel: m\n",
            ["line 2, column 1: ", "'\\t' that cannot start any token", "indent by spaces"],
        ),
        (
            "a: [1,\nb: 2\n",
            ["line 3, column 1: ", "expected ',' or ']'", "a flow sequence that begins on line 1"],
        ),
        ("a: 1\nb: \x07\n", ["line 2, column 4: ", r"special characters are not allowed: '\x07'"]),
        ("- 1\n", ["mapping", "list"]),
        ("", ["empty file"]),
        ("1: 2\n", ["a key must be text", "key=1"]),
        ("swift: {a: !!int abc}\n", ["line 1: ", "without a YAML tag", "remove it"]),
        ("swift:\n  a: !!timestamp x\n", ["line 2: ", "without a YAML tag"]),
        ("a: " + "[" * 5000 + "]" * 5000, ["line 1: ", "at most 32 deep"]),
        ("a: " + "{b: " * 1500 + "1" + "}" * 1500, ["line 1: ", "at most 32 deep"]),
        ("\n".join("- " * number for number in range(1, 40)), ["at most 32 deep"]),
        ("a: &a [*a]\n", ["line 1: ", "inside what it names"]),
        (
            "a0: &a0 [1]\n"
            + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)),
            ["at most 100000 values", "line 6: "],
        ),
        (
            "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [[[[[[[[*a{i - 1}]]]]]]]]\n" for i in range(1, 500)),
            ["at most 32 deep"],
        ),
        (f"control_timeout_s: {'1' * 401}\n", ["line 1: ", "at most 18 digits, got 401"]),
        (f"control_timeout_s: {'-' + '9' * 5000}\n", ["at most 18 digits, got 5000"]),
        (
            "swift: !!python/object/apply:os.getcwd []\n",
            ["line 1: ", "tag='tag:yaml.org,2002:python/object/apply:os.getcwd'", "remove it"],
        ),
    ],
)
def test_text_that_is_no_configuration_is_refused(tmp_path: Path, text: str, parts: list[str]) -> None:
    message = refusal(tmp_path, text)
    for part in parts:
        assert part in message


def test_an_alias_and_leading_zeros_are_read(tmp_path: Path) -> None:
    text = f"swift: {{a: &a [1, 2], b: *a, c: {'0' * 30}7}}\nstage2_ab: {{schedule: {{b_ratio: 0}}}}\n"
    assert load(tmp_path, text).swift == {"a": [1, 2], "b": [1, 2], "c": 7}


KEYS = (
    "sk-proj-Ab12Cd34Ef56Gh78",
    "sk_live_abcdef0123456789",
    "hf_AbCdEfGhIjKlMnOp1234567890",
    "ghp_0a1b2c3d4e5f6g7h8i9j",
    "0123456789abcdef0123456789abcdef",
    "AKIAIOSFODNN7EXAMPLE",
    "Bearer abc",
    "a key",
    "ключ",
    "",
)


@pytest.mark.parametrize("key", KEYS)
def test_a_key_in_place_of_a_variables_name_is_refused_and_never_shown(tmp_path: Path, key: str) -> None:
    message = refusal(tmp_path, changed("rollout.api_key_env", key))
    assert "must be the name of an environment variable" in message
    assert not key or key not in message


@pytest.mark.parametrize(
    "name",
    [
        "SWIFT_ROLLOUT_API_KEY",
        "key",
        "_K2",
        "rollout_server_key_2",
        "HF_TOKEN",
        "VERY_LONG_NAME_OF_A_VARIABLE_2024",
    ],
)
def test_names_of_variables_are_taken(tmp_path: Path, name: str) -> None:
    assert load(tmp_path, changed("rollout.api_key_env", name)).rollout.api_key_env == name


@pytest.mark.parametrize(
    "base_url",
    [
        "http://me:hush@h:1",
        "http://me:hu/sh@h:1",
        "me:hush@h:1",
        "http://hush@h:1/x",
        "http://me:hush@h:port",
        "http://h:1/?k=hush@",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_shown(tmp_path: Path, base_url: str) -> None:
    message = refusal(tmp_path, changed("rollout.servers", [{"base_url": base_url}]))
    assert "credentials" in message
    assert "hush" not in message
    assert "sh@" not in message


@pytest.mark.parametrize(
    ("servers", "told"),
    [
        (
            [
                {"base_url": "http://h:7001", "group_port": 7002},
                {"base_url": "http://h:7002", "group_port": 7003},
            ],
            "port 7002 of host h for both servers[0].group_port and servers[1].base_url",
        ),
        (
            [
                {"base_url": "http://localhost:7001", "group_port": 7002},
                {"base_url": "http://127.0.0.1:7001"},
            ],
            "port 7001 of host 127.0.0.1 for both servers[0].base_url and servers[1].base_url",
        ),
    ],
)
def test_ports_of_one_host_are_all_different(
    tmp_path: Path, servers: list[dict[str, Any]], told: str
) -> None:
    assert told in refusal(tmp_path, changed("rollout.servers", servers))


def test_the_same_ports_on_two_hosts_are_fine(tmp_path: Path) -> None:
    servers = [{"base_url": "http://h:7001"}, {"base_url": "http://g:7001"}]
    assert len(load(tmp_path, changed("rollout.servers", servers)).rollout.servers) == 2


def test_a_long_value_is_not_told_in_full(tmp_path: Path) -> None:
    message = refusal(tmp_path, changed("rollout.servers", "x" * 10_000))
    assert "(10002 characters)" in message
    assert len(message) < 600


def test_an_ending_alone_is_no_likeness() -> None:
    with pytest.raises(ConfigError, match="remove it") as caught:
        refuse_unknown_names({"rlhf_type": "dpo"}, {"torch_dtype", "lora_dtype", "learning_rate"})
    assert "did you mean" not in str(caught.value)


def test_a_request_shorter_than_its_answer_is_warned_about(tmp_path: Path) -> None:
    (warning,) = load(tmp_path, changed("rollout.request_timeout_s", 0.5)).warnings
    assert "rollout.request_timeout_s=0.5" in warning
    assert "write rollout.request_timeout_s: 4 or more" in warning


def test_servers_that_nobody_needs_are_told(tmp_path: Path) -> None:
    data = changed("stage2_ab.schedule.b_ratio", 0)
    assert load(tmp_path, data).warnings == ()
    data["launch"] = {"servers": [{"engine": "transformers"}]}
    (warning,) = load(tmp_path, data).warnings
    assert "launch.servers are not started" in warning


def test_a_file_that_cannot_be_read_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"must exist, got path=.*absent\.yaml"):
        load_config(tmp_path / "absent.yaml")
    with pytest.raises(UserError, match="readable UTF-8"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"swift: {a: \xff}")
    with pytest.raises(UserError, match="readable UTF-8"):
        load_config(tmp_path / "latin.yaml")


swift_values = st.recursive(
    st.none() | st.booleans() | st.integers(1 - 10**18, 10**18 - 1) | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(["off", "1e-5", "010", "null", "2026-01-02", "~", "1:30", "=", "<<", "0x1f"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@given(
    st.dictionaries(st.from_regex(r"[a-z_]{1,9}", fullmatch=True), swift_values, max_size=4), st.floats(0, 1)
)
def test_the_resolved_configuration_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, swift: dict[str, Any], b_ratio: float
) -> None:
    data = copy.deepcopy(BASE)
    data["swift"] = {f"{key}_x": value for key, value in swift.items()}
    data["stage2_ab"]["schedule"]["b_ratio"] = b_ratio
    config = bind(Stage2Config, data)
    file = tmp_path_factory.mktemp("config") / "resolved.yaml"
    file.write_text(write_yaml(config.without_secrets()), encoding="utf-8")
    assert load_config(file) == config


def test_the_token_is_read_from_the_environment_and_never_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = load(tmp_path, changed("rollout.api_key_env", "OUR_TOKEN"))
    monkeypatch.delenv("OUR_TOKEN", raising=False)
    assert config.rollout.api_key() is None
    monkeypatch.setenv("OUR_TOKEN", "hush-hush")
    assert config.rollout.api_key() == "hush-hush"
    assert "hush-hush" not in str(config.without_secrets())


def test_arguments_become_argv() -> None:
    arguments = {
        "model": "m", "dataset": ["a.jsonl", "b.jsonl"], "bf16": True, "use_cpu": False, "learning_rate": 1e-5,
        "loss_scale": None, "gradient_checkpointing_kwargs": {"use_reentrant": False},
    }  # fmt: skip
    assert as_argv(arguments) == [
        "--model", "m", "--dataset", "a.jsonl", "b.jsonl", "--bf16", "true", "--use_cpu", "false",
        "--learning_rate", "1e-05", "--gradient_checkpointing_kwargs", '{"use_reentrant": false}',
    ]  # fmt: skip


def test_an_argument_that_swift_does_not_have_names_the_nearest() -> None:
    valid = ("learning_rate", "model", "lr_scheduler_type")
    refuse_unknown_names({"model": "m", "learning_rate": 1}, valid)
    with pytest.raises(
        ConfigError, match="unknown key 'lerning_rate' in section swift; did you mean 'learning_rate'"
    ):
        refuse_unknown_names({"model": "m", "lerning_rate": 1}, valid)
    with pytest.raises(ConfigError, match=r"unknown key 'xyz' in section swift; .* remove it"):
        refuse_unknown_names({"xyz": 1}, valid)
    with pytest.raises(ConfigError, match=r"'beta'.* did you mean 'stage2_ab.channel_b.grpo.kl_weight'"):
        refuse_unknown_names({"beta": 0.04}, valid)
    with pytest.raises(ConfigError, match=r"did you mean 'stage2_ab\.schedule\.b_ratio'"):
        refuse_unknown_names({"b_ratio": 0.5}, valid)


def test_importing_the_configuration_loads_no_heavy_package() -> None:
    heavy = ("torch", "swift", "transformers", "numpy")
    code = f"import sys, swift_stage2.config, swift_stage2.cli; sys.exit(str([m for m in {heavy} if m in sys.modules]))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stderr.strip() == "[]"


@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parents[1] / "configs").glob("*.yaml")), ids=lambda file: file.name
)
def test_every_example_is_read_without_a_warning(file: Path) -> None:
    assert load_config(file).warnings == ()


def test_there_are_examples() -> None:
    assert len(list((Path(__file__).parents[1] / "configs").glob("*.yaml"))) >= 2


@pytest.mark.parametrize(
    "name", ["host", "--port", "model", "api-key-env", "api_key", "engine", "weights-root"]
)
def test_what_launch_writes_itself_is_refused_among_a_servers_args(name: str) -> None:
    with pytest.raises(ConfigError, match=f"args must not set {name}; launch takes it from"):
        ServerProcess(args={name: "x"})


# --- shared devices ------------------------------------------------------------------------------------


def sharing(*servers: dict[str, Any], **launch: Any) -> dict[str, Any]:
    """BASE with learner and servers on device 0."""
    data = copy.deepcopy(BASE)
    data["rollout"]["servers"] = [
        {"base_url": f"http://127.0.0.1:{8000 + index}", "group_port": 29600 + index}
        for index in range(len(servers))
    ]
    placed = [{"devices": [0]} | server for server in servers]
    data["launch"] = {"share_devices": True, "learner": {"devices": [0]}, "servers": placed} | launch
    return data


def on_vllm(share: Any, key: str = "vllm_gpu_memory_utilization", **server: Any) -> dict[str, Any]:
    return {"engine": "vllm", "args": {key: share}} | server


@pytest.mark.parametrize(
    "data",
    [
        sharing(on_vllm(0.4)),
        sharing(on_vllm(0.4, "--vllm-gpu-memory-utilization")),
        sharing(on_vllm(0.3), on_vllm(0.3), {"engine": "transformers"}),
        sharing({"engine": "transformers"}),
        sharing({"engine": "vllm", "devices": [1]}),  # its own: vLLM's default is right
        sharing(on_vllm(1, devices=[1])),
        sharing({"engine": "swift", "devices": []}, learner={}),
        sharing(on_vllm(0.4, engine="swift"), learner={"devices": [1, 0], "nproc_per_node": 2}),
    ],
)
def test_devices_that_may_be_shared_are_taken(tmp_path: Path, data: dict[str, Any]) -> None:
    assert load(tmp_path, data).launch.share_devices


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (
            sharing({"engine": "vllm"}),
            ["device 0 for learner and servers[0]", "take 0.9; write vllm_gpu_memory_utilization: 0.5"],
        ),
        (
            sharing(on_vllm(0.3), {"engine": "vllm"}),
            ["launch.servers[1].args", "beside 0.3 of servers[0]; write vllm_gpu_memory_utilization: 0.35"],
        ),
        (
            sharing(on_vllm(0.6), on_vllm(0.4)),
            ["below 1", "0.6 of servers[0], 0.4 of servers[1]: 1;", ": 0.33"],
        ),
        (sharing(on_vllm("0.4")), ["launch.servers[0].args.vllm_gpu_memory_utilization must be", "='0.4'"]),
        (sharing(on_vllm(True)), ["vllm_gpu_memory_utilization=True"]),
        (sharing(on_vllm(1)), ["below 1 together", "vllm_gpu_memory_utilization 1 of servers[0]"]),
        (sharing(on_vllm(1.2, devices=[1])), ["at most 1, got vllm_gpu_memory_utilization=1.2"]),
        (
            sharing(on_vllm(0.4, engine="swift")),
            ["NCCL", "rank 0 and servers[0] with engine='swift'", "engine: vllm"],
        ),
        (sharing(on_vllm(0.4), share_devices=False), ["devices of their own", "launch.share_devices: true"]),
    ],
)
def test_shared_devices_that_cannot_work_are_refused(
    tmp_path: Path, data: dict[str, Any], parts: list[str]
) -> None:
    message = refusal(tmp_path, data)
    assert all(part in message for part in parts), message


# --- the record of a run -------------------------------------------------------------------------------


def test_a_record_needs_the_ledger_and_the_arguments_that_a_replay_starts_with(tmp_path: Path) -> None:
    recorded = changed("telemetry.record", True)
    assert load(tmp_path, recorded).telemetry.record
    recorded["telemetry"]["audit"] = False
    assert "write telemetry.audit: true" in refusal(tmp_path, recorded)
    recorded = changed("telemetry.record", True)
    del recorded["swift"]["model"]
    assert "got model=None; write them there" in refusal(tmp_path, recorded)


def test_what_a_record_holds_of_a_configuration_has_no_secret_and_reads_back(tmp_path: Path) -> None:
    data = changed("launch.servers", [{"engine": "vllm", "env": {"KEY": "s3cret"}, "args": {"a": "s3cret"}}])
    secrets = dict.fromkeys(("hub_token", "swanlab_token", "swanlab_secret", "swanlab_webhook_url"), "s3cret")
    kept = {"new_special_tokens": ["t"], "max_new_tokens": 9}
    data["swift"] |= {**secrets, **kept}
    config = load(tmp_path, data)
    plain = config.without_secrets()
    assert "s3cret" not in str(plain)
    again = bind(Stage2Config, plain)
    assert again.stage2_ab == config.stage2_ab
    assert again.rollout == config.rollout
    assert again.swift == {**BASE["swift"], **kept}


# --- evaluations on the rollout servers ----------------------------------------------------------------


def test_evaluations_are_off_by_default_and_ask_for_no_validation_set(tmp_path: Path) -> None:
    settings = load(tmp_path, BASE).stage2_ab.evaluation
    assert (settings.every_steps, settings.num_samples, settings.max_round_delay_steps) == (0, 64, 4)
    assert settings.final_timeout_s == 600
    load(tmp_path, BASE).check_validation_set(0)


@pytest.mark.parametrize("rows", [{"val_dataset": ["v.jsonl"]}, {"split_dataset_ratio": 0.1}])
def test_evaluations_need_a_validation_set(tmp_path: Path, rows: dict[str, Any]) -> None:
    data = changed("stage2_ab.evaluation", {"every_steps": 50})
    data["swift"]["dataset"] = ["t.jsonl"]
    message = refusal(tmp_path, data)
    assert "stage2_ab.evaluation needs ms-swift's validation set, got none and every_steps=50" in message
    assert "write swift.val_dataset, or swift.split_dataset_ratio above 0" in message
    data["swift"] |= rows
    config = load(tmp_path, data)
    config.check_validation_set(1)
    with pytest.raises(ConfigError, match="got none and every_steps=50"):
        config.check_validation_set(0)  # what ms-swift made of it


@pytest.mark.parametrize(
    "strategy", [{"eval_strategy": "no"}, {"eval_strategy": False}, {"save_strategy": "no"}], ids=str
)
def test_a_split_that_ms_swift_drops_is_no_validation_set(tmp_path: Path, strategy: dict[str, Any]) -> None:
    data = changed("stage2_ab.evaluation", {"every_steps": 50})
    data["swift"] |= {"dataset": ["t.jsonl"], "split_dataset_ratio": 0.1, **strategy}
    assert "needs ms-swift's validation set, got none and every_steps=50" in refusal(tmp_path, data)
    data["swift"]["val_dataset"] = ["v.jsonl"]
    load(tmp_path, data)


def test_evaluations_need_channel_b(tmp_path: Path) -> None:
    data = changed("stage2_ab.evaluation", {"every_steps": 50})
    data["stage2_ab"]["schedule"]["b_ratio"] = 0
    assert "got b_ratio=0 and every_steps=50; write every_steps: 0, or a b_ratio above 0" in refusal(
        tmp_path, data
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [("every_steps", -1), ("num_samples", 0), ("max_round_delay_steps", -1), ("final_timeout_s", -1)],
)
def test_numbers_of_evaluations_are_checked(tmp_path: Path, key: str, value: int) -> None:
    assert f"{key}={value}" in refusal(tmp_path, changed("stage2_ab.evaluation", {key: value}))
