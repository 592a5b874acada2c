"""The configuration: what is read, what is refused and how it is said, what is warned about."""

from __future__ import annotations

import copy
import math
from dataclasses import fields, is_dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml
from builders import BASE, changed, on_vllm, servers_at, sharing
from golden import Golden, name_of
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.config import Stage2Config, StarvationAction, load_config
from swift_stage2.config.binding import bind
from swift_stage2.config.stage2_ab import PrefetchConfig
from swift_stage2.config.swift_arguments import UNSUPPORTED, as_argv, best_metric, require_metric
from swift_stage2.config.yaml_text import write_yaml
from swift_stage2.errors import ConfigError, UserError


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
    return message.replace(f"{tmp_path}/", "")


PREFETCH = "stage2_ab.channel_b.prefetch"
DECODING = "rollout.decoding"


NO_CONFIGURATION = {
    "a section twice": "stage2_ab:\n  schedule: {b_ratio: 0}\nstage2_ab: {}\n",
    "a key twice": "stage2_ab: {schedule: {b_ratio: 0, b_ratio: 1}}",
    "an open bracket": "stage2_ab: {schedule: ",
    "a tab": "swift:\n\tmodel: m\n",
    "a list": "- 1\n",
    "nothing": "",
    "a number for a key": "1: 2\n",
    "a tag": "swift:\n  a: !!timestamp x\n",
    "a tag that runs code": "swift: !!python/object/apply:os.getcwd []\n",
}

SERVERS = "rollout.servers"
SYNC = "rollout.sync"
LEARNER = "launch.learner"
LAUNCHED = "launch.servers"
GRPO = "stage2_ab.channel_b.grpo"
TARGET = "stage2_ab.channel_b.target"
EVALUATION = "stage2_ab.evaluation"

ON_DISK = {f"{SYNC}.transport": "disk", f"{SYNC}.disk_directory": "/w"}
BY_REWARDS = {
    "stage2_ab.objective": "grpo",
    "rollout.num_generations": 4,
    f"{DECODING}.temperature": 1.0,
    "swift.tuner_type": "full",
}
WITH_A_REFERENCE = {
    "swift.tuner_type": "lora",
    "swift.lora_dropout": 0,
    "swift.init_weights": True,
    "swift.lora_bias": "none",
    f"{GRPO}.kl_weight": 0.05,
}
INLINE = {"stage2_ab.mode": "inline"}
EVALUATED = {f"{EVALUATION}.every_steps": 50, "swift.dataset": ["t.jsonl"]}
BEST = {
    "swift.val_dataset": ["v.jsonl"],
    "swift.metric_for_best_model": "eval_f1",
    "swift.eval_strategy": "no",
    "swift.save_strategy": "best",
}
REWARD_WEIGHTS = "stage2_ab.channel_b.reward.weights"
WEIGHTS = (
    "structure",
    "matched_label",
    "missed_label",
    "matched_coordinates",
    "missed_coordinates",
    "closure",
)
TERMS = ("f1", "iou", "format", "duplicates", "misses")


def launched(*entries: dict[str, Any]) -> dict[str, Any]:
    return {LAUNCHED: list(entries)}


REFUSED: list[dict[str, Any]] = [
    # values outside their range
    {"stage2_ab.schedule.b_ratio": 1.2},
    {"stage2_ab.schedule.b_ratio": math.nan},
    {f"{PREFETCH}.version_window": -1},
    {"swift.report_to": False},
    {"swift.deepspeed": False},
    {"swift.gradient_accumulation_steps": 0},
    {f"{DECODING}.temperature": -1},
    {f"{DECODING}.top_p": 0},
    {f"{DECODING}.top_k": 0},
    {"rollout.request_timeout_s": math.inf},
    {f"{SYNC}.timeout_s": 0},
    {f"{SYNC}.mode": "delta"},
    {f"{TARGET}.weights": dict.fromkeys(WEIGHTS, 0)},
    # values that do not go together
    {f"{PREFETCH}.prefetch_target_packs": 9},
    {f"{PREFETCH}.queue_limit": 3},
    {PREFETCH: {"version_window": 0, "sync_every_steps": 1}},
    {"control_timeout_s": 929},
    {"telemetry.record": True, "telemetry.audit": False},
    {"telemetry.record": True, "swift.model": ...},
    # the task and its rewards
    {"stage2_ab.task": "points"},
    {"stage2_ab.task": "point", f"{TARGET}.dialect": "object_map"},
    {f"{TARGET}.dialect": "point_list"},
    {f"{REWARD_WEIGHTS}.misses": -0.5},
    {f"{REWARD_WEIGHTS}.f2": 1.0},
    # servers
    {SERVERS: []},
    {SERVERS: ..., "control_timeout_s": 3},
    {"rollout": ..., **launched({"engine": "swift"})},
    {SERVERS: [{"group_port": 5}]},
    servers_at("127.0.0.1:8000"),
    servers_at("http://h"),
    servers_at("http://h:8000/x"),
    servers_at("http://h:1024", group_port=1024),
    servers_at("http://h:1", group_host="tcp://h"),
    servers_at("http://h:1", group_bind="10.0.0.5:7"),
    servers_at("http://h:1", "http://h:1"),
    servers_at("http://h:1", "http://h:2"),
    {
        SERVERS: [
            *servers_at("http://h:7001", group_port=7002)[SERVERS],
            *servers_at("http://h:7002")[SERVERS],
        ]
    },
    {
        SERVERS: [
            *servers_at("http://localhost:7001", group_port=7002)[SERVERS],
            *servers_at("http://127.0.0.1:7001")[SERVERS],
        ]
    },
    # what launch starts
    launched({"engine": "swift"}, {"engine": "swift"}),
    launched({"devices": [0, 1]}) | {f"{LEARNER}.devices": [1]},
    {LEARNER: {"devices": [0], "nproc_per_node": 2}},
    {LEARNER: {"devices": [0, 0]}},
    {LEARNER: {"nnodes": 2}},
    *({LEARNER: {"nnodes": 2, "rdzv_endpoint": each}} for each in ("fd00::2:29400", "a:0")),
    launched({"engine": "vllm", "merge": True, "upstream_port": 9}),
    launched({"upstream_port": 9}),
    launched({"env": {"CUDA_VISIBLE_DEVICES": "1"}}),
    launched({"env": {"A": True}}),
    {LEARNER: {"env": {"CUDA_VISIBLE_DEVICES": "1"}}},
    *(launched({"args": {name: "x"}}) for name in ("host", "--port", "api-key-env")),
    sharing({"engine": "vllm"}),
    sharing(on_vllm(0.6), on_vllm(0.4)),
    sharing(on_vllm(0.4, engine="swift")),
    sharing(on_vllm(0.4), share_devices=False),
    sharing({"engine": "swift"}) | INLINE | {f"{LEARNER}.devices": [1]},
    sharing(on_vllm(0.4)) | INLINE | servers_at("http://10.0.0.7:7001"),
    sharing(on_vllm(0.4, args={"vllm_gpu_memory_utilization": 0.4, "sleep-level": 0})) | INLINE,
    sharing(on_vllm(0.4)) | {"stage2_ab.phase_steps": 8},
    launched({"engine": "vllm"}) | {"rollout.max_turns": 2},
    launched({"engine": "vllm", "args": {"multi_turn_scheduler": "x"}}),
    sharing(on_vllm(0.4)) | {"launch.offload_optimizer": True},
    sharing(on_vllm(0.4)) | INLINE | {"launch.offload_optimizer": True, "swift.deepspeed": "zero2"},
    # how weights travel
    ON_DISK | launched({"engine": "swift"}),
    {"rollout.max_turns": 2} | launched({"engine": "transformers"}),
    {f"{SYNC}.transport": "disk"},
    ON_DISK | {f"{SYNC}.disk_directory": "weights"},
    # keys that are unknown, misplaced, retired or missing
    {f"{PREFETCH}.version_windw": 2},
    {f"{SYNC}.on_pending": "wait"},
    {"stage2_ab.channel_b.grpo.straggler_s": 30},
    {"stage2_abc": {}},
    {"b_ratio": 0.5},
    {"rollout.temperature": 0.5},
    {"engine": "vllm"},
    {SERVERS: [{"base_ulr": "http://h:1"}]},
    {"stage2_ab.channel_b.rollout_buffer": {}},
    {"stage2_ab": ...},
    {"stage2_ab.schedule.b_ratio": ...},
    # wrong types
    {f"{PREFETCH}.queue_limit": True},
    {f"{PREFETCH}.queue_limit": "8"},
    {f"{PREFETCH}.queue_limit": "1" * 400},
    {f"{PREFETCH}.redraw_dropped": 1},
    {"rollout.api_key_env": 7},
    {SERVERS: {"base_url": "http://h:1"}},
    {SERVERS: ["http://h:1"]},
    {"swift": ["--model", "m"]},
    {f"{LEARNER}.devices": [0, "1"]},
    {f"{TARGET}.dialect": "object_lst"},
    # arguments of ms-swift
    {"swift.fsdp": "full_shard"},
    {"swift.fsdp": {"fsdp_config": {"fsdp_version": 2, "offload_params": True}}},
    {"swift.fsdp": "fsdp2", "swift.deepspeed": "zero3", "swift.tuner_type": "full"},
    {"swift.fsdp": "fsdp2", "swift.save_only_model": True, "swift.tuner_type": "full"},
    {"swift.fsdp": "fsdp2", "swift.resume_from_checkpoint": "c", "swift.tuner_type": "lora"},
    {"swift.fsdp": "fsdp2", "swift.resume_from_checkpoint": "c"},
    {"swift.quant_bits": 4, "swift.deepspeed": "zero3"},
    {"swift.quant_bits": 4, "swift.fsdp": "fsdp2"},
    {"swift.quant_bits": 4},
    {"swift.enable_dft_loss": True, f"{TARGET}.missed_order": "any"},
    {"swift.loss_type": "mine", f"{TARGET}.missed_order": "any"},
    # rollouts that are trained by their rewards
    BY_REWARDS | {"stage2_ab.objective": "corrected_target"},
    BY_REWARDS | {"rollout.num_generations": 1},
    BY_REWARDS | {f"{GRPO}.min_group": 5},
    BY_REWARDS | {f"{DECODING}.temperature": 0.01},
    BY_REWARDS | {f"{DECODING}.top_p": 0.95},
    BY_REWARDS | {"swift.tuner_type": "lora"},
    BY_REWARDS | {f"{GRPO}.kl_weight": 0.05},
    BY_REWARDS | {"swift.loss_type": "mine"},
    BY_REWARDS | {REWARD_WEIGHTS: dict.fromkeys(TERMS, 0)},
    BY_REWARDS | WITH_A_REFERENCE | {"swift.init_weights": "pissa"},
    BY_REWARDS | WITH_A_REFERENCE | {"swift.lora_bias": "all"},
    BY_REWARDS | WITH_A_REFERENCE | {"swift.fsdp": "fsdp2"},
    BY_REWARDS | {"stage2_ab.objective": "mixed", f"{GRPO}.target_in_group": True},
    # evaluations
    EVALUATED,
    EVALUATED | BEST | {f"{EVALUATION}.every_steps": 0},
    EVALUATED | BEST | {"swift.metric_for_best_model": "eval_ap"},
    EVALUATED | BEST | {"swift.eval_strategy": "steps"},
    EVALUATED | BEST | {"swift.load_best_model_at_end": True},
    EVALUATED | {"swift.split_dataset_ratio": 0.1, "swift.eval_strategy": "no"},
    EVALUATED | {"swift.split_dataset_ratio": 0.1, "swift.save_strategy": "no"},
    {f"{EVALUATION}.every_steps": 50, "stage2_ab.schedule.b_ratio": 0},
]

MESSAGES = Golden(__file__, [*map(name_of, REFUSED), *NO_CONFIGURATION])


@pytest.mark.parametrize("changes", REFUSED, ids=name_of)
def test_what_is_refused_is_told_in_these_words(tmp_path: Path, changes: dict[str, Any]) -> None:
    MESSAGES.check(name_of(changes), refusal(tmp_path, changed(changes)))


ACCEPTED: list[dict[str, Any]] = [
    *(ON_DISK | servers_of_ours for servers_of_ours in (launched({"engine": "vllm"}), launched())),
    servers_at("http://h:7001", "http://g:7001"),
    {"swift.packing": False, "swift.sequence_parallel_size": 1, "swift.truncation_strategy": "delete"},
    {"swift.deepspeed": "zero3"},
    {"swift.average_tokens_across_devices": True, "swift.fsdp": "fsdp2"},
    {"swift.fsdp": "fsdp2", "swift.resume_from_checkpoint": "c", "swift.tuner_type": "full"},
    {"swift.quant_bits": 4, "swift.quant_method": "bnb", "swift.deepspeed": "zero2"},
    {"swift.packing": True, "swift.padding_free": True, "swift.use_liger_kernel": True},
    {"swift.cached_dataset": ["cached/train"]},
    BY_REWARDS,
    BY_REWARDS | {"stage2_ab.objective": "mixed"},
    BY_REWARDS | WITH_A_REFERENCE,
    BY_REWARDS | {f"{GRPO}.target_in_group": True},
    {"telemetry.record": True},
    EVALUATED | {"swift.val_dataset": ["v.jsonl"]},
    EVALUATED | {"swift.split_dataset_ratio": 0.1},
    EVALUATED
    | {"swift.val_dataset": ["v.jsonl"], "swift.split_dataset_ratio": 0.1, "swift.eval_strategy": "no"},
    EVALUATED | BEST,
    EVALUATED | BEST | {"swift.save_strategy": "no"},
    {"swift.metric_for_best_model": "loss", "swift.load_best_model_at_end": True},
    sharing(on_vllm(0.4)),
    sharing(on_vllm(0.4, "--vllm-gpu-memory-utilization")),
    sharing(on_vllm(0.3), on_vllm(0.3), {"engine": "transformers"}),
    sharing({"engine": "transformers"}),
    sharing({"engine": "vllm", "devices": [1]}),  # its own: vLLM's default is right
    sharing({"engine": "swift", "devices": []}, learner={}),
    sharing(on_vllm(0.4, engine="swift"), learner={"devices": [1, 0], "nproc_per_node": 2}),
]


@pytest.mark.parametrize("changes", ACCEPTED, ids=name_of)
def test_what_is_near_a_refusal_and_works_is_taken_as_it_is_written(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    data = changed(changes)
    assert load(tmp_path, data).swift == data["swift"]


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
        message = refusal(tmp_path, changed({f"{place}.{misspelt}" if place else misspelt: 1}))
        assert repr(misspelt) in message
        assert "did you mean" in message or "its keys are" in message


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


@pytest.mark.parametrize("rule", UNSUPPORTED, ids=lambda rule: rule.key)
def test_unsupported_arguments_are_refused_with_a_reason(tmp_path: Path, rule: Any) -> None:
    value = next(value for value in (True, 2, "seq_cls", "left", "zero3", False) if rule.refused(value))
    message = refusal(tmp_path, changed({f"swift.{rule.key}": value}))
    for part in (f"swift.{rule.key}", rule.reason, rule.remedy, repr(value)):
        assert part in message


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        (  # useful: 1 * ceil(3 * 0.25 * 4) = 3
            {"swift.gradient_accumulation_steps": 1, f"{PREFETCH}.queue_limit": 4},
            "write stage2_ab.channel_b.prefetch.queue_limit: 3",
        ),
        ({"swift.gradient_accumulation_steps": 1}, "write stage2_ab.channel_b.prefetch.queue_limit: 3"),
        (
            {
                "swift.gradient_accumulation_steps": 1,
                PREFETCH: {"queue_limit": 3, "prefetch_target_packs": 3},
            },
            None,
        ),
        ({"stage2_ab.schedule.b_ratio": 0}, None),
    ],
)
def test_what_wastes_something_is_advised_against_with_the_value_to_write(
    tmp_path: Path, changes: dict[str, Any], advice: str | None
) -> None:
    warnings = load(tmp_path, changed(changes)).warnings
    assert len(warnings) == (advice is not None)
    for warning in warnings:
        assert advice in warning


@given(st.integers(0, 1000), st.integers(1, 6), st.integers(1, 9), st.integers(1, 8))
def test_the_useful_queue_limit_is_exact(
    thousandths: int, window: int, every: int, accumulation: int
) -> None:
    data = copy.deepcopy(BASE)
    data["swift"] = {"gradient_accumulation_steps": accumulation}
    data["stage2_ab"]["schedule"]["b_ratio"] = thousandths / 1000
    data["stage2_ab"]["channel_b"] = {"prefetch": {"version_window": window, "sync_every_steps": every}}
    steps = Fraction((window + 1) * every * thousandths, 1000)
    expected = accumulation * max(1, -(-steps.numerator // steps.denominator))
    warnings = bind(Stage2Config, data).warnings
    is_useful = not thousandths or expected >= 8  # a derived limit above 8 is of use
    assert [f" = {expected} keeps" in warning for warning in warnings] == [True] * (not is_useful)


@pytest.mark.parametrize(
    ("prefetch", "b_ratio", "accumulation", "target", "limit"),
    [
        # A pack may age 2 * 4 steps: at b_ratio 0.25 they hold two B steps, at 1 eight.
        ({}, "0.25", 4, 8, 8),
        ({}, "1", 4, 32, 32),
        ({}, "0.3", 9, 27, 27),
        ({"sync_every_steps": 50_000}, "1", 4, 32, 32),
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
    with pytest.raises(
        ConfigError, match=r"prefetch_target_packs >= .* \(otherwise B could never run\), got 4 >= 5"
    ):
        config.check_accumulation(5)


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


@pytest.mark.parametrize("case", NO_CONFIGURATION)
def test_text_that_is_no_configuration_is_refused(tmp_path: Path, case: str) -> None:
    MESSAGES.check(case, refusal(tmp_path, NO_CONFIGURATION[case]))


@pytest.mark.parametrize(
    "key", ["sk-proj-Ab12Cd34Ef56Gh78", "ghp_0a1b2c3d4e5f6g7h8i9j", "AKIAIOSFODNN7EXAMPLE", "a key", ""]
)
def test_a_key_in_place_of_a_variables_name_is_refused_and_never_shown(tmp_path: Path, key: str) -> None:
    message = refusal(tmp_path, changed({"rollout.api_key_env": key}))
    assert "must be the name of an environment variable" in message
    assert not key or key not in message


@pytest.mark.parametrize(
    "base_url",
    [
        "http://me:hush@h:1",
        "me:hush@h:1",
        "http://hush@h:1/x",
        "http://h:1/?k=hush@",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_shown(tmp_path: Path, base_url: str) -> None:
    message = refusal(tmp_path, changed({"rollout.servers": [{"base_url": base_url}]}))
    assert "hush" not in message


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
    config = load(tmp_path, changed({"rollout.api_key_env": "OUR_TOKEN"}))
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


@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parents[1] / "configs").glob("*.yaml")), ids=lambda file: file.name
)
def test_every_example_is_read_without_a_warning(file: Path) -> None:
    assert load_config(file).warnings == ()


def test_what_a_record_holds_of_a_configuration_has_no_secret_and_reads_back(tmp_path: Path) -> None:
    data = changed(
        {"launch.servers": [{"engine": "vllm", "env": {"KEY": "s3cret"}, "args": {"a": "s3cret"}}]}
    )
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


def test_a_validation_set_that_ms_swift_makes_empty_is_none(tmp_path: Path) -> None:
    config = load(tmp_path, changed(EVALUATED, {"swift.split_dataset_ratio": 0.1}))
    config.check_validation_set(1)
    with pytest.raises(ConfigError, match="got none and every_steps=50"):
        config.check_validation_set(0)


def test_a_metric_of_evaluations_is_known_by_its_name() -> None:
    names = {"eval_f1": "f1", "eval/f1": "f1", "f1": "f1", "eval/exact": "exact"}
    names |= dict.fromkeys(("loss", "eval_loss", "rouge-l", None))
    assert {name: best_metric({"metric_for_best_model": name}) for name in names} == names
    require_metric({"metric_for_best_model": "eval/exact"}, ("exact",))
    with pytest.raises(ConfigError, match=r"got eval/exakt; write one of eval/precision, .*, eval/exact$"):
        require_metric({"metric_for_best_model": "eval/exakt"}, ("exact",))
